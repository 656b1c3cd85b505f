"""The program of a worker process.

It loops: it receives a message, makes the batch, and answers. Whose batches it makes is a client: a
socket and, where any worker may make any batch, a queue of tasks. A worker that serves one process
has one client, and ends when the client's socket is closed. A worker that the ranks of a host share
has one for each iterator of each rank. The nursery passes their sockets by another one, and the
worker ends once that is closed.

Clients are served in turns: the next message is that of the client that was served longest ago, of
those that have any. A rank that does not wait for batches has no tasks in its queue. So a rank
whose batches take long, and which therefore waits, gets more of the workers' time.

A worker shares no lock with its siblings. It ends at once when the process that owns it dies. A
child that the user's code forks in it, and that comes back to ours, ends with status 1 before it
writes to a slot, answers, or receives a message.

The module is long because a worker's whole life is in it, with one client and with many.
"""

import contextlib
import faulthandler
import gc
import os
import select
import signal
import socket
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data._utils import signal_handling

from shmloader import messages
from shmloader.batch.failures import RemoteError
from shmloader.batch.payload import ForkedPayload, receive_payload
from shmloader.batch.sample_rng import seed_worker
from shmloader.errors import InternalError
from shmloader.host import peer_of
from shmloader.memory.writer import install
from shmloader.pools.batch_server import BatchServer, TaskConfig
from shmloader.pools.forking import ParentDeathPipe, ignore_sigint
from shmloader.pools.status_page import (
    FIRST_TASK,
    NO_TASK,
    RECEIVING,
    STACK_SIGNAL,
    Phase,
)
from shmloader.pools.task_queue import LOOK_S, LOOKS, looks, receive, watch_queue
from shmloader.pools.worker_dataset import introduce


@dataclass(frozen=True, slots=True)
class WorkerStart:
    """The values that a worker gets when it starts.

    Attributes:
        worker_id: Number of the worker, from 0.
        worker_count: The most workers there may be.
        base_seed: Seeds the worker's random generators, together with its number.
        parent_death: Ends this process with the one that owns it.
        client: How the tasks of its only client are served; None if ranks share the worker.
        reports: Whether the worker first reports that torch's generator is not locked.
    """

    worker_id: int
    worker_count: int
    base_seed: int
    parent_death: ParentDeathPipe
    client: TaskConfig | None = None
    reports: bool = False


def worker_main(
    payload: Any,
    channel: socket.socket,
    start: WorkerStart,
    close_inherited: Callable[[], None] | None = None,
) -> None:
    """Run a worker. The target of its process.

    Args:
        payload: Its ``load()`` returns (dataset, worker_init_fn), and the only client's functions.
        channel: The worker's end of a socket pair: that of the only client, or the one that brings
            clients.
        start: What the worker gets.
        close_inherited: In a worker that was forked from the user's process, closes what other
            workers and loaders use; else None.
    """
    if os.getpid() == start.parent_death.main_pid:  # a context's Process may be anything
        raise InternalError("the code of a worker process was called in the main process")
    # The first full collection would write into the headers of all containers that this process
    # shares with the one that forked it, and the kernel would copy their pages. The collector
    # leaves frozen objects alone. The main process does not freeze before the fork, since
    # unfreezing there would also unfreeze what the user, or Python 3.12, has frozen.
    gc.freeze()
    ignore_sigint()
    channel.setblocking(True)  # whatever socket.setdefaulttimeout() says here
    start.parent_death.hold()
    worker = _Worker(start, channel)  # before what this process has inherited is closed
    if close_inherited is not None:
        close_inherited()
        # A thread that this process does not have may hold the lock of NumPy's generator.
        lock: Any = np.random.mtrand._rand._bit_generator.lock
        lock._at_fork_reinit()
    # Writing to a closed socket must raise, whatever the user's process does about SIGPIPE.
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    signal_handling._set_worker_signal_handlers()  # type: ignore[attr-defined]
    torch.multiprocessing._set_thread_name("pt_data_worker")
    torch.set_num_threads(1)
    try:
        if start.reports:
            report_unlocked(channel)
        worker.run(payload)
    except ConnectionError:
        return  # the main process is gone, or has closed the loader
    except BaseException:  # noqa: BLE001 - a worker's outermost line
        # At once, whatever threads the user's code has: the main process waits for this end.
        traceback.print_exc()
        os._exit(1)


def report_unlocked(channel: socket.socket) -> None:
    """Tell the main process that torch's generator is not locked in this process."""
    torch.default_generator.get_state()  # waits for ever if it is
    channel.send(b"-")


