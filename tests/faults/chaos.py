"""Kills at random times: ``python -m tests.faults.chaos --kills 1000``.

Programs run loaders of every kind, epoch after epoch, and check every batch that they get. Beside
them, workers are killed by SIGKILL at random times, and now and then a whole main process. Counted
are hangs (no progress for half a minute), wrong batches (content, order, one that is missing or
comes twice, an exception that a kill does not explain) and leaks (processes that outlive their
main process by two seconds; what a program still holds when its loader is closed).

The seed decides what programs do and when kills come; which line of code a kill meets is chance.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import gc
import itertools
import json
import logging
import os
import random
import select
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

import torch

from tests.holdings import Holdings

ROOT = Path(__file__).parents[2]

# No progress for so long is a hang: workers of four programs may start at once, on two cores.
HANG_S = 30.0
# Processes must have ended so long after their main process.
LEFT_S = 2.0
# Between two kills of a program, on average.
BETWEEN_S = 0.12
# Kills of workers before a program is asked to end, or its main process is killed.
KILLS_EACH = (3, 25)

BATCHES = 24
BATCH_SIZE = 4
_SAMPLE_BYTES = 20_000


# The program -----------------------------------------------------------------------------------


def make_sample(index: int) -> torch.Tensor:
    """Bytes that only this index has."""
    return torch.arange(_SAMPLE_BYTES, dtype=torch.int64).mul_(index * 2 + 1).to(torch.uint8)


class Numbers(torch.utils.data.Dataset):
    """Samples that tell their indices."""

    def __len__(self) -> int:
        return BATCHES * BATCH_SIZE

    def __getitem__(self, index: int) -> Any:
        return make_sample(index), index


class Streams(torch.utils.data.IterableDataset):
    """The same numbers, every worker its share, batch by batch."""

    def __iter__(self) -> Iterator[Any]:
        worker = torch.utils.data.get_worker_info()
        for batch in range(worker.id, BATCHES, worker.num_workers):
            for index in range(batch * BATCH_SIZE, (batch + 1) * BATCH_SIZE):
                yield make_sample(index), index


def check(batch: Any) -> int:
    """The number of a batch.

    Raises:
        AssertionError: If its content is not what it should be.
    """
    images, labels = batch
    number = int(labels[0]) // BATCH_SIZE
    indices = range(number * BATCH_SIZE, (number + 1) * BATCH_SIZE)
    assert labels.tolist() == list(indices), f"labels {labels.tolist()}"
    for image, index in zip(images, indices, strict=True):
        assert torch.equal(image, make_sample(index)), f"content of sample {index}"
    return number


def choose(seed: int) -> dict[str, Any]:
    """What a program does."""
    chance = random.Random(seed)
    workers = chance.choice([1, 2, 3, 4])
    return {
        "dataset": chance.choice(["map", "map", "iterable"]),
        "stage": chance.choice(["", "", "pin", "device"]),
        "keeps": chance.choice([0, 0, 1, 9]),
        "loader": {
            "batch_size": BATCH_SIZE,
            "num_workers": workers,
            "prefetch_factor": chance.choice([1, 2, 4]),
            "multiprocessing_context": chance.choice(["fork"] * 8 + ["spawn", "forkserver"]),
            "persistent_workers": chance.random() < 0.5,
            "in_order": chance.random() < 0.7,
            "worker_restarts": chance.choice([0, 2, 10**6]),
        },
    }


def prepare(plan: dict[str, Any]) -> Any:
    """Put in what the plan's stage needs; returns how to read a batch."""
    if plan["stage"] == "pin":
        from tests.simulated import install_pinning

        install_pinning()
        plan["loader"]["pin_memory"] = True
    if plan["stage"] == "device":
        from tests.simulated import SimulatedDevice, install

        device = install(SimulatedDevice(seed=1))
        plan["loader"]["device"] = "sim"
        return lambda batch: [device.read(part) for part in batch]
    return lambda batch: batch


def run_epoch(loader: Any, plan: dict[str, Any], read: Any, is_asked_to_end: Any) -> None:
    """One epoch, or what a death leaves of it.

    Raises:
        AssertionError: If a batch is wrong, missing, or comes twice.
    """
    from shmloader import ClosedLoaderError, WorkerDiedError

    kept: list[tuple[int, Any]] = []
    numbers: list[int] = []
    batches: Iterator[Any] = iter(())
    try:
        batches = iter(loader)
        for batch in batches:
            content = read(batch)
            numbers.append(check(content))
            kept.append((numbers[-1], content))
            for number, old in kept[: max(0, len(kept) - plan["keeps"])]:
                assert check(old) == number, "a kept batch has changed"
                kept.pop(0)
            say(".")
            if is_asked_to_end():
                break
        else:
            assert sorted(numbers) == list(range(BATCHES)), f"the epoch ends with {numbers}"
    except WorkerDiedError as error:  # as an epoch begins, too: of a worker that had nothing to do
        if "killed by signal: Killed" not in str(error):
            raise AssertionError(f"a death as {error}") from error
        say("x")
        for _ in range(2):
            try:
                next(batches)
            except (ClosedLoaderError, StopIteration):
                continue
            raise AssertionError("a batch after the death") from error
    if plan["loader"]["in_order"]:
        assert numbers == sorted(numbers), f"the order is {numbers}"
        assert numbers == list(range(len(numbers))), f"one is missing in {numbers}"
    assert len(set(numbers)) == len(numbers), f"one comes twice in {numbers}"


