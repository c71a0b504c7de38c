"""Run `python -m tools.smoke` under the command of version 1: `python test_server.py --url URL`."""

import sys

from tools.smoke.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
