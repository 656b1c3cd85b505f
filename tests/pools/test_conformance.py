"""What every pool keeps (``shmloader/pools/__init__.py``), tried on each: alone and in an engine.

A pool that exists for the tests alone (``calling``) has to pass as well: so what the page says is
enough to write one by.
"""

import concurrent.futures
import contextlib
import errno
import functools
import itertools
import multiprocessing
import os
import signal
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from shmloader import ShardedDataLoader
from shmloader.batch.checkpoint import Checkpoint
from shmloader.batch.fetch import FetchConfig
from shmloader.batch.payload import ForkedPayload, PortablePayload
from shmloader.engine.engine import Engine
from shmloader.engine.scheduler import Scheduler
from shmloader.errors import ClosedLoaderError, LoaderTimeoutError
from shmloader.memory.arena import Arena
from shmloader.pools import Pool, host_pool
from shmloader.pools.batch_server import TaskConfig
from shmloader.pools.executor import ExecutorPool
from shmloader.pools.host_pool import HostPool, SharedWorkers, open_host_pool
from shmloader.pools.nursery import Nursery
from shmloader.pools.nursery_process import HostStart, serve
from shmloader.pools.process import ProcessPool
from shmloader.pools.starting import OwnWorkers
from shmloader.pools.status_page import Phase, StatusPage
from shmloader.pools.task_queue import TaskQueue
from shmloader.pools.thread import ThreadConfig, ThreadPool
from shmloader.threads import all_parked
from tests.pools.calling import CallingPool
from tests.pools.scripted import next_of
from tests.process.bytecodes import Preempted, interrupt
from tests.process.support import Bad, Calls, Gate, in_thread, wait_until

WINDOW, LENT = 6, 2
PLAN = FetchConfig(is_iterable=False, auto_collation=False, drop_last=False)


def as_it_is(sample: Any) -> Any:
    return sample


def processes(
    make: Callable[[Any], Any], worker_count: int, queue: TaskQueue | None = None
) -> Pool:
    tasks = TaskConfig(PLAN, Arena.create(None, WINDOW + LENT), StatusPage(worker_count), queue)
    objects = Calls(make, 1 << 20), None, as_it_is, "raise"
    starter = OwnWorkers(None, worker_count, objects, tasks, base_seed=1)
    return started(ProcessPool(starter, tasks, worker_count), worker_count)


def queued(make: Callable[[Any], Any], worker_count: int) -> Pool:
    return processes(make, worker_count, TaskQueue())


def started(pool: ProcessPool, worker_count: int) -> Pool:
    for worker_id in range(worker_count):
        pool.resume(worker_id, Checkpoint())
    return pool


POOLS_OF_HOST: list[HostPool] = []


def host(make: Callable[[Any], Any], worker_count: int) -> Pool:
    """Workers that ranks share. This process is the only rank."""
    pool = open_host_pool(Calls(make, 1 << 20), None, worker_count, 1, is_alone=True)
    POOLS_OF_HOST.append(pool)
    arena, page = Arena.create(None, WINDOW + LENT), StatusPage(worker_count)
    tasks = TaskConfig(PLAN, arena, page, TaskQueue())
    starter = SharedWorkers(pool, (as_it_is, "raise"), tasks)
    return started(ProcessPool(starter, tasks, worker_count), worker_count)


