"""Fuzzes one target in this process: `python -m tests.fuzzing.fuzz TARGET [libFuzzer's arguments]`.

With a file of an input it only checks that: `python -m tests.fuzzing.fuzz heads FILE`.

The fuzzer is atheris: libFuzzer with the coverage of Python's own branches and comparisons. It is
in an environment of its own, which scripts/check_sanitizers.sh makes.
"""

import sys

import atheris

from tests.fuzzing.targets import load

if __name__ == "__main__":
    # The service and its client, and no library.
    with atheris.instrument_imports(include=["app", "smart_embedder", "smart_embedder_client"]):
        target = load(sys.argv[1])
    atheris.Setup(sys.argv[1:], target.check)
    atheris.Fuzz()
