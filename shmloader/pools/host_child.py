"""The program of a worker that the ranks of a host share.

The worker has one dataset, and for each iterator of a rank a channel and a queue, with the rank's
own slots, functions and seed. It receives a task from the queue that it has served longest ago, of
those that have any. A rank that does not wait for batches has no tasks in its queue. So a rank
whose batches take long, and which therefore waits, gets more of the workers' time. Nor is a rank
served that takes no answers, such as a stopped one: sending would keep the worker from the others.

Before it sleeps, a worker has looked into all queues. So it does not matter which queue's message
has woken it, and which one another worker has emptied meanwhile.

The worker ends when the process that started it closes the channel to it, and at once when that
process dies. A rank that closes its channel, or dies, does not disturb the others.
"""

import contextlib
import functools
import os
import select
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shmloader.batch.failures import RemoteError
from shmloader.batch.payload import PayloadReceiver, ReceivedPayload
from shmloader.batch.sample_rng import seed_worker
from shmloader.forked_child import end_if_forked
from shmloader.interruptions import is_interruption
from shmloader.messages import RECEIVE_BYTES
from shmloader.pools.child import enter_worker, load, run_until_closed
from shmloader.pools.generator_locks import unlock_numpy
from shmloader.pools.parent_death import ParentDeathPipe
from shmloader.pools.status_page import (
    MEMORY_IDLE_MS,
    NO_TASK,
    RECEIVING,
    Line,
    Memory,
    Phase,
    StatusPage,
)
from shmloader.pools.task_queue import LOOK_S, watch_queue
from shmloader.pools.task_server import TaskServer
from shmloader.pools.waker import poll_soon
from shmloader.pools.worker_dataset import introduce


@dataclass(frozen=True, slots=True)
class HostWorkerStart:
    """The values that a worker gets when it is forked.

    Attributes:
        worker_id: Number of the worker, from 0.
        worker_count: The most workers there may be.
        base_seed: Seeds the worker's random generators, together with its number.
        parent_death: Ends this process with the one that started it.
        status_page: Where the worker writes, for that process, whether it is making a batch.
    """

    worker_id: int
    worker_count: int
    base_seed: int
    parent_death: ParentDeathPipe
    status_page: StatusPage


def host_worker_main(
    payload: ReceivedPayload,
    channel: socket.socket,
    start: HostWorkerStart,
    close_inherited: Callable[[], None],
) -> None:
    """Run a worker. The target of its process.

    Args:
        payload: Its ``load()`` returns (dataset, worker_init_fn).
        channel: Brings a socket for each rank.
        start: What the worker gets.
        close_inherited: Closes what the process that forked this one uses.
    """
    line = enter_worker(start.worker_id, start.parent_death, start.status_page, close_inherited)
    unlock_numpy()
    channel.setblocking(True)
    worker = _HostWorker(channel, start, line)
    run_until_closed(channel, functools.partial(worker.run, payload))


