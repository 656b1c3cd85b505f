"""Kills among ranks of one host: ``python -m tests.faults.host``; ``--help`` lists the options.

In most trials a few ranks read some epochs from one pool (``worker_scope="host"``), and one process
is killed by SIGKILL at a random moment, or a rank is stopped until all others have ended. If a
worker or a rank dies or is stopped, the other ranks must get all batches and no error. If the owner
dies, each rank must get one clear error, in time, and then continue. In the other trials the ranks
share a dataset (``share_on_host``), and the rank that builds it is killed, or one that takes it.
All other ranks must have the dataset, also after a restart of the run. In the end nothing may be
left: no process, no name of a socket, nothing in /dev/shm, no memory of a dead rank in the workers.

Each trial is a process that adopts the orphans of its ranks and has a /dev/shm of its own, if it
may mount one, so several can run at a time. In most trials the ranks fork what they would spawn
(:mod:`tests.faults.announcements`), and in a few the owner is a new interpreter. A kill that comes
too late, when the process or all ranks have finished, does not count: the trial is repeated.
"""

import contextlib
import ctypes
import functools
import hashlib
import multiprocessing.connection
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch

from shmloader import ShardedDataLoader, share_on_host
from shmloader.host import name_of_socket, token_of_group
from tests.faults import docs
from tests.faults.announcements import Announcements, is_running, tell_forks_of_spawned
from tests.faults.harness import mount_shm, options_of
from tests.process.ranks import FORK, Rank, join

_COUNT, _BATCH, _WORKERS, _EPOCHS = 240, 4, 2, 3
_MOST_RANKS = 4
# How long a sample takes, and at least how long it takes to build the dataset.
_SAMPLE_S, _BUILD_S = 0.001, 0.1
# How long after a kill a rank's result may take, and what a process used may outlive it.
_HANG_S, _LEFT_S = 60.0, 10.0
# How soon a rank must learn that the owner is dead.
_TOLD_S = 2.0
# Of so many trials, the owner of one is a new interpreter.
_FRESH_OF = 20
_VICTIMS = (
    *("worker", "rank", "owner", "starting worker", "starting owner", "stopped rank"),
    *("builder", "taking rank"),
)
_OWNER_ERRORS = ("owns the workers", "forks the workers")
# What is counted for each victim, and its heading. A problem's text begins with its sort.
_COUNTED = (
    ("trial", "kills"),
    ("hang", "hangs"),
    ("wrong batch", "wrong batches"),
    ("leak", "leaks"),
    ("other problem", "other problems"),
    ("rank told", "ranks told of it"),
)
# From <sys/prctl.h>.
_PR_SET_CHILD_SUBREAPER = 36


class _Expected(NamedTuple):
    """What the ranks should get."""

    epochs: dict[int, list[Any]]  # for each number of ranks, the epochs of each rank
    dataset: str  # the digest of the shared dataset


class _Samples:
    """Samples that take ``sample_s`` seconds each."""

    def __init__(self, sample_s: float) -> None:
        self.sample_s = sample_s

    def __len__(self) -> int:
        return _COUNT

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        time.sleep(self.sample_s)
        return index, torch.rand(2)


def _contents(batches: Any) -> list[Any]:
    return [(indices.tolist(), drawn.tolist()) for indices, drawn in batches]


def _expected() -> _Expected:
    """Return what the ranks should get, loaded without workers."""

    def epochs(rank: int, ranks: int) -> list[Any]:
        with ShardedDataLoader(
            _Samples(0), _BATCH, True, rank=rank, world_size=ranks, last_batch="keep"
        ) as alone:
            return [_contents(alone) for _ in range(_EPOCHS)]

    of_ranks = {
        ranks: [epochs(rank, ranks) for rank in range(ranks)] for ranks in range(2, _MOST_RANKS + 1)
    }
    return _Expected(of_ranks, _digest(_make_dataset()))


# What a rank gets, and its errors with their times.
_Found = tuple[list[Any], list[tuple[str, float]]]


