"""Runs the command line for ``python -m shmloader``, as the script ``shmloader`` does."""

import sys

from shmloader.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