class _HostWorker:
    """State of a worker between its messages."""

    def __init__(self, channel: socket.socket, start: HostWorkerStart, line: Line) -> None:
        self._channel = channel
        self._start = start
        self._line = line
        self._where = f"in DataLoader worker process {start.worker_id}"
        self._dataset: Any = None
        self._by_value = False
        self._error: RemoteError | None = None
        self._poll = select.epoll()
        self._ranks: dict[int, _Rank] = {}
        # The rank that was served last: the dataset is in its epoch.
        self._served: _Rank | None = None
        self._served_count = 0

    def run(self, payload: ReceivedPayload) -> None:
        """Get ready, then serve until the channel ends."""
        pid = os.getpid()
        self._prepare(payload)
        self._poll.register(self._channel, select.EPOLLIN)
        while True:
            end_if_forked(pid)
            for fd, _ in self._poll.poll(0):
                if fd in self._ranks:
                    self._attempt(self._ranks[fd], self._ranks[fd].read, self._open)
                elif fd == self._channel.fileno() and not self._take_rank():
                    return
            ranks = sorted(self._ranks.values(), key=lambda rank: rank.served_at)
            is_idle = not any(self._attempt(rank, self._serve_next, rank) for rank in ranks)
            if is_idle and not poll_soon(self._poll):
                self._rest()

    def _attempt(self, rank: "_Rank", call: Callable[..., bool], *arguments: object) -> bool:
        """Call a function, and drop the rank if it has closed its channel meanwhile."""
        try:
            return call(*arguments)
        except ConnectionError as error:
            if is_interruption(error):
                raise
            self._drop(rank)
            return False

    def _rest(self) -> None:
        """Wait for the next event. This process's memory is measured first if that is due."""
        if self._line.memory_is_due and not self._poll.poll(MEMORY_IDLE_MS / 1000):
            self._line.note_memory()
        self._poll.poll(LOOK_S)

    def _prepare(self, payload: ReceivedPayload) -> None:
        """Load the dataset, and call ``worker_init_fn``."""
        start, pid = self._start, os.getpid()
        try:
            try:
                self._dataset, init_fn = load(payload)
            finally:
                seed = seed_worker(start.base_seed, start.worker_id)
            introduce(start.worker_id, start.worker_count, seed, self._dataset, init_fn)
            self._by_value = payload.by_value
        except BaseException:  # noqa: BLE001 - it answers every task
            end_if_forked(pid)
            self._error = RemoteError.caught(self._where)

    def _take_rank(self) -> bool:
        """Receive a rank's channel. Returns False if this worker is to end."""
        data, descriptors, _, _ = socket.recv_fds(self._channel, RECEIVE_BYTES, 1)
        if not data:
            return False
        # If no descriptor came, this process has none left. The kernel has then closed the rank's
        # channel, which the rank sees.
        for fd in descriptors:
            self._ranks[fd] = _Rank(
                socket.socket(fileno=fd), self._poll, self._start.worker_id, self._line.memory
            )
            self._poll.register(fd, select.EPOLLIN)
        return True

    def _open(self, tasks: TaskServer, functions: ReceivedPayload) -> None:
        """Give the dataset and a rank's functions to the server of the rank's tasks."""
        if self._error is not None:
            tasks.fail(self._error)
            return
        try:
            collate_fn, on_error = load(functions)
            tasks.install()
            by_value = self._by_value or functions.by_value
            tasks.open(self._dataset, collate_fn, on_error, by_value=by_value)
        except BaseException:  # noqa: BLE001 - it answers every task of the rank
            tasks.fail(RemoteError.caught(self._where))

    def _serve_next(self, rank: "_Rank") -> bool:
        """Make a rank's next batch. Returns False if its queue is empty."""
        data = rank.receive_task()
        if data is None:
            return False
        self._served_count += 1
        rank.served_at = self._served_count
        is_first_in_turn, self._served = rank is not self._served, rank
        self._line.note(Phase.LOADING)
        rank.serve(data, is_first_in_turn=is_first_in_turn)
        self._line.idle()
        return True

    def _drop(self, rank: "_Rank") -> None:
        """Forget a rank that has closed its channel."""
        del self._ranks[rank.channel.fileno()]
        self._served = None
        rank.close()
        self._line.show_stack()


