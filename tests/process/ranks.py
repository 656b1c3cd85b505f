"""Forked processes that are the ranks of one run, for tests of what the ranks of a host share.

Their process group has a store and no collective operations. So ranks start at any time.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed
from torch.testing._internal.distributed import fake_pg  # noqa: F401 - it registers "fake"

from tests.process.support import wait_until

FORK = multiprocessing.get_context("fork")
#: How long a rank may take on a busy machine.
LONG_S = 150


def join(store: Path, rank: int, ranks: int) -> None:
    """Make this process a rank of the run that has this file as its store."""
    _join(torch.distributed.FileStore(str(store), -1), rank, ranks)


def join_launched() -> None:
    """Make this process the rank as which torchrun has started it."""
    _join(*next(torch.distributed.rendezvous("env://")))


def _join(store: torch.distributed.Store, rank: int, ranks: int) -> None:
    if torch.distributed.is_initialized():  # that of a test, which has forked this rank
        torch.distributed.destroy_process_group()
    torch.distributed.init_process_group("fake", store=store, rank=rank, world_size=ranks)


def meet(folder: Path, what: str = "begun", *, ranks: int = 2) -> None:
    """Wait, in a rank, until all ranks have come here."""
    (folder / f"{what} {os.environ['RANK']}").touch()
    wait_until(lambda: len([*folder.glob(f"{what} *")]) == ranks, LONG_S)


class Rank:
    """A forked process that is a rank of a run, and runs a function."""

    def __init__(self, function: Callable[[], Any], store: Path, rank: int, ranks: int) -> None:
        self._ours, theirs = FORK.Pipe()
        self._function = function
        self._place = store, rank, ranks
        self.process = FORK.Process(target=self._main, args=(theirs,))
        self.process.start()
        theirs.close()

    def _main(self, channel: Any) -> None:
        os.environ["RANK"] = str(self._place[1])
        join(*self._place)
        try:
            result = self._function()
        except BaseException as error:
            result = error
        channel.send(result)
        channel.recv()  # lives until it is let go

    def result(self, timeout_s: float = LONG_S) -> Any:
        assert self._ours.poll(timeout_s), "the rank has not answered"
        return self._ours.recv()

    def end(self) -> None:
        if self._ours.closed:
            return
        with contextlib.suppress(OSError):
            self._ours.send(None)
        self._ours.close()
        self.process.join(LONG_S)
        self.process.close()


class Run:
    """Ranks of one run, which end with the test."""

    def __init__(self, store: Path) -> None:
        self.store = store
        self.started: list[Rank] = []

    def start(self, function: Callable[[], Any], rank: int = 0, ranks: int = 2) -> Rank:
        found = Rank(function, self.store, rank, ranks)
        self.started.append(found)
        return found

    def results(self, function: Callable[[], Any], ranks: int) -> list[Any]:
        started = [self.start(function, rank, ranks) for rank in range(ranks)]
        return [one.result() for one in started]

    def close(self) -> None:
        for rank in self.started:
            rank.end()
