"""Kills at random times: ``python -m tests.faults.chaos``; ``--help`` lists the options.

Programs that use loaders run two at a time. Workers, and most programs themselves, are killed by
SIGKILL at random times. A hang is a program that makes no step for long. A wrong batch is one with
wrong bytes or at a wrong place. A leak is what a program still holds, or leaves behind, at its end.
"""

import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from tests.faults import docs
from tests.faults.harness import Starter, is_server, options_of, session_of, stacks_of

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
                with tempfile.TemporaryDirectory(
                    prefix="shmloader-chaos-", ignore_cleanup_errors=True
                ) as name:
                    _Program(self, starter, number, Path(name)).run()
        finally:
            starter.close()

    @property
    def verdict(self) -> str:
        """How many problems of each sort there are."""
        found = Counter(problem.partition(":")[0] for _, problem in self.problems)
        return ", ".join(f"{found[sort]} {several}" for sort, several in _SORTS.items())

    def count(self, what: str) -> None:
        """Count that something happened."""
        with self._lock:
            self.counts[what] += 1

    def tell(self, number: int, counts: Counter[str], problems: list[str]) -> None:
        """Print the result of a program that has ended, and count it."""
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

    def __init__(self, chaos: Chaos, starter: Starter, number: int, directory: Path) -> None:
        self._chaos = chaos
        self._starter = starter
        self._number = number
        self._random = random.Random(f"{chaos.seed}/{number}")
        self._method = self._random.choice(_METHODS)
        self._directory = directory
        self._pid = 0
        self._wait: Callable[[float], int | None] = lambda _: None
        self._steps = -1
        self._stepped = 0.0
        self._hang = ""

    def run(self) -> None:
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
        expected = 0
        if code is None and not self._hang:
            if self._random.randrange(10) < _MAINS_OF_TEN:
                os.kill(self._pid, signal.SIGKILL)
                self._chaos.count("programs killed")
                expected = -signal.SIGKILL
            else:
                (self._directory / "stop").touch()
        code = self._live_until(lambda: False, code)
        ended = self._starter.ended(self._pid, self._directory, code, self._wait)
        problems = [self._hang] if self._hang else []
        if (told := self._directory / "problems").exists():
            problems += told.read_text().splitlines()
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


def main() -> None:
    """Kill as often as the command line says; exit with 1 if anything was wrong."""
    options = options_of("chaos", __doc__, kills=(1000, "kills"), jobs=(2, "programs at a time"))
    began = time.monotonic()
    chaos = Chaos(options.seed, options.kills)
    chaos.run(options.jobs)
    counts, minutes = chaos.counts, (time.monotonic() - began) / 60
    print(f"--seed {chaos.seed}: {chaos.done} kills in {minutes:.1f} minutes: {dict(counts)}")
    told = [f"program {number}: {problem}" for number, problem in chaos.problems]
    print(*told, chaos.verdict, sep="\n")
    if options.docs:
        docs.write(
            "chaos",
            f"{docs.where_and_when()}; {minutes:.0f} minutes, `--seed {chaos.seed}`: "
            f"**{chaos.done} kills, {chaos.verdict}**.",
            "",
            *docs.table(["", ""], [(name, f"{counts[name]:,}") for name in sorted(counts)]),
            "",
            "A step is a batch that was checked, the end of an epoch, a death that an error "
            "reported, or a worker that was replaced. The separate counts of these are only of the "
            "programs that were not killed in the end.",
            *[f"- {problem.splitlines()[0]}" for problem in told],
        )
    sys.exit(bool(chaos.problems))


if __name__ == "__main__":
    main()
