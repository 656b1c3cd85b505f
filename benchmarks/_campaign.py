"""Runs a benchmark as a campaign: fresh processes, kinds in turns, each run recorded at once.

The benchmark defines its cases and their kinds, a function that does one run, and a function that
makes a section of ``RESULTS.md`` from the recorded runs. This module does the rest: it reads the
command line, puts the runs in order, continues after an interruption, and writes the section.
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
# Parts of the machine's description that may change during a campaign.
_CHANGING = ("date", "load before", "options")

#: What a run measured: the case, the peer and the figures of each cell of the table.
Cells = Sequence[tuple[str, str, Mapping[str, Any]]]


@dataclass(frozen=True)
class Campaign:
    """What a benchmark is made of.

    Attributes:
        file: The benchmark's own file.
        about: What it compares, in a line.
        kinds: The kinds of each case. Each kind is one run in each round.
        smallest: The same for ``--smallest``.
        rounds: How many rounds a full campaign has.
        limit_s: Seconds after which a run is ended, and counts as failed.
        run: Does one run. Gets the case, the kind, the number of the round, and whether the run
            should be as small as possible.
        report: Returns the lines of the section. Gets all runs, the machine, and whether the runs
            were as small as possible.
        options: How the runs are made. The section has it before the number of rounds.
        more: Further lines of the section's description of the machine.
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
            print(f"\nstopped; the same command continues from {path}", file=sys.stderr)
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
        """The folder for records, and for the results of incomplete campaigns."""
        return _HERE.parent / "build" / Path(self.file).stem

    def _read_arguments(self) -> argparse.Namespace:
        parser = argparse.ArgumentParser(description=self.about)
        parser.add_argument("--cases", help="cases, separated by commas; default: all")
        parser.add_argument("--rounds", type=int, default=self.rounds)
        parser.add_argument("--smallest", action="store_true", help="only check that it runs")
        parser.add_argument("--anew", action="store_true", help="discard what is recorded")
        folder = f"build/{self._folder.name}"
        parser.add_argument("--record", type=Path, help=f"file of the runs; default: in {folder}")
        parser.add_argument("--results", type=Path,
            help="page to put the section in; default: benchmarks/RESULTS.md if complete, else "
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
        """Do the runs that are not recorded yet; return whether none failed."""
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
        """Return the runs that are still to be done, in order: round, case and kind.

        A failed run is repeated, unless its kind has failed often enough.
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
    """Return the name that stands for a run in the record; its figures may fill several cells."""
    return f"{name}, {kind}"
