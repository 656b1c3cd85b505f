"""``shmloader.install()``: torch's own loaders run on our engine, wherever they are created.

Frameworks create ``torch.utils.data.DataLoader`` themselves, or a subclass of their own. While
installed, ``iter()`` of such a loader makes a *stand-in*, a loader of ours with the attributes that
the loader has at that moment, and returns the stand-in's iterator::

    for batch in loader ──▶ torch's DataLoader.__iter__, replaced ──▶ StandIn ──▶ our iterator

The loader itself does not change: its class, attributes, length and pickles are torch's. A stand-in
lives for one call of ``iter()``, or as long as the persistent workers that it started.

Guarantees:
    * A loader that cannot be taken over runs on torch's iterators as before, and the report says
      why.
    * Only an iterator refers to a stand-in, so a loader is freed when it is dropped.

The module is long because it documents what users call and read.
"""

import contextlib
import functools
import logging
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sized
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, TypedDict, Unpack

import torch
import torch.utils.data
from torch.utils.data import RandomSampler, SequentialSampler

from shmloader.batch.failures import OnError
from shmloader.grammar import counted
from shmloader.loader.dataloader import DataLoader
from shmloader.loader.options import (
    DEFAULTS,
    OPTIONS,
    SnapshotInterval,
    describe_unsupported,
    is_data_pipe,
    starts_processes,
)
from shmloader.memory.limits import why_unsupported
from shmloader.process_state import PROCESS
from shmloader.sampling.progress import EpochCounter
from shmloader.sampling.seeded_order import SeededOrder

_log = logging.getLogger("shmloader")

_TorchLoader = torch.utils.data.DataLoader

# The attributes of a loader that torch's constructor sets and torch's iterators read.
_TORCHS = (
    "dataset", "batch_size", "sampler", "batch_sampler", "num_workers", "collate_fn", "pin_memory",
    "drop_last", "timeout", "worker_init_fn", "generator", "prefetch_factor", "persistent_workers",
    "pin_memory_device", "in_order", "_dataset_kind", "_IterableDataset_len_called",
    "_DataLoader__multiprocessing_context", "_auto_collation", "_index_sampler",
)  # fmt: skip

# The attribute in which a loader keeps the number of its next epoch, with ``seed``. It is a plain
# int, so copies and pickles of the loader keep it.
_EPOCH = "_shmloader_epoch"

# No state of these loaders is ever saved.
_DEFAULTS = DEFAULTS | {"snapshot_every_n_steps": 0}


class InstallOptions(TypedDict, total=False):
    """The arguments of :func:`install`; :class:`shmloader.DataLoader` describes them."""

    seed: int | None
    on_error: OnError
    max_failures: int | float | Fraction | None
    sample_timeout: float | None
    worker_restarts: int
    thread_pool: bool
    fetch_concurrency: int | None
    shm_size: int | str | None
    device: str | int | torch.device | None
    device_transform: Callable[[Any], Any] | None
    device_prefetch: int
    snapshot_every_n_steps: SnapshotInterval


class StandIn(DataLoader[Any]):
    """A loader of ours that has the attributes of a loader of torch's.

    ``left_out`` has the arguments of :func:`install` that do not fit the loader, and why.
    """

    # What the loader's class may override, which are properties of torch's.
    _auto_collation: Any = None
    _index_sampler: Any = None

    def __init__(self, loader: Any, installation: "_Installation") -> None:
        # torch's constructor has checked its arguments for the loader. It is not called again,
        # since it would repeat its warnings.
        self._read(loader)
        own, options = self.__dict__, installation.options
        unfit = _unfit(loader, options)
        self.left_out = "; ".join(f"without {name}: {why}" for name, why in unfit.items())
        own.update(_DEFAULTS, **{name: options[name] for name in options.keys() - unfit})  # type: ignore[literal-required]
        self.installation, self._owner = installation, weakref.ref(loader)
        self._iterator, self._sample_seed = None, own["seed"]
        own["_DataLoader__initialized"] = True
        plan = self._set_plan(EpochCounter())
        plan.generator, plan.counter.next = self.generator, vars(loader).get(_EPOCH, 0)
        if isinstance(plan.order, SeededOrder):
            # A sampler that counts epochs by itself is at this one; any other is at the one before.
            plan.order.known_epochs = max(0, plan.counter.next - 1), plan.counter.next

    def begin(self, loader: Any, iterator: Any) -> Any:
        """Begin an epoch of the loader, with new workers or those that persist in an iterator."""
        self._read(loader)
        self._iterator = iterator
        try:
            ours = iter(self)
        finally:
            # The loader keeps the iterator. With a reference here, too, there would be a cycle, and
            # only the garbage collector would end the workers.
            self._iterator = None
        if self._sample_seed is not None:
            vars(loader)[_EPOCH] = self._present_plan.counter.next
        return ours

    @property
    def as_torch_sees_it(self) -> Any:
        """The loader for which this one stands in."""
        return self._owner()

    def _read(self, loader: Any) -> None:
        """Take over the attributes that the loader has now."""
        self.__dict__.update({name: getattr(loader, name) for name in _TORCHS})

    def _source_of(self, sampler: Any) -> Sized | None:
        """Return the source of a sampler that torch made for ``shuffle``, which ``seed`` replaces.

        A sampler of the user's that is equal to one of torch's counts as torch's.
        """
        is_default = type(sampler) is SequentialSampler or (
            type(sampler) is RandomSampler
            and not sampler.replacement
            and sampler._num_samples is None
            and sampler.generator is None
        )
        return sampler.data_source if is_default else None