def _read(announcements: Announcements, is_fresh: bool, is_persistent: bool) -> _Found:
    """Read all epochs, and an epoch again if it fails."""
    announcements.watch_spawned(forks=not is_fresh)
    found: list[Any] = []
    errors: list[tuple[str, float]] = []
    with ShardedDataLoader(
        _Samples(_SAMPLE_S),
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


def _take(announcements: Announcements, late_s: float) -> _Found:
    """Take the dataset, or build it."""
    time.sleep(late_s)
    try:
        found = share_on_host(functools.partial(_build, announcements))
    except RuntimeError as error:
        return [], [(f"{type(error).__name__}: {error}", time.monotonic())]
    return [_digest(found)], []


def _build(announcements: Announcements) -> dict[str, Any]:
    announcements.tell("building")
    time.sleep(_BUILD_S)
    found = _make_dataset()
    announcements.tell("built")
    return found


def _make_dataset() -> dict[str, Any]:
    return {"numbers": torch.arange(500_000), "texts": [str(index) for index in range(20_000)]}


def _digest(dataset: dict[str, Any]) -> str:
    digest = hashlib.sha256(dataset["numbers"].numpy().tobytes())
    digest.update("\n".join(dataset["texts"]).encode())
    return digest.hexdigest()


class _Verdict(NamedTuple):
    """What a trial has shown."""

    was_late: bool  # whether the victim, or all ranks, had finished before the kill
    problems: list[str]
    errors: int  # how many ranks got an error


class _Trial:
    """One run of ranks, in which a process is killed or stopped."""

    def __init__(self, seed: str, victim: str) -> None:
        self._random = random.Random(seed)
        self._victim = victim
        self._count = self._random.randint(2, _MOST_RANKS)
        self._folder = Path(tempfile.mkdtemp())
        self._store = self._folder / "store"
        self._announcements = Announcements()
        self._ranks: list[Rank] = []
        self._killed_s = 0.0
        self._dead_rank: int | None = None
        self._stopped_rank: int | None = None
        self._was_late = False
        self._errors = 0
        self._in_shm = set(Path("/dev/shm").iterdir())
        self._problems: list[str] = []

    def _start_ranks(self, function: Callable[[int], Callable[[], _Found]]) -> None:
        for rank in range(self._count):
            self._ranks.append(Rank(function(rank), self._store, rank, self._count))

    def _end_ranks(self) -> None:
        for rank in self._ranks:
            if self._problems:
                rank.process.kill()  # also one that is stopped
            rank.end()
        self._ranks.clear()

    def _pids_of_ranks(self) -> list[int]:
        return [rank.process.pid or 0 for rank in self._ranks]

    def _signal(self, pid: int, number: signal.Signals) -> None:
        """Kill or stop a process; note if it, or all ranks, had already finished."""
        self._was_late = not is_running(pid) or all(rank._ours.poll(0) for rank in self._ranks)
        self._killed_s = time.monotonic()
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)

    def _wait_for(self, what: str) -> list[int]:
        return self._announcements.wait_for(what, _HANG_S)

    def _pause(self, *most_s: float) -> None:
        """Wait for a random time, up to one of these limits."""
        time.sleep(self._random.uniform(0, self._random.choice(most_s)))

    def _check(self, number: int, is_right: Callable[[_Found], bool], *clear: str) -> None:
        """Check what a rank got, and that it was told once, clearly, and in time.

        Args:
            number: The rank.
            is_right: Whether it got what it should have.
            clear: Texts of which an error must have one; none if there must be no error.
        """
        rank = self._ranks[number]
        if not rank._ours.poll(max(0.0, self._killed_s + _HANG_S - time.monotonic())):
            self._problems.append(f"hang: rank {number}")
            return
        try:
            result = rank.result()
        except EOFError:
            result = RuntimeError("it has died")
        name = f"other problem: rank {number}"
        if isinstance(result, BaseException):
            self._problems.append(f"{name}: {result!r}")
            return
        if not is_right(result):
            self._problems.append(f"wrong batch: rank {number}")
        errors = result[1]
        self._errors += bool(errors)
        if len(errors) > bool(clear):
            self._problems.append(f"{name}: {errors}")
        for text, at_s in errors:
            if not any(each in text for each in clear):
                self._problems.append(f"{name}: unclear: {text}")
            if (late_s := at_s - self._killed_s) > _TOLD_S:
                self._problems.append(f"{name}: error after {late_s:.1f} s")

    def _token(self) -> str:
        join(self._store, 0, self._count)
        return token_of_group("")

    def _check_left(self, *topics: str) -> None:
        """Check that nothing is left of a run."""
        if not _is_soon(lambda: not _processes()):
            left = [(one.pid, one.name(), one.status()) for one in _processes()]
            self._problems.append(f"leak: processes {left}")
            for one in _processes():
                one.kill()
        run = _in_child(self._token)
        names = {name_of_socket(run, topic).removeprefix("\0") for topic in topics}
        text = Path("/proc/net/unix").read_text()
        if names & set(re.findall(r"@(\S+)", text)):
            self._problems.append("leak: the name of a socket")
        # Without a /dev/shm of its own, a trial also reports files that other programs leave.
        if not _is_soon(lambda: not set(Path("/dev/shm").iterdir()) - self._in_shm):
            files = set(Path("/dev/shm").iterdir()) - self._in_shm
            self._problems.append(f"leak: {sorted(map(str, files))}")


