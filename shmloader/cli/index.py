"""``shmloader index``: makes the indexes of shards ahead of their first use."""

import argparse
import os
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path

from shmloader.cli.target import UsageError
from shmloader.errors import ShardError
from shmloader.grammar import counted
from shmloader.streams import Format, open_jsonl, open_parquet, open_tar

_FORMATS: dict[str, Format] = {
    ".tar": open_tar, ".tgz": open_tar, ".tzst": open_tar, ".jsonl": open_jsonl,
    ".ndjson": open_jsonl, ".parquet": open_parquet,
}  # fmt: skip

# Interruptions are left to the parent of the processes.
_NO_INTERRUPTS = signal.SIGINT, signal.SIG_IGN


def index(options: argparse.Namespace) -> int:
    """Run the command. Returns 1 if a shard cannot be read.

    Raises:
        UsageError: If the name of a file does not say its format, or if a process was killed.
    """
    for path in options.files:
        if _format_of(path) is None:
            raise UsageError(f"{path}: its name should end in {', '.join(_FORMATS)}, .gz or .zst")
    shards = records = 0
    for result in _results(options.files, options.jobs or len(os.sched_getaffinity(0))):
        if isinstance(result, str):
            print(result)
        else:
            shards, records = shards + 1, records + result
    print(f"{counted(shards, 'shard')} with {counted(records, 'record')}")
    return int(shards < len(options.files))


def _results(paths: Sequence[str], jobs: int) -> Iterator[int | str]:
    """Yield the number of records of each shard, or what is wrong with it."""
    jobs = min(jobs, len(paths))
    if jobs == 1:
        yield from map(_result, paths)
        return
    # Forked, since a fresh process would import torch.
    pool = ProcessPoolExecutor(jobs, get_context("fork"), signal.signal, _NO_INTERRUPTS)
    try:
        yield from pool.map(_result, paths)
    except BrokenProcessPool as error:
        raise UsageError(f"a process was killed: try fewer than --jobs {jobs}") from error
    finally:
        pool.shutdown(cancel_futures=True)


def _result(path: str) -> int | str:
    found = _format_of(path)
    assert found is not None
    try:
        return found.count(path)
    except (ShardError, ImportError) as error:
        return str(error)


def _format_of(path: str) -> Format | None:
    return _FORMATS.get(Path(path.lower().removesuffix(".gz").removesuffix(".zst")).suffix)