def _unfit(loader: Any, options: InstallOptions) -> dict[str, str]:
    """Return which arguments of :func:`install` do not fit a loader, and why, by their names.

    Without workers, an argument that simply has no effect counts as fitting, such as ``shm_size``.
    """
    unfit = {}
    for name, value in options.items():
        option = OPTIONS[name]
        if value == _DEFAULTS[name]:
            continue
        if missing := option.missing(loader):
            unfit[name] = f"it needs {missing}"
        elif "multiprocessing_context" in option.excludes and loader.multiprocessing_context:
            unfit[name] = "the loader has a multiprocessing_context"
        elif name == "seed" and loader.generator is not None:
            unfit[name] = "the loader has a generator"
    return unfit


@dataclass(frozen=True, slots=True)
class InstalledLoader:
    """A line of an :class:`InstallReport`: loaders of one kind, and what they ran on.

    Attributes:
        loader: The name of the loaders' class, with its module.
        dataset: The name of the class of their datasets, without its module.
        num_workers: Their number of workers.
        engine: "shmloader", or "torch" if torch's own iterator loads.
        why: With "torch", the reason. With "shmloader", the arguments of :func:`install` that were
            left out and why, or "" if none was.
        epochs: How many epochs such loaders have begun.
    """

    loader: str
    dataset: str
    num_workers: int
    engine: str
    why: str
    epochs: int


class InstallReport:
    """What torch's loaders in this process ran on since :func:`install`. Any thread may read it.

    ``str(report)`` has a line for each kind of loader. The report leaves out epochs of other
    processes, and of loaders whose own ``__iter__`` does not call torch's.
    """

    __module__ = "shmloader"  # users import it from there

    def __init__(self) -> None:
        self._epochs: Counter[tuple[str, str, int, str, str]] = Counter()

    @property
    def loaders(self) -> tuple[InstalledLoader, ...]:
        """The kinds of loaders, in the order of their first epochs."""
        return tuple(InstalledLoader(*key, count) for key, count in self._epochs.copy().items())

    @property
    def epochs(self) -> int:
        """How many epochs have begun."""
        return self._epochs.total()

    def add(self, loader: Any, engine: str, why: str) -> None:
        """Count an epoch of a loader that has begun; see :class:`InstalledLoader`."""
        kind = type(loader)
        name = f"{kind.__module__}.{kind.__qualname__}"
        key = (name, type(loader.dataset).__qualname__, loader.num_workers, engine, why)
        self._epochs[key] += 1
        if engine == "shmloader" and why and self._epochs[key] == 1:
            _log.warning("a %s of %s with num_workers=%s runs on %s: %s", *key)

    def __str__(self) -> str:
        """Return a line for each kind of loader."""
        lines = [
            f"{one.loader} of {one.dataset}, num_workers={one.num_workers}: on {one.engine}, "
            f"{counted(one.epochs, 'epoch')}" + (f" ({one.why})" if one.why else "")
            for one in self.loaders
        ]
        return "\n".join(lines) or "no loader has begun an epoch since shmloader.install()"

    __repr__ = __str__


class _Installation:
    """What is installed in this process: the arguments of :func:`install`, and the report."""

    def __init__(self, options: InstallOptions) -> None:
        self.options = options
        self.report = InstallReport()

    def _why_not(self, loader: Any) -> str:
        """Return why a loader of torch's cannot be taken over; "" if it can."""
        if is_data_pipe(loader.dataset):
            return "the dataset is a data pipe"
        if not starts_processes(loader.multiprocessing_context):
            return "its multiprocessing_context starts no processes"
        if loader.num_workers and not self.options.get("thread_pool") and why_unsupported():
            return describe_unsupported()
        return ""

    def begin(self, by_torch: Callable[[Any], Any], loader: Any) -> Any:
        """Begin an epoch of any loader of torch's class, in place of torch's ``__iter__``."""
        kept: Any = getattr(loader, "_iterator", None)  # which has persistent workers
        why = self._why_not(loader)
        if kept is not None and not why:
            if (stand_in := getattr(kept, "_stand_in", None)) is not None:
                loader._iterator = self._begin(stand_in, loader, kept)
                return loader._iterator
            kept._shutdown_workers()  # it is torch's, from before install()
            loader._iterator = None
        counted = self.report.epochs
        found = by_torch(loader)
        if self.report.epochs == counted:  # get_iterator() was not called
            why = why or f"{type(loader).__qualname__} has its own _get_iterator"
            self.report.add(loader, "torch", why)
        return found

    def get_iterator(self, by_torch: Callable[[Any], Any], loader: Any) -> Any:
        """Return a new iterator of a loader, in place of torch's ``_get_iterator``."""
        why = self._why_not(loader)
        if not why:
            return self._begin(StandIn(loader, self), loader, None)
        self.report.add(loader, "torch", why)
        return by_torch(loader)

    def _begin(self, stand_in: StandIn, loader: Any, iterator: Any) -> Any:
        ours = stand_in.begin(loader, iterator)
        self.report.add(loader, "shmloader", stand_in.left_out)
        if loader.persistent_workers and loader.num_workers > 0:
            ours._stand_in = stand_in  # which would otherwise be garbage
        return ours


