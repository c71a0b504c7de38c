"""tools.verify in two halves, for scripts/check_arm.sh: each runs on another machine.

    python -m scripts.check_arm compute FILE    prove every path; run the engine, and store results
    python -m scripts.check_arm compare FILE    compare them with the references

The references take an hour on an emulated processor, and their results are the same on any.
"""

import asyncio
import pickle
import sys
from pathlib import Path

from smart_embedder.settings.sources import load_settings
from tools.verify.__main__ import Verification, comparable, print_table, run_engine
from tools.verify.paths import path_rows, print_paths


def compute(file: Path) -> bool:
    """Whether every path of this machine holds."""
    settings = comparable(load_settings())
    rows = list(path_rows("cpu"))
    print_paths(rows)
    file.write_bytes(pickle.dumps(asyncio.run(run_engine(settings))))
    return all(row.proof.holds for row in rows)


def compare(file: Path) -> bool:
    """Whether the stored results agree with the references."""
    ours = pickle.loads(file.read_bytes())
    rows = list(Verification(comparable(load_settings()), ours).rows())
    print_table(rows)
    return all(row.agrees for row in rows)


if __name__ == "__main__":
    agrees = {"compute": compute, "compare": compare}[sys.argv[1]](Path(sys.argv[2]))
    sys.exit(0 if agrees else 1)