def say(character: str) -> None:
    """Tell the one who kills us of progress."""
    os.write(1, character.encode())


def run_program(seed: int) -> None:
    """Epoch after epoch until standard input ends; then say what is left of the loader."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    logging.disable()  # of each restart there is a warning
    plan = choose(seed)
    method = plan["loader"]["multiprocessing_context"]
    resource_tracker.ensure_running()
    if method == "forkserver":
        forkserver.ensure_running()
    read = prepare(plan)
    from shmloader import DataLoader

    asked = select.poll()
    asked.register(0, select.POLLIN | select.POLLHUP)

    def is_asked_to_end() -> bool:
        return bool(asked.poll(0))

    dataset = Numbers() if plan["dataset"] == "map" else Streams()
    before = Holdings.now()
    say("ready\n")
    with DataLoader(dataset, **plan["loader"]) as loader:
        while not is_asked_to_end():
            run_epoch(loader, plan, read, is_asked_to_end)
    del loader
    deadline = time.monotonic() + LEFT_S
    while (left := Holdings.now().beyond(before)) and time.monotonic() < deadline:
        gc.collect()  # exceptions and their frames hold each other
        time.sleep(0.01)
    say(f"\n{json.dumps(left)}\n")


# The one who kills ------------------------------------------------------------------------------


@dataclass
class Counts:
    """What was seen."""

    kills: Counter[str] = field(default_factory=Counter)
    problems: Counter[str] = field(default_factory=Counter)
    batches: int = 0
    deaths: int = 0
    programs: int = 0


class Program:
    """A program, seen from outside."""

    def __init__(self, seed: int) -> None:
        self.plan = choose(seed)
        self.seed = seed
        self.out = b""
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "tests.faults.chaos", f"--program={seed}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        assert self.process.stdout is not None
        self._fd = self.process.stdout.fileno()
        os.set_blocking(self._fd, False)

    def progress(self, timeout_s: float) -> bool:
        """Wait for a sign of life; whether one came."""
        ready, _, _ = select.select([self._fd], [], [], timeout_s)
        if not ready:
            return False
        with contextlib.suppress(BlockingIOError):
            self.out += os.read(self._fd, 1 << 16)
        return True

    def session(self) -> dict[int, tuple[int, str]]:
        """Its processes that run: parent and command, by number."""
        found = {}
        for name in os.listdir("/proc"):  # noqa: PTH208 - numbers, not paths
            if not name.isdecimal():
                continue
            with contextlib.suppress(OSError):
                if os.getsid(int(name)) == self.process.pid:
                    stat = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
                    if stat[0] not in "ZX":
                        command = Path(f"/proc/{name}/cmdline").read_text()
                        found[int(name)] = int(stat[1]), command
        return found

    def workers(self) -> list[int]:
        """Its workers, those that are just starting included."""
        processes = self.session()
        servers = {pid for pid, (_, command) in processes.items() if "forkserver" in command}
        main = self.process.pid
        if self.plan["loader"]["multiprocessing_context"] == "forkserver":
            # A worker's command is the server's: it is told by its parent.
            server = {pid for pid in servers if processes[pid][0] == main}
            return sorted(pid for pid, (parent, _) in processes.items() if parent in server)
        return sorted(
            pid
            for pid, (parent, command) in processes.items()
            if parent == main and "resource_tracker" not in command and pid not in servers
        )

    def stacks(self) -> str:
        """Of its main process."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGUSR1)
        time.sleep(0.5)
        return " ".join(f"{pid}: {command[:60]}" for pid, (_, command) in self.session().items())

    def end(self) -> tuple[int, str, list[str]]:
        """Wait for its end; its code, what it said on stderr, and who outlived it."""
        self.process.wait()
        deadline = time.monotonic() + LEFT_S
        while (left := self.session()) and time.monotonic() < deadline:
            time.sleep(0.01)
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        while self.progress(0) and not self.out.endswith(b"\0"):
            before = len(self.out)
            self.progress(0)
            if len(self.out) == before:
                break
        assert self.process.stderr is not None
        err = self.process.stderr.read().decode(errors="replace")
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()
        return self.process.returncode, err, [f"{pid}: {words}" for pid, words in left.items()]


