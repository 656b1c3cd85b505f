"""The cells of the fault campaign, as data: faults, points, modes, and the required effects.

A cell is one fault at one point, under one start method, in one mode. :func:`effect_of` says which
effect it must have. The trial (:mod:`tests.faults.trial`) places the fault, and judges the effect.
To add a point, add a line to ``_POINTS``; to add a mode, add one to ``_MODES``.
"""

import enum
import itertools
import re
import signal
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

METHODS = ("fork", "spawn", "forkserver")


class Kind(enum.Enum):
    """What a fault does to the process, or to the call, that takes it."""

    ENDS = "ends the process"
    RAISES = "raises"
    STOPS = "stops the process, or holds its interpreter's lock"
    INTERRUPTS = "sends SIGINT to the group"
    STARVES = "leaves no descriptors"
    KILLS_WORKER = "main kills a worker"
    STOPS_WORKER = "main stops a worker"
    CONSUMES = "changes how the consumer uses batches"


@dataclass(frozen=True)
class Fault:
    """A fault.

    Attributes:
        name: Name in tables, and of a function in :mod:`tests.faults.actions` (``_`` for ``-``).
        kind: What the fault does.
        code: Exit code of a process that it ends; negative for a signal.
        raises: Name of the exception's class, if it raises one.
        arrives_as: Name of the class that a worker's exception has in the main process.
        noise: Regular expression of what libraries may write to stderr because of it.
    """

    name: str
    kind: Kind
    code: int = 0
    raises: str = ""
    arrives_as: str = ""
    noise: str = ""


def _torch_says(what: str) -> str:
    """Return the pattern of what torch's own signal handler in workers writes."""
    return rf"ERROR: Unexpected {what} encountered in worker\.[^\n]*\n?"


_FAULTS = [
    Fault("sigkill", Kind.ENDS, -signal.SIGKILL),
    Fault("sigsegv", Kind.ENDS, -signal.SIGSEGV, noise=_torch_says("segmentation fault")),
    Fault("sigbus", Kind.ENDS, -signal.SIGBUS, noise=_torch_says("bus error")),
    Fault("sigterm", Kind.ENDS, -signal.SIGTERM),
    Fault("os-exit", Kind.ENDS, 3),
    Fault("fork-exit", Kind.ENDS, 7),
    Fault("sigstop", Kind.STOPS),
    Fault("gil", Kind.STOPS),
    Fault("sigint", Kind.INTERRUPTS),
    Fault("ctrl-c", Kind.INTERRUPTS),
    # PyTorch's cpuinfo reads this file when a process first computes in parallel.
    Fault("emfile", Kind.STARVES, noise=r"Error in cpuinfo: [^\n]*/proc/cpuinfo\n?"),
    Fault("memory", Kind.RAISES, 1, "MemoryError", "MemoryError"),
    # Only the user's own code raises those that follow.
    Fault("sys-exit", Kind.RAISES, 4, "SystemExit", "RuntimeError"),
    Fault("plain", Kind.RAISES, 1, "ValueError", "ValueError"),
    Fault("two-arguments", Kind.RAISES, 1, "TwoArgumentsError", "RuntimeError"),
    Fault("unpicklable", Kind.RAISES, 1, "UnpicklableError", "UnpicklableError"),
    Fault("failing-str", Kind.RAISES, 1, "FailingStrError", "FailingStrError"),
    Fault("local", Kind.RAISES, 1, "LocalError", "LocalError"),
    Fault("long", Kind.RAISES, 1, "ValueError", "ValueError"),
    Fault("stop-iteration", Kind.RAISES, 1, "StopIteration", "RuntimeError"),
    Fault("keyboard-interrupt", Kind.RAISES, 1, "KeyboardInterrupt", "RuntimeError"),
    Fault("generator-exit", Kind.RAISES, 1, "GeneratorExit", "RuntimeError"),
    Fault("kill-worker", Kind.KILLS_WORKER, -signal.SIGKILL),
    Fault("stop-worker", Kind.STOPS_WORKER),
    Fault("keeps", Kind.CONSUMES),
    Fault("slow", Kind.CONSUMES),
]
FAULTS = {fault.name: fault for fault in _FAULTS}