def _hook(name: str, call: Callable[..., Any]) -> None:
    """Have ``call`` run in place of a method of torch's loaders, while shmloader is installed."""
    original = getattr(_TorchLoader, name)
    if hasattr(original, "_shmloader"):  # also if other code has wrapped ours
        return

    @functools.wraps(original)
    def hooked(loader: Any) -> Any:
        installation = PROCESS.installation
        stand_in = getattr(getattr(loader, "_iterator", None), "_stand_in", None)
        if stand_in is not None and stand_in.installation is not installation:
            loader._iterator = None  # its persistent workers end when it is dropped
        if installation is None or isinstance(loader, DataLoader):
            return original(loader)
        return call(installation, original, loader)

    hooked._shmloader = True  # type: ignore[attr-defined]
    setattr(_TorchLoader, name, hooked)


def _set(installation: _Installation | None) -> None:
    """Set the installation of this process; None uninstalls."""
    PROCESS.installation = installation
    _hook("__iter__", _Installation.begin)
    _hook("_get_iterator", _Installation.get_iterator)


def _checked(options: InstallOptions) -> _Installation:
    """Check the arguments of :func:`install` by making a loader with them."""
    unknown = options.keys() - InstallOptions.__annotations__.keys()
    if unknown:
        raise TypeError(
            f"install() got unexpected arguments: {', '.join(sorted(unknown))}. It takes "
            f"{', '.join(InstallOptions.__annotations__)}"
        )
    DataLoader([0], num_workers=1, **options)  # type: ignore[arg-type]
    return _Installation(options)


def install(**options: Unpack[InstallOptions]) -> InstallReport:
    """Make every loader of torch's run on shmloader's engine, from its next ``iter()`` on.

    This applies to every ``torch.utils.data.DataLoader`` of this process, including subclasses and
    loaders that were created before. The loaders keep their class and attributes. Their order,
    random numbers and batches stay the same, unless an argument such as ``seed`` changes them. The
    arguments apply to each loader that they fit.

    Some loaders run on torch's iterators as before: those of data pipes, and those whose
    ``__iter__`` or ``_get_iterator`` does not call torch's. So do loaders whose
    ``multiprocessing_context`` has threads in place of processes, and loaders with worker processes
    on a system where shmloader cannot have any. Loaders of shmloader's classes keep their own
    arguments.

    A process that is started by "spawn" or "forkserver" has to call this function itself. A second
    call replaces the arguments and begins a new report.

    Args:
        options: Any of ``seed``, ``on_error``, ``max_failures``, ``sample_timeout``,
            ``worker_restarts``, ``thread_pool``, ``fetch_concurrency``, ``shm_size``, ``device``,
            ``device_transform``, ``device_prefetch`` and ``snapshot_every_n_steps`` of
            :class:`shmloader.DataLoader`.
            An argument that does not fit a loader is left out for that loader, and the report says
            so: ``thread_pool``, ``on_error``, ``max_failures`` and ``fetch_concurrency`` for an
            iterable dataset; ``thread_pool`` for a loader with a ``multiprocessing_context``;
            ``seed`` for a loader with a ``generator``; ``thread_pool``, ``worker_restarts`` and
            ``sample_timeout`` for a loader without workers. With ``seed``, a loader counts its
            epochs from 0, or uses the ``epoch`` of its sampler if other code sets that.

    Returns:
        A report of the loaders and what they ran on. It is updated while this is installed.

    Raises:
        TypeError, ValueError: If an argument is unknown or wrong, as for
            :class:`shmloader.DataLoader`.
    """
    installation = _checked(options)
    _set(installation)
    return installation.report


def uninstall() -> None:
    """Undo :func:`install`: torch's loaders run on torch's iterators from their next ``iter()`` on.

    Iterators that are in use deliver the rest of their epochs, and persistent workers end when the
    next epoch begins. May be called again, or without :func:`install`.
    """
    _set(None)


@contextlib.contextmanager
def installed(**options: Unpack[InstallOptions]) -> Iterator[InstallReport]:
    """Make every loader of torch's run on shmloader's engine, inside a ``with`` block.

    After the block, an earlier :func:`install` is in effect again. Without one, nothing is
    installed.

    Args:
        options: The arguments of :func:`install`.

    Returns:
        A context manager that yields the report; see :func:`install`.

    Raises:
        TypeError, ValueError: As :func:`install` does.
    """
    before, installation = PROCESS.installation, _checked(options)
    _set(installation)
    try:
        yield installation.report
    finally:
        _set(before)
