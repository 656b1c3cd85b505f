"""The pool whose workers are processes of this machine, and whose batches come in slots.

Owns one ``SOCK_SEQPACKET`` socket pair for each worker, and a descriptor of its process, and waits
for all of them at once. What starts the workers is :class:`~shmloader.pools.starting.OwnWorkers`,
or, if the ranks of a host share them, :class:`~shmloader.pools.host_pool.SharedWorkers`.

Guarantees:
    * A send never blocks. What a socket refuses waits here, in order.
    * Everything that a worker sent before it died is received before its death is reported.
    * ``end_workers`` ends every worker within a bounded time, even a stopped or hung one, reaps it,
      and leaves no descriptor. It only leaves workers that other ranks share. Called again, or in
      a forked child, it ends no process.

The module is long because one object waits for messages, for deaths and for space to send at once.
"""

import contextlib
import math
import multiprocessing.process
import multiprocessing.util
import os
import pickle
import select
import signal
import threading
import time
import weakref
from array import array
from typing import Any

from shmloader import messages
from shmloader.batch.checkpoint import Checkpoint
from shmloader.batch.failures import RemoteError
from shmloader.errors import ClosedLoaderError, InternalError, SharedMemoryError
from shmloader.grammar import size
from shmloader.insight.measurements import Readings, Usage, usage_of
from shmloader.interruptions import SIGNAL_S, is_interruption, uninterruptible
from shmloader.memory import compiled
from shmloader.memory.limits import MemoryAdmission
from shmloader.messages import DONE, HUNG, NO_EPOCH, SPILLED, TASK
from shmloader.pools.answers import Answer, Death, read_layout
from shmloader.pools.batch_server import TaskConfig
from shmloader.pools.forking import Waker, is_readable
from shmloader.pools.handle import KILL_S, WorkerHandle, end_all, end_unused
from shmloader.pools.slot_memory import SlotMemory
from shmloader.pools.starting import remedied
from shmloader.pools.status_page import FIRST_TASK, RECEIVING, AtWork, Phase
from shmloader.pools.task_queue import LOOKS, SHARED_LOOKS, looks, receive
from shmloader.process_state import PROCESS
from shmloader.sampling.indices import IndexArray

_GRACE_S = 1.0

# A worker looks for a task for some milliseconds at most. One that takes this long is stopped.
_RECEIVING_S = 2.0
_LOOK_S = 0.0002

# A pickle of indices that is longer than this lies in the slot.
_LONG_BYTES = messages.INLINE_BYTES // 2

_pack_head = messages.TASK_HEAD.pack
_unpack_head, _HEAD_BYTES = messages.DONE_HEAD.unpack_from, messages.DONE_HEAD.size