class Place(enum.Enum):
    """Whose code a point is in."""

    WORKER = "ours, in a worker"
    USER = "the user's, in a worker"
    MAIN = "ours, in the main process"
    CONSUMER = "the user's, in the main process"


@dataclass(frozen=True)
class Point:
    """A point in the code at which a fault is taken.

    Attributes:
        name: Name in tables.
        place: Whose code the point is in, and in which process.
        env: The point's name in ``SHMLOADER_FAULT``.
        nth: At which arrival at the point the fault is taken, from 1.
        per_epoch: How often worker 1, or the main process, reaches the point in an epoch. 0: it is
            reached once.
        scenario: What the trial's main process does: a method ``_run_...`` of the trial.
    """

    name: str
    place: Place
    env: str
    nth: int = 1
    per_epoch: int = 0
    scenario: str = "epoch"

    @property
    def is_idle(self) -> bool:
        """Whether a worker that receives tasks from a queue has none there."""
        return self.name in {"start", "init", "idle", "during", "answered"}

    @property
    def is_of_a_task(self) -> bool:
        """Whether a worker reaches the point for each of its tasks."""
        return self.place in {Place.WORKER, Place.USER} and self.per_epoch > 0


# An epoch is twelve batches of four samples, by two workers; worker 1 takes the fault.
BATCHES = 12
BATCH_SIZE = 4
WORKERS = 2

_POINTS = [
    Point("start", Place.WORKER, "worker.start/1"),
    Point("init", Place.USER, "worker.init/1"),
    Point("idle", Place.WORKER, "worker.idle/1", 4),
    Point("task", Place.WORKER, "worker.task/1", 2, 6),
    Point("getitem", Place.USER, "worker.getitem/1", 6, 24),
    Point("collate", Place.USER, "worker.collate/1", 2, 6),
    Point("write", Place.WORKER, "worker.write/1", 3, 6),
    Point("answer", Place.WORKER, "worker.answer/1", 2, 6),
    Point("during", Place.WORKER, "worker.answer/1", 2, 6),
    Point("answered", Place.WORKER, "worker.answered/1", 2, 6),
    Point("stop", Place.WORKER, "worker.stop/1", 1, 0, "drained"),
    Point("main-start", Place.MAIN, "main.start", 2),
    Point("main-dispatch", Place.MAIN, "main.dispatch", 6, 12),
    Point("main-next", Place.MAIN, "main.next"),
    Point("main-deliver", Place.MAIN, "main.deliver", 3, 12),
    Point("main-return", Place.MAIN, "main.return", 3, 12),
    Point("main-stage", Place.MAIN, "main.stage", 3, 12),
    Point("main-close", Place.MAIN, "main.close", 1, 0, "close"),
    Point("main-exit", Place.MAIN, "main.exit", 1, 0, "exit"),
    Point("main-thread", Place.CONSUMER, "main.thread", 3, 0, "thread"),
    Point("main-abandoned", Place.CONSUMER, "main.abandoned", 1, 0, "abandoned"),
    Point("main-held", Place.CONSUMER, "main.held", 1, 0, "held"),
    Point("consumer", Place.CONSUMER, "main.consume", 1, 12),
]
POINTS = {point.name: point for point in _POINTS}


@dataclass(frozen=True, eq=False)
class Mode:
    """A way to use the loader.

    Attributes:
        name: Name in tables.
        options: Keyword arguments of the loader.
        prepare: Name of a function of the trial that simulates a device, for whose sake batches
            pass through a thread of ours; "" for none.
        epoch: The epoch in which the fault is taken, if the point is reached in each epoch.
        is_dynamic: Whether a batch goes to whichever worker is idle, and not to each in turn.
    """

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    prepare: str = ""
    epoch: int = 0
    is_dynamic: bool = False

    @property
    def restarts(self) -> bool:
        """Whether a dead worker is replaced."""
        return "worker_restarts" in self.options