class _Rank:
    """A worker's end of one channel to a rank, and of the rank's queue.

    Attributes:
        channel: The socket to the rank.
        served_at: When a task of this rank was served last, counted in tasks of all ranks.
    """

    def __init__(
        self, channel: socket.socket, poll: select.epoll, worker_id: int, memory: Memory
    ) -> None:
        self.channel = channel
        self.served_at = 0
        self._poll, self._worker_id, self._memory = poll, worker_id, memory
        channel.setblocking(True)
        # Two payloads come. The first has the TaskConfig and the status page, the second the
        # functions.
        self._receiver: PayloadReceiver | None = PayloadReceiver(channel)
        self._line: Line | None = None
        self._tasks: TaskServer | None = None
        self._queue: socket.socket | None = None
        self._watches_queue = self._is_full = False
        self._writable = select.poll()
        self._writable.register(channel, select.POLLOUT)

    def read(self, then: Callable[[TaskServer, ReceivedPayload], None]) -> bool:
        """Handle the messages that have arrived by the channel.

        Args:
            then: Called with the server of the tasks and with the functions, once these have come.

        Raises:
            ConnectionError: If the rank has closed its channel.
        """
        if self._is_full:
            self._look_for_room()
        with contextlib.suppress(BlockingIOError):
            while self._receiver is not None:
                payload = self._receiver.receive(socket.MSG_DONTWAIT)
                if payload is not None and self._tasks is None:
                    config, page = payload.load()
                    self._queue = config.queue.receiver()
                    self._line = page.open_line(self._worker_id, self._memory)
                    self._tasks = TaskServer(self.channel, self._worker_id, config, self._line)
                    self._receiver = PayloadReceiver(self.channel)
                elif payload is not None:
                    assert self._tasks is not None
                    self._receiver = None
                    then(self._tasks, payload)
                    assert self._line is not None
                    self._line.idle()
            while True:
                data = self.channel.recv(RECEIVE_BYTES, socket.MSG_DONTWAIT)
                if not data:
                    raise ConnectionResetError("a rank has closed its channel")
                self.serve(data, is_first_in_turn=True)
        return True

    def receive_task(self) -> bytes | None:
        """Return the next task of the rank's queue, or None."""
        if self._queue is None or not self._watches_queue:
            return None
        self._look_for_room()
        if self._is_full:
            return None
        assert self._line is not None
        self._line.held[0] = RECEIVING
        with contextlib.suppress(BlockingIOError):
            data = self._queue.recv(RECEIVE_BYTES)
            if data:  # otherwise the rank has closed the queue, and is about to close its channel
                return data
        self._line.held[0] = NO_TASK
        return None

    def serve(self, data: bytes, *, is_first_in_turn: bool) -> None:
        """Handle a message.

        Args:
            data: The message.
            is_first_in_turn: Whether another rank may have been served last, with another epoch.

        Raises:
            ConnectionError: If the rank has closed its channel.
        """
        tasks, line = self._tasks, self._line
        assert tasks is not None
        assert line is not None
        if is_first_in_turn:
            tasks.tell_epoch_again()
            tasks.install()
            line.show_stack()
        tasks.take(data)
        line.held[0] = NO_TASK
        line.idle()
        line.note_use(has_task=True)
        self._watch()

    def _look_for_room(self) -> None:
        """See whether the channel takes an answer; if not, wait for that rather than for tasks.

        The kernel reports that a channel can be written to while a quarter of it is used at most,
        which leaves room for one answer of any size.
        """
        is_full = not self._writable.poll(0)
        if is_full is not self._is_full:
            self._is_full = is_full
            self._poll.modify(self.channel, select.EPOLLIN | (select.EPOLLOUT if is_full else 0))
            self._watch()

    def _watch(self) -> None:
        """Have tasks of the queue wake this worker, or not, as things are now."""
        assert self._tasks is not None
        watches = self._tasks.uses_queue and not self._is_full
        if watches is not self._watches_queue:
            assert self._queue is not None
            self._watches_queue = watches
            if watches:
                watch_queue(self._poll, self._queue)
            else:
                self._poll.unregister(self._queue)

    def close(self) -> None:
        """Close the channel and the queue, and unmap the rank's slots and status page."""
        self._poll.unregister(self.channel)
        self.channel.close()
        if self._queue is not None:
            if self._watches_queue:
                self._poll.unregister(self._queue)
            self._queue.close()
        if self._tasks is not None:
            self._tasks.close()
        if self._line is not None:
            self._line.close()