class _Client:
    """One client of this worker: its socket, its queue, and what makes its batches.

    The worker sets ``poll``, by which it waits for messages, and which watches the socket.
    """

    poll: select.epoll

    def __init__(self, channel: socket.socket, tasks: TaskConfig, worker_id: int) -> None:
        self.channel, self._tasks = channel, tasks
        self.line = tasks.page.open_line(worker_id)
        self.server = BatchServer(tasks, worker_id, self.line)
        self._queue = None if tasks.queue is None else tasks.queue.pop_receiver()
        # From where messages are received: from the queue as soon as the worker knows where its
        # dataset resumes.
        self._sockets: tuple[socket.socket, ...] = (channel,)
        # The pieces of a long message that have come.
        self._pieces = bytearray()

    def receive(self, most: int) -> bytes | None:
        """Return the next message: b"" if the client has closed its end, None if there is none.

        Looks so often where tasks come from.
        """
        held = self.line.held
        for each in self._sockets:
            held[0] = NO_TASK if each is self.channel else RECEIVING
            data = receive(each, most if each is self._sockets[-1] else 1)
            if data is not None:
                return data
            held[0] = NO_TASK
        return None

    def serve(self, data: bytes) -> None:
        """Do what a message says, and answer it if it is a task or asks for an answer."""
        if data[0] & messages.TASK:
            head = messages.TASK_HEAD
            bits, seq, epoch, slot_id, touched_bytes, told = head.unpack_from(data)
            dataset_epoch, indices = None if told == messages.NO_EPOCH else told, data[head.size :]
            task = messages.Task(seq, epoch, slot_id, touched_bytes, dataset_epoch, indices, bits)
            self._make_batch(task)
            return
        whole = messages.join(self._pieces, data)
        if whole is None:
            return
        message = messages.unpack(whole)
        self.line.held[0] = NO_TASK
        if isinstance(message, messages.StartEpoch):
            self.line.set(Phase.LEAVING_EPOCH)
            beginning = self.server.dataset.start_epoch(message.dataset_epoch)
            self._send(messages.pack(messages.EpochStarted(beginning)))
        elif isinstance(message, messages.ResumeStream):
            self.server.dataset.resume(message.checkpoint)
            if self._queue is not None and len(self._sockets) == 1:
                self._sockets = (self.channel, self._queue)
                watch_queue(self.poll, self._queue)
        else:
            raise InternalError(f"a worker does not take {message!r}")

    def _make_batch(self, task: messages.Task) -> None:
        line, dataset = self.line, self.server.dataset
        line.held[0] = task.seq + FIRST_TASK
        if not dataset.is_ready:
            line.set(Phase.GETTING_READY)
            dataset.get_ready(task.dataset_epoch)
        line.set(Phase.LOADING, task.epoch, task.seq)
        if dataset.has_ended:
            self._send(messages.pack(messages.StreamEnded(task.seq, task.epoch)))
        else:
            self._send(self.server.serve(task))

    def _send(self, answer: bytes) -> None:
        if os.getpid() != self.server.writer.pid:
            os._exit(1)
        if len(answer) <= messages.INLINE_BYTES:
            self.channel.send(answer)
        else:
            for piece in messages.pieces(answer):
                self.channel.send(piece)

    def close(self) -> None:
        """Close the channel and the queue, and unmap the client's slots and status page."""
        for each in self._sockets:
            self.poll.unregister(each)
        self.channel.close()
        if self._queue is not None:
            self._queue.close()
        self._tasks.arena.close()
        self.line.close()