class _PoolTrial(_Trial):
    """Ranks that read from one pool of workers."""

    def __init__(self, seed: str, victim: str) -> None:
        super().__init__(seed, victim)
        self._is_persistent = self._random.random() < 0.5
        self._is_fresh = self._random.randrange(_FRESH_OF) == 0

    def run(self, expected: _Expected) -> None:
        epochs = expected.epochs[self._count]
        read = functools.partial(_read, self._announcements, self._is_fresh, self._is_persistent)
        clear = _OWNER_ERRORS if "owner" in self._victim else ()

        def check(number: int) -> None:
            self._check(number, lambda result: result[0] == epochs[number], *clear)

        self._start_ranks(lambda _: read)
        try:
            self._kill()
            for number in {*range(self._count)} - {self._dead_rank, self._stopped_rank}:
                check(number)
            if self._stopped_rank is not None:
                os.kill(self._pids_of_ranks()[self._stopped_rank], signal.SIGCONT)
                self._killed_s = time.monotonic()
                check(self._stopped_rank)
        finally:
            self._end_ranks()
        self._check_left(*[f"workers {number}" for number in range(2 * _EPOCHS)])

    def _kill(self) -> None:
        match self._victim:
            case "worker":
                self._wait_for("forked")
                self._pause(0.4)
                workers = self._announcements.pids("forked")
                self._signal(self._random.choice(workers or [0]), signal.SIGKILL)
            case "starting worker":
                pid = self._random.choice(self._wait_for("forked") or [0])
                self._pause(0.0, 0.05)
                self._signal(pid, signal.SIGKILL)
            case "owner":
                owners = self._wait_for("spawned")
                self._wait_for("forked")
                self._pause(0.4)
                self._signal(self._random.choice(owners or [0]), signal.SIGKILL)
            case "starting owner":
                owners = self._wait_for("spawned")
                self._pause(0.0, 2.0 if self._is_fresh else 0.1)
                self._signal(self._random.choice(owners or [0]), signal.SIGKILL)
            case "rank":
                self._dead_rank = self._random.randrange(self._count)
                if self._random.random() < 0.7:
                    self._wait_for("spawned")
                self._pause(0.4)
                pid = self._pids_of_ranks()[self._dead_rank]
                memory = _memory_of(pid)
                self._signal(pid, signal.SIGKILL)
                self._ranks[self._dead_rank].process.join()
                if not _is_soon(lambda: not self._is_used(memory)):
                    self._problems.append("leak: workers keep memory of a dead rank")
            case "stopped rank":
                # A rank that is stopped while it starts the owner would keep all others waiting.
                self._wait_for("forked")
                self._pause(0.4)
                self._stopped_rank = self._random.randrange(self._count)
                self._signal(self._pids_of_ranks()[self._stopped_rank], signal.SIGSTOP)

    def _is_used(self, memory: set[str]) -> bool:
        return any(memory & _memory_of(pid) for pid in self._announcements.pids("forked"))


