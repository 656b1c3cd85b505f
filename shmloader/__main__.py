"""``python -m shmloader``; the script ``shmloader`` is the same."""

import sys

from shmloader.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
