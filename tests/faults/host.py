"""Kills among ranks that share workers: ``python -m tests.faults.host --times N``.

Each time a few ranks read some epochs from one pool (``worker_scope="host"``), and one process is
killed by SIGKILL at a random moment, or a rank is stopped until all others have ended. A worker or
a rank that dies, or is stopped, must cost the other ranks nothing; of a dead owner each rank must
learn by one clear error, in time, and then go on. In the end nothing may be left: no process, no
name of a socket, nothing in /dev/shm, no memory of a dead rank in the workers.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import functools
import hashlib
import os
import random
import re
import signal
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch

from shmloader import ShardedDataLoader
from shmloader.host.meeting import name_of_run
from tests.process.ranks import Rank, variables

_COUNT, _BATCH, _WORKERS, _EPOCHS = 240, 4, 2, 3
# How long a whole trial may take, and how long what a process used may outlive it.
_HANG_S, _LEFT_S = 60.0, 10.0
# How soon a rank learns that the owner is dead.
_TOLD_S = 2.0
_VICTIMS = ("worker", "rank", "owner", "starting worker", "starting owner", "stopped rank")
_PR_SET_CHILD_SUBREAPER = 36


class _Samples:
    """Samples that take a moment where there are workers."""

    def __init__(self, sample_s: float) -> None:
        self.sample_s = sample_s

    def __len__(self) -> int:
        return _COUNT

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        time.sleep(self.sample_s)
        return index, torch.rand(2)


def _contents(batches: Any) -> list[Any]:
    return [(indices.tolist(), drawn.tolist()) for indices, drawn in batches]


@functools.cache
def _expected(rank: int, ranks: int) -> list[Any]:
    """What a rank gets without workers."""
    with ShardedDataLoader(
        _Samples(0), _BATCH, True, rank=rank, world_size=ranks, last_batch="keep"
    ) as alone:
        return [_contents(alone) for _ in range(_EPOCHS)]


def _read(is_persistent: bool) -> tuple[list[Any], list[tuple[str, float]]]:
    """Read all epochs, and an epoch again if it fails. Returns them, and the errors' times."""
    found: list[Any] = []
    errors: list[tuple[str, float]] = []
    with ShardedDataLoader(
        _Samples(0.002),
        _BATCH,
        True,
        num_workers=_WORKERS,
        worker_scope="host",
        worker_restarts=1000,
        persistent_workers=is_persistent,
        last_batch="keep",
    ) as one:
        while len(found) < _EPOCHS and len(errors) < _EPOCHS:
            one.set_epoch(len(found))
            try:
                found.append(_contents(one))
            except RuntimeError as error:
                errors.append((f"{type(error).__name__}: {error}", time.monotonic()))
    return found, errors


