"""Forked processes that are the ranks of one run, for tests of what the ranks of a host share."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.process.support import wait_until

FORK = multiprocessing.get_context("fork")
#: How long a rank may take on a busy machine.
LONG_S = 150


def variables(run_id: str, rank: int, ranks: int, restarts: int = 0) -> dict[str, str]:
    return {
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_RESTART_COUNT": str(restarts),
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
    }


def meet(folder: Path, what: str = "begun", *, ranks: int = 2) -> None:
    """Wait, in a rank, until all ranks have come here."""
    (folder / f"{what} {os.environ['RANK']}").touch()
    wait_until(lambda: len([*folder.glob(f"{what} *")]) == ranks, LONG_S)


class Rank:
    """A forked process that is a rank of a run, and runs a function."""

    def __init__(
        self, function: Callable[[], Any], run: str, rank: int, ranks: int, restarts: int
    ) -> None:
        self._ours, theirs = FORK.Pipe()
        self._function = function
        self._environment = variables(run, rank, ranks, restarts)
        self.process = FORK.Process(target=self._main, args=(theirs,))
        self.process.start()
        theirs.close()

    def _main(self, channel: Any) -> None:
        os.environ.update(self._environment)
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

    def __init__(self) -> None:
        self.run_id = str(uuid.uuid4())
        self.started: list[Rank] = []

    def start(
        self, function: Callable[[], Any], rank: int = 0, ranks: int = 2, restarts: int = 0
    ) -> Rank:
        found = Rank(function, self.run_id, rank, ranks, restarts)
        self.started.append(found)
        return found

    def results(self, function: Callable[[], Any], ranks: int) -> list[Any]:
        started = [self.start(function, rank, ranks) for rank in range(ranks)]
        return [one.result() for one in started]