class _ShareTrial(_Trial):
    """Ranks that share a dataset."""

    def run(self, expected: _Expected) -> None:
        for restarts in range(2):
            self._store = self._folder / f"store {restarts}"
            late_s = [self._random.uniform(0, _BUILD_S) for _ in range(self._count)]
            late_s[self._random.randrange(self._count)] = 0
            self._start_ranks(
                lambda rank, late_s=late_s: functools.partial(  # type: ignore[misc]
                    _take, self._announcements, late_s[rank]
                )
            )
            try:
                if restarts:
                    self._dead_rank, self._killed_s = None, time.monotonic()
                else:
                    self._kill()
                for number in {*range(self._count)} - {self._dead_rank}:
                    self._check(
                        number, lambda result: result[0] == [expected.dataset] or bool(result[1])
                    )
            finally:
                self._end_ranks()
            self._check_left("share_on_host 0")

    def _kill(self) -> None:
        (builder,) = self._wait_for("building")
        if self._random.random() < 0.5:
            self._pause(1.2 * _BUILD_S)
        else:
            self._wait_for("built")
            self._pause(0.0, 0.03)
        pids = self._pids_of_ranks()
        if self._victim == "builder":
            self._dead_rank = pids.index(builder)
        else:
            self._dead_rank = self._random.choice(
                [number for number, pid in enumerate(pids) if pid != builder]
            )
        self._signal(pids[self._dead_rank], signal.SIGKILL)
        self._ranks[self._dead_rank].process.join()


def _processes() -> list[psutil.Process]:
    """Return all processes of the trial. Its orphans are children of this process."""
    found = []
    for one in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if one.status() != psutil.STATUS_ZOMBIE:
                found.append(one)
            elif one.ppid() == os.getpid():
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(one.pid, os.WNOHANG)
    return found


def _memory_of(pid: int) -> set[str]:
    """Return the inodes of the memfds that a process has mapped."""
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
        return {line.split()[4] for line in lines if "/memfd:" in line}
    return set()


def _is_soon(condition: Callable[[], bool]) -> bool:
    until = time.monotonic() + _LEFT_S
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(0.01)
    return True


def _adopt_orphans() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


class _TrialProcess:
    """A process that runs one trial.

    Attributes:
        number: The trial's number.
        victim: What is killed.
        attempt: How often kills of this trial came too late.
        connection: Readable when the process has ended.
    """

    def __init__(self, seed: int, number: int, attempt: int, expected: _Expected) -> None:
        self.number, self.attempt = number, attempt
        self.victim = _VICTIMS[number % len(_VICTIMS)]
        self.connection, theirs = FORK.Pipe(duplex=False)
        arguments = (theirs, f"{seed}/{number}/{attempt}", self.victim, expected)
        self._process = FORK.Process(target=_run_trial, args=arguments)
        self._process.start()
        theirs.close()
        self.until_s = time.monotonic() + 3 * _HANG_S

    def verdict(self) -> _Verdict:
        """Return the trial's verdict if the connection is readable; otherwise kill it: it hangs."""
        problem = "other problem: it died"
        with self.connection, contextlib.suppress(EOFError):
            if self.connection.poll(0):
                verdict: _Verdict = self.connection.recv()
                self._process.join()
                return verdict
            problem = "hang: the trial"
            children = psutil.Process(self._process.pid).children(recursive=True)
            for one in [psutil.Process(self._process.pid), *children]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.kill()
        self._process.join()
        return _Verdict(was_late=False, problems=[problem], errors=0)