_MODES = [
    Mode("plain"),
    Mode("pin_memory", {"pin_memory": True}, "simulate_pinning"),
    Mode("device", {"device": "simulated"}, "simulate_device"),
    Mode("restarts", {"worker_restarts": 2}),
    Mode("pin_restarts", {"pin_memory": True, "worker_restarts": 2}, "simulate_pinning"),
    Mode("persistent", {"persistent_workers": True}, epoch=1),
    # An idle worker takes the oldest ticket, and the engine has a thread of its own.
    Mode("seed", {"seed": 5}, is_dynamic=True),
]
MODES = {mode.name: mode for mode in _MODES}


class Effect(enum.Enum):
    """The required effect. In any case, batches are right, nothing is left, an epoch follows."""

    TOLD = "WorkerDiedError in place of the batch, in full; or, with restarts, a right epoch"
    FAILED = "the worker's exception in place of its batch, and all other batches"
    LATE = "LoaderTimeoutError, then the whole epoch"
    DELAYED = "the whole epoch, later"
    INTERRUPTED = "one KeyboardInterrupt; then the whole epoch, or a closed iterator"
    RAISED = "the exception from the loader's call; then the rest, or a closed iterator"
    LEFT = "the exception leaves the user's loop, and the iterator with it"
    STARVED = "the whole epoch, or an error that names the limit"
    UNSEEN = "nothing but the whole epoch"
    ENDED = "the main process ends with the right code, quietly"


# The effects: "FAULTS at POINTS: EFFECT". The first line holds that names the fault or its kind,
# and the point or its place, also as "MODE/POINT". "-", or no line: these do not combine.
#
# A persistent loader keeps its iterator; and if a worker's init raises, each of its epochs fails.
# At main-exit, -deliver and -return our code raises nothing, and could not recover from it.
_EFFECTS = """
ANY at persistent/main-abandoned persistent/main-held: -
RAISES at persistent/init: -

ENDS STOPS memory at stop: UNSEEN
ENDS at WORKER USER: TOLD
RAISES gil STARVES at during: -
RAISES at USER: FAILED
memory at write: FAILED
memory at WORKER: TOLD
sigstop at WORKER USER: LATE
gil at WORKER USER: DELAYED
STARVES at stop: -
STARVES at WORKER USER: STARVED

CONSUMES at consumer: UNSEEN
ANY at consumer: -
memory sys-exit at main-thread: LEFT
sys-exit at CONSUMER: ENDED
RAISES at CONSUMER main-exit main-deliver main-return: -
sys-exit at MAIN: ENDED
memory plain at MAIN: RAISED
ctrl-c at ANY: ENDED
sigint at ANY: INTERRUPTED
fork-exit at MAIN CONSUMER: -
ENDS at MAIN CONSUMER: ENDED
STARVES KILLS_WORKER STOPS_WORKER at main-close main-exit main-abandoned main-held: UNSEEN
STARVES at MAIN CONSUMER: STARVED
KILLS_WORKER at MAIN CONSUMER: TOLD
STOPS_WORKER at MAIN CONSUMER: LATE
"""
_RULES = [
    ({*faults.split()}, {*points.split()}, Effect.__members__.get(effect))
    for faults, points, effect in re.findall("(.+) at (.+): (.+)", _EFFECTS)
]


def effect_of(fault: Fault, point: Point, mode: Mode) -> Effect | None:
    """Return the required effect of a cell; None if its parts do not combine."""
    if point.name == "main-stage" and not mode.prepare:
        return None
    of_fault = {fault.name, fault.kind.name, "ANY"}
    of_point = {point.name, point.place.name, f"{mode.name}/{point.name}", "ANY"}
    for faults, points, effect in _RULES:
        if not faults.isdisjoint(of_fault) and not points.isdisjoint(of_point):
            return effect
    return None


