"""Kills at random times: ``python -m tests.faults.chaos``; ``--help`` lists the options.

Programs that use loaders run two at a time. Workers, and most programs themselves, are killed by
SIGKILL at random times. A hang is a program that makes no step for long. A wrong batch is one with
wrong bytes or at a wrong place. A leak is what a program still holds, or leaves behind, at its end.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from tests.faults import docs
from tests.faults.harness import Starter, is_server, session_of, stacks_of

# Within so many seconds a program must make a step. A worker that is spawned imports torch.
_STALL_S = {"fork": 20.0, "spawn": 90.0, "forkserver": 90.0}
# Mean seconds between two kills, by start method.
_PAUSE_S = {"fork": 0.06, "spawn": 2.0, "forkserver": 1.0}
_METHODS = ["fork"] * 18 + ["spawn", "forkserver"]
# Of ten programs, so many are killed themselves in the end.
_MAINS_OF_TEN = 7
# The text that a problem begins with, and the plural for the results.
_SORTS = {
    "hang": "hangs",
    "wrong batch": "wrong batches",
    "leak": "leaks",
    "other problem": "other problems",
}


class Chaos:
    """Runs programs and kills until there were enough kills.

    Attributes:
        counts: How often each thing happened, by name.
        problems: Each program's number, and a problem in words.

    Args:
        seed: Decides all but the times at which things happen.
        kills: Number of kills after which no program is started.
    """

    def __init__(self, seed: int, kills: int) -> None:
        self.seed = seed
        self.kills = kills
        self.counts: Counter[str] = Counter()
        self.problems: list[tuple[int, str]] = []
        self._lock = threading.Lock()
        self._programs = 0
        self._began = time.monotonic()

    def run(self, jobs: int) -> None:
        """Run it, with so many programs at a time."""
        threads = [threading.Thread(target=self._work) for _ in range(jobs)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    @property
    def done(self) -> int:
        """Number of kills so far."""
        return self.counts["workers killed"] + self.counts["programs killed"]

    def _work(self) -> None:
        starter = Starter(is_fresh=False)
        try:
            while self.done < self.kills:
                with self._lock:
                    number = self._programs
                    self._programs += 1
                _Program(self, starter, number).run()
        finally:
            starter.close()

    @property
    def verdict(self) -> str:
        """How many problems of each sort there are."""
        found = Counter(problem.partition(":")[0] for _, problem in self.problems)
        return ", ".join(f"{found[sort]} {several}" for sort, several in _SORTS.items())

    def count(self, what: str, times: int = 1) -> None:
        """Note that something happened."""
        with self._lock:
            self.counts[what] += times

    def tell(self, number: int, counts: Counter[str], problems: list[str]) -> None:
        """Note that a program has ended, and print its result."""
        with self._lock:
            self.counts += counts
            self.counts["programs"] += 1
            self.problems += [(number, problem) for problem in problems]
            elapsed_s = time.monotonic() - self._began
            print(
                f"{self.done}/{self.kills} kills {elapsed_s:.0f} s  program {number}: "
                f"{'; '.join(problems) or 'right'} {dict(counts) or ''}",
                flush=True,
            )


class _Program:
    """One program, and the kills of its workers and of itself."""

    def __init__(self, chaos: Chaos, starter: Starter, number: int) -> None:
        self._chaos = chaos
        self._starter = starter
        self._number = number
        self._random = random.Random(f"{chaos.seed}/{number}")
        self._method = self._random.choice(_METHODS)
        self._directory = Path(tempfile.mkdtemp(prefix="shmloader-chaos-"))
        self._pid = 0
        self._wait: Callable[[float], int | None] = lambda _: None
        self._steps = -1
        self._stepped = 0.0
        self._hang = ""

    def run(self) -> None:
        try:
            self._run()
        finally:
            shutil.rmtree(self._directory, ignore_errors=True)

    def _run(self) -> None:
        arguments = ["--hammered", f"{self._chaos.seed}/{self._number}", self._method]
        self._pid, self._wait = self._starter.start(arguments, self._directory)
        self._stepped = time.monotonic()
        code = self._live_until(lambda: self._steps > 0)
        for _ in range(self._random.randint(0, 5)):
            pause_s = self._random.expovariate(1 / _PAUSE_S[self._method])
            until = time.monotonic() + pause_s
            code = self._live_until(lambda until=until: time.monotonic() > until, code)
            if code is None and not self._hang:
                self._kill_worker()
        is_main_killed = False
        if code is None and not self._hang:
            if self._random.randrange(10) < _MAINS_OF_TEN:
                os.kill(self._pid, signal.SIGKILL)
                self._chaos.count("programs killed")
                is_main_killed = True
            else:
                (self._directory / "stop").touch()
        code = self._live_until(lambda: False, code)
        ended = self._starter.ended(self._pid, self._directory, code, self._wait)
        problems = [self._hang] if self._hang else []
        problems += _lines(self._directory / "problems")
        expected = -signal.SIGKILL if is_main_killed else 0
        if not self._hang and ended.code != expected:
            problems.append(f"other problem: exit code {ended.code}, not {expected}")
        if ended.left:
            problems.append(f"leak: {ended.left}")
        if ended.err:
            problems.append(f"other problem: on stderr: {ended.err}")
        counts = Counter(json.loads(ended.out)) if ended.out else Counter()
        counts["steps"] = max(0, self._steps)
        self._chaos.tell(self._number, counts, problems)

    def _live_until(self, condition: Callable[[], bool], code: int | None = None) -> int | None:
        """Watch the program until a condition holds; return its exit code if it has ended."""
        while code is None and not self._hang and not condition():
            code = self._wait(0.01)
            steps = self._read_steps()
            if steps != self._steps:
                self._steps, self._stepped = steps, time.monotonic()
            elif time.monotonic() - self._stepped > _STALL_S[self._method]:
                stacks = stacks_of(self._pid, self._directory)
                self._hang = f"hang:\n{stacks}"
        return code

    def _read_steps(self) -> int:
        with contextlib.suppress(FileNotFoundError):
            return int.from_bytes((self._directory / "progress").read_bytes()[:8], "little")
        return -1

    def _kill_worker(self) -> None:
        pids = [pid for pid in session_of(self._pid) if pid != self._pid and not is_server(pid)]
        if pids:
            pid = self._random.choice(pids)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                self._chaos.count("workers killed")


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.faults.chaos", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("--kills", type=int, default=1000, metavar="N", help="kills (1000)")
    parser.add_argument("--seed", type=int, default=None, help="seed of all choices; printed")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="programs at a time (2)")
    parser.add_argument("--docs", action="store_true", help="write the result into the docs")
    return parser.parse_args()


def main() -> None:
    """Kill as often as the command line says; exit with 1 if anything was wrong."""
    options = _arguments()
    seed = random.SystemRandom().randrange(1 << 32) if options.seed is None else options.seed
    print(f"--seed {seed}", flush=True)
    began = time.monotonic()
    chaos = Chaos(seed, options.kills)
    chaos.run(options.jobs)
    minutes = (time.monotonic() - began) / 60
    print(f"--seed {seed}: {chaos.done} kills in {minutes:.1f} minutes: {dict(chaos.counts)}")
    told = [f"program {number}: {problem}" for number, problem in chaos.problems]
    print(*told, chaos.verdict, sep="\n")
    if options.docs:
        docs.write_chaos(seed, chaos.done, minutes, chaos.counts, chaos.verdict, told)
    sys.exit(bool(chaos.problems))


if __name__ == "__main__":
    main()
