"""What does one pool of workers for all ranks of a host save, beside workers of each rank?

Each case runs the same epochs on ranks with workers of their own (``own``), on one pool (``host``:
``worker_scope="host"``) of as many workers in all, except in the row ``memory``, and with torch's
loader and ``DistributedSampler`` (``torch``). Each run has fresh processes, and the kinds take
turns. Samples only sleep, so the machine's cores do not decide, except in the rows on memory, on
strings and on the main process.

=========  =======================================================================================
even       4 ranks, 4 workers in all, samples of 2 ms: samples a second of all ranks
uneven     half as many batches, but samples of rank 0 take 5 times as long: seconds until all end
memory     4 ranks with 4 workers each, or with 4 in one pool: number of worker processes and their
           PSS, both with the process that owns the pool
strings    4 ranks with 2 workers each, a list of a million texts of 40 to 200 characters, shuffled:
           PSS of all processes less that of a run with hardly any texts, to that of the list once
main2      2 ranks, 2 workers in all, one int a batch: CPU time of a rank's process for a batch
main4      the same with 4 ranks and 4 workers
many       8 ranks, 64 workers in all, samples of 80 ms: samples a second, to the ideal
most       8 ranks, 512 workers in all, samples of 320 ms: the same, for the pool alone
=========  =======================================================================================

torchrun starts the ranks (``_host_rank.py``), which have a process group of gloo. Each has a
session of its own, and the kernel shares the cores out among sessions (sched(7), "autogroup"). PSS
is the proportional set size: a page that n processes share counts 1/n in each of them.

The row ``strings`` is about the dataset. In all its kinds, each rank has forked workers of its own.
``own`` and ``torch`` have a list in each rank, ``share`` is ``own`` with ``shmloader.share`` in
each rank, and ``host`` is ``own`` with ``shmloader.share_on_host``.

The rows on the main process load the same samples as row A of ``peers.py``. The loader of that row
has no seed, and so neither random streams for each sample nor dynamic dispatch. ``unseeded`` is
that ``DataLoader``, with a rank's share of the workers.

Every run is recorded at once, and a campaign that was interrupted continues where it was. A full
run replaces its section of ``RESULTS.md``.

Exit code: 0; 2 if a run failed; 130 if it was interrupted. No figure is a pass or a fail.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from _campaign import Campaign, Cells
from _host_rank import KINDS, SHARE, UNSEEDED, Case
from _record import Run, select
from _sections import judge, write_table
from _spread import with_spread_if_any
from _usage import pss_bytes
from memory import make_texts
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

_RANK = Path(__file__).with_name("_host_rank.py")
_RUN_LIMIT_S = 600.0

CASES = {
    "even": Case(4, 4, 60, 16, 0.002),
    "uneven": Case(4, 4, 30, 16, 0.002, slower=5),
    "memory": Case(4, 4, 60, 16, 0.0, own=4),
    "strings": Case(4, 8, 250, 1000, data="texts"),
    "main2": Case(2, 2, 5000, 1, data="ints"),
    "main4": Case(4, 4, 2500, 1, data="ints"),
    "many": Case(8, 64, 320, 4, 0.08),
    "most": Case(8, 512, 1024, 4, 0.32, is_alone=True),
}
SMALLEST = {
    "even": Case(2, 2, 4, 4, 0.001),
    "strings": Case(2, 2, 16, 1000, data="texts", is_alone=True),
    "main2": Case(2, 2, 8, 1, data="ints"),
}


def run(case: Case, kind: str) -> dict[str, float]:
    """Do a run, and return its figures."""
    if case.data != "texts":
        return _start_ranks(case, kind)
    count = case.share * case.ranks
    once = _list_bytes(count)  # before memory is freed that the texts could use
    # One batch for each worker, so that all take part.
    empty = _start_ranks(case._replace(batches=case.own_workers), kind)
    figures = _start_ranks(case, kind)
    data_bytes = figures["all_bytes"] - empty["all_bytes"]
    return figures | {"data_bytes": data_bytes, "list_bytes": once, "lists": data_bytes / once}


def _list_bytes(count: int) -> int:
    """Return how much memory the texts take in one list."""
    before = pss_bytes()
    texts = make_texts(count)
    nbytes = pss_bytes() - before
    assert len(texts) == count
    return nbytes


def _start_ranks(case: Case, kind: str) -> dict[str, float]:
    """Start the ranks as the program ``torchrun`` does, and wait for their end.

    If one fails, this process exits with 1, and what went wrong is the last line on stderr.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # otherwise torchrun sets it, with a warning
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder, "figures.json")
        options = ["--standalone", f"--nproc-per-node={case.ranks}", f"--log-dir={folder}"]
        program = [str(_RANK), json.dumps(case._asdict()), kind, str(results)]
        try:
            torchrun.run(torchrun.parse_args([*options, *program]))
        except ChildFailedError as error:
            sys.exit(_describe(error))
        found: dict[str, float] = json.loads(results.read_text())
    return found


