"""Sums over the calls of ``iter()`` and ``next()``, computed when somebody reads them.

A call is kept as bytes: whole numbers of eight bytes, which :data:`_COLUMNS` names. The first ones
are where the next batch was if there is none (a number of :data:`CAUSES`); when the call began and
returned, in ns; how much of that time was spent in the sampler; and when the stage after the engine
began and ended. The rest are the times of the batch, packed as in
:mod:`shmloader.insight.measurements`, or zeros.

Without workers, the consumer's thread loads a batch when it is asked for, and the stage is what is
done to the batch after it is collated.
"""

import collections
import copy
import itertools
import math
import struct
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Self

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    Numbers = npt.NDArray[np.int64]

Table = dict[str, "Numbers"]

# Each power of two of a histogram is divided into this many parts.
_PARTS = 8
_COLUMNS = (
    "cause", "asked", "taken", "draw", "stage_began", "stage_ended",
    "worker", "offered", "sent", "looked", "seen", "handed", "nbytes", "lent",
    "began", "fetch", "collate", "encode", "samples",
)  # fmt: skip
#: Returns the first six columns of a call as bytes.
pack = struct.Struct("=6q").pack
#: Stands for the times of a batch where there is none.
NO_BATCH = bytes(8 * len(_COLUMNS[6:]))
#: Where the next batch was, for a call without one, with its number: parts of its way, as
#: :data:`~shmloader.insight.stats.PARTS` names them.
CAUSES = {"": 0, "start": 1, "end": 2, "other": 3}
_CAUSES = list(CAUSES)
_START = CAUSES["start"]
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

    def record(self, durations_ns: "Sequence[int] | Numbers") -> None:
        """Count durations."""
        buckets = np.rint(_PARTS * np.log2(np.maximum(durations_ns, 0) + 1.0))
        self.update(buckets.astype(int).tolist())

    def percentile(self, percent: float) -> int:
        """Return the duration in ns that ``percent`` % of all do not exceed; 0 if there is none."""
        rank, seen = math.ceil(self.total() * percent / 100), 0
        for bucket, count in sorted(self.items()):
            seen += count
            if seen >= rank:
                return round(2 ** (bucket / _PARTS) - 1)
        return 0


def columns_of(calls: Sequence[bytes]) -> "Numbers":
    """Return calls as an array of shape (column, call)."""
    return np.frombuffer(b"".join(calls), np.int64).reshape(-1, len(_COLUMNS)).T


def tabulate(columns: "Numbers") -> Table:
    """Return the times of all batches among the calls by name."""
    table = dict(zip(_COLUMNS, columns[:, columns[0] == 0], strict=True))
    table["fetched"] = table["began"] + table["fetch"]
    table["collated"] = table["fetched"] + table["collate"]
    table["done"] = table["collated"] + table["encode"]
    table["arrived"] = table["done"] + table["seen"] - np.maximum(table["looked"], table["done"])
    return table


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
        self.added: dict[Any, int] = collections.defaultdict(int)
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

    def _add_all(self, more: dict[Any, int]) -> None:
        for name, value in more.items():
            self.added[name] += value

    def merge(self, later: Self) -> None:
        """Add a later epoch's sums. The time between the two epochs is left out."""
        self._add_all(later.added)
        self.waits.update(later.waits)
        self.set_most(**later.most)
        self.newest |= later.newest | {"epoch": None}

    def add(self, calls: Sequence[bytes], stage: str, *, in_order: bool, is_local: bool) -> None:
        """Add calls of the same epoch, in their order, and the name of the stage."""
        added, columns = self.added, columns_of(calls)
        if not calls:
            return
        spent = columns[2] - columns[1]
        waited, causes = spent.tolist(), columns[0].tolist()
        if not self.last_ns:  # iter() and the first next()
            added["startup"] += sum(waited[:2])
        added["waited"] += sum(waited)
        self.last_ns = int(columns[2, -1])
        waits, longest_ns = spent, max(waited)
        if any(causes):
            waits = spent[columns[0] != _START]
            longest_ns = max(waits.tolist(), default=0)
            for cause, spent_ns, draw_ns in zip(causes, waited, columns[3].tolist(), strict=True):
                if cause:
                    added["wait", _CAUSES[cause]] += spent_ns - draw_ns
                    added["wait", "draw"] += draw_ns
        self.waits.record(waits)
        self.set_most(next=longest_ns)
        if is_local:
            self._add_local(columns.T.tolist(), stage)
            return
        table = tabulate(columns)
        if not len(table["asked"]):
            return
        stages = stages_of(table, stage, self._turn_ns, in_order=in_order)
        self._turn_ns = max(self._turn_ns, int(table["arrived"].max()))
        self._add_all({("stage", name): int(spent.sum()) for name, spent in stages.items()})
        self._add_all({name: int(table[name].sum()) for name in ("samples", "nbytes")})
        added["batches"] += len(table["asked"])
        worker_ids = np.flatnonzero(np.bincount(table["worker"])).tolist()
        self._add_waits(table, stage, worker_ids)
        self._add_workers(table, worker_ids)

    def _add_local(self, calls: Iterable[list[int]], stage: str) -> None:
        """Add batches that the consumer's thread loaded while it waited for them.

        Without arrays, since in-process epochs may be many and short.
        """
        added = self.added
        for cause, asked_ns, _, _, stage_began, stage_ended, *known in calls:
            if not cause:
                *_, nbytes, _, began_ns, fetch_ns, collate_ns, _, count = known
                spent = {"fetch": fetch_ns, "collate": collate_ns, stage: stage_ended - stage_began}
                for name, each_ns in spent.items():
                    added["stage", name] += each_ns
                    if name != "build":  # which is what is left of all waiting
                        added["wait", name] += each_ns
                added["wait", "draw"] += began_ns - asked_ns
                added["batches"] += 1
                added["samples"] += count
                added["nbytes"] += nbytes

    def _add_waits(self, table: Table, stage: str, worker_ids: list[int]) -> None:
        """Add where the batches were while the consumer waited for them."""
        # A worker's first batch of the epoch waits for the worker's start.
        new = [worker_id for worker_id in worker_ids if worker_id not in self._spans]
        firsts = [int((table["worker"] == worker_id).argmax()) for worker_id in new]
        left = np.stack([table["asked"], *(table[name] for name in _LEFT)])
        left[1, firsts] = 0
        # When the batch left each part, but not before the call, and not after its return.
        left = np.minimum(left, table["taken"])
        for before, after in itertools.pairwise(left):  # faster than np.maximum.accumulate
            np.maximum(before, after, out=after)
        spent = np.diff(left, axis=0)
        waits = dict(zip(_OF_WAIT, spent.sum(axis=1).tolist(), strict=False))
        waits["start"] = int(spent[1, firsts].sum())
        waits["queue"] -= waits["start"]
        # While the consumer's thread handed the batch over, it may have drawn for another one.
        waits["draw"] = int(np.minimum(table["draw"], spent[6] + spent[8]).sum())
        waits[stage] = waits.pop("stage")
        waits.pop("build", None)  # which is what is left of all waiting
        self._add_all({("wait", name): spent_ns for name, spent_ns in waits.items()})

    def _add_workers(self, table: Table, worker_ids: list[int]) -> None:
        busy = table["done"] - table["began"]
        for worker_id in worker_ids:
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
