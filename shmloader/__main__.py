"""``python -m shmloader``; the script ``shmloader`` is the same."""

import sys

from shmloader.commands.main import main

if __name__ == "__main__":
    sys.exit(main())
