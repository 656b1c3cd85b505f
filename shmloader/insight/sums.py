"""Sums over the calls of ``iter()`` and ``next()``, computed when somebody reads them.

A call is a tuple of six: when it was called and when it returned, both in ns; how much of that time
was spent in the sampler; the times of its batch; what else is known of it; and the bytes of its
batch, if they are not among the times. The times and what else is known are

* for a batch of an engine, the fields of :class:`~shmloader.insight.measurements.BatchTimes`, and
  the name of the stage after the engine with when that began and ended (None without a stage);
* for a batch that the consumer's thread loaded, the fields of
  :class:`~shmloader.insight.measurements.WorkTimes`, but with the time in the stage after collate
  as ``encode_ns``, and the name of that stage;
* for a call without a batch, None, and where the next batch was: the name of a part of its way
  (:data:`~shmloader.insight.stats.PARTS`).
"""

import collections
import copy
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

Call = tuple[int, int, int, Any, Any, int]
Table = dict[str, "npt.NDArray[np.int64]"]

# Each power of two of a histogram is divided into this many parts.
_PARTS = 8
_COLUMNS = (
    "asked", "taken", "draw", "worker", "offered", "sent", "began", "fetch", "collate", "encode",
    "samples", "looked", "seen", "handed", "nbytes", "lent", "stage_began", "stage_ended",
)  # fmt: skip
# The parts of a wait, in order, and when a batch leaves them; "stage" stands for the stage after
# the engine. What follows it counts as "build".
_OF_WAIT = ("slot", "queue", "fetch", "collate", "encode", "transport", "build", "stage")
_LEFT = (
    "sent", "began", "fetched", "collated", "done", "handed", "stage_began", "stage_ended", "taken",
)  # fmt: skip


class Histogram(collections.Counter[int]):
    """Counts durations in buckets, eight for each power of two.

    Only buckets that have a duration take memory. A percentile is accurate to 7 %.
    """

    def record(self, durations_ns: Sequence[int]) -> None:
        """Count durations."""
        self.update(round(_PARTS * math.log2(max(0, each) + 1)) for each in durations_ns)

    def percentile(self, percent: float) -> int:
        """Return the duration in ns that ``percent`` % of all do not exceed; 0 if there is none."""
        rank, seen = math.ceil(self.total() * percent / 100), 0
        for bucket, count in sorted(self.items()):
            seen += count
            if seen >= rank:
                return round(2 ** (bucket / _PARTS) - 1)
        return 0


def tabulate(calls: Sequence[Call], *, is_local: bool) -> tuple[Table, str]:
    """Return the times of all batches as columns, and the name of the stage after the engine."""
    rows, stage = [], "build"
    for asked_ns, received_ns, draw_ns, times, about, nbytes in calls:
        if times is not None and is_local:
            began_ns, fetch_ns, collate_ns, stage_ns, count = times
            end_ns, stage = began_ns + fetch_ns + collate_ns, about
            work = (began_ns, fetch_ns, collate_ns, 0, count)
            known = (0, began_ns, began_ns, *work, 0, end_ns, end_ns, nbytes, 0)
            rows.append((asked_ns, received_ns, 0, *known, end_ns, end_ns + stage_ns))
        elif times is not None:
            worker_id, offered_ns, sent_ns, work, *known = times
            stage, began_ns, ended_ns = about or (stage, received_ns, received_ns)
            known = (worker_id, offered_ns, sent_ns, *work, *known)
            rows.append((asked_ns, received_ns, draw_ns, *known, began_ns, ended_ns))
    columns = np.array(rows, np.int64).reshape(-1, len(_COLUMNS)).T
    table = dict(zip(_COLUMNS, columns, strict=True))
    table["fetched"] = table["began"] + table["fetch"]
    table["collated"] = table["fetched"] + table["collate"]
    table["done"] = table["collated"] + table["encode"]
    table["arrived"] = table["done"] + table["seen"] - np.maximum(table["looked"], table["done"])
    return table, stage


def stages_of(table: Table, stage: str, turn_ns: int, *, in_order: bool) -> Table:
    """Return how long each batch was in each stage.

    The batch before the first one could be delivered at ``turn_ns``.
    """
    arrived, handed, began, ended = (
        table[name] for name in ("arrived", "handed", "stage_began", "stage_ended")
    )
    turn = arrived
    if in_order and len(arrived):
        turn = np.maximum.accumulate(np.maximum(arrived, turn_ns))
    stages = {
        "slot": table["sent"] - table["offered"],
        "queue": np.maximum(0, table["began"] - table["sent"]),
        **{name: table[name] for name in ("fetch", "collate", "encode")},
        "transport": arrived - table["done"],
        "reorder": turn - arrived,
        "ready": np.maximum(0, handed - turn) + np.maximum(0, table["asked"] - ended),
        "build": began - handed,
    }
    return stages | {stage: stages.get(stage, 0) + ended - began}


