"""Makes the batch of one task in a slot, and the answer to the task.

All of it runs in a worker process, once for each of its clients, on the thread that makes batches.
"""

import os
import pickle
from dataclasses import dataclass
from typing import Any

from shmloader import messages
from shmloader.batch.collator import Timer
from shmloader.batch.dataset_state import Saved, dump_state, dumps_state
from shmloader.batch.explain import pickle_or_explain
from shmloader.batch.failures import RemoteError
from shmloader.batch.fetch import EmptyBatchError, FetchConfig
from shmloader.errors import SharedMemoryError
from shmloader.memory.arena import Arena, Slot
from shmloader.memory.flat import FlatLayout
from shmloader.memory.limits import MemoryAdmission, MemoryConfig
from shmloader.memory.pickled import write_batch
from shmloader.memory.writer import SlotWriter
from shmloader.pools.answers import Answer
from shmloader.pools.status_page import Line, StatusPage
from shmloader.pools.task_queue import TaskQueue
from shmloader.pools.worker_dataset import WorkerDataset
from shmloader.sampling.indices import load_indices

# States that are taken after so many batches, or more, do not lie in slots.
_RARE = 10


@dataclass(frozen=True, slots=True)
class TaskConfig:
    """How a client's tasks are served.

    Attributes:
        config: How batches are made.
        arena: The slots.
        page: Shows the client what each worker is doing.
        queue: The queue from which the tasks are received; None if they come by the channel.
        memory: The memory that workers may take; None if memory is not checked.
    """

    config: FetchConfig
    arena: Arena
    page: StatusPage
    queue: TaskQueue | None = None
    memory: MemoryConfig | None = None

    def close(self) -> None:
        """Close what the client has made."""
        self.arena.close()
        self.page.close()
        if self.queue is not None:
            self.queue.close()


class BatchServer:
    """Makes the batches of one client's tasks, and the answers.

    Attributes:
        dataset: The worker's dataset. Callers resume it and start its epochs.
        writer: Writes to the task's slot.
        where: Where this runs, for the texts of errors.
    """

    def __init__(self, tasks: TaskConfig, worker_id: int, line: Line) -> None:
        self._tasks, self._arena, self._timer = tasks, tasks.arena, Timer()
        self.where = f"in DataLoader worker process {worker_id}"
        admission = None if tasks.memory is None else MemoryAdmission(tasks.memory)
        self.writer = SlotWriter(tasks.arena, admission)
        self.dataset = WorkerDataset(
            tasks.config, worker_id, self.where, self.writer, self._timer, line.set_sample
        )
        # Whether the user's code is offered memory of slots. Code that has kept some gets ordinary
        # memory, which is copied to the slot.
        self._offers = not tasks.config.auto_collation
        # The layout by which the main process reads this worker's next batch, unless a new one
        # comes with the batch.
        self._last_layout = b""
        self._last_flat_layout: object = None

    def serve(self, task: messages.Task) -> bytes:
        """Make a task's batch in its slot. Returns the packed answer, perhaps with an exception."""
        seq, epoch, slot_id, touched_bytes, *_ = task
        dataset, writer = self.dataset, self.writer
        slot = self._arena.slots[slot_id]
        slot.touched_bytes = touched_bytes
        self._timer.begin()
        writer.open(slot, is_offered=self._offers)
        dataset.fingerprint = snapshot = None
        error, is_empty = dataset.error, False
        if error is None:
            try:
                layout = self._make(task, slot)
            except EmptyBatchError:
                is_empty = True
            except BaseException as caught:  # noqa: BLE001 - it is the answer
                if not dataset.has_ended:
                    error = RemoteError.of(caught, self.where)
        if writer.part():
            self._offers = False
        if dataset.has_ended:
            beginning = dataset.next_beginning() if self._tasks.config.is_persistent else None
            return messages.pack(messages.StreamEnded(seq, epoch, beginning))
        used_bytes = writer.used_bytes
        if self._tasks.config.snapshot_every:
            try:
                snapshot = dataset.save(self._put_state)
            except BaseException as caught:  # noqa: BLE001 - it is the answer
                self._last_layout, self._last_flat_layout = b"", None  # the layout is not sent
                error = RemoteError.of(caught, self.where)
        report = dataset.pop_report() if dataset.has_report else None
        is_failed = is_empty or error is not None
        if is_failed:
            layout, used_bytes = None, writer.touched_bytes
        unusual = layout, report, snapshot, dataset.fingerprint
        if not is_failed and unusual == (None,) * 4:
            head = messages.DONE_HEAD.pack(messages.DONE, seq, epoch, slot_id, used_bytes)
            return head + self._timer.read()
        answer = Answer(None, report, self._timer.read(), used_bytes, error)
        answer.is_empty, answer.is_final = is_empty and error is None, dataset.is_lost
        answer.snapshot, answer.fingerprint = snapshot, dataset.fingerprint
        return messages.pack(messages.Answered(seq, epoch, slot_id, used_bytes, answer, layout))

    def _put_state(self, saved: Saved) -> bytes | messages.InSlot:
        """Put a state into the slot, after the batch. Returns where it lies, or its pickle.

        It is sent as a pickle if it is too long, or if states are taken rarely: they may be large,
        and the pages of every slot that once held one would stay.
        """
        writer, config = self.writer, self._tasks.config
        if os.getpid() != writer.pid:
            os._exit(1)
        start = writer.used_bytes
        if config.is_iterable and config.snapshot_every >= _RARE:
            return dumps_state(saved)
        try:
            dump_state(saved, writer, lambda: writer.rewind(start))
        except SharedMemoryError:
            return dumps_state(saved)
        return messages.InSlot(writer.slot.slot_id, start, writer.used_bytes - start)

    def _make(self, task: messages.Task, slot: Slot) -> bytes | None:
        """Make a batch and write it to the slot. Returns its layout if the layout is new."""
        indices = task.indices
        if task.bits & messages.SPILLED:
            nbytes = int(indices)
            self._arena.reach(slot, nbytes)
            indices = bytes(slot.memory[:nbytes])
        content = load_indices(indices)
        content, self.dataset.hung = content if task.bits & messages.HUNG else (content, {})
        batch = self.dataset.load(content, task.dataset_epoch)
        if os.getpid() != self.writer.pid:
            os._exit(1)
        return self._put_batch(batch)

    def _put_batch(self, batch: Any) -> bytes | None:
        """Encode a batch into the slot. Returns its layout, or None if it is that of the last one.

        Raises:
            TypeError: If part of the batch cannot be pickled; names that part.
            SharedMemoryError: If the batch does not fit the slot.
        """
        flat = batch if type(batch) is FlatLayout else None
        if flat is None:
            pickled = pickle_or_explain(batch)
            layout = write_batch(pickled, self.writer, spill_bytes=messages.INLINE_BYTES // 2)
        elif flat is self._last_flat_layout:
            return None
        data = pickle.dumps(flat or layout, pickle.HIGHEST_PROTOCOL)
        is_new = data != self._last_layout
        # Set after the write: the main process does not get a layout that could not be written.
        self._last_layout, self._last_flat_layout = data, flat
        return data if is_new else None
