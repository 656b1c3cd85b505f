"""One trial of the fault campaign: a program that runs a loader, takes a fault, and judges.

``python tests/faults/trial.py CELL`` runs in a fresh interpreter, or in a fork of one that has
imported torch, but not shmloader (:mod:`tests.template`). Prints one line of JSON: what was found
wrong, and what was measured. If the fault ends this very process, it prints nothing, and
:mod:`tests.faults.harness` judges alone.
"""

import contextlib
import faulthandler
import gc
import hashlib
import itertools
import json
import logging
import multiprocessing
import os
import re
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import forkserver, resource_tracker
from typing import Any

import torch

from tests.faults import actions, hammered, points
from tests.faults.cells import BATCH_SIZE, BATCHES, WORKERS, Cell, Effect, Place, cell_of
from tests.faults.hammered import make_sample
from tests.faults.points import reach
from tests.holdings import Holdings

# Seconds within which a death must be told, close() must return, and nothing may be left.
TOLD_S = 2.0
# The same limit where a worker is spawned, and must import torch first.
START_S = 30.0
TIMEOUT_S = 0.5


def dump_stacks_on_signal() -> None:
    """Let SIGUSR1 write all stacks of this process into the trial's directory."""
    directory = os.environ.get(actions.DIRECTORY)
    if directory:
        fd = os.open(f"{directory}/stacks", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        faulthandler.register(signal.SIGUSR1, file=fd, all_threads=True)


if __name__ == "__mp_main__":  # a worker that was spawned, or what forks workers
    dump_stacks_on_signal()
    points.install()


class Numbers(torch.utils.data.Dataset):
    """Samples that carry their indices.

    Args:
        is_late: Whether samples wait until the fault is taken, so that main has to wait for them.
        is_late_in_0: Whether those of worker 0 do, so that worker 1 receives tasks.
        stuck_from: First batch whose samples hold their worker's interpreter for a minute.
    """

    def __init__(
        self, *, is_late: bool = False, is_late_in_0: bool = False, stuck_from: int = BATCHES
    ) -> None:
        self.is_late, self.is_late_in_0 = is_late, is_late_in_0
        self.stuck_from = stuck_from

    def __len__(self) -> int:
        return BATCHES * BATCH_SIZE

    def __getitem__(self, index: int) -> Any:
        reach("worker.getitem")
        info = torch.utils.data.get_worker_info()
        if self.is_late or (self.is_late_in_0 and info is not None and info.id == 0):
            actions.await_taken()
        if index >= self.stuck_from * BATCH_SIZE:
            actions.keep_interpreter(60)
        return make_sample(index), index


def collate(samples: list[Any]) -> Any:
    """Reach the point, then collate as torch does."""
    reach("worker.collate")
    return torch.utils.data.default_collate(samples)


def init(worker_id: int) -> None:
    """Reach the point, and do nothing else."""
    reach("worker.init")


def hash_of(batch: Any) -> str:
    """Return the hash of all bytes of a batch."""
    images, labels = batch
    digest = hashlib.blake2b(images.numpy().tobytes(), digest_size=16)
    digest.update(labels.numpy().tobytes())
    return digest.hexdigest()


def expected_hashes() -> dict[str, int]:
    """Return the number of each batch by its hash, computed without a loader."""
    hashes = {}
    for number in range(BATCHES):
        indices = range(number * BATCH_SIZE, (number + 1) * BATCH_SIZE)
        batch = torch.stack([make_sample(index) for index in indices]), torch.tensor([*indices])
        hashes[hash_of(batch)] = number
    return hashes


def copy_slowly(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor. If the fault is taken at exit, make a long call of torch first."""
    if "main.exit" in os.environ.get("SHMLOADER_FAULT", ""):
        torch.arange(1_000_000).flip(0).sort()
    return tensor.clone()


def simulate_pinning() -> None:
    """If torch has no accelerator, pin by copying, in the loader's real thread."""
    if torch.accelerator.is_available():
        return
    from shmloader.loader import engines

    class CopyingStage(engines.PinStage):
        def start(self) -> None:
            torch.set_num_threads(1)

        def run(self, batch: Any) -> Any:
            reach("main.stage")
            return [copy_slowly(part) for part in batch]

    torch.accelerator.is_available = lambda: True
    torch.accelerator.current_device_index = lambda: 0
    torch.accelerator.current_accelerator = lambda *_, **__: torch.device("cpu")
    engines.PinStage = CopyingStage


def simulate_device() -> None:
    """Simulate a device in this process's memory. Its copies are done one query late."""
    from shmloader.device import backend, device

    class Event:
        def __init__(self) -> None:
            self.is_done = False

        def query(self) -> bool:
            was_done, self.is_done = self.is_done, True
            return was_done

        def synchronize(self) -> None:
            self.is_done = True

    class Device(backend.Backend):
        def enter(self) -> None: ...

        def copy(self, tensor: torch.Tensor) -> torch.Tensor:
            return copy_slowly(tensor)

        def record(self) -> Any:
            return Event()

        def deliver(self, *_: object) -> None: ...

    # There is no pinned memory.
    device.is_small = lambda _: False
    torch.Tensor.pin_memory = lambda tensor: tensor

    def parse(value: object) -> torch.device | None:
        return None if value is None else torch.device("meta")

    backend.parse_device = parse
    device.Backend = Device


class _Interrupts:
    """Raises KeyboardInterrupt only in the loader's calls, so that the trial loses no batch."""

    def __init__(self) -> None:
        self._is_inside = False
        self._is_pending = False
        signal.signal(signal.SIGINT, self._handle)

    def _handle(self, number: int, frame: object) -> None:
        if self._is_inside:
            self._is_inside = False
            raise KeyboardInterrupt
        self._is_pending = True

    @contextlib.contextmanager
    def allowed(self) -> Iterator[None]:
        try:
            self._is_inside = True
            if self._is_pending:
                self._is_pending = self._is_inside = False
                raise KeyboardInterrupt
            yield
        finally:
            self._is_inside = False


def _says_stopped(text: str, pid: int) -> bool:
    """Whether an error says that worker 1, which has this pid, is stopped."""
    words = rf"Worker 1 \(pid {pid}\).*the process is stopped \(SIGSTOP\)"
    return re.search(words, text) is not None


class Trial:
    """Runs and judges one cell.

    Attributes:
        problems: What is not as it must be, a line each.
        log: What shmloader logged.
    """

    def __init__(self, cell: Cell) -> None:
        self.cell = cell
        self.problems: list[str] = []
        self.log: list[str] = []
        self._hashes = expected_hashes()
        # Signs of life: (time.monotonic_ns(), what happened).
        self._marks: list[tuple[int, str]] = []
        self._kept: list[Any] = []
        # Numbers of the batches that came in the epoch of the fault.
        self._delivered: list[int] = []
        # Class names and texts of errors. Not the errors: they could keep alive what must be gone.
        self._kinds: list[str] = []
        self._texts: list[str] = []
        self._stall_s = self._close_s = 0.0
        self._interrupts = None if cell.fault.name == "ctrl-c" else _Interrupts()

    def _mark(self, what: str) -> None:
        """Record a sign of life."""
        self._marks.append((time.monotonic_ns(), what))

    def _log(self, record: logging.LogRecord) -> None:
        self.log.append(record.getMessage())
        self._mark("log")

    def _check(self, is_right: object, text: str) -> None:
        if not is_right:
            self.problems.append(text)

    def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call the loader, from any thread. A Ctrl-C is raised only during such calls."""
        if self._interrupts is None or threading.current_thread() is not threading.main_thread():
            return function(*arguments)
        with self._interrupts.allowed():
            return function(*arguments)

    def _record_error(self, error: BaseException) -> None:
        if isinstance(error, KeyboardInterrupt) and self._interrupts is None:
            raise error
        self._mark(type(error).__name__)
        self._kinds.append(type(error).__name__)
        self._texts.append(_text_of(error))

    @contextlib.contextmanager
    def _recording(self, *kinds: type[BaseException]) -> Iterator[None]:
        """Record an interruption, or an error of these types, and go on."""
        try:
            yield
        except (KeyboardInterrupt, *kinds) as error:
            self._record_error(error)

    def _make_loader(self, method: str, **options: Any) -> Any:
        from shmloader import DataLoader

        return DataLoader(
            Numbers(
                is_late=self.cell.point.name == "main-next",
                is_late_in_0=self.cell.mode.is_dynamic
                and (self.cell.point.is_of_a_task or self.cell.point.name in {"init", "idle"}),
                stuck_from=self.cell.stuck_from,
            ),
            batch_size=BATCH_SIZE,
            num_workers=WORKERS,
            collate_fn=collate,
            worker_init_fn=init,
            multiprocessing_context=method,
            **options,
        )

    def run(self) -> None:
        """Run the whole trial."""
        import shmloader  # noqa: F401 - before holdings are compared

        cell = self.cell
        if cell.mode.prepare:
            globals()[cell.mode.prepare]()
        handler = logging.Handler()
        handler.emit = self._log
        logging.getLogger("shmloader").addHandler(handler)
        before = self._holdings_to_begin_with()
        options = dict(cell.mode.options)
        if cell.effect in {Effect.LATE, Effect.DELAYED}:
            options["timeout"] = TIMEOUT_S
        self._loader: Any = self._make_loader(cell.method, **options)
        for _ in range(cell.fault_epoch):
            self._whole_epoch("before the fault")
        getattr(self, f"_run_{cell.point.scenario}")()
        if cell.point.scenario == "exit":
            return
        actions.relieve()
        self._judge_the_fault()
        actions.consumer.update(keeps=False, slow=False)
        self._kept.clear()
        if cell.point.scenario not in {"close", "drained"}:
            self._whole_epoch("after the fault")
        self._close()
        self._judge_what_is_left(before, "close()")
        self._close_again()
        self._loader = self._make_loader(cell.method if "fresh" in sys.argv else "fork")
        self._whole_epoch("of a new loader")
        self._close()
        self._judge_what_is_left(before, "a new loader")

    def _holdings_to_begin_with(self) -> Holdings:
        if self.cell.method != "fork":
            resource_tracker.ensure_running()
            if self.cell.method == "forkserver":
                multiprocessing.set_forkserver_preload(["torch"])
                # With SIGINT blocked, as a pool starts it: otherwise Ctrl-C would reach a worker
                # that is still importing the user's program.
                before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
                forkserver.ensure_running()
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return Holdings.now()

    def _iterate(self) -> Any:
        for _ in range(BATCHES):
            self._mark("start")
            with self._recording(Exception):
                return self._call(iter, self._loader)
            actions.relieve()
        raise RuntimeError("iter() fails again and again")

    def _next(self, iterator: Any, delivered: list[int]) -> bool:
        """Do one step of an epoch; return whether the epoch continues."""
        try:
            batch = self._call(next, iterator)
        except StopIteration:
            self._mark("end")
            return False
        except (Exception, KeyboardInterrupt) as error:
            kind = type(error).__name__
            self._record_error(error)
            taken = actions.taken()
            if taken is not None and _says_stopped(_text_of(error), taken[0]):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(taken[0], signal.SIGCONT)
            if kind == "WorkerDiedError":
                self._expect_closed(iterator)
            if len(self._kinds) > 100:
                raise RuntimeError("one error after the other") from error
            return kind not in {"WorkerDiedError", "ClosedLoaderError"}
        self._consume(batch, delivered)
        return True

    def _consume(self, batch: Any, delivered: list[int]) -> None:
        self._mark("batch")
        number = self._hashes.get(hash_of(batch))
        self._check(number is not None, f"a wrong batch came after {delivered}")
        delivered.append(-1 if number is None else number)
        reach("main.consume")
        if actions.consumer["keeps"]:
            self._kept.append((batch, number))
        if actions.consumer["slow"]:
            time.sleep(0.03)
        for kept, its_number in self._kept:
            self._check(
                self._hashes.get(hash_of(kept)) == its_number, f"batch {its_number} has changed"
            )

    def _expect_closed(self, iterator: Any) -> None:
        from shmloader import ClosedLoaderError

        try:
            next(iterator)
        except ClosedLoaderError:
            return
        except BaseException as error:
            self.problems.append(f"after a death, next() raised {error!r}")
        else:
            self.problems.append("after a death, next() gave a batch")

    def _run_epoch(self, between: str = "") -> None:
        """Run the epoch in which the fault is taken."""
        iterator = self._iterate()
        while self._next(iterator, self._delivered):
            if between:
                reach(between)

    def _first_batches(self) -> Any:
        iterator = self._iterate()
        for _ in range(3):
            self._next(iterator, self._delivered)
        return iterator

    def _run_close(self) -> None:
        _iterator = self._first_batches()
        self._close()
        with contextlib.suppress(KeyboardInterrupt):
            self._call(self._mark, "closed")

    def _run_drained(self) -> None:
        """Run a whole epoch. Workers are told to stop at its end, or by close()."""
        self._run_epoch()
        self._close()
        with contextlib.suppress(KeyboardInterrupt):
            self._call(self._mark, "closed")

    def _run_exit(self) -> None:
        self._at_exit = self._first_batches()
        self._check(self._delivered == [0, 1, 2], f"batches: {self._delivered}")
        _ends_at_exit.append(self)

    def _run_thread(self) -> None:
        """Run the epoch in a thread that is not the main one."""
        is_over = threading.Event()

        def run() -> None:
            try:
                with self._recording(Exception, SystemExit):
                    self._run_epoch("main.thread")
            finally:
                is_over.set()

        thread = threading.Thread(target=run, name="user's")
        thread.start()
        # Not join(): if it is interrupted, Python 3.11 takes the thread for ended.
        while not is_over.is_set():
            with self._recording():
                self._call(is_over.wait)
        thread.join()

    def _run_abandoned(self) -> None:
        gc.disable()
        iterator = self._first_batches()
        iterator.itself = iterator  # a cycle: only the garbage collector ends it
        del iterator
        with self._recording():
            self._call(reach, "main.abandoned")
        gc.enable()
        gc.collect()

    def _run_held(self) -> None:
        """Let a user's exception hold the frame that holds the iterator."""

        def fail() -> None:
            _iterator = self._first_batches()
            raise LookupError("of the user")

        try:
            fail()
        except LookupError as error:
            held: Any = error
        with self._recording():
            self._call(reach, "main.held")
        del held
        gc.collect()

    def _whole_epoch(self, which: str) -> None:
        """Run an epoch in which everything must be right."""
        delivered: list[int] = []
        errors = len(self._kinds)
        iterator = self._iterate()
        while self._next(iterator, delivered):
            pass
        del iterator
        late = [kind for kind in self._kinds[errors:] if kind == "LoaderTimeoutError"]
        other = self._texts[errors + len(late) :]
        del self._kinds[errors:], self._texts[errors:]
        self._check(not other, f"errors in the epoch {which}: {other}")
        self._check(delivered == list(range(BATCHES)), f"batches of the epoch {which}: {delivered}")

    def _close(self) -> None:
        began, errors = time.monotonic(), len(self._kinds)
        with self._recording(Exception):
            self._call(self._loader.close)
        if len(self._kinds) > errors:
            self._loader.close()
        self._close_s = max(self._close_s, time.monotonic() - began)
        self._check(self._close_s < TOLD_S, f"close() took {self._close_s:.2f} s")

    def _judge_the_fault(self) -> None:
        cell = self.cell
        taken = actions.taken()
        self._check(taken is not None, "the fault was not taken")
        numbers = self._delivered
        self._check(
            all(a < b for a, b in itertools.pairwise(numbers)),
            f"batches out of order, or twice: {numbers}",
        )
        victim, taken_ns = taken or (0, time.monotonic_ns())
        self._judge_promptness(taken_ns)
        effect = cell.effect
        if effect is Effect.TOLD and cell.mode.restarts:
            self._judge_restart(victim)
        else:
            may_log = effect is Effect.STARVED and cell.mode.restarts
            self._check(may_log or not self.log, f"logged: {self.log}")
            getattr(self, f"_judge_{effect.name.lower()}")(victim)

    def _judge_promptness(self, received_ns: int) -> None:
        """Check that from the fault on something happens at least every two seconds."""
        afresh = self.cell.method != "fork"
        is_in_main = self.cell.point.place is Place.MAIN
        before, last, is_replaced, is_starting = received_ns, "", False, False
        for at, what in self._marks:
            is_replaced = is_replaced or last == "log"
            if at > received_ns:
                # Spawned workers import torch first. A fault in the main process may come, and be
                # told, before they deliver their first batch.
                awaits_first = is_in_main and is_starting and what == "batch"
                is_slow = afresh and (is_replaced or last == "start" or awaits_first)
                gap_s = (at - before) / 1e9
                self._check(
                    gap_s < (START_S if is_slow else TOLD_S),
                    f"nothing happened for {gap_s:.2f} s before: {what}",
                )
                if not is_slow:
                    self._stall_s = max(self._stall_s, gap_s)
                before = at
            last = what
            if what in ("start", "batch"):
                is_starting = what == "start"

    def _expect_errors(self, *kinds: str) -> None:
        self._check(self._kinds == list(kinds), f"errors: {self._texts}")

    def _expect_first_error(self, *others: str, first: str) -> None:
        """Check that the first error is one, and that only these others come after it."""
        is_right = self._kinds[:1] == [first] and {*self._kinds[1:]} <= {*others}
        self._check(is_right, f"errors: {self._texts}")

    def _expect_batches(self, count: int = BATCHES) -> None:
        self._check(self._delivered == list(range(count)), f"batches: {self._delivered}")

    def _expect_whole_or_closed(self) -> None:
        is_closed = "ClosedLoaderError" in self._kinds
        if is_closed or self.cell.point.scenario not in {"epoch", "thread"}:
            self._expect_batches(len(self._delivered))
        else:
            self._expect_batches()

    def _expect_words(self, text: str, *words: str) -> None:
        for word in words:
            self._check(word in text, f"{word!r} is not in {text!r}")

    def _expect_end(self, text: str, victim: int, *words: str) -> None:
        """Check that a text says how a worker ended."""
        code = self.cell.fault.code
        end = f"exited unexpectedly with exit code {code}. "
        if code < 0:
            end = f"is killed by signal: {signal.strsignal(-code)}. "
        self._expect_words(text, f"DataLoader worker (pid {victim}) {end}", *words)

    def _words_of_batch(self, number: int, worker: str = "Worker 1") -> str:
        first = number * BATCH_SIZE
        last = first + BATCH_SIZE - 1
        return f"{worker} was loading batch {number} (indices {first} to {last})."

    def _may_be_of_worker_1(self, number: int) -> bool:
        return self.cell.mode.is_dynamic or number % WORKERS == 1

    def _judge_told(self, victim: int) -> None:
        number = len(self._delivered)
        if self.cell.mode.is_dynamic and not self._kinds and number == BATCHES:
            return  # it had no task any more, and the other worker took the rest
        self._expect_errors("WorkerDiedError")
        self._expect_batches(number)
        for text in self._texts[:1]:
            self._expect_end(text, victim, self._words_of_batch(number))
            self._check(self._may_be_of_worker_1(number), f"batch {number} is not worker 1's")

    def _judge_restart(self, victim: int) -> None:
        self._expect_errors()
        self._expect_batches()
        self._check(len(self.log) == 1, f"logged: {self.log}")
        for text in self.log[:1]:
            self._expect_end(text, victim, "Worker 1 is replaced.")

    def _judge_failed(self, victim: int) -> None:
        fault = self.cell.fault
        missing = sorted(set(range(BATCHES)) - set(self._delivered))
        if self.cell.point.name == "init":
            # Where any worker may make any batch, worker 0 may have made all before 1 had begun.
            is_all = missing == list(range(1, BATCHES, WORKERS))
            self._check(is_all or self.cell.mode.is_dynamic, f"{missing=}")
        else:
            is_one = len(missing) == 1 and self._may_be_of_worker_1(missing[0])
            self._check(is_one, f"{missing=}")
        self._expect_errors(*[fault.arrives_as] * len(missing))
        has_text = fault.name not in {"failing-str", "sys-exit", "two-arguments"}
        for text, number in zip(self._texts, missing, strict=False):
            self._expect_words(
                text,
                f"Caught {fault.raises} in DataLoader worker process 1.",
                self._words_of_batch(number, f"Worker 1 (pid {victim})"),
                "of the trial" if has_text else "",
            )

    def _judge_late(self, victim: int) -> None:
        self._expect_batches()
        may_be_idle = self.cell.fault.name == "stop-worker" or self.cell.point.is_idle
        if self.cell.mode.is_dynamic and may_be_idle and not self._kinds:
            # It was idle when it was stopped, and the other worker received all that was left. So
            # no batch of it was waited for; otherwise the epoch would not be whole.
            return
        self._expect_first_error("LoaderTimeoutError", first="LoaderTimeoutError")
        self._check(
            any(_says_stopped(text, victim) for text in self._texts),
            f"no error says that worker 1 (pid {victim}) is stopped: {self._texts}",
        )

    def _judge_delayed(self, victim: int) -> None:
        self._expect_batches()
        self._check(set(self._kinds) <= {"LoaderTimeoutError"}, f"errors: {self._texts}")

    def _judge_interrupted(self, victim: int) -> None:
        self._expect_first_error("ClosedLoaderError", first="KeyboardInterrupt")
        self._expect_whole_or_closed()

    def _judge_raised(self, victim: int) -> None:
        self._expect_first_error("ClosedLoaderError", first=self.cell.fault.raises)
        if self.cell.point.name == "main-stage":
            missing = set(range(BATCHES)) - set(self._delivered)
            self._check(len(missing) == 1, f"missing: {missing}")
        else:
            self._expect_whole_or_closed()

    def _judge_left(self, victim: int) -> None:
        self._expect_errors(self.cell.fault.raises)
        self._expect_batches(len(self._delivered))

    def _judge_starved(self, victim: int) -> None:
        if self._kinds == ["WorkerDiedError"] and self.cell.point.name != "main-start":
            number = len(self._delivered)
            self._expect_words(self._texts[0], f"(pid {victim})", f"was loading batch {number} ")
            return
        self._check(set(self._kinds) <= {"OSError", "ClosedLoaderError"}, f"{self._texts}")
        for text in self._texts[:1]:
            self._check(re.search("[Tt]oo many open files", text), f"error: {text}")
        self._expect_whole_or_closed()

    def _judge_unseen(self, victim: int) -> None:
        self._expect_errors()
        if self.cell.point.scenario in {"epoch", "thread"}:
            self._expect_batches()

    def _judge_what_is_left(self, before: Holdings, after: str) -> None:
        left = before.left(TOLD_S)
        self._check(not left, f"left after {after}: {left}")

    def _close_again(self) -> None:
        began, held = time.monotonic(), Holdings.now()
        self._loader.close()
        left = Holdings.now().beyond(held)
        self._check(not left, f"the second close() brought {left}")
        elapsed_s = time.monotonic() - began
        self._check(elapsed_s < 1, f"the second close() took {elapsed_s:.2f} s")

    def report(self) -> str:
        """Return the line of JSON."""
        return json.dumps(
            {
                "problems": self.problems,
                "stall_s": round(self._stall_s, 3),
                "close_s": round(self._close_s, 3),
                "errors": self._kinds,
            }
        )


# Trials whose iterators must still exist when the interpreter ends.
_ends_at_exit: list[Trial] = []


def _text_of(error: BaseException) -> str:
    """Return an error's text and notes, even if its ``__str__`` fails."""
    try:
        text = str(error)
    except Exception:
        text = " ".join(map(str, error.args))
    if len(text) > 8000:
        text = f"{text[:6000]} … {text[-2000:]}"
    return "\n".join([text, *getattr(error, "__notes__", [])])


def run_cell(cell: Cell) -> None:
    """Run a trial. ``SHMLOADER_FAULT`` is set here: workers that are spawned read it."""
    os.environ["SHMLOADER_FAULT"] = cell.variable
    os.environ[actions.MAIN_PID] = str(os.getpid())
    # A program that is started in the background inherits that SIGINT is ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(1)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    dump_stacks_on_signal()
    points.install()
    trial = Trial(cell)
    trial.run()
    print(trial.report(), flush=True)


def main() -> None:
    """Run the cell, or the program, that the arguments name."""
    if sys.argv[1] == "--hammered":
        dump_stacks_on_signal()
        torch.set_num_threads(1)
        simulate_pinning()
        hammered.run(sys.argv[2], sys.argv[3])
    else:
        run_cell(cell_of(sys.argv[1]))


if __name__ == "__main__":
    main()