class ProcessPool:
    """Worker processes, of which the first ``count`` are started at once, and their slots.

    See :class:`~shmloader.pools.Pool` for what the methods do and raise. ``dataset_epoch`` is the
    number for the dataset's ``set_epoch()`` in the present epoch; None for no call.

    Attributes:
        handles: The workers, by number.
        queue: The queue from which the workers receive their tasks; None if each task is sent to
            one worker's socket.
        nursery: The process that forks the workers; None if this process starts each of them.

    Args:
        starter: Starts and ends the workers. The pool owns it from now on.
        tasks: How tasks are served. The pool owns the slots, the queue and the page.
        locker: Locks the pages of slots that are lent, if a device reads them.
        may_replace: Whether ``start`` will be called. If so, everything that starting a worker
            needs is kept.
        grace_s: How long ``end_workers`` waits for workers to end by themselves: they may be
            loading a sample.

    Raises:
        Exception: What ``starter.open()`` and ``starter.start()`` raise.
    """

    def __init__(
        self,
        starter: Any,
        tasks: TaskConfig,
        count: int,
        locker: Any = None,
        *,
        may_replace: bool = True,
        grace_s: float = _GRACE_S,
    ) -> None:
        self.dataset_epoch: int | None = None
        admission = None if tasks.memory is None else MemoryAdmission(tasks.memory)
        self.memory = SlotMemory(tasks.arena, locker, admission)
        self.counts = self.memory.counts
        self._starter, self.queue, self._grace_s = starter, tasks.queue, grace_s
        self._page, self.has_queue = tasks.page, tasks.queue is not None
        # How often to look for messages before sleeping.
        self._looks = SHARED_LOOKS if starter.is_shared else LOOKS
        self._pid = os.getpid()
        self.handles: list[WorkerHandle] = []
        self._is_closed = self._is_exiting = self._is_woken = False
        self.is_waiting = self.is_inherited = False
        self._waker: Waker | None = None
        self._poll = select.poll()
        # Worker numbers by the descriptors of their sockets, and of their processes.
        self._by_fd, self._by_pidfd = dict[int, int](), dict[int, int]()
        # The descriptors of the sockets.
        self._sockets = array("i")
        self.readings = Readings()
        # At the interpreter's exit multiprocessing waits for ever for a daemonic process that is
        # stopped. This finalizer runs first, regardless of the order of registration.
        self._at_exit = multiprocessing.util.Finalize(
            None, _end_at_exit, args=(weakref.ref(self),), exitpriority=100
        )
        # From here on another thread may fork a child, which then abandons this object.
        PROCESS.worker_groups.add(self)
        try:
            with remedied():
                starter.open()
                if self._is_closed:  # at the interpreter's exit
                    starter.close()
                for worker_id in range(count):
                    self._check_open()
                    self.handles.append(self._start_worker(worker_id))
        except BaseException:
            self.end_workers()
            raise
        self.nursery = starter.nursery
        self.readings.open(self._usage)
        if not may_replace:
            starter.finish()

    # Start -------------------------------------------------------------------------------

    def _start_worker(self, worker_id: int) -> WorkerHandle:
        worker: WorkerHandle = self._starter.start(worker_id)
        self._by_fd[worker.channel.fileno()] = self._by_pidfd[worker.pidfd] = worker_id
        self._sockets = array("i", self._by_fd)
        for fd in (worker.channel, worker.pidfd):
            self._poll.register(fd, select.POLLIN)
        return worker

    def start(self, worker_id: int) -> None:
        """Start a worker for the first time, or in place of a dead one."""
        for old in self.handles[worker_id : worker_id + 1]:
            old.channel.close()
            old.close_pidfd()
        try:
            self._check_open()
            with remedied():
                new = self._start_worker(worker_id)
        except Exception as error:
            self._check_open(error)
            raise
        self.handles[worker_id : worker_id + 1] = [new]
        if self._is_closed:  # a close on another thread may have missed it
            end_unused(new)
            self._check_open()

    def _check_open(self, cause: Exception | None = None) -> None:
        if self._is_closed:
            raise ClosedLoaderError("the workers have been ended") from cause

    def kill(self, worker_id: int) -> None:
        """Kill a worker that takes too long for a sample."""
        worker = self.handles[worker_id]
        if not worker.is_lost:
            worker.send_signal(signal.SIGKILL)

    def _lose(self, worker: WorkerHandle) -> None:
        """Stop using a worker."""
        worker.is_lost = True
        worker.outbox.clear()
        self._by_fd.pop(worker.channel.fileno(), None)
        self._by_pidfd.pop(worker.pidfd, None)
        self._sockets = array("i", self._by_fd)
        for fd in (worker.channel.fileno(), worker.pidfd):
            with contextlib.suppress(KeyError, ValueError):
                self._poll.unregister(fd)

    # Messages ----------------------------------------------------------------------------

    def send(self, ticket: Any, epoch: int) -> Answer | None:
        """Send a ticket's task."""
        slot_id, memory, bits = ticket.slot_id, self.memory, TASK
        if memory.is_short:
            memory.prepare(slot_id)
        try:
            content: Any = ticket.indices
            if ticket.hung:
                content, bits = (content, ticket.hung), TASK | HUNG
            is_array = type(content) is IndexArray
            data = content.dump() if is_array else pickle.dumps(content, pickle.HIGHEST_PROTOCOL)
            if len(data) > _LONG_BYTES:
                data, bits = self._spill(ticket, data), bits | SPILLED
        except Exception as error:
            if is_interruption(error):
                raise
            # Pickling the user's keys may raise anything.
            where = "while sending indices to a DataLoader worker process"
            return Answer(error=RemoteError.caught(where))
        touched_bytes = memory.slots[slot_id].touched_bytes
        told = NO_EPOCH if self.dataset_epoch is None else self.dataset_epoch
        data = _pack_head(bits, ticket.seq, epoch, slot_id, touched_bytes, told) + data
        if self.queue is None:
            worker = self.handles[ticket.worker_id]
            if not worker.send(data):
                self._poll.modify(worker.channel, select.POLLIN | select.POLLOUT)
        elif not self.queue.send(data):
            self._poll.register(self.queue.channel, select.POLLOUT)
        return None

    def _spill(self, ticket: Any, body: bytes) -> bytes:
        """Put a long index list into the ticket's slot. Returns its length."""
        memory, nbytes = self.memory, len(body)
        if nbytes > memory.arena.slot_bytes:
            raise SharedMemoryError(
                f"the indices of batch {ticket.seq} take {size(nbytes)}, but "
                f"{memory.arena.describe_limit(nbytes)}. Or lower batch_size."
            )
        memory.grow(ticket.slot_id, nbytes).memory[:nbytes] = body
        memory.count_pages(ticket.slot_id, nbytes)
        return b"%d" % nbytes

    def start_epoch(self, worker_id: int, epoch: int) -> bool:  # noqa: ARG002 - workers count none
        """Tell a worker to begin a further epoch."""
        self._send(worker_id, messages.StartEpoch(self.dataset_epoch))
        return False

    def resume(self, worker_id: int, checkpoint: Checkpoint) -> None:
        """Tell a worker where its dataset resumes."""
        self._send(worker_id, messages.ResumeStream(checkpoint))

    def _send(self, worker_id: int, message: messages.ToWorker) -> None:
        """Send a message to a worker, without blocking. A message to a dead worker is dropped."""
        worker = self.handles[worker_id]
        for piece in messages.pieces(messages.pack(message)):
            if not worker.send(piece):
                self._poll.modify(worker.channel, select.POLLIN | select.POLLOUT)

    def _receive(self, worker_id: int, data: bytes, events: Any) -> None:
        """Report the contents of a worker's message."""
        if data[0] != DONE:
            self._receive_unusual(worker_id, data, events)
            return
        _, seq, epoch, slot_id, used_bytes = _unpack_head(data)
        reader = self.handles[worker_id].reader
        memory = self.memory
        if used_bytes > memory.slots[slot_id].touched_bytes:
            memory.count_pages(slot_id, used_bytes)
        memory.recent_bytes = max(memory.recent_bytes, used_bytes)
        memory.batches += 1
        if isinstance(reader, RemoteError):
            answer = Answer(error=reader)
        else:
            answer = Answer(reader, None, data[_HEAD_BYTES:], used_bytes)
        events.answered(seq, epoch, worker_id, answer)

    def _receive_unusual(self, worker_id: int, data: bytes, events: Any) -> None:
        """Report the contents of a message that is not a batch with a known layout."""
        whole = messages.join(self.handles[worker_id].pieces, data)
        if whole is None:
            return
        message = messages.unpack(whole)
        if isinstance(message, messages.Answered):
            seq, epoch, slot_id, touched_bytes, answer, layout = message
            self.memory.count_pages(slot_id, touched_bytes)
            if isinstance(answer.snapshot, messages.InSlot):
                answer.snapshot = self._copy_out(*answer.snapshot)
            if answer.error is None and not answer.is_empty:
                self.memory.count_batch(slot_id, answer.nbytes)
                worker = self.handles[worker_id]
                if layout is not None:
                    worker.reader = read_layout(layout, [each.reader for each in self.handles])
                if isinstance(worker.reader, RemoteError):
                    answer.error = worker.reader
                else:
                    answer.content = worker.reader
            events.answered(seq, epoch, worker_id, answer)
        elif isinstance(message, messages.StreamEnded):
            events.stream_ended(message.seq, message.epoch, message.beginning or Checkpoint())
        elif isinstance(message, messages.EpochStarted):
            events.epoch_entered(worker_id, message.beginning)
        else:
            raise InternalError(f"a worker sent {message!r}")

    def _copy_out(self, slot_id: int, offset: int, nbytes: int) -> bytes:
        """Return a copy of bytes that lie in a slot."""
        memory, end = self.memory, offset + nbytes
        memory.count_pages(slot_id, end)
        slot = memory.mapped(slot_id, end)
        memory.recent_bytes = max(memory.recent_bytes, end)
        return bytes(slot.memory[offset:end])

    def recall(self) -> list[int]:
        """Take back the tasks that no worker has received."""
        return [] if self.queue is None else self.queue.recall()

    def enable_wake(self) -> None:
        """Enable :meth:`wake`."""
        self._waker = Waker()
        self._poll.register(self._waker.fd, select.POLLIN)

    def wake(self) -> None:
        """Make the present or the next ``wait`` return. Called from any thread."""
        waker = self._waker
        self._is_woken = True
        # `wait` accesses the two flags in the opposite order, so one side sees the other's.
        if waker is not None and self.is_waiting:
            waker.wake()

    def poll(self, events: Any, worker_id: int = -1) -> bool:
        """Report what has come, or comes while it looks. Never sleeps.

        Given an awaited worker, nothing else is reported: :meth:`wait` does that, at once.
        """
        if worker_id < 0 or self._is_closed:
            return self._look(self._looks, events)
        data = receive(self.handles[worker_id].channel, self._looks)
        if not data:
            return False
        self._receive(worker_id, data, events)
        return True

    def _look(self, most: int, events: Any) -> bool:
        """Look so often for anything that has happened, and report it."""
        if compiled.receive_each is not None and not self._is_closed:
            found = compiled.receive_each(self._sockets, most)
            for fd, data in found:
                worker_id = self._by_fd.get(fd)
                if worker_id is not None:  # else it was lost meanwhile
                    self._receive(worker_id, data, events)
            ready = [] if found else self._poll.poll(0)  # such as a death
            return bool(found) or (bool(ready) and self._report(ready, self._waker, events))
        for _ in looks(most):
            if self._is_closed:
                break
            if ready := self._poll.poll(0):
                return self._report(ready, self._waker, events)
        return False

    def wait(self, timeout_s: float | None, events: Any) -> bool:
        """Wait until something happens, and report it."""
        waker = self._waker  # noqa: F841 - this reference keeps it open
        if self._is_closed:
            return False
        self.is_waiting = True
        left_s = SIGNAL_S if timeout_s is None else min(timeout_s, SIGNAL_S)
        if self._is_woken:
            left_s = 0
        ready = self._poll.poll(max(0, math.ceil(left_s * 1000)))
        self.is_waiting = self._is_woken = False
        if bool(self._is_closed):  # by another thread, meanwhile
            if self._is_exiting and threading.current_thread().daemon:
                # The interpreter exits. A daemon thread must not return to its caller any more.
                threading.Event().wait()
            return False
        return bool(ready) and self._look(1, events)

    def _report(self, ready: list[tuple[int, int]], waker: Waker | None, events: Any) -> bool:
        """Report a message of each worker that has sent one, and then deaths."""
        has_any, dead = False, []
        queue = self.queue
        for fd, event in ready:
            worker_id = self._by_fd.get(fd)
            if worker_id is None:
                if waker is not None and fd == waker.fd:
                    waker.reset()
                elif queue is not None and fd == queue.channel.fileno():
                    if queue.flush():
                        self._poll.unregister(fd)
                elif fd in self._by_pidfd:  # else it was lost meanwhile
                    dead.append(self._by_pidfd[fd])
                continue
            worker = self.handles[worker_id]
            if event & select.POLLOUT and worker.flush():
                self._poll.modify(worker.channel, select.POLLIN)
            data = worker.receive()
            if data is not None:
                self._receive(worker_id, data, events)
                has_any = True
            elif event & (select.POLLHUP | select.POLLERR):
                # The socket is closed. An event of the process will soon say why.
                self._poll.unregister(worker.channel)
        for worker_id in dead:
            self._receive_all(worker_id, events)
        for worker_id in dead:
            self._lose(self.handles[worker_id])
            self.handles[worker_id].reap(time.monotonic() + KILL_S)
        for worker_id in dead:
            self._report_death(worker_id, events)
        return has_any or bool(dead)

    def _receive_all(self, worker_id: int, events: Any) -> None:
        worker = self.handles[worker_id]
        while not worker.is_lost and (data := worker.receive()) is not None:
            self._receive(worker_id, data, events)

    def _report_death(self, worker_id: int, events: Any) -> None:
        worker, starter, held = self.handles[worker_id], self._starter, set[int]()
        recalled = self.recall()
        if self.queue is not None:
            held = self._held()
            for other in range(len(self.handles)):
                self._receive_all(other, events)
        # One that was idle for this rank was loading a batch of another one, or was ended outside.
        was_elsewhere = starter.is_shared and self.was_at(worker_id).phase is Phase.IDLE
        death = Death(worker.pid, worker.exit_code, was_elsewhere, starter.lost)
        events.lost(worker_id, death, recalled, held)

    def _held(self) -> set[int]:
        """Return the numbers of the tasks that living workers have received from the empty queue.

        Waits for workers that may be receiving. A stopped one is killed.
        """
        held, page = set(), self._page
        for worker_id, worker in enumerate(self.handles):
            deadline = time.monotonic() + _RECEIVING_S
            while not worker.is_lost and (found := page.held(worker_id)) == RECEIVING:
                if is_readable(worker.pidfd):  # it has ended
                    break
                if time.monotonic() > deadline:
                    self.kill(worker_id)
                    deadline = math.inf
                time.sleep(_LOOK_S)
            if not worker.is_lost and found >= FIRST_TASK:
                held.add(found - FIRST_TASK)
        return held

    # What the workers do ------------------------------------------------------------------

    def pid(self, worker_id: int) -> int:
        """Return the process id of a worker."""
        return self.handles[worker_id].pid

    def was_at(self, worker_id: int, *, with_stack: bool = False) -> AtWork:
        """Return what a worker is doing, or was doing when it died."""
        return self._page.read(worker_id, self.pid(worker_id) if with_stack else None)

    def _usage(self, thoroughly: bool) -> list[Usage]:
        """Return what the workers have used."""
        return [usage_of(worker.pid, thoroughly=thoroughly) for worker in self.handles]

    # End ---------------------------------------------------------------------------------

    def end_workers(self) -> None:
        """End the workers, or stop using them. May be called again, and from any thread."""
        if self._is_closed:
            return
        if os.getpid() != self._pid:
            self.abandon()
        else:
            uninterruptible(self._end_all)

    def _end_all(self) -> None:
        """End everything. Runs again if it is interrupted."""
        # Set here, not in end_workers(): an interruption between the two would leak the workers.
        self._is_closed = True
        self._at_exit.cancel()
        # After a Ctrl-C, the second try does not wait for busy workers.
        grace_s, self._grace_s = self._grace_s, 0.0
        self.readings.close()
        self.recall()  # a worker that is busy begins no further task
        for worker in self.handles:
            worker.hang_up()
        end_all(self.handles, grace_s)
        self._close_rest()

    def _close_rest(self) -> None:
        self._waker = None
        if self.queue is not None:
            self.queue.close()
        self._starter.close()

    def close(self) -> None:
        """End all workers, and free all memory except what lies under the user's views."""
        try:
            self.end_workers()
        finally:
            uninterruptible(self.memory.close)

    def leave_to_parent(self) -> None:
        """Forget the workers in a forked child: multiprocessing would end them at its exit.

        Shared workers would take the child's copies of the sockets for living ranks.
        """
        self.is_inherited = True
        for worker in self.handles:
            multiprocessing.process._children.discard(worker.process)  # type: ignore[attr-defined]
            if self._starter.is_shared:
                worker.channel.close()

    def abandon(self) -> None:
        """Close this object's descriptors in a forked child, which is not the workers' parent."""
        was_closed, self._is_closed = self._is_closed, True
        if was_closed:
            # Other files may have the numbers of these descriptors by now.
            return
        for worker in self.handles:
            worker.channel.close()
            with contextlib.suppress(OSError):
                worker.close_pidfd()
        self._close_rest()


def _end_at_exit(reference: "weakref.ref[ProcessPool]") -> None:
    group = reference()
    if group is not None:
        group._is_exiting = True
        group.end_workers()
