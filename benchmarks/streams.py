"""How large are the states of streams of shards, how fast do they begin and go on, are they exact?

"state": bytes of the pickled state of a loader over 64 readers, in the middle of an epoch, with a
window shuffle of 1,000 records a reader, and with a rolling buffer of 10,000 records in all.

"10,000 shards" and "rolling, tar": seconds from ``Shards(…)`` to the next batch, at the beginning
of an epoch and from a state in its middle, which was saved in the same process; without workers,
and with two that have to start. To go on, the names of all shards are compared, and the sizes of
those of the first reader, or of each worker's first readers. The tar shards are
local, and 10,000 records are in the buffers of all readers. "100,000 shards": the same, at the
beginning. Shards of these two are small files that a function reads.

"server": an epoch of shards from a web server on this machine that fails 5 % of the requests, with
2 workers. It is exact if its batches are those of the same shards on the disk, in the same order.

Every run is recorded at once, and a campaign that was interrupted continues where it was. A full
campaign takes some minutes, and writes the section of ``RESULTS.md``.

Exit code: 0; 2 if a run failed. No figure is a pass or a fail.
"""

from __future__ import annotations

import io
import pickle
import statistics
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from _campaign import Campaign, Cells
from _record import Run, values_of
from _sections import judge, three_digits, write_table
from _spread import with_spread_if_any

from shmloader import DataLoader
from shmloader.streams import ShardCache, Shards, open_tar

READERS, WINDOW, BUFFER, BATCH = 64, 1_000, 10_000, 64
_FAILED_SHARE = 0.05

# Cases about numbers of shards; with a smallest size.
_MANY = {"10,000 shards": 10_000, "100,000 shards": 100_000}
_SMALLEST_SHARDS = 128

CASES = {
    "state": ("window", "rolling"),
    "10,000 shards": ("begin", "go on", "begin, 2 workers", "go on, 2 workers"),
    "rolling, tar": ("begin", "go on"),
    "100,000 shards": ("begin",),
    "server": ("2 workers",),
}


def read_lines(path: str) -> Iterator[int]:
    """Yield 20 records, whatever the file has."""
    number = int(Path(path).name)
    return iter(range(20 * number, 20 * number + 20))


def _small_files(folder: Path, count: int) -> list[str]:
    paths = [folder / f"{number:06}" for number in range(count)]
    for path in paths:
        path.touch()
    return list(map(str, paths))


def _tars(folder: Path, shards: int, records: int) -> list[str]:
    paths = []
    for shard in range(shards):
        path = folder / f"{shard:06}.tar"
        with tarfile.open(path, "w") as file:
            for number in range(records):
                info = tarfile.TarInfo(f"{shard:03}-{number:06}.bin")
                info.size = 1_000
                file.addfile(info, io.BytesIO(number.to_bytes(4, "little") * 250))
        paths.append(str(path))
    return paths


def _loader(stream: Any, workers: int = 0) -> DataLoader[Any]:
    return DataLoader(stream.batch(BATCH), batch_size=None, num_workers=workers)


def _state_after(stream: Any, batches: int) -> dict[str, Any]:
    loader = _loader(stream)
    iterator = iter(loader)
    for _ in range(batches):
        next(iterator)
    return loader.state_dict()


