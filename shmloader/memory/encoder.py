"""Places any picklable batch in its slot: the worker's half of :mod:`shmloader.memory.codec`.

Data that lies in the slot already is only referred to. All other data is copied into it.
"""

from shmloader.memory.codec import PickledLayout
from shmloader.memory.pickler import OutOfBand, batch_reducers, dump, reduce_data
from shmloader.memory.slot_writer import SlotWriter


def pickle_batch(batch: object, *, by_value: bool) -> tuple[bytes, OutOfBand]:
    """Pickle a batch. Returns the pickle, and what lies outside it.

    Args:
        batch: Any picklable value.
        by_value: Whether to fall back to cloudpickle, for classes and functions that pickle cannot
            import.

    Raises:
        Exception: What pickling the batch raises.
    """
    try:
        return dump(batch, reduce_data, batch_reducers())
    except Exception:
        if not by_value:
            raise
        return dump(batch, reduce_data, batch_reducers(), by_value=True)


def place(
    pickled: tuple[bytes, OutOfBand], writer: SlotWriter, *, spill_bytes: int
) -> PickledLayout:
    """Place a pickled batch in the slot of the current task, and return where each buffer lies.

    Runs in the worker, once per task. What collate already put into the slot is not copied again.

    Args:
        pickled: What :func:`pickle_batch` returned.
        writer: Writer of the task's slot, after collate has used it.
        spill_bytes: A body longer than this goes into the slot as well.

    Raises:
        SharedMemoryError: If the batch does not fit the slot.
    """
    body, out_of_band = pickled
    taken: list[tuple[int, int]] = []

    def put(address: int, nbytes: int) -> int:
        # Bytes in the slot are used for one span only. Another buffer that shares them, but not a
        # torch storage (an array and its tensor), is copied, as with torch's loader.
        offset = writer.offset_of(address, nbytes)
        if offset is None or any(offset < end and at < offset + nbytes for at, end in taken):
            return writer.put_memory(address, nbytes)
        taken.append((offset, offset + nbytes))
        return offset

    spans = out_of_band.place(put)
    body_or_place = body if len(body) <= spill_bytes else writer.put(body)
    return PickledLayout(body_or_place, spans, tuple(out_of_band.order))
