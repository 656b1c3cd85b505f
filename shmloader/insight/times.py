"""What is known of one batch's way. All clocks are ``time.monotonic_ns()``, one for all processes.

::

    offered ── sent ─── began ─ fetch ─ collate ─ encode ─ … seen ──── handed ─ (stage) ─ taken
       └ slot ┘ └ queue ┘                                 └ transport ┘└ reorder, ready ┘
"""

from typing import NamedTuple

#: The parts of a batch's way, in order; keys of :attr:`LoaderStats.stages`.
STAGES = (
    "slot",
    "queue",
    "fetch",
    "collate",
    "encode",
    "transport",
    "reorder",
    "ready",
    "build",
    "pin",
    "device",
)


class WorkTimes(NamedTuple):
    """What a worker has measured of a batch; it travels in the batch's answer.

    Attributes:
        began_ns: When it took the task up.
        fetch_ns: In the dataset, and what is left of the fetcher.
        collate_ns: In ``collate_fn``.
        encode_ns: Until the answer was ready to be sent.
        sample_count: Samples that were collated.
    """

    began_ns: int
    fetch_ns: int
    collate_ns: int
    encode_ns: int
    sample_count: int


class BatchTimes(NamedTuple):
    """What an engine knows of a batch that it hands over.

    Attributes:
        worker_id: Who loaded it.
        offered_ns: When its indices were drawn.
        sent_ns: When it had a slot and a worker, and was sent.
        work: The worker's part, fields of :class:`WorkTimes`.
        looked_ns: Since when the engine had been looking for answers when this one was seen: what
            lies between its end and this is nobody's delay, since nobody asked.
        seen_ns: When its answer was seen.
        handed_ns: When its turn had come, and it was asked for.
        nbytes: Of memory that it takes: of its slot, or of its tensors and arrays.
        lent_count: Slots that were lent at that moment.
    """

    worker_id: int
    offered_ns: int
    sent_ns: int
    work: tuple[int, int, int, int, int]
    looked_ns: int
    seen_ns: int
    handed_ns: int
    nbytes: int
    lent_count: int = 0
