"""The command `python -m ringattn.launch.serve`."""

import sys

from ringattn.launch.serve.cli import main

if __name__ == "__main__":
    sys.exit(main())
