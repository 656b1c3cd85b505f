"""Records what a campaign has measured, so that it can continue after an interruption."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

_MOST_FAILURES = 2  # after which a cell is not run again


@dataclass(frozen=True)
class Run:
    """One run: figures, or what went wrong."""

    case: str
    peer: str
    round: int
    figures: Mapping[str, Any] | None
    error: str | None = None


def select(runs: Sequence[Run], case: str, peer: str) -> list[Run]:
    """Return the runs of one cell of the table."""
    return [run for run in runs if (run.case, run.peer) == (case, peer)]


def values_of(runs: Sequence[Run], case: str, kind: str, name: str) -> list[float]:
    """Return a figure of all runs of a case and kind that have it."""
    return [
        run.figures[name] for run in select(runs, case, kind) if run.figures and name in run.figures
    ]


class Record:
    """All runs of a campaign, in a file of JSON lines. The first line describes the campaign."""

    def __init__(self, path: Path, about: Mapping[str, Any]) -> None:
        self._path = path
        self.runs: list[Run] = []
        if path.exists():
            text = path.read_text()
            whole = text[: text.rfind("\n") + 1]  # the last line may be incomplete
            path.write_text(whole)
            lines = [json.loads(line) for line in whole.splitlines()]
            if lines[0] != about:
                changed = [key for key in about if lines[0].get(key) != about[key]]
                sys.exit(
                    f"{path} is of another campaign ({', '.join(changed)} differ): "
                    "discard it with --anew, or name another file with --record."
                )
            self.runs = [Run(**line) for line in lines[1:]]
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(about) + "\n")

    def has(self, round_: int, case: str, peer: str) -> bool:
        """Whether such a run is recorded."""
        return any(run.round == round_ for run in select(self.runs, case, peer))

    def has_whole(self, round_: int, case: str, peer: str) -> bool:
        """Whether such a run is recorded that did not fail."""
        runs = select(self.runs, case, peer)
        return any(run.round == round_ and not run.error for run in runs)

    def is_hopeless(self, case: str, peer: str) -> bool:
        """Whether a peer has failed so often on a case that it is not run again."""
        failures = [run for run in select(self.runs, case, peer) if run.error]
        return len(failures) >= _MOST_FAILURES

    def add(self, run: Run) -> None:
        """Record a run, on disk as well."""
        self.runs.append(run)
        with self._path.open("a") as file:
            file.write(json.dumps(asdict(run)) + "\n")
