"""Measure one peer on one case, in this process, and print the figures as JSON.

``peers.py`` starts this file in a fresh process for each run; it can be started by hand too,
beneath a profiler for instance::

    python benchmarks/_peer_run.py "B, 38 MB" torch --seconds 10
"""

from __future__ import annotations

import argparse
import json

from _peers import PEERS
from _report import BARES
from _rows import CASES, Settings, run


def main() -> None:
    """Do one run; the result is the last line of stdout."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("case", choices=CASES)
    parser.add_argument("peer", choices=[*PEERS, *BARES])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=1.5)
    parser.add_argument("--smallest", action="store_true")
    options = parser.parse_args()
    settings = Settings(options.workers, options.seconds, options.smallest)
    print(json.dumps(run(options.case, options.peer, settings)), flush=True)


if __name__ == "__main__":
    main()
