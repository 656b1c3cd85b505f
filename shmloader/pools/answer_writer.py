"""Writes a worker's answers: into the message if they are short, otherwise into the slot.

It runs in a worker process, on the thread that makes batches. The slot is the one that
``SlotWriter.open`` was last called with. A batch that does not fit into its slot fails. An error or
report that does not fit is shortened, and a state that does not fit is left out.
"""

import pickle
from typing import Any

from shmloader.batch.failures import SampleReport
from shmloader.batch.remote_error import RemoteError
from shmloader.batch.unpicklable import find_unpicklable
from shmloader.errors import SharedMemoryError
from shmloader.grammar import with_article
from shmloader.memory.encoder import pickle_batch, place
from shmloader.memory.flat import FlatLayout, ShardLayouts
from shmloader.memory.pickler import (
    ByValuePickler,
    OutOfBand,
    PlainPickler,
    batch_reducers,
    reduce_data,
)
from shmloader.memory.slot_writer import SlotWriter
from shmloader.messages import INLINE_BYTES, Spilled, TooLong

# Once the user's code has kept memory of this many batches, it gets no more memory of slots.
_KEPT_LIMIT = 4


def pickle_or_explain(batch: object, *, by_value: bool) -> tuple[bytes, OutOfBand]:
    """Pickle a batch; see :func:`pickle_batch`.

    Raises:
        TypeError: If part of the batch cannot be pickled; names that part.
        MemoryError: If there is no memory for that.
    """
    try:
        return pickle_batch(batch, by_value=by_value)
    except MemoryError:
        raise
    except Exception as error:
        pickler = ByValuePickler if by_value else PlainPickler

        def pickle_to(value: object, file: Any) -> None:
            pickler(file, reduce_data, OutOfBand(), batch_reducers()).dump(value)

        found = find_unpicklable([batch], ["batch"], pickle_to=pickle_to)
        path, part = found or ("batch", batch)
        kind = f"{type(part).__module__}.{type(part).__qualname__}"
        raise TypeError(
            f"a batch cannot be sent from its worker: {path} is {with_article(kind)} and "
            f"cannot be pickled ({type(error).__name__}: {error}). Return something picklable "
            "from the dataset or collate_fn."
        ) from error


class AnswerWriter:
    """Writes the answers of one worker.

    Attributes:
        by_value: Whether the dataset was pickled by cloudpickle; its batches may need that, too.
        offers: Whether the user's code may be offered memory of the slot.

    Args:
        writer: Writer of the slot of the task in work.
    """

    def __init__(self, writer: SlotWriter) -> None:
        self._writer = writer
        self.by_value = False
        self.offers = True
        self._kept_count = 0
        # The layout by which the main process reads this worker's next batch, unless a new one
        # comes with the batch.
        self._last_layout = b""
        self._last_flat_layout: object = None
        self._shard_layouts = ShardLayouts()

    def put_batch(self, batch: object, *, may_shard: bool) -> bytes | Spilled | None:
        """Encode a batch into the slot.

        Args:
            batch: The collated batch.
            may_shard: Whether a list may be a list of batches, one for each shard.

        Returns:
            The pickled layout; None if it is that of the last batch.

        Raises:
            TypeError: If part of the batch cannot be pickled; names that part.
            SharedMemoryError: If the batch does not fit the slot.
        """
        if type(batch) is list and may_shard:
            batch = self._shard_layouts.joined(batch, self._writer.slot)
        flat = batch if type(batch) is FlatLayout else None
        if flat is None:
            pickled = pickle_or_explain(batch, by_value=self.by_value)
            layout = place(pickled, self._writer, spill_bytes=INLINE_BYTES // 2)
        elif flat is self._last_flat_layout:
            return None
        data = pickle.dumps(flat or layout, pickle.HIGHEST_PROTOCOL)
        sent: bytes | Spilled | None = None
        if data != self._last_layout:
            sent = data if len(data) <= INLINE_BYTES // 2 else Spilled(*self._writer.put(data))
        # Set after the write: the main process does not get a layout that could not be written.
        self._last_layout, self._last_flat_layout = data, flat
        return sent

    def put_error(self, error: RemoteError) -> bytes | Spilled:
        """Write an error, shortened if the slot has no room for it."""
        data = error.dumps()
        if len(data) <= INLINE_BYTES // 2:
            return data
        self._writer.rewind()  # the batch has failed, so its memory is free
        try:
            return Spilled(*self._writer.put(data))
        except SharedMemoryError:
            return error.shortened(INLINE_BYTES // 4).dumps()

    def put_report(self, report: SampleReport | None) -> bytes | Spilled | None:
        """Write the report on a batch's samples, shortened if the slot has no room for it."""
        if report is None:
            return None
        sent = self.put_state(report.dumps())  # with the same limits
        return report.shortened().dumps() if isinstance(sent, TooLong) else sent

    def put_state(self, state: bytes | None) -> bytes | Spilled | TooLong | None:
        """Write a pickled state after the batch. Returns TooLong if it does not fit."""
        if state is None or len(state) <= INLINE_BYTES // 4:
            return state
        try:
            return Spilled(*self._writer.put(state))
        except SharedMemoryError:
            return TooLong(len(state))

    def part(self) -> None:
        """Leave to the user's code what it holds of the slot, now that the batch is made."""
        self._writer.is_offered = False
        # Code that keeps a batch once may be a cache. Code that always does (a generator that holds
        # its last batch) gets ordinary memory, which is copied to the slot: that is as fast.
        self._kept_count += self._writer.part()
        self.offers = self._kept_count < _KEPT_LIMIT