class Chaos:
    """Kills until there were enough.

    Args:
        kills: How many.
        seed: Of everything that is chosen.
    """

    def __init__(self, kills: int, seed: int) -> None:
        self.wanted = kills
        self.counts = Counts()
        self._seeds = itertools.count(seed * 1_000_003)
        self._lock = threading.Lock()
        self._began = time.monotonic()

    @property
    def total(self) -> int:
        return sum(self.counts.kills.values())

    def run(self) -> None:
        """One program after the other; called by several threads."""
        while self.total < self.wanted:
            with self._lock:
                seed = next(self._seeds)
                self.counts.programs += 1
            self._run_program(seed)

    def _note(self, what: str, seed: int, words: str) -> None:
        with self._lock:
            self.counts.problems[what] += 1
        print(f"\n{what} (--program={seed}, {choose(seed)}): {words}", flush=True)

    def _run_program(self, seed: int) -> None:
        chance = random.Random(seed + 1)
        program = Program(seed)
        kills_main = chance.random() < 0.35
        wait = self._keep_killing(program, chance, chance.randint(*KILLS_EACH))
        if not wait:
            self._note("hang", seed, program.stacks())
            program.process.kill()
        elif kills_main and program.process.poll() is None:
            time.sleep(chance.expovariate(1 / BETWEEN_S))
            program.process.kill()
            with self._lock:
                self.counts.kills["main process"] += 1
        elif not self._ask_to_end(program):
            self._note("hang", seed, f"at its end: {program.stacks()}")
            program.process.kill()
        code, err, left = program.end()
        with self._lock:
            self.counts.batches += program.out.count(b".")
            self.counts.deaths += program.out.count(b"x")
        if left:
            self._note("leak", seed, f"processes left: {left}")
        if code == -signal.SIGKILL:
            return
        if code != 0 or err:
            self._note("wrong", seed, f"exit code {code}\n{err}")
        elif (held := program.out.splitlines()[-1]) != b"[]":
            self._note("leak", seed, held.decode())

    def _keep_killing(self, program: Program, chance: random.Random, kills: int) -> bool:
        """Kill workers at random times; False at a hang."""
        while b"ready" not in program.out:
            if not program.progress(HANG_S):
                return False
            if program.process.poll() is not None:
                return True
        kind = "restart" if program.plan["loader"]["worker_restarts"] else "no restart"
        method = program.plan["loader"]["multiprocessing_context"]
        pause_s = BETWEEN_S if method == "fork" else 20 * BETWEEN_S
        for _ in range(kills if method == "fork" else max(1, kills // 8)):
            until = time.monotonic() + chance.expovariate(1 / pause_s)
            while (left := until - time.monotonic()) > 0:
                program.progress(left)
                if program.process.poll() is not None:
                    return True
            workers = program.workers()
            if workers and self.total < self.wanted:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(chance.choice(workers), signal.SIGKILL)
                    with self._lock:
                        self.counts.kills[f"worker, {kind}, {method}"] += 1
            if not program.progress(HANG_S):
                return False
            self._show()
        return True

    def _ask_to_end(self, program: Program) -> bool:
        assert program.process.stdin is not None
        program.process.stdin.close()
        deadline = time.monotonic() + HANG_S
        while program.process.poll() is None and time.monotonic() < deadline:
            program.progress(0.05)
        return program.process.poll() is not None

    def _show(self) -> None:
        elapsed_s = time.monotonic() - self._began
        counts = self.counts
        print(
            f"\r{self.total}/{self.wanted} kills, {counts.programs} programs, {elapsed_s:.0f} s, "
            f"problems: {sum(counts.problems.values())} ",
            end="",
            flush=True,
        )


def main() -> None:
    """Kill, count, and say so; exit code 1 if anything was not as it must be."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.chaos", description=__doc__)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=int(time.time()) % 100_000)
    parser.add_argument("--jobs", type=int, default=2, help="programs at a time")
    parser.add_argument("--program", type=int, help="run one program by hand, until Ctrl-D")
    options = parser.parse_args()
    if options.program is not None:
        run_program(options.program)
        return
    print(f"seed {options.seed}")
    chaos = Chaos(options.kills, options.seed)
    threads = [threading.Thread(target=chaos.run) for _ in range(options.jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    counts = chaos.counts
    print(f"\nseed {options.seed}: {chaos.total} kills in {counts.programs} programs:")
    for what, count in sorted(counts.kills.items()):
        print(f"  {what}: {count}")
    print(f"{counts.batches} batches were checked, {counts.deaths} deaths were told as errors")
    problems = {name: counts.problems[name] for name in ("hang", "wrong", "leak")}
    print(f"hangs {problems['hang']}, wrong {problems['wrong']}, leaks {problems['leak']}")
    sys.exit(any(problems.values()))


if __name__ == "__main__":
    main()