class Sums:
    """The sums of an epoch, or of several. What is missing is not known, or zero.

    Attributes:
        added: Counts, and times in ns, by name; those of a stage, a cause or a worker by a pair:
            ("stage", its name), ("wait", its name), or the worker's number and a name.
        most: Maxima, by name.
        newest: What the newest epoch says, by name.
    """

    def __init__(self) -> None:
        self.added: collections.Counter[Any] = collections.Counter()
        self.most: dict[str, int] = {}
        self.newest: dict[Any, Any] = {}
        self.waits = Histogram()
        self.last_ns = self._turn_ns = 0
        # For each worker of the epoch, when its first batch began, and its last one ended.
        self._spans: dict[int, tuple[int, int]] = {}

    def copy(self) -> Self:
        """Return a copy that shares nothing that changes."""
        other = copy.copy(self)
        for name in ("added", "most", "newest", "waits", "_spans"):
            setattr(other, name, getattr(self, name).copy())
        return other

    def set_most(self, **values: int) -> None:
        """Raise maxima to these values."""
        for name, value in values.items():
            self.most[name] = max(value, self.most.get(name, 0))

    def merge(self, later: Self) -> None:
        """Add a later epoch's sums. The time between the two epochs is left out."""
        self.added.update(later.added)
        self.waits.update(later.waits)
        self.set_most(**later.most)
        self.newest |= later.newest | {"epoch": None}

    def add(self, calls: Sequence[Call], *, in_order: bool, is_local: bool) -> None:
        """Add calls of the same epoch, in their order."""
        added = self.added
        if not self.last_ns:  # iter() and the first next()
            added["startup"] += sum(call[1] - call[0] for call in calls[:2])
        waits = [call[1] - call[0] for call in calls if call[4] != "start"]
        self.waits.record(waits)
        self.set_most(next=max(waits, default=0))
        added["waited"] += sum(call[1] - call[0] for call in calls)
        self.last_ns = calls[-1][1] if calls else self.last_ns
        for asked_ns, received_ns, draw_ns, times, about, _ in calls:
            if times is None:
                added["wait", about] += received_ns - asked_ns - draw_ns
                added["wait", "draw"] += draw_ns
        if is_local:
            self._add_local(calls)
            return
        table, stage = tabulate(calls, is_local=False)
        if not len(table["asked"]):
            return
        stages = stages_of(table, stage, self._turn_ns, in_order=in_order)
        self._turn_ns = max(self._turn_ns, int(table["arrived"].max()))
        added.update({("stage", name): int(spent.sum()) for name, spent in stages.items()})
        added.update({name: int(table[name].sum()) for name in ("samples", "nbytes")})
        added["batches"] += len(table["asked"])
        self._add_waits(table, stage)
        self._add_workers(table)

    def _add_local(self, calls: Sequence[Call]) -> None:
        """Add batches that the consumer's thread loaded while it waited for them.

        Without arrays, since in-process epochs may be many and short.
        """
        added = self.added
        for asked_ns, _, _, times, stage, nbytes in calls:
            if times is not None:
                began_ns, *spent_ns, count = times
                for name, each_ns in zip(("fetch", "collate", stage), spent_ns, strict=True):
                    added["stage", name] += each_ns
                    if name != "build":  # which is what is left of all waiting
                        added["wait", name] += each_ns
                added["wait", "draw"] += began_ns - asked_ns
                added["batches"] += 1
                added["samples"] += count
                added["nbytes"] += nbytes

    def _add_waits(self, table: Table, stage: str) -> None:
        """Add where the batches were while the consumer waited for them."""
        worker, firsts = np.unique(table["worker"], return_index=True)
        # A worker's first batch of the epoch waits for the worker's start.
        firsts = firsts[[number not in self._spans for number in worker]]
        left = np.stack([table["asked"], *(table[name] for name in _LEFT)])
        left[1, firsts] = 0
        # When the batch left each part, but not before the call, and not after its return.
        spent = np.diff(np.maximum.accumulate(np.minimum(left, table["taken"])), axis=0)
        waits = dict(zip(_OF_WAIT, spent.sum(axis=1).tolist(), strict=False))
        waits["start"] = int(spent[1, firsts].sum())
        waits["queue"] -= waits["start"]
        # While the consumer's thread handed the batch over, it may have drawn for another one.
        waits["draw"] = int(np.minimum(table["draw"], spent[6] + spent[8]).sum())
        waits[stage] = waits.pop("stage")
        waits.pop("build", None)  # which is what is left of all waiting
        self.added.update({("wait", name): spent_ns for name, spent_ns in waits.items()})

    def _add_workers(self, table: Table) -> None:
        busy = table["done"] - table["began"]
        for worker_id in np.unique(table["worker"]).tolist():
            of = table["worker"] == worker_id
            began_ns, _ = self._spans.get(worker_id, (int(table["began"][of][0]), 0))
            self._spans[worker_id] = began_ns, int(table["done"][of][-1])
            self.added[worker_id, "batches"] += int(of.sum())
            self.added[worker_id, "busy"] += int(busy[of].sum())

    def finish(self, first_ns: int) -> None:
        """Compute what depends on the time since ``first_ns``. No call may be added after that."""
        self.added["elapsed"] = max(0, self.last_ns - first_ns)
        for worker_id, (began_ns, ended_ns) in self._spans.items():
            busy_ns = self.added[worker_id, "busy"]
            self.added[worker_id, "span"] = max(0, self.last_ns - began_ns)
            # Only between its batches: not while it started, or had nothing left to load.
            self.added[worker_id, "idle"] = max(0, ended_ns - began_ns - busy_ns)