def fork_nursery(start: HostStart) -> Nursery:
    """Fork the nursery, which is spawned elsewhere, so that its workers have a test's gates."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def run() -> None:
        ours.close()
        serve(theirs, start)

    with theirs, all_parked():
        process = multiprocessing.get_context("fork").Process(target=run)
        process.start()
    multiprocessing.process._children.discard(process)  # type: ignore[attr-defined]
    return Nursery(ours, process)


def leave_host() -> None:
    while POOLS_OF_HOST:
        POOLS_OF_HOST.pop().nursery.close()


CONFIGS = []


def threads(make: Callable[[Any], Any], worker_count: int) -> Pool:
    CONFIGS[:] = [ThreadConfig(PLAN, Calls(make, 1 << 20), as_it_is, "raise")]
    return ThreadPool(worker_count, weakref.ref(CONFIGS[0]))


EXECUTORS: list[concurrent.futures.ProcessPoolExecutor] = []


def executor(make: Callable[[Any], Any], worker_count: int) -> Pool:
    # One process more than workers: one may be in a task of an epoch that was left.
    context = multiprocessing.get_context("fork")
    EXECUTORS.append(concurrent.futures.ProcessPoolExecutor(worker_count + 1, context))
    objects = Calls(make, 1 << 20), as_it_is, None, "raise", tuple(PLAN), worker_count
    return ExecutorPool(
        EXECUTORS[-1], PortablePayload(objects), loader=b"-", numbers=itertools.count(), base_seed=1
    )


def end_executors() -> None:
    for each in EXECUTORS:
        processes, manager = list((each._processes or {}).values()), each._executor_manager_thread
        results = each._result_queue
        each.shutdown(wait=False, cancel_futures=True)
        if manager is None:
            continue
        # The manager ends with an error if a process is killed while it has cancelled tasks.
        left = lambda manager=manager: [*manager.pending_work_items.values()]  # noqa: E731
        wait_until(lambda left=left: not any(one.future.cancelled() for one in left()))
        for process in processes:
            process.kill()
        manager.join(20)
        if manager.is_alive():
            # One that was killed as it sent has left half a message, and the manager waits for
            # the rest while anybody could write it: this process, too.
            results._writer.close()
            manager.join()
    EXECUTORS.clear()


@pytest.fixture(autouse=True)
def _owners_are_forked(monkeypatch) -> None:
    monkeypatch.setattr(host_pool, "start_nursery", fork_nursery)
    pickled = host_pool.pickle_for_workers

    def unpickled_dataset(objects: tuple[object, ...], names: Any, method: str) -> Any:
        if names[0] == "dataset":
            return ForkedPayload(objects)
        return pickled(objects, names, method)

    monkeypatch.setattr(host_pool, "pickle_for_workers", unpickled_dataset)


@pytest.fixture(autouse=True)
def _executors_end() -> Iterator[None]:
    yield
    end_executors()
    leave_host()


def calling(make: Callable[[Any], Any], worker_count: int) -> Pool:
    return CallingPool(make)


@dataclass(frozen=True)
class Kind:
    """A kind of pool.

    Attributes:
        make: Makes one.
        is_apart: Whether its workers work while nobody waits.
        has_slots: Whether its batches come in slots.
        shows_stacks: Whether it sees what its workers are doing.
    """

    make: Callable[[Callable[[Any], Any], int], Pool]
    is_apart: bool = True
    has_slots: bool = False
    shows_stacks: bool = True


KINDS = {
    "processes": Kind(processes, has_slots=True),
    "queued": Kind(queued, has_slots=True),
    "host": Kind(host, has_slots=True),
    "threads": Kind(threads),
    "executor": Kind(executor, shows_stacks=False),
    "calling": Kind(calling, is_apart=False),
}


@pytest.fixture(params=KINDS)
def kind(request) -> Kind:
    return KINDS[request.param]


@pytest.fixture
def apart(kind) -> Kind:
    if not kind.is_apart:
        pytest.skip("its worker is the thread that waits")
    return kind


@contextlib.contextmanager
def opened(
    kind: Kind, make: Callable[[Any], Any], worker_count: int = 2
) -> Iterator[tuple[Pool, "Told"]]:
    pool = kind.make(make, worker_count)
    try:
        yield pool, Told(pool, worker_count)
    finally:
        pool.close()
        CONFIGS.clear()
        end_executors()
        leave_host()


class Told:
    """Who is told, with a scheduler beside it: a window of tasks, and the answers of one epoch."""

    def __init__(self, pool: Pool, worker_count: int = 2) -> None:
        self.pool = pool
        self.scheduler = Scheduler(
            worker_count,
            WINDOW,
            LENT,
            in_order=True,
            has_queue=pool.has_queue,
            has_slots=pool.memory is not None,
        )
        self.slot_ids: dict[int, int] = {}
        self.answers: dict[int, Any] = {}
        self.entered: set[int] = set()
        self.threads: set[int] = set()
        self.deaths: list[tuple[int, Any]] = []

    def send(self, *tasks: Any) -> None:
        for indices in tasks:
            self.scheduler.offer(indices)
            while self.scheduler.unsent:
                ticket = self.scheduler.unsent.popleft()
                self.slot_ids[ticket.seq] = ticket.slot_id
                assert self.pool.send(ticket, self.scheduler.epoch) is None

    def take_all(self, count: int) -> None:
        wait_until(
            lambda: (
                len(self.answers) >= count
                or (self.pool.wait(1, self) and len(self.answers) >= count)
            )
        )

    def answered(self, seq: int, epoch: int, worker_id: int, answer: Any) -> None:
        self.threads.add(threading.get_ident())
        assert seq not in self.answers, "each task is answered once"
        assert not self.pool.is_waiting, "what is interrupted from now on may be lost"
        ticket = self.scheduler.answered(seq, epoch, answer, taker=worker_id)
        assert ticket.worker_id == worker_id
        if not ticket.is_dropped:
            self.answers[seq] = answer

    def epoch_entered(self, worker_id: int, beginning: Checkpoint) -> None:
        assert beginning == Checkpoint()
        self.entered.add(worker_id)
        self.scheduler.left_epoch(worker_id)

    def end_epoch(self, worker_count: int = 2) -> None:
        self.scheduler.end_epoch(self.pool.recall())
        for worker_id in range(worker_count):
            if self.pool.start_epoch(worker_id, 1):
                self.scheduler.left_epoch(worker_id)

    def lost(self, worker_id: int, death: Any, recalled: Any = (), held: Any = ()) -> None:
        assert not recalled
        assert not held
        self.deaths.append((worker_id, death))

    def batch(self, seq: int) -> Any:
        answer = self.answers[seq]
        if self.pool.memory is None:
            return answer.content
        return answer.content.read(self.pool.memory.mapped(self.slot_ids[seq]), None)


def squared(index: int) -> torch.Tensor:
    if index == 13:
        raise Bad(index)
    return torch.full((100,), index * index)


def test_each_task_is_answered_once_on_the_thread_that_waits(kind) -> None:
    with opened(kind, squared) as (pool, told):
        told.send(*range(WINDOW))
        told.take_all(WINDOW)
        assert sorted(told.answers) == list(range(WINDOW))
        assert told.threads == {threading.get_ident()}
        for seq in range(WINDOW):
            assert torch.equal(told.batch(seq), squared(seq))
        assert not pool.wait(0, told)


def test_an_exception_of_the_dataset_is_an_answer(kind) -> None:
    with opened(kind, squared) as (_, told):
        told.send(12, 13, 14)
        told.take_all(3)
        assert [told.answers[seq].error is None for seq in range(3)] == [True, False, True]
        assert isinstance(told.answers[1].error.rebuilt(""), Bad)


def test_polling_takes_what_is_there_without_waiting(apart) -> None:
    gate = Gate()
    with opened(apart, lambda index: gate.pass_through() or index, 1) as (pool, told):
        told.send(7)
        began = time.monotonic()
        assert not pool.poll(told)
        assert time.monotonic() - began < 5
        gate.open()
        wait_until(lambda: pool.poll(told))
        assert told.batch(0) == 7


def test_what_other_workers_say_comes_while_one_is_awaited(apart) -> None:
    gate = Gate()
    with opened(apart, lambda index: gate.pass_through() or 7 if index else index) as (pool, told):
        told.send(1, 0)
        wait_until(lambda: pool.poll(told, 0) or pool.wait(1, told))
        assert told.batch(1) == 0
        gate.open()
        wait_until(lambda: pool.poll(told, 0) or pool.wait(1, told))
        assert told.batch(0) == 7


def test_the_death_of_another_worker_comes_while_one_is_awaited() -> None:
    gate = Gate()
    with opened(KINDS["processes"], lambda _: gate.pass_through()) as (pool, told):
        told.send(0, 1)
        os.kill(pool.pid(1), signal.SIGKILL)
        wait_until(lambda: pool.poll(told, 0) or pool.wait(1, told))
        ((worker_id, death),) = told.deaths
        assert (worker_id, death.exit_code) == (1, -signal.SIGKILL)
        gate.open()
        wait_until(lambda: pool.poll(told, 0) or pool.wait(1, told))
        assert [*told.answers] == [0]


def test_a_wait_is_over_after_its_time(kind) -> None:
    with opened(kind, squared) as (pool, told):
        began = time.monotonic()
        while time.monotonic() - began < 0.2:
            assert not pool.wait(0.2, told)
        assert time.monotonic() - began < 10


@pytest.mark.parametrize("before", [False, True])
def test_a_wake_ends_a_wait_now_or_the_next(kind, before) -> None:
    with opened(kind, squared) as (pool, told):
        pool.enable_wake()
        with in_thread(
            lambda: (before or wait_until(lambda: pool.is_waiting), pool.wake())
        ) as wake:
            if before:
                wake.join()
            began = time.monotonic()
            assert not pool.wait(60, told)
            assert time.monotonic() - began < 20


def test_a_further_epoch_begins_after_all_that_was_sent_or_without_it(kind) -> None:
    with opened(kind, squared) as (pool, told):
        told.send(*range(4))
        told.end_epoch()
        wait_until(lambda: told.scheduler.is_epoch_left or pool.wait(1, told) is None)
        assert not told.answers  # nobody wants them
        told.scheduler.start_epoch()
        told.send(5, 6)
        told.take_all(2)
        assert [int(told.batch(seq)[0]) for seq in range(2)] == [25, 36]


def test_what_is_being_made_when_an_epoch_is_given_up_is_not_told_in_the_next(apart) -> None:
    gate = Gate()

    def make(index: int) -> int:
        if index == 3:
            gate.pass_through()
        return index

    with opened(apart, make, 1) as (pool, told):
        told.send(3)
        wait_until(lambda: pool.was_at(0).phase is Phase.LOADING)
        told.end_epoch(1)
        if not told.scheduler.is_epoch_left:
            gate.open()
        wait_until(lambda: told.scheduler.is_epoch_left or pool.wait(1, told) is None)
        told.scheduler.start_epoch()
        told.send(7)
        gate.open()
        told.take_all(1)
        assert told.batch(0) == 7
        assert list(told.answers) == [0]


def test_what_a_worker_is_at_may_be_asked(apart) -> None:
    gate = Gate()
    with opened(apart, lambda index: gate.pass_through() or index, 1) as (pool, told):
        wait_until(lambda: pool.was_at(0).phase is Phase.IDLE)
        told.send(3)
        wait_until(lambda: pool.was_at(0).phase is Phase.LOADING)
        found = pool.was_at(0, with_stack=True)
        assert (found.phase, found.epoch, found.seq) == (Phase.LOADING, 0, 0)
        assert ("pass_through" in found.stack) == apart.shows_stacks
        pid = pool.pid(0)
        assert pid is None or pid != os.getpid()
        gate.open()
        told.take_all(1)


def test_an_interruption_of_a_wait_loses_nothing(kind) -> None:
    main = threading.main_thread().ident
    with opened(kind, squared) as (pool, told):

        def press() -> None:
            wait_until(lambda: pool.is_waiting)
            signal.pthread_kill(main, signal.SIGINT)

        with in_thread(press), pytest.raises(KeyboardInterrupt):
            wait_until(lambda: pool.wait(60, told))
        assert pool.is_waiting
        told.send(*range(3))
        told.take_all(3)


@pytest.mark.slow
@pytest.mark.timeout(1800)  # 700 pools, one after the other
def test_what_a_handler_raises_at_any_instruction_of_a_wait_loses_no_answer(apart) -> None:
    while_waiting = 0
    for nth in itertools.count(1):
        gate = Gate()
        with opened(apart, lambda index, gate=gate: gate.pass_through() or index, 1) as (
            pool,
            told,
        ):
            told.send(3)
            wait_until(lambda: pool.was_at(0).phase is Phase.LOADING)
            gate.open()
            wait_until(lambda: pool.was_at(0).phase is Phase.IDLE)
            outcome = interrupt(functools.partial(pool.wait, 60, told), nth, Preempted)
            if pool.is_waiting:  # otherwise an engine gives up
                while_waiting += 1
                began = time.monotonic()
                assert pool.wait(60, told), outcome.where
                assert time.monotonic() - began < 20, f"{outcome.where}: it waited in vain"
        if outcome.where is None:
            break
    assert list(told.answers) == [0]
    assert while_waiting > 5


@pytest.mark.parametrize("times", [1, 3])
def test_closing_ends_all_and_may_be_done_again(kind, times) -> None:
    pool = kind.make(squared, 2)
    told = Told(pool)
    told.send(*range(4))
    for _ in range(times):
        pool.end_workers()
    for _ in range(times):
        pool.close()
    CONFIGS.clear()


def test_closing_does_not_wait_for_all_that_was_sent(apart) -> None:
    gate = Gate()
    pool = apart.make(lambda index: gate.pass_through(), 1)
    told = Told(pool, 1)
    told.send(*range(WINDOW))
    wait_until(lambda: pool.was_at(0).phase is Phase.LOADING)
    with in_thread(pool.close):
        gate.open()  # one of them
    CONFIGS.clear()


def test_a_worker_that_is_killed_in_a_task_is_replaced_and_does_the_task_again(apart) -> None:
    if not apart.has_slots:
        pytest.skip("its tasks cannot be ended")
    gate, tries = Gate(), Gate()

    def make(index: int) -> torch.Tensor:
        tries.open()
        if index == 0:
            gate.pass_through()
        return squared(index)

    with opened(apart, make, 1) as (pool, told):
        told.send(0)
        tries.wait_until_open()
        wait_until(lambda: pool.was_at(0).phase is Phase.LOADING)
        pool.kill(0)
        (ticket,) = told.scheduler.tickets
        wait_until(lambda: told.deaths or (pool.wait(1, told) or told.deaths))
        pool.start(0)
        pool.resume(0, Checkpoint())
        pool.send(ticket, 0)
        tries.wait_until_open()
        gate.open()
        told.take_all(1)
        assert told.batch(0).sum() == 0
        assert len(told.answers) == 1


def test_a_forked_child_knows_that_the_workers_are_not_its_own(kind) -> None:
    with opened(kind, squared) as (pool, _):
        assert not pool.is_inherited
        pid = os.fork()
        if pid == 0:
            os._exit(0 if pool.is_inherited else 1)
        assert os.waitpid(pid, 0)[1] == 0


@contextlib.contextmanager
def engine_of(
    kind: Kind,
    make: Callable[[Any], Any],
    worker_count: int = 2,
    *,
    in_order: bool = True,
    timeout_s: float = 30,
) -> Iterator[Engine]:
    pool = kind.make(make, worker_count)
    scheduler = Scheduler(
        worker_count, WINDOW, LENT if kind.has_slots else 0, in_order=in_order,
        has_queue=pool.has_queue, has_slots=kind.has_slots,
    )  # fmt: skip
    engine = Engine(pool, scheduler, timeout_s=timeout_s)
    try:
        yield engine
    finally:
        engine.close()
        CONFIGS.clear()


def values(engine: Engine) -> list[int]:
    found = []
    with contextlib.suppress(StopIteration):
        while True:
            found.append(int(next_of(engine)[0]))
    return found


def test_an_epoch_ends_without_a_look_for_an_answer(kind, monkeypatch) -> None:
    """Each look lets busy processes run, which takes as long as they want."""
    with engine_of(kind, squared) as engine:
        engine.start(iter(range(3)))
        for _ in range(3):
            next_of(engine)
        for name in ("poll", "wait"):
            monkeypatch.setattr(engine._pool, name, lambda *_: pytest.fail("nothing can come"))
        with pytest.raises(StopIteration):
            next_of(engine)


def test_an_engine_gives_batches_in_order_epoch_after_epoch(kind) -> None:
    with engine_of(kind, squared) as engine:
        engine.start(iter(range(12)))
        for epoch in range(3):
            assert values(engine) == [index * index for index in range(epoch, 12)]
            engine.restart(iter(range(epoch + 1, 12)))
        assert int(next_of(engine)[0]) == 9
        engine.restart(iter([2]))  # and what was in flight never comes
        assert values(engine) == [4]


def test_an_engine_gives_each_batch_once_in_any_order(kind) -> None:
    with engine_of(kind, squared, in_order=False) as engine:
        engine.start(iter(range(12)))
        assert sorted(values(engine)) == [index * index for index in range(12)]


def test_an_engine_raises_in_a_batch_s_place_and_goes_on(kind) -> None:
    with engine_of(kind, squared) as engine:
        engine.start(iter(range(12, 15)))
        assert int(next_of(engine)[0]) == 144
        with pytest.raises(Bad) as caught:
            next_of(engine)
        notes = "".join(getattr(caught.value, "__notes__", ()))
        assert "was loading batch 1 (index 13)" in notes
        assert values(engine) == [196]


@pytest.mark.sampled(2)
def test_an_engine_tells_what_a_late_worker_is_at(apart) -> None:
    gate = Gate()
    with engine_of(
        apart, lambda index: gate.pass_through() or torch.tensor([index]), 1, timeout_s=0.2
    ) as engine:
        engine.start(iter(range(2)))
        with pytest.raises(LoaderTimeoutError) as caught:
            next_of(engine)
        assert "waiting for batch 0 (index 0)" in str(caught.value)
        gate.open(2)
        found: list[int] = []
        while len(found) < 2:
            with contextlib.suppress(LoaderTimeoutError):  # a busy machine takes longer
                found.append(int(next_of(engine)[0]))
        assert found == [0, 1]


def test_a_batch_outlives_its_engine(kind) -> None:
    with engine_of(kind, lambda index: torch.full((200_000,), index)) as engine:
        engine.start(iter(range(8)))
        kept = [next_of(engine) for _ in range(5)]
    assert [set(batch.tolist()) for batch in kept] == [{index} for index in range(5)]


def test_a_closed_engine_says_so(kind) -> None:
    with engine_of(kind, squared) as engine:
        engine.start(iter(range(8)))
        next_of(engine)
        engine.close()
        for _ in range(2):
            with pytest.raises(ClosedLoaderError):
                next_of(engine)


def test_a_nursery_that_cannot_start_a_worker_says_why(monkeypatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr("shmloader.pools.nursery_process._Server._start_worker", refuse)
    with (
        ShardedDataLoader(range(4), num_workers=1, worker_scope="host") as loader,
        pytest.raises(OSError, match="Too many open files: no worker process could be started"),
    ):
        next(iter(loader))