class _Worker:
    """State of a worker between its messages."""

    # The client that was served last: the dataset is in its epoch.
    _served: _Client | None = None
    _dataset: Any = None
    _error: RemoteError | None = None

    def __init__(self, start: WorkerStart, channel: socket.socket) -> None:
        self._start, self._channel = start, channel
        self._is_shared = start.client is None
        # The one that was served longest ago comes first.
        self._clients: list[_Client] = []
        if start.client is not None:
            self._add(_Client(channel, start.client, start.worker_id))

    def run(self, payload: Any) -> None:
        """Get ready, then serve until the channel is closed."""
        pid = os.getpid()
        self._poll = select.epoll()  # now that what this process has inherited is closed
        self._poll.register(self._channel, select.EPOLLIN)
        functions = ForkedPayload(self._prepare(payload))
        for client in self._clients:
            self._open(client, functions)
        del payload, functions
        while True:
            if os.getpid() != pid:
                os._exit(1)
            found = self._look()
            if self._is_shared:
                if not self._wait(is_idle=found is None):
                    return
            elif found is None:
                self._poll.poll(LOOK_S)
            if found is None:
                continue
            client, data = found
            if data:
                self._serve(client, data)
            elif self._is_shared:
                self._drop(client)
            else:
                return

    def _look(self) -> tuple[_Client, bytes] | None:
        """Return the next message with its client; None if none is about to arrive."""
        if len(self._clients) == 1:
            (client,) = self._clients
            data = client.receive(LOOKS)
            return None if data is None else (client, data)
        for _ in looks(LOOKS):
            for client in self._clients:
                data = client.receive(1)
                if data is not None:
                    return client, data
        return None

    def _serve(self, client: _Client, data: bytes) -> None:
        if client is not self._served:
            self._turn_to(client)
        try:
            client.serve(data)
        except ConnectionError:
            if not self._is_shared:
                raise
            self._drop(client)
            return
        client.line.set(Phase.IDLE)
        if len(self._clients) > 1:
            self._clients.remove(client)
            self._clients.append(client)

    def _add(self, client: _Client) -> None:
        """Serve a client that has come, before any other."""
        self._clients.insert(0, client)
        self._turn_to(client)

    def _turn_to(self, client: _Client) -> None:
        """Serve another client than before, with its epoch and its slots."""
        self._served = client
        if self._is_shared:  # the dataset has served another client meanwhile
            client.server.dataset.told = None
        install(client.server.writer)
        client.line.show_stack()

    def _wait(self, *, is_idle: bool) -> bool:
        """Add a client that has come; if idle, first wait. Returns False if it is to end."""
        ready = self._poll.poll(LOOK_S if is_idle else 0)
        is_called = any(fd == self._channel.fileno() for fd, _ in ready)
        return not is_called or self._add_client()

    # Getting ready ------------------------------------------------------------------------

    def _prepare(self, payload: Any) -> list[Any]:
        """Load the dataset, and call ``worker_init_fn``. Returns the only client's functions."""
        start = self._start
        functions: list[Any] = []
        try:
            self._dataset, init_fn, *functions = payload.load(waits=True)
            # After loading, since modules that it imports may seed the generators or draw.
            seed = seed_worker(start.base_seed, start.worker_id)
            introduce(start.worker_id, start.worker_count, seed, self._dataset, init_fn)
        except BaseException:  # noqa: BLE001 - it answers every task
            self._error = RemoteError.caught(f"in DataLoader worker process {start.worker_id}")
        return functions

    def _open(self, client: _Client, functions: Any) -> None:
        """Give the dataset and the client's functions to what makes the client's batches."""
        client.poll = self._poll
        server, error = client.server, self._error
        try:
            if error is None:
                collate_fn, on_error = functions.load()
                server.dataset.open(self._dataset, collate_fn, on_error)
        except BaseException:  # noqa: BLE001 - it answers every task of the client
            error = RemoteError.caught(server.where)
        if error is not None:
            server.dataset.fail(error)
        client.line.set(Phase.IDLE)

    # Clients that come and go -------------------------------------------------------------

    def _add_client(self) -> bool:
        """Receive a rank's channel. Returns False if there is no rank any more."""
        data, descriptors, _, _ = socket.recv_fds(self._channel, messages.RECEIVE_BYTES, 1)
        if not data:
            return False
        # If no descriptor came, this process has none left. The kernel has then closed the rank's
        # channel, and this process ends, since the rank would wait for it.
        (fd,) = descriptors
        channel = socket.socket(fileno=fd)
        channel.setblocking(True)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            # A launcher may bind each rank to other cores.
            cores = os.sched_getaffinity(peer_of(channel)[0])
            os.sched_setaffinity(0, cores | os.sched_getaffinity(0))
        try:
            # The rank has sent both before it sent the channel.
            tasks = receive_payload(channel).load()
            functions = receive_payload(channel)
        except ConnectionError:
            channel.close()
            return True
        self._poll.register(channel, select.EPOLLIN)
        client = _Client(channel, tasks, self._start.worker_id)
        self._add(client)
        self._open(client, functions)
        return True

    def _drop(self, client: _Client) -> None:
        """Forget a rank that has closed its channel."""
        self._clients.remove(client)
        self._served = None
        client.close()
        if self._clients:
            self._turn_to(self._clients[0])
        else:
            faulthandler.unregister(STACK_SIGNAL)
