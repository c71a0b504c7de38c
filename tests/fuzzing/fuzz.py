"""Fuzzes one target in this process: `python -m tests.fuzzing.fuzz TARGET [libFuzzer's arguments]`.

With a file it only checks that input: `python -m tests.fuzzing.fuzz heads FILE`.

The fuzzer is atheris: libFuzzer with the coverage of branches and comparisons in Python.
scripts/check_sanitizers.sh installs it in an environment of its own.
"""

import sys

import atheris

from tests.fuzzing.inputs import load

if __name__ == "__main__":
    # Only the service and its client, not the libraries.
    with atheris.instrument_imports(include=["app", "smart_embedder", "smart_embedder_client"]):
        target = load(sys.argv[1])
    atheris.Setup(sys.argv[1:], target.check)
    atheris.Fuzz()
