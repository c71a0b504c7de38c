"""`python -m tools.demo FOLDER`: build the demo checkpoint."""

import argparse
import sys
from pathlib import Path

from smart_embedder.errors import StartupError
from tools.demo.checkpoint import build_demo_checkpoint


def main(arguments: list[str] | None = None) -> int:
    """Build the checkpoint; return 0, or 1 with one sentence on stderr."""
    parser = argparse.ArgumentParser(prog="python -m tools.demo", description=__doc__)
    parser.add_argument("folder", type=Path, help="folder of the checkpoint, about 90 MB")
    try:
        folder = build_demo_checkpoint(parser.parse_args(arguments).folder)
        print(f"The demo model is in {folder}.")
    except StartupError as error:
        print(f"The demo model cannot be built: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
