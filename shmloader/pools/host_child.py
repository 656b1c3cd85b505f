"""The program of a worker that the ranks of a host share.

The worker has one dataset, and for each iterator of a rank a channel with the rank's own slots,
functions and seed. It reads all channels before each batch. Then it makes the batch that is
furthest behind the newest one that its rank has asked any worker for. So a rank whose batches take
long, and which therefore waits, gets more of the workers' time than a rank that does not wait.
Ranks that are equally far behind take turns.

The worker ends when the process that started it closes the channel to it, and at once when that
process dies. A rank that closes its channel, or dies, does not disturb the others.
"""

import collections
import contextlib
import functools
import os
import select
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shmloader.batch.payload import PayloadReceiver, ReceivedPayload
from shmloader.batch.remote_error import RemoteError
from shmloader.batch.seeds import seed_worker
from shmloader.forked_child import end_if_forked
from shmloader.interruptions import is_interruption
from shmloader.messages import RECEIVE_BYTES, Task, unpack
from shmloader.pools.child import enter_worker, load, run_until_closed
from shmloader.pools.generator_locks import unlock_numpy
from shmloader.pools.host_loads import Loads
from shmloader.pools.parent_death import ParentDeathPipe
from shmloader.pools.status_page import MEMORY_IDLE_MS, Line, Memory, Phase, StatusPage
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
        loads: Where the worker writes, for the ranks, how many tasks it has completed.
    """

    worker_id: int
    worker_count: int
    base_seed: int
    parent_death: ParentDeathPipe
    status_page: StatusPage
    loads: Loads


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
        self._poll = select.poll()
        self._ranks: dict[int, _Rank] = {}
        # The rank that was served last: the dataset is in its epoch.
        self._served: _Rank | None = None
        self._served_count = 0

    def run(self, payload: ReceivedPayload) -> None:
        """Get ready, then serve until the channel ends."""
        pid = os.getpid()
        self._prepare(payload)
        self._poll.register(self._channel, select.POLLIN)
        while True:
            end_if_forked(pid)
            if self._most_urgent() is None:
                happened = poll_soon(self._poll) or self._rest()
            else:
                happened = self._poll.poll(0)
            for fd, _ in happened:
                if fd == self._channel.fileno():
                    if not self._take_rank():
                        return
                else:
                    self._read(self._ranks[fd])
            rank = self._most_urgent()
            if rank is not None:
                self._serve(rank)

    def _rest(self) -> list[tuple[int, int]]:
        """Wait for the next event. This process's memory is measured first if that is due."""
        if self._line.memory_is_due:
            happened = self._poll.poll(MEMORY_IDLE_MS)
            if happened:
                return happened
            self._line.note_memory()
        return self._poll.poll()

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
            start, memory = self._start, self._line.memory
            rank = _Rank(socket.socket(fileno=fd), start.worker_id, start.loads, memory)
            self._ranks[fd] = rank
            self._poll.register(fd, select.POLLIN)
        return True

    def _read(self, rank: "_Rank") -> None:
        try:
            rank.read(self._open)
        except OSError as error:
            if is_interruption(error):
                raise
            self._drop(rank)

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

    def _most_urgent(self) -> "_Rank | None":
        """Return the rank whose message is to be handled next; None if there is no message."""
        waiting = [rank for rank in self._ranks.values() if rank.messages]
        if not waiting:
            return None
        return max(waiting, key=lambda rank: (rank.urgency(), -rank.served_at))

    def _serve(self, rank: "_Rank") -> None:
        self._served_count += 1
        rank.served_at = self._served_count
        rank.is_first_in_turn = rank is not self._served
        self._served = rank
        self._line.note(Phase.LOADING)
        try:
            rank.serve()
        except OSError as error:
            if is_interruption(error):
                raise
            self._drop(rank)
        self._line.idle()

    def _drop(self, rank: "_Rank") -> None:
        """Forget a rank that has closed its channel."""
        fd = rank.channel.fileno()
        self._poll.unregister(fd)
        del self._ranks[fd]
        self._served = None
        rank.close()
        self._line.show_stack()


class _Rank:
    """A worker's end of one channel to a rank.

    Attributes:
        channel: The socket to the rank.
        messages: Messages that were received and not handled yet.
        served_at: When a message of this rank was handled last, counted in handled messages of all
            ranks.
        is_first_in_turn: Whether another rank was served last, and may have another epoch.
    """

    def __init__(
        self, channel: socket.socket, worker_id: int, loads: Loads, memory: Memory
    ) -> None:
        self.channel = channel
        self.served_at, self.is_first_in_turn = 0, True
        self._loads, self._memory = loads, memory
        self._row = -1
        channel.setblocking(True)
        self.messages: collections.deque[object] = collections.deque()
        self._worker_id = worker_id
        # Two payloads come. The first has the TaskConfig, the status page and the rank's row of the
        # table of loads. The second has the functions.
        self._receiver: PayloadReceiver | None = PayloadReceiver(channel)
        self._line: Line | None = None
        self._tasks: TaskServer | None = None

    def read(self, then: Callable[[TaskServer, ReceivedPayload], None]) -> None:
        """Receive the messages that have arrived.

        Args:
            then: Called with the server of the tasks and with the functions, once these have come.

        Raises:
            OSError: If the rank has closed its channel.
        """
        with contextlib.suppress(BlockingIOError):
            while self._receiver is not None:
                payload = self._receiver.receive(socket.MSG_DONTWAIT)
                if payload is not None and self._tasks is None:
                    config, page, self._row = payload.load()
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
                self.messages.append(unpack(data))

    def urgency(self) -> int:
        """Return how far the next task is behind the newest that the rank has sent to any worker.

        Messages that are not tasks come first, since they take no time. So do tasks of an earlier
        epoch.
        """
        message = self.messages[0]
        assert self._line is not None
        epoch, seq = self._line.newest()
        if type(message) is not Task or message.epoch != epoch:
            return 1 << 62
        return seq - message.seq

    def serve(self) -> None:
        """Handle the next message.

        Raises:
            OSError: If the rank has closed its channel.
        """
        tasks, line = self._tasks, self._line
        assert tasks is not None
        assert line is not None
        message = self.messages.popleft()
        if self.is_first_in_turn:
            tasks.tell_epoch_again()
        if type(message) is Task:
            tasks.install()
            line.show_stack()
        tasks.take(message)
        if type(message) is Task:
            self._loads.note_made(self._row, self._worker_id)
        line.idle()
        line.note_use(has_task=bool(self.messages))

    def close(self) -> None:
        """Close the channel, and unmap the rank's slots and status page."""
        self.channel.close()
        if self._tasks is not None:
            self._tasks.close()
        if self._line is not None:
            self._line.close()