def _measure_state(kind: str, folder: Path, is_smallest: bool) -> dict[str, float]:
    shards = _SMALLEST_SHARDS if is_smallest else 8_000
    # Keys have large numbers in the middle of a long list.
    stream: Any = Shards(_small_files(folder, shards), read_lines, seed=3, readers=READERS)
    rolling = kind == "rolling"
    stream = stream.shuffle(BUFFER // READERS if rolling else WINDOW, rolling=rolling)
    state = _state_after(stream, shards * 20 // BATCH // 2)
    return {"state_bytes": len(pickle.dumps(state))}


def _measure_next(case: str, kind: str, folder: Path, is_smallest: bool) -> dict[str, float]:
    """Measure the time to the next batch, at the beginning or in the middle."""
    rolling = case == "rolling, tar"
    readers = 8 if is_smallest else READERS
    if rolling:
        shards, records = readers, 50 if is_smallest else 600
        paths, form = _tars(folder, shards, records), open_tar
    else:
        shards, records = _SMALLEST_SHARDS if is_smallest else _MANY[case], 20
        paths, form = _small_files(folder, shards), read_lines  # type: ignore[assignment]

    def make() -> Any:
        stream = Shards(paths, form, seed=3, readers=readers)
        return stream.shuffle(BUFFER // READERS if rolling else WINDOW, rolling=rolling)

    # For both kinds, so that the same is imported and in the system's cache.
    middle = 2 if case == "100,000 shards" else shards * records // BATCH // 2
    state = _state_after(make(), middle)
    began_s = time.perf_counter()
    loader = _loader(make(), 2 if kind.endswith("2 workers") else 0)
    if kind.startswith("go on"):
        loader.load_state_dict(state)
    next(iter(loader))
    return {"next_s": time.perf_counter() - began_s}


def _measure_server(folder: Path, is_smallest: bool) -> dict[str, float]:
    sys.path.append(str(Path(__file__).parents[1]))
    from tests.streams.web_server import WebServer

    shards, readers = (8, 8) if is_smallest else (64, 8)
    paths = _tars(folder, shards, 20 if is_smallest else 100)

    def batches(addresses: Sequence[str], **options: Any) -> list[Any]:
        stream = Shards(addresses, open_tar, seed=3, readers=readers, **options)
        loader = DataLoader(stream.shuffle(50).batch(16), batch_size=None, num_workers=2)
        return list(loader)

    expected = batches(paths)
    files = {Path(path).name: Path(path).read_bytes() for path in paths}
    cache = ShardCache(str(folder / "cache"))
    with WebServer(files, share=_FAILED_SHARE, seed=1).running() as server:
        began_s = time.perf_counter()
        got = batches([server.url + name for name in files], cache=cache)
        epoch_s = time.perf_counter() - began_s
    failed = sum(server.failed.values())
    return {"exact": float(got == expected), "failed_requests": failed, "epoch_s": epoch_s}


def _run(name: str, kind: str, round_: int, is_smallest: bool) -> Cells:  # noqa: ARG001
    with tempfile.TemporaryDirectory() as folder:
        if name == "state":
            figures = _measure_state(kind, Path(folder), is_smallest)
        elif name == "server":
            figures = _measure_server(Path(folder), is_smallest)
        else:
            figures = _measure_next(name, kind, Path(folder), is_smallest)
    return [(name, kind, figures)]


# ---------------------------------------------------------------- the section


def report(runs: Sequence[Run], machine: Mapping[str, str], is_smallest: bool) -> list[str]:  # noqa: ARG001
    """Return the lines of the section of RESULTS.md."""
    rows = [
        [case, kind, name, with_spread_if_any(values_of(runs, case, kind, name), ".4g")]
        for case, kinds in CASES.items()
        for kind in kinds
        for name in ("state_bytes", "next_s", "exact", "failed_requests", "epoch_s")
        if values_of(runs, case, kind, name)
    ]
    return [
        "## Streams of shards",
        "",
        "Made by `benchmarks/streams.py`, which says what each figure is.",
        "",
        *(f"- {name}: {value}" for name, value in machine.items()),
        "",
        *write_table(["case", "", "figure", ""], rows),
        "",
        *write_table(["figure", "goal", ""], _goals(runs)),
    ]


def _goals(runs: Sequence[Run]) -> list[list[str]]:
    def to_begin(kind: str) -> list[float]:
        begin = values_of(runs, "10,000 shards", f"begin{kind}", "next_s")
        go_on = values_of(runs, "10,000 shards", f"go on{kind}", "next_s")
        return [one / other for one, other in zip(go_on, begin, strict=False)]

    goals = (
        ("state, window, bytes", values_of(runs, "state", "window", "state_bytes"), 2_048, True),
        (
            "state, rolling, bytes",
            values_of(runs, "state", "rolling", "state_bytes"),
            204_800,
            True,
        ),
        ("10,000 shards, go on to begin, no workers", to_begin(""), 1.5, True),
        ("10,000 shards, go on to begin, 2 workers", to_begin(", 2 workers"), 1.5, True),
        ("rolling, tar, go on, s", values_of(runs, "rolling, tar", "go on", "next_s"), 1, True),
        ("100,000 shards, s", values_of(runs, "100,000 shards", "begin", "next_s"), 2, True),
        ("server, exact", values_of(runs, "server", "2 workers", "exact"), 1, False),
    )
    return [
        [f"{name}: {three_digits(statistics.median(seen))}", *judge(seen, wanted, is_most=is_most)]
        for name, seen, wanted, is_most in goals
        if seen
    ]


def main() -> int:
    """Measure, or do one run."""
    campaign = Campaign(
        file=__file__,
        about=str(__doc__).partition("\n")[0],
        kinds=CASES,
        smallest=CASES,
        rounds=5,
        limit_s=300.0,
        run=_run,
        report=report,
    )
    return campaign.main()


if __name__ == "__main__":
    raise SystemExit(main())