@dataclass(frozen=True)
class Cell:
    """One trial: a fault at a point, under a start method, in a mode."""

    fault: Fault
    point: Point
    method: str
    mode: Mode

    @property
    def id(self) -> str:
        """The cell's name on command lines and in tests."""
        return f"{self.fault.name}@{self.point.name}-{self.method}-{self.mode.name}"

    @property
    def lot(self) -> int:
        """A key for an order that is always the same, and mixes all sorts of cells."""
        return zlib.crc32(self.id.encode())

    @property
    def effect(self) -> Effect:
        """The required effect."""
        effect = effect_of(self.fault, self.point, self.mode)
        assert effect is not None
        return effect

    @property
    def fault_epoch(self) -> int:
        """The number of the epoch in which the fault is taken."""
        return self.mode.epoch if self.point.per_epoch else 0

    @property
    def variable(self) -> str:
        """Value of ``SHMLOADER_FAULT``."""
        prefix = "during_" if self.point.name == "during" else ""
        action = f"tests.faults.actions.{prefix}{self.fault.name.replace('-', '_')}"
        nth = self.point.nth + self.mode.epoch * self.point.per_epoch
        return f"{self.point.env}:{nth}:{action}"

    @property
    def is_interrupt_at_exit(self) -> bool:
        """Whether a Ctrl-C comes when the program is at its end. Python prints it, and goes on."""
        return self.fault.kind is Kind.INTERRUPTS and self.point.name == "main-exit"

    @property
    def exit_code(self) -> int:
        """Exit code with which the trial's main process must end."""
        if self.effect is not Effect.ENDED or self.is_interrupt_at_exit:
            return 0
        return -signal.SIGINT if self.fault.name == "ctrl-c" else self.fault.code

    @property
    def stuck_from(self) -> int:
        """The first batch that holds its worker's interpreter while the main process ends."""
        if self.effect is Effect.ENDED and self.fault.kind is Kind.ENDS and not self.mode.epoch:
            # With dynamic dispatch, a worker gets a further task only when it has done one.
            return 4 if self.mode.is_dynamic else 3
        return BATCHES

    @property
    def traceback(self) -> str:
        """The exception with whose traceback a process may end, as the user should see; or ""."""
        fault, point = self.fault, self.point
        if fault.name == "ctrl-c" or self.is_interrupt_at_exit:
            return "KeyboardInterrupt"
        if fault.kind is Kind.STARVES:
            return "OSError"
        is_ours = point.place is Place.WORKER and point.name != "write"
        return fault.raises if is_ours else ""


def cell_of(text: str) -> Cell:
    """Return the cell of an id.

    Raises:
        ValueError: If there is no such cell.
    """
    fault, _, rest = text.partition("@")
    point, method, mode = [*rest.rsplit("-", 2), "", ""][:3]
    if fault in FAULTS and point in POINTS and method in METHODS and mode in MODES:
        cell = Cell(FAULTS[fault], POINTS[point], method, MODES[mode])
        if effect_of(cell.fault, cell.point, cell.mode):
            return cell
    raise ValueError(f"there is no cell {text!r}")


def all_cells() -> list[Cell]:
    """Return every cell whose parts combine."""
    return [
        Cell(fault, point, method, mode)
        for method, mode, fault, point in itertools.product(
            METHODS, MODES.values(), FAULTS.values(), POINTS.values()
        )
        if effect_of(fault, point, mode) is not None
    ]


def pairs_of(cell: Cell) -> list[tuple[str, ...]]:
    """Return the pairs of parts of a cell that the sample must cover.

    Every fault at every point would take more than three minutes. So the sample covers each fault
    in each place, each kind of fault at each point, and both kinds and places with each start
    method and mode.
    """
    kind, place = cell.fault.kind.name, cell.point.place.name
    modes = [(part, other) for part in (kind, place) for other in (cell.method, cell.mode.name)]
    return [(cell.fault.name, place), (kind, cell.point.name), *modes]


def pairwise(cells: Iterable[Cell], cost: dict[str, int]) -> Iterator[Cell]:
    """Yield cells that together cover every pair that any cell covers; the same each time.

    Args:
        cells: Cells to choose from.
        cost: Cost of each start method. If several can cover a pair, a cheaper one does.
    """
    left = list(cells)
    pairs = {cell: pairs_of(cell) for cell in left}
    open_pairs = {pair for covered in pairs.values() for pair in covered}
    while open_pairs:
        best = max(
            left,
            key=lambda cell: (
                len(open_pairs.intersection(pairs[cell])) / cost[cell.method],
                cell.lot,  # among equals, mix all sorts
            ),
        )
        open_pairs.difference_update(pairs[best])
        left.remove(best)
        yield best