def _describe(error: ChildFailedError) -> str:
    """Return a line that says why ranks have failed, beginning with the first to fail."""
    failures = sorted(error.failures.items(), key=lambda item: item[1].timestamp)
    # When one has failed, torchrun ends the others.
    own = [item for item in failures if item[1].exitcode != -signal.SIGTERM]
    reasons: dict[str, int] = {}
    for rank, failure in own or failures:
        told: Any = failure.message  # of an exception a dict, of a signal a str
        text = told["message"] if isinstance(told, dict) else told
        reasons.setdefault(" ".join(text.split()), rank)
    return "; ".join(f"rank {rank}: {reason}" for reason, rank in reasons.items())


class Row(NamedTuple):
    """A row of the table.

    Attributes:
        case: The case.
        title: What the table calls the figure, with its unit.
        spec: How the figure is written.
        wanted: The goal for the figure in one pool, or for the ratio; None if there is none.
        key: The figure of a run, before ``figure`` computes with it.
        is_ratio: Whether the ratio to workers of each rank is judged.
        is_most: Whether ``wanted`` is the most; else it is the least.
        own: The kind in the column ``own``.
    """

    case: str
    title: str
    spec: str
    wanted: float | None
    key: str
    is_ratio: bool = True
    is_most: bool = True
    own: str = "own"

    def figure(self, run: Mapping[str, float], case: Case) -> float:
        """Return the row's figure of a run."""
        samples = case.ranks * case.batches * case.batch_size
        value = run[self.key]
        if self.key == "worker_bytes":
            return value / 1e6
        if self.case == "even":
            return samples / value
        if self.case in {"many", "most"}:
            return samples * case.sample_s / case.workers / value
        return value


ROWS = (
    Row("uneven", "uneven: s", ".2f", 0.6, "elapsed_s"),
    Row("even", "even: samples/s", ",.0f", 0.97, "elapsed_s", is_most=False),
    Row("memory", "memory: processes", ".0f", None, "processes"),
    Row("memory", "memory: PSS of these, MB", ",.0f", 0.4, "worker_bytes"),
    Row("strings", "strings: memory to the list", ".2f", 1.2, "lists", is_ratio=False),
    Row("strings", "strings: beside `share` in each rank", ".2f", None, "lists", own=SHARE),
    Row("main2", "main2: µs of CPU a batch", ".0f", 35, "main_us", is_ratio=False),
    Row("main4", "main4: µs of CPU a batch", ".0f", 35, "main_us", is_ratio=False),
    Row("many", "many: of the ideal", ".3f", 0.95, "elapsed_s", is_ratio=False, is_most=False),
    Row("most", "most: of the ideal", ".3f", 0.95, "elapsed_s", is_ratio=False, is_most=False),
)


def _cells(runs: Sequence[Run], row: Row, case: Case) -> list[str]:
    """Return a row: the figure of each kind, the ratio, the goal, the verdict."""
    figures = {
        kind: {
            run.round: row.figure(run.figures, case)
            for run in select(runs, row.case, kind)
            if run.figures
        }
        for kind in (*KINDS, UNSEEDED, SHARE)
    }
    told = {kind: list(of_kind.values()) for kind, of_kind in figures.items()}
    cells = [
        with_spread_if_any(told[kind], row.spec) if told[kind] else ""
        for kind in ("host", row.own, UNSEEDED, "torch")
    ]
    own, host = figures[row.own], figures["host"]
    ratios = [host[round_] / own[round_] for round_ in host if round_ in own]
    ratio = with_spread_if_any(ratios, ".2f") if ratios else ""
    judged = ratios if row.is_ratio else told["host"]
    if row.wanted is None or not judged:
        return [row.title, *cells, ratio, "", "" if told["host"] else "not run"]
    goal, verdict = judge(judged, row.wanted, is_most=row.is_most)
    return [row.title, *cells, ratio, f"{goal}{' of own' if row.is_ratio else ''}", verdict]


def report(runs: Sequence[Run], machine: Mapping[str, str], is_smallest: bool) -> list[str]:
    """Return the lines of the section of RESULTS.md."""
    cases = SMALLEST if is_smallest else CASES
    rows = [_cells(runs, row, cases[row.case]) for row in ROWS if row.case in cases]
    short = [row[0].partition(":")[0] for row in rows if row[-1].startswith("**")]
    heading = ["what", "host", "own", UNSEEDED, "torch", "host to own", "goal", ""]
    return [
        "## One pool of workers for all ranks of a host",
        "",
        "Made by `make bench-host`; `benchmarks/host_workers.py` says what each row is.",
        "",
        *(f"- {name}: {value}" for name, value in machine.items()),
        "",
        *write_table(heading, rows),
        "",
        f"Rows that fall short: {', '.join(short) if short else 'none'}.",
    ]


def _run(name: str, kind: str, round_: int, is_smallest: bool) -> Cells:  # noqa: ARG001
    return [(name, kind, run((SMALLEST if is_smallest else CASES)[name], kind))]


def main() -> int:
    """Compare, or do one run for a comparison."""
    campaign = Campaign(
        file=__file__,
        about=str(__doc__).partition("\n")[0],
        kinds={name: case.kinds for name, case in CASES.items()},
        smallest={name: case.kinds for name, case in SMALLEST.items()},
        rounds=3,
        limit_s=_RUN_LIMIT_S,
        run=_run,
        report=report,
    )
    return campaign.main()


if __name__ == "__main__":
    raise SystemExit(main())
