"""The command `python -m ringattn.launch.train`."""

import sys

from ringattn.launch.train.cli import main

if __name__ == "__main__":
    sys.exit(main())
