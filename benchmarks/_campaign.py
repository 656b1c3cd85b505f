"""A campaign: every run in a fresh process, kinds in turns, each run recorded at once.

A benchmark that is one defines its cases and their kinds, does one run, and makes its section of
``RESULTS.md`` of the recorded runs. All else is here: the command line, the turns, going on after
an interruption, and where the section goes.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _fresh import in_turn, try_anew
from _machine import describe_machine, find_commit
from _record import Record, Run
from _sections import put_section

_HERE = Path(__file__).parent
# Of the machine, what may change while a campaign goes on.
_CHANGING = ("date", "load before", "options")

#: The figures of a run: for each cell of the table, the case, the peer, and the figures.
Cells = Sequence[tuple[str, str, Mapping[str, Any]]]


@dataclass(frozen=True)
class Campaign:
    """What a benchmark is made of.

    Attributes:
        file: The benchmark's own file.
        about: What it compares, in a line.
        kinds: For each case, its kinds, each of which is a run of its own.
        smallest: The same for ``--smallest``.
        rounds: How many rounds a full campaign has.
        limit_s: The longest time for a run, in seconds.
        run: Does one run: gets the case, the kind, the number of the round, and whether it is to be
            as small as possible.
        report: Returns the lines of the section. Gets all runs, the machine, and whether they were
            as small as possible.
        options: How the runs were made, as the section says it before the number of rounds.
        more: What else the section says of the machine.
    """

    file: str
    about: str
    kinds: Mapping[str, Sequence[str]]
    smallest: Mapping[str, Sequence[str]]
    rounds: int
    limit_s: float
    run: Callable[[str, str, int, bool], Cells]
    report: Callable[[Sequence[Run], Mapping[str, str], bool], list[str]]
    options: str = ""
    more: Mapping[str, str] | None = None

    def main(self) -> int:
        """Do what the command line asks for: a campaign, or one of its runs.

        Returns:
            The exit code: 0; 2 if a run failed, or a case is unknown; 130 if it was interrupted.
        """
        options = self._read_arguments()
        if options.run:
            name, kind, round_ = options.run
            cells = self.run(name, kind, int(round_), options.smallest)
            print("\n" + json.dumps({"cells": cells}))
            return 0
        machine = describe_machine() | {"commit": find_commit()} | dict(self.more or {})
        rounds = f"{options.rounds} rounds of fresh processes"
        machine["options"] = f"{self.options}, {rounds}" if self.options else rounds
        about = {key: value for key, value in machine.items() if key not in _CHANGING}
        size = "smallest" if options.smallest else "full"
        path = options.record or self._folder / f"{size}-{machine['commit']}.jsonl"
        if options.anew:
            path.unlink(missing_ok=True)
        record = Record(path, about | {"smallest": options.smallest})
        try:
            is_whole = self._measure(options, record)
        except KeyboardInterrupt:
            print(f"\nstopped; the same command goes on from {path}", file=sys.stderr)
            return 130
        has_all = not options.smallest and not self._missing(record, self.kinds, self.rounds)
        results = options.results or (_HERE if has_all else self._folder) / "RESULTS.md"
        lines = self.report(record.runs, machine, options.smallest)
        put_section(results, Path(self.file).name, lines)
        print("\n".join(lines))
        print(f"\n{results}", file=sys.stderr)
        return 0 if is_whole else 2

    @property
    def _folder(self) -> Path:
        """Where goes what is not all of it."""
        return _HERE.parent / "build" / Path(self.file).stem

    def _read_arguments(self) -> argparse.Namespace:
        parser = argparse.ArgumentParser(description=self.about)
        parser.add_argument("--cases", help="which, separated by commas; default: all")
        parser.add_argument("--rounds", type=int, default=self.rounds)
        parser.add_argument("--smallest", action="store_true", help="whether it runs, and no more")
        parser.add_argument("--anew", action="store_true", help="forget what is recorded")
        folder = f"build/{self._folder.name}"
        parser.add_argument("--record", type=Path, help=f"where runs are kept; default: {folder}")
        parser.add_argument("--results", type=Path,
            help="the page with the section; default: benchmarks/RESULTS.md if all is there, else "
            f"{folder}/RESULTS.md")  # fmt: skip
        names = ("CASE", "KIND", "ROUND")
        parser.add_argument("--run", nargs=3, metavar=names, help=argparse.SUPPRESS)
        options = parser.parse_args()
        kinds = self.smallest if options.smallest else self.kinds
        options.cases = list(kinds) if options.cases is None else options.cases.split(",")
        if unknown := set(options.cases) - set(kinds):
            parser.error(f"--cases should be of {', '.join(kinds)}, but got {', '.join(unknown)}")
        options.rounds = 1 if options.smallest else options.rounds
        return options

    def _measure(self, options: argparse.Namespace, record: Record) -> bool:
        """Do what is not recorded yet; returns whether all runs were whole."""
        kinds = self.smallest if options.smallest else self.kinds
        todo = self._missing(record, {name: kinds[name] for name in options.cases}, options.rounds)
        size = ["--smallest"] if options.smallest else []
        is_whole = True
        for number, (round_, name, kind) in enumerate(todo, 1):
            head = f"[{number}/{len(todo)}] round {round_ + 1} {name}, {kind}"
            if record.is_hopeless(name, _marker(name, kind)):
                print(f"{head}: has failed twice, not run again", file=sys.stderr, flush=True)
                continue
            arguments = [*size, "--run", name, kind, str(round_)]
            found = try_anew(self.file, arguments, self.limit_s)
            if isinstance(found, str):
                is_whole = False
                record.add(Run(name, _marker(name, kind), round_, None, found))
                print(f"{head}: {found}", file=sys.stderr, flush=True)
                continue
            for cell, peer, figures in found["cells"]:
                record.add(Run(cell, peer, round_, figures))
                told = ", ".join(f"{key} {value:.4g}" for key, value in figures.items())
                print(f"{head}: {cell}, {peer}: {told}", file=sys.stderr, flush=True)
            record.add(Run(name, _marker(name, kind), round_, {}))
        return is_whole

    @staticmethod
    def _missing(
        record: Record, kinds: Mapping[str, Sequence[str]], rounds: int
    ) -> list[tuple[int, str, str]]:
        """Return the runs that are to be done: round, case and kind, in the order of turns.

        One that has failed is done again, unless it has failed often enough.
        """
        return [
            (round_, name, kind)
            for round_ in range(rounds)
            for name in kinds
            for kind in in_turn(kinds[name], round_)
            if not record.has_whole(round_, name, _marker(name, kind))
            and not record.is_hopeless(name, _marker(name, kind))
        ]


def _marker(name: str, kind: str) -> str:
    """Stands in the record for a run, whose figures may be several cells."""
    return f"{name}, {kind}"
