"""Workers that all ranks of a host share, as one rank sees them.

::

    rank 0 ─┐ HostPool: one connection, held while a loader uses the pool   ┌─ owner (host_service)
    rank 1 ─┤ HostWorkers: one more for each iterator ──────────────────────┤   starts and reaps
    …       │                                                               └──┬──────┬──────
            ├── one queue for each iterator ── tasks ────────────────────────▶ any worker
            └── one socket pair for each iterator and worker ◀── batches ───── worker 0, worker 1, …

:mod:`shmloader.pools.host_pool` says how ranks find, start and leave the owner.
"""

import contextlib
import os
import select
import socket
from collections.abc import Iterable, Iterator

from shmloader.batch.payload import Payload
from shmloader.errors import ClosedLoaderError
from shmloader.interruptions import Suppressed, is_interruption
from shmloader.messages import RECEIVE_BYTES
from shmloader.pools.answers import Death
from shmloader.pools.handle import WorkerChannel
from shmloader.pools.host_messages import (
    Attach,
    Attached,
    Detach,
    Kill,
    Lost,
    Wanted,
    describe_owner,
    pack,
    unpack,
)
from shmloader.pools.host_pool import HostPool, receive_welcome
from shmloader.pools.starting import pickle_for_workers
from shmloader.pools.status_page import StatusPage
from shmloader.pools.task_server import TaskConfig
from shmloader.pools.waker import SHARED_LOOKS
from shmloader.pools.worker_channels import WorkerChannels