def _run_trial(connection: Any, seed: str, victim: str, expected: _Expected) -> None:
    _adopt_orphans()
    mount_shm()
    is_of_share = victim in ("builder", "taking rank")
    trial = (_ShareTrial if is_of_share else _PoolTrial)(seed, victim)
    try:
        trial.run(expected)
    except BaseException:
        trial._problems.append(f"other problem: {traceback.format_exc()}")
    shutil.rmtree(trial._folder)
    connection.send(_Verdict(trial._was_late, trial._problems, trial._errors))


def _verdicts(
    seed: int, times: int, jobs: int, expected: _Expected
) -> Iterator[tuple[_TrialProcess, _Verdict]]:
    """Run trials, and yield each with its verdict."""
    numbers = iter(range(times))
    running: list[_TrialProcess] = []
    while True:
        while len(running) < jobs and (number := next(numbers, None)) is not None:
            running.append(_TrialProcess(seed, number, 0, expected))
        if not running:
            return
        left_s = max(0.0, min(one.until_s for one in running) - time.monotonic())
        ready = multiprocessing.connection.wait([one.connection for one in running], left_s)
        for one in list(running):
            if one.connection in ready or time.monotonic() > one.until_s:
                running.remove(one)
                verdict = one.verdict()
                yield one, verdict
                if verdict.was_late and not verdict.problems:
                    running.append(_TrialProcess(seed, one.number, one.attempt + 1, expected))


def _in_child(function: Callable[[], Any]) -> Any:
    """Call a function in a child, since threads that torch starts must not be there at a fork."""
    ours, theirs = FORK.Pipe(duplex=False)
    process = FORK.Process(target=lambda: theirs.send(function()))
    process.start()
    theirs.close()
    result = ours.recv()
    process.join()
    return result


def main() -> None:
    """Kill as often as the command line says; exit with 1 if anything was wrong."""
    options = options_of(
        "host", __doc__, times=(300, "trials, each victim in turn"), jobs=(1, "trials at a time")
    )
    _adopt_orphans()
    resource_tracker.ensure_running()  # once for all ranks
    expected = _in_child(_expected)
    counts: dict[str, Counter[str]] = {victim: Counter() for victim in _VICTIMS}
    began_s = time.monotonic()
    wrong = 0
    for trial, verdict in _verdicts(options.seed, options.times, options.jobs, expected):
        counts[trial.victim] += Counter(one.partition(":")[0] for one in verdict.problems)
        if verdict.was_late and not verdict.problems:
            continue
        counts[trial.victim] += Counter({"trial": 1, "rank told": verdict.errors})
        wrong += bool(verdict.problems)
        elapsed_s = time.monotonic() - began_s
        told = "; ".join(verdict.problems) or "right"
        print(f"{trial.number} {elapsed_s:.0f} s  {trial.victim}: {told}", flush=True)
    for victim, count in counts.items():
        print(f"{victim}: " + ", ".join(f"{count[what]} {several}" for what, several in _COUNTED))
    minutes = (time.monotonic() - began_s) / 60
    end = f"{minutes:.1f} minutes: {wrong} with problems"
    print(f"--seed {options.seed}: {options.times} kills in {end}")
    if options.docs:
        total = sum(counts.values(), Counter())
        found = ", ".join(f"{total[what]} {several}" for what, several in _COUNTED[1:-1])
        docs.write(
            "host",
            f"{docs.where_and_when()}; {minutes:.0f} minutes, `--seed {options.seed}`: "
            f"**{options.times} kills, {found}**.",
            "",
            *docs.table(
                ["killed", "times", *[several for _, several in _COUNTED[1:]]],
                [
                    [victim, *[f"{count[what]:,}" for what, _ in _COUNTED]]
                    for victim, count in counts.items()
                ],
            ),
        )
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
elif __name__ == "__mp_main__":
    tell_forks_of_spawned()