class _Trial:
    """One run of ranks, of which a process is killed."""

    def __init__(self, seed: str, victim: str) -> None:
        self._random = random.Random(seed)
        self.victim = victim
        self._ranks = self._random.randint(2, 4)
        self._is_persistent = self._random.random() < 0.5
        self._killed_s = 0.0
        self._dead_rank: int | None = None
        self._stopped_rank: int | None = None
        self._in_shm = set(Path("/dev/shm").iterdir())
        self.problems: list[str] = []

    def run(self) -> None:
        run_id = str(uuid.uuid4())
        os.environ.update(variables(run_id, 0, self._ranks))
        read = functools.partial(_read, self._is_persistent)
        ranks = [Rank(read, run_id, rank, self._ranks, 0) for rank in range(self._ranks)]
        try:
            self._kill(ranks)
            for number, rank in enumerate(ranks):
                if number not in (self._dead_rank, self._stopped_rank):
                    self._check(number, rank)
            if self._stopped_rank is not None:
                stopped = ranks[self._stopped_rank]
                os.kill(stopped.process.pid or 0, signal.SIGCONT)
                self._killed_s = time.monotonic()
                self._check(self._stopped_rank, stopped)
        finally:
            for rank in ranks:
                if self.problems:
                    rank.process.kill()  # also one that is stopped
                rank.end()
        self._check_left()

    def _kill(self, ranks: list[Rank]) -> None:
        by_pid = {rank.process.pid: number for number, rank in enumerate(ranks)}
        is_starting = self.victim.startswith("starting")
        if "rank" in self.victim:
            number = self._random.randrange(self._ranks)
            pid = ranks[number].process.pid or 0
            if self.victim == "rank":
                self._dead_rank = number
            else:
                self._stopped_rank = number
                _first(_workers)  # one that is stopped while it starts them keeps all waiting
            if self._random.random() < 0.7:
                _first(_owners)
        else:
            pid = self._random.choice(_first(_owners if "owner" in self.victim else _workers))
        if is_starting:
            time.sleep(self._random.choice([0.0, self._random.uniform(0, 2)]))
        elif self.victim == "owner":
            _first(_workers)
        if not is_starting:
            time.sleep(self._random.uniform(0, 1.5))
        memory = _memory_of(pid) if pid in by_pid else set()
        with contextlib.suppress(ProcessLookupError):
            self._killed_s = time.monotonic()
            os.kill(pid, signal.SIGKILL if self._stopped_rank is None else signal.SIGSTOP)
        if self._dead_rank is not None:
            ranks[by_pid[pid]].process.join()
            if not _is_soon(lambda: not any(memory & _memory_of(one) for one in _workers())):
                self.problems.append("leak: workers keep memory of a dead rank")

    def _check(self, number: int, rank: Rank) -> None:
        if not rank._ours.poll(max(0.0, self._killed_s + _HANG_S - time.monotonic())):
            self.problems.append(f"hang: rank {number}")
            return
        result = rank.result()
        if isinstance(result, BaseException):
            self.problems.append(f"other problem: rank {number}: {result!r}")
            return
        found, errors = result
        if found != _expected(number, self._ranks):
            self.problems.append(f"wrong batch: rank {number}")
        if len(errors) > ("owner" in self.victim):
            self.problems.append(f"other problem: rank {number}: {errors}")
        for text, at_s in errors:
            if "owns the workers" not in text and "was to own the workers" not in text:
                self.problems.append(f"other problem: rank {number}: unclear: {text}")
            if at_s > self._killed_s + _TOLD_S:
                late_s = at_s - self._killed_s
                self.problems.append(f"other problem: rank {number}: error after {late_s:.1f} s")

    def _check_left(self) -> None:
        if not _is_soon(lambda: not _processes()):
            left = [(one.pid, one.name(), one.status()) for one in _processes()]
            self.problems.append(f"leak: processes {left}")
            for one in _processes():
                one.kill()
        names = {_name_of_pool(number) for number in range(2 * _EPOCHS)}
        text = Path("/proc/net/unix").read_text()
        if names & set(re.findall(r"@(\S+)", text)):
            self.problems.append("leak: the name of a socket")
        if files := set(Path("/dev/shm").iterdir()) - self._in_shm:
            self.problems.append(f"leak: {sorted(map(str, files))}")


def _name_of_pool(number: int) -> str:
    digest = hashlib.sha256(os.fsencode(f"{name_of_run()}\nworkers {number}")).hexdigest()[:32]
    return f"shmloader-{os.geteuid()}-{digest}"


def _processes() -> list[psutil.Process]:
    """All processes of the trial; orphans are children of this one."""
    found = []
    for one in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if one.status() != psutil.STATUS_ZOMBIE:
                found.append(one)
            elif one.ppid() == os.getpid():
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(one.pid, os.WNOHANG)
    return found


def _owners() -> list[int]:
    found = []
    for one in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            if any("spawn_main" in part for part in one.cmdline()) and not _is_owner(one.ppid()):
                found.append(one.pid)
    return found


def _is_owner(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
        return any("spawn_main" in part for part in psutil.Process(pid).cmdline())
    return False


def _workers() -> list[int]:
    found = []
    for pid in _owners():
        with contextlib.suppress(psutil.NoSuchProcess):
            found += [one.pid for one in psutil.Process(pid).children()]
    return found


def _memory_of(pid: int) -> set[str]:
    """The inodes of the anonymous files that a process has mapped."""
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
        return {line.split()[4] for line in lines if "/memfd:" in line}
    return set()


def _first(pids: Callable[[], list[int]]) -> list[int]:
    """Wait until there are such processes."""
    until = time.monotonic() + _HANG_S
    while not (found := pids()):
        assert time.monotonic() < until, "no process has started"
        time.sleep(0.001)
    return found


def _is_soon(condition: Callable[[], bool]) -> bool:
    until = time.monotonic() + _LEFT_S
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(0.01)
    return True


def main() -> None:
    """Kill as often as the command line says; exit code 1 if anything was wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.faults.host", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument(
        "--times", type=int, default=300, metavar="N", help="how many (300), each victim in turn"
    )
    parser.add_argument("--seed", type=int, default=None, help="of all choices; printed")
    options = parser.parse_args()
    seed = random.SystemRandom().randrange(1 << 32) if options.seed is None else options.seed
    print(f"--seed {seed}", flush=True)
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    counts: Counter[str] = Counter()
    wrong = 0
    began_s = time.monotonic()
    for number in range(options.times):
        trial = _Trial(f"{seed}/{number}", _VICTIMS[number % len(_VICTIMS)])
        trial.run()
        counts[trial.victim] += 1
        wrong += bool(trial.problems)
        elapsed_s = time.monotonic() - began_s
        told = "; ".join(trial.problems) or "right"
        print(f"{number} {elapsed_s:.0f} s  {trial.victim}: {told}", flush=True)
    print(f"--seed {seed}: {options.times} kills {dict(counts)}: {wrong} with problems")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