class HostWorkers(WorkerChannels[WorkerChannel]):
    """The workers of a host, as one iterator of one rank uses them.

    Args:
        pool: The pool of the host.
        functions: (collate_fn, on_error).
        tasks: How tasks are served.
        count: How many of the workers are used at first.

    Raises:
        TypeError, AttributeError, pickle.PicklingError: If the functions cannot be pickled.
        OSError: If there are no descriptors left, or the owner has ended.
    """

    looks = SHARED_LOOKS

    def __init__(
        self, pool: HostPool, functions: tuple[object, object], tasks: TaskConfig, count: int
    ) -> None:
        self._pool: HostPool | None = pool
        self._page = StatusPage(pool.worker_count)
        self._control: socket.socket | None = None
        self._payloads: list[Payload] = []
        self._owner_pid = pool.owner_pid
        self._pids = [0] * pool.worker_count
        # How often this iterator has attached to each worker number.
        self._attachments = [0] * pool.worker_count
        self._deaths: dict[int, Death] = {}
        self._because = ""
        super().__init__(tasks.own_queue)
        try:
            self._control = pool.connect()
            if receive_welcome(self._control) is None:
                raise ConnectionResetError(self._describe_lost_owner())
            self._payloads.append(Payload((tasks, self._page)))
            names = ("collate_fn", "on_error")
            self._payloads.append(pickle_for_workers(functions, names, "spawn"))
            self._poll.register(self._control, select.POLLIN)
            for worker_id in range(count):
                self._workers.append(self._attach(worker_id))
                self._introduce(worker_id)
        except BaseException:
            self.close()
            raise
        self._open_readings()

    @property
    def _status_page(self) -> StatusPage:
        return self._page

    def _attach(self, worker_id: int) -> WorkerChannel:
        """Have the owner give a worker one end of a new socket pair. Returns the other end."""
        assert self._control is not None
        self._pids[worker_id] = 0
        self._attachments[worker_id] += 1
        message = pack(Attach(worker_id, self._attachments[worker_id]))
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with theirs:
                theirs.setblocking(True)
                socket.send_fds(self._control, [message], [theirs.fileno()])
            ours.setblocking(False)
            self._by_fd[ours.fileno()] = worker_id
            self._poll.register(ours, select.POLLIN)
        except BaseException:
            ours.close()
            raise
        return WorkerChannel(ours)

    def _introduce(self, worker_id: int) -> None:
        """Send a worker the configuration and the functions for this iterator's tasks."""
        for payload in self._payloads:
            for data, descriptors in payload.messages():
                self.send(worker_id, data, *descriptors)

    # What the owner says -----------------------------------------------------------------

    def _take_notice(self, fd: int) -> Iterator[tuple[int, bytes | None]]:
        """Handle the owner's messages."""
        assert self._control is not None
        assert fd == self._control.fileno()
        while True:
            try:
                data = self._control.recv(RECEIVE_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except OSError as error:
                if is_interruption(error):
                    raise
                data = b""
            if not data:
                yield from self._lose_owner()
                return
            message = unpack(data)
            if isinstance(message, Attached):
                self._pids[message.worker_id] = message.pid
            elif isinstance(message, Wanted):
                self.wanted_count = message.worker_count
                if self._pool is not None:  # a later iterator begins with this number
                    self._pool.wanted_count = message.worker_count
            elif isinstance(message, Lost):
                worker_id, attachment, pid, exit_code, kills, was_loading, because = message
                if attachment != self._attachments[worker_id]:
                    continue  # this iterator has left that worker, and attached to its successor
                is_ours = self.was_at(worker_id).is_loading
                is_elsewhere = was_loading and not is_ours
                death = Death(pid, exit_code, kills, was_elsewhere=is_elsewhere, because=because)
                yield from self._lose(worker_id, death)

    def _lose_owner(self) -> Iterable[tuple[int, bytes | None]]:
        """Handle the end of the owner, with which all workers end."""
        assert self._control is not None
        self._poll.unregister(self._control)
        self._because = self._describe_lost_owner()
        if self._pool is not None:
            self._pool.close()
        for worker_id in range(len(self._workers)):
            death = Death(self.pid(worker_id), None, because=self._because)
            yield from self._lose(worker_id, death)

    def _lose(self, worker_id: int, death: Death) -> Iterator[tuple[int, bytes | None]]:
        """Yield a dead worker's last messages, and then None for its loss."""
        worker = self._workers[worker_id]
        if worker.is_lost:
            return
        while (data := worker.receive()) is not None:
            yield worker_id, data
        worker.is_lost = True
        worker.outbox.clear()
        with contextlib.suppress(KeyError, ValueError):
            self._poll.unregister(worker.channel)
        self._deaths[worker_id] = death
        yield worker_id, None

    def pid(self, worker_id: int) -> int:
        """Return the process id of a worker; 0 if it is not known yet."""
        return self._pids[worker_id]

    def death(self, worker_id: int) -> Death:
        """Return how a lost worker ended."""
        return self._deaths[worker_id]

    # Workers -----------------------------------------------------------------------------

    def kill(self, worker_id: int) -> None:
        """Have the owner kill a worker."""
        if self._control is not None and not self._workers[worker_id].is_lost:
            with Suppressed(OSError):  # the owner has ended, which the next wait reports
                self._control.send(pack(Kill(worker_id)))

    def replace(self, worker_id: int) -> None:
        """Attach to the successor of a lost worker, which the owner starts unless it runs already.

        Raises:
            OSError: If there are no descriptors left.
            RuntimeError: If the owner has ended.
            ClosedLoaderError: If another thread closes this meanwhile.
        """
        try:
            self.start(worker_id)
        except ConnectionError as error:
            if is_interruption(error):
                raise
            raise RuntimeError(self._because or self._describe_lost_owner()) from error

    def start(self, worker_id: int) -> None:
        """Attach to a worker, which the owner starts unless it runs.

        Raises:
            OSError: If there are no descriptors left, or the owner has ended.
            ClosedLoaderError: If another thread closes this meanwhile.
        """
        if self._is_closed:
            raise ClosedLoaderError("the workers have been ended")
        if self._because:
            raise ConnectionResetError(self._because)
        if worker_id == len(self._workers):
            self._workers.append(self._attach(worker_id))
        else:
            old = self._workers[worker_id]
            self._by_fd.pop(old.channel.fileno(), None)
            old.channel.close()
            self._page.clear(worker_id)
            self._workers[worker_id] = self._attach(worker_id)
        self._introduce(worker_id)

    def retire(self, worker_id: int) -> None:
        """Detach from an idle worker, which the owner ends when no other rank uses it."""
        worker = self._workers[worker_id]
        if worker.is_lost or self._is_closed:
            return
        worker.is_lost = True
        worker.outbox.clear()
        with contextlib.suppress(KeyError, ValueError):
            self._poll.unregister(worker.channel)
        self._by_fd.pop(worker.channel.fileno(), None)
        worker.hang_up()
        self.report(Detach(worker_id))

    def report(self, message: tuple[object, ...]) -> bool:
        """Send the owner a message, without blocking. Called from any thread.

        Returns:
            Whether it was sent. False if the owner has ended, or has too many unread messages.
        """
        control = self._control
        with Suppressed(OSError):
            if control is not None:
                control.send(pack(message), socket.MSG_DONTWAIT)
                return True
        return False

    def _describe_lost_owner(self) -> str:
        return (
            f"{describe_owner(self._owner_pid)} has ended, and all workers with it. "
            "The next epoch starts new ones."
        )

    # End ---------------------------------------------------------------------------------

    def _end_all(self) -> None:
        self._is_closed = True
        self._at_exit.cancel()
        if self.queue is not None:
            self.queue.recall()
        self._hang_up()
        self.readings.close()
        self._waker = self._pool = None

    def _hang_up(self) -> None:
        for worker in self._workers:
            worker.hang_up()
        if self._control is not None:
            if os.getpid() == self._pid:
                with Suppressed(OSError):  # ends the connection, even if a forked child has a copy
                    self._control.shutdown(socket.SHUT_RDWR)
            self._control.close()
        for payload in self._payloads:
            payload.close()
        if self.queue is not None:
            self.queue.close()
        self._page.close()

    def leave_to_parent(self) -> None:
        """Close the sockets in a forked child, whose copies would keep the owner from ending."""
        super().leave_to_parent()
        for worker in self._workers:
            worker.channel.close()
        if self._control is not None:
            self._control.close()

    def abandon(self) -> None:
        """Close this object's descriptors in a forked child."""
        was_closed, self._is_closed = self._is_closed, True
        if was_closed:
            return
        for worker in self._workers:
            worker.channel.close()
        self._workers.clear()
        self._hang_up()
        self._waker = None
