"""`python -m tools.demo FOLDER`: make the demo checkpoint and say where it lies."""

import argparse
import sys
from pathlib import Path

from smart_embedder.errors import StartupError
from tools.demo.checkpoint import build_demo_checkpoint


def main(arguments: list[str] | None = None) -> int:
    """Build the checkpoint; 0 where it lies there then, or 1 with one sentence on stderr."""
    parser = argparse.ArgumentParser(prog="python -m tools.demo", description=__doc__)
    parser.add_argument("folder", type=Path, help="where the checkpoint goes, about 90 MB")
    try:
        folder = build_demo_checkpoint(parser.parse_args(arguments).folder)
        print(f"The demo model lies in {folder}.")
    except StartupError as error:
        print(f"The demo model cannot be made: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
