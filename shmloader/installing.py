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
"""

import contextlib
import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator
from fractions import Fraction
from typing import Any, TypedDict, Unpack

import torch
import torch.utils.data
from torch.utils.data import BatchSampler, IterableDataset, RandomSampler, SequentialSampler
from torch.utils.data.dataloader import _BaseDataLoaderIter

from shmloader.batch.failures import OnError
from shmloader.install_report import InstallReport
from shmloader.loader.arguments import is_data_pipe
from shmloader.loader.by_torch import describe_unsupported
from shmloader.loader.dataloader import DataLoader
from shmloader.loader.iterator import EngineIterator
from shmloader.memory.system_support import is_supported
from shmloader.process_state import PROCESS
from shmloader.sampling.seeded_order import SeededOrder

_TorchLoader = torch.utils.data.DataLoader

#: The attributes of a loader that torch's constructor sets and torch's iterators read.
_TORCHS = (
    "dataset",
    "batch_size",
    "sampler",
    "batch_sampler",
    "num_workers",
    "collate_fn",
    "pin_memory",
    "drop_last",
    "timeout",
    "worker_init_fn",
    "generator",
    "prefetch_factor",
    "persistent_workers",
    "pin_memory_device",
    "in_order",
    "_dataset_kind",
    "_IterableDataset_len_called",
    "_DataLoader__multiprocessing_context",
)

#: A loader that overrides one of these decides itself what its iterators do.
_HOOKS = ("_get_iterator", "_index_sampler", "_auto_collation")

#: The attribute in which a loader keeps the number of its next epoch, with ``seed``. It is a plain
#: int, so copies and pickles of the loader keep it.
_EPOCH = "_shmloader_epoch"


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
    snapshot_every_n_steps: int | None


_DEFAULTS = {
    name: parameter.default
    for name, parameter in inspect.signature(DataLoader.__init__).parameters.items()
    if name not in (*inspect.signature(_TorchLoader.__init__).parameters, "self")
} | {"snapshot_every_n_steps": 0}  # no state of these loaders is ever saved


class StandIn(DataLoader[Any]):
    """A loader of ours that has the attributes of a loader of torch's.

    Attributes:
        kind: The class of torch's loader.
        left_out: The arguments of :func:`install` that do not fit the loader, and why; "" if all
            fit.

    Args:
        loader: The loader of torch's.
        options: The arguments of :func:`install`.
    """

    def __init__(self, loader: Any, options: InstallOptions) -> None:
        # torch's constructor has checked these for the loader. It is not called again, since it
        # would repeat its warnings.
        own = self.__dict__
        own.update({name: getattr(loader, name) for name in _TORCHS})
        own["_DataLoader__initialized"] = True
        self.kind = type(loader)
        unfit = _unfit(loader, options)
        self.left_out = "; ".join(f"without {name}: {why}" for name, why in unfit.items())
        fit = {name: value for name, value in options.items() if name not in unfit}
        own.update(_DEFAULTS, **fit)
        self._iterator = None
        self._owner = weakref.ref(loader)
        self._sample_seed = own["seed"]
        self._make_own_parts()
        self._make_plan(*_given_samplers(loader))
        plan = self._present_plan
        plan.counter.next = vars(loader).get(_EPOCH, 0)
        if isinstance(plan.order, SeededOrder):
            plan.order.expect_epoch(plan.counter.next)

    def begin(self, loader: Any, iterator: Any) -> Any:
        """Begin an epoch of the loader, and return its iterator.

        Args:
            loader: The loader.
            iterator: The iterator whose persistent workers load; None to start new workers.
        """
        self.__dict__["_IterableDataset_len_called"] = loader._IterableDataset_len_called
        self._iterator = iterator
        try:
            begun = iter(self)
        finally:
            # The loader keeps the iterator. With a reference here, too, there would be a cycle, and
            # only the garbage collector would end the workers.
            self._iterator = None
        if self._sample_seed is not None:
            vars(loader)[_EPOCH] = self._present_plan.counter.next
        return begun

    def check_worker_number_rationality(self) -> None:
        """Warn of more worker processes than cores, as the loader itself does."""
        owner = self._owner()
        if not self.thread_pool and owner is not None:
            owner.check_worker_number_rationality()


def _unfit(loader: Any, options: InstallOptions) -> dict[str, str]:
    """Return which arguments of :func:`install` do not fit a loader, and why, by their names.

    Without workers, an argument that simply has no effect counts as fitting, such as ``shm_size``.
    """
    unfit = {}
    if isinstance(loader.dataset, IterableDataset):
        names = ("thread_pool", "on_error", "max_failures", "fetch_concurrency")
        unfit = dict.fromkeys(names, "the dataset is iterable")
    elif loader.multiprocessing_context is not None:
        unfit["thread_pool"] = "the loader has a multiprocessing_context"
    if loader.generator is not None:
        unfit["seed"] = "the loader has a generator"
    given = {name for name, value in options.items() if value != _DEFAULTS[name]}
    without_workers: tuple[str, ...] = ()
    if loader.num_workers == 0:
        without_workers = ("thread_pool", "worker_restarts", "sample_timeout")
    return {name: why for name, why in unfit.items() if name in given} | dict.fromkeys(
        given.intersection(without_workers), "the loader has no workers"
    )


def _given_samplers(loader: Any) -> tuple[Iterable[Any] | None, Iterable[Any] | None]:
    """Return a loader's sampler and batch sampler; None for one that is torch's default."""
    sampler, batches = loader.sampler, loader.batch_sampler
    is_usual = type(batches) is BatchSampler and batches.sampler is sampler
    if batches is not None and not (is_usual and loader.batch_size is not None):
        return None, batches
    if type(sampler) is SequentialSampler:
        return None, None
    if type(sampler) is RandomSampler and not sampler.replacement and sampler._num_samples is None:
        return None, None
    return sampler, None


def _why_not(loader: Any, options: InstallOptions) -> str:
    """Return why a loader of torch's cannot be taken over; "" if it can."""
    if is_data_pipe(loader.dataset):
        return "the dataset is a data pipe"
    for name in _HOOKS:
        found = inspect.getattr_static(loader, name)
        if found is not inspect.getattr_static(_TorchLoader, name):
            return f"{type(loader).__qualname__} has its own {name}"
    if loader.num_workers and not options.get("thread_pool") and not is_supported():
        return describe_unsupported()
    return ""


class _Installation:
    """What is installed in this process.

    Args:
        options: The arguments of :func:`install`.

    Attributes:
        report: What the loaders ran on.
    """

    def __init__(self, options: InstallOptions) -> None:
        self.options = options
        self.report = InstallReport()
        # The iterators with persistent workers. Their stand-ins refer to the loaders.
        self._persistent: weakref.WeakSet[Any] = weakref.WeakSet()

    def begin(self, loader: Any, by_torch: Callable[[Any], Any]) -> Any:
        """Begin an epoch of any loader of torch's class, and return its iterator.

        Args:
            loader: The loader.
            by_torch: torch's own ``__iter__``.
        """
        iterator: Any = getattr(loader, "_iterator", None)
        keeps = bool(loader.persistent_workers and loader.num_workers > 0)
        goes_on = keeps and iterator is not None
        if isinstance(loader, DataLoader) or _why_not(loader, self.options):
            begun = by_torch(loader)
            if goes_on and begun is iterator:
                self.note(iterator, loader)
            return begun
        stand_in = getattr(iterator, "_stand_in", None) if goes_on else None
        if goes_on and stand_in is None:  # an iterator of torch's, from before install()
            iterator._shutdown_workers()
            iterator = None
        if stand_in is None:
            stand_in = StandIn(loader, self.options)
        begun = stand_in.begin(loader, iterator if goes_on else None)
        if keeps:
            loader._iterator = begun
            begun._stand_in = stand_in
            self._persistent.add(begun)
        return begun

    def note(self, iterator: Any, loader: Any) -> None:
        """Note that an iterator of a loader, or of its stand-in, has begun an epoch."""
        engine = "shmloader" if isinstance(iterator, EngineIterator) else "torch"
        if isinstance(loader, StandIn):
            self.report.note(loader.kind, loader, engine, loader.left_out)
            return
        why = ""
        if engine == "torch":
            has_hooks = isinstance(loader, _TorchLoader)
            why = _why_not(loader, self.options) if has_hooks else ""
            why = why or "its iterator is made without the __iter__ of torch's DataLoader"
        self.report.note(type(loader), loader, engine, why)

    def let_go(self) -> None:
        """Make the loaders forget the iterators that keep our persistent workers.

        An iterator that is in use delivers the rest of its epoch. Its workers end when it is
        dropped.
        """
        for iterator in list(self._persistent):
            loader = iterator._stand_in._owner()
            if loader is not None and loader._iterator is iterator:
                loader._iterator = None


def _replace(owner: type, name: str, make: Callable[[Any], Any]) -> None:
    """Replace a method of torch's by a function that calls it, unless it is replaced already."""
    original = getattr(owner, name)
    if not hasattr(original, "_shmloader"):
        replacement = make(original)
        replacement.__name__, replacement.__qualname__ = name, original.__qualname__
        replacement.__doc__, replacement._shmloader = original.__doc__, original
        setattr(owner, name, replacement)


def _restore(owner: type, name: str) -> None:
    """Put torch's method back, unless other code has replaced ours and may still call it."""
    method = getattr(owner, name)
    original = getattr(method, "_shmloader", None)
    # A wrapper that functools.wraps() made has our attributes, too.
    if original is not None and not hasattr(method, "__wrapped__"):
        setattr(owner, name, original)


def _iter_with(by_torch: Callable[[Any], Any]) -> Any:
    def __iter__(self: Any) -> Any:  # noqa: N807 - it becomes a method
        installation = PROCESS.installation
        return by_torch(self) if installation is None else installation.begin(self, by_torch)

    return __iter__


def _init_with(by_torch: Callable[..., None]) -> Any:
    def __init__(self: Any, loader: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        by_torch(self, loader, *args, **kwargs)
        if PROCESS.installation is not None:
            PROCESS.installation.note(self, loader)

    return __init__


def _set(installation: _Installation | None) -> None:
    """Set the installation of this process; None uninstalls."""
    before, PROCESS.installation = PROCESS.installation, installation
    if before is not None:
        before.let_go()
    if installation is None:
        _restore(_TorchLoader, "__iter__")
        _restore(_BaseDataLoaderIter, "__init__")
    else:
        _replace(_TorchLoader, "__iter__", _iter_with)
        _replace(_BaseDataLoaderIter, "__init__", _init_with)


def _checked(options: InstallOptions) -> _Installation:
    """Check the arguments of :func:`install` by making a loader with them."""
    unknown = options.keys() - InstallOptions.__annotations__.keys()
    if unknown:
        raise TypeError(
            f"install() got unexpected arguments: {', '.join(sorted(unknown))}. Arguments of "
            "torch's loader are given where a loader is created; install() takes "
            f"{', '.join(InstallOptions.__annotations__)}"
        )
    DataLoader([0], num_workers=1, **options)  # type: ignore[arg-type]
    return _Installation(options)


def install(**options: Unpack[InstallOptions]) -> InstallReport:
    """Make every loader of torch's run on shmloader's engine, from its next ``iter()`` on.

    This applies to every ``torch.utils.data.DataLoader`` of this process, including subclasses and
    loaders that were created before. The loaders keep their class, attributes, order and random
    numbers, and their batches are the same as before, unless an argument such as ``seed`` changes
    that. The arguments apply to each loader that they fit.

    Some loaders run on torch's iterators as before: loaders that override ``_get_iterator``,
    ``_index_sampler`` or ``_auto_collation``, loaders whose ``__iter__`` does not call torch's, and
    loaders of data pipes. So do loaders with worker processes on a system where shmloader cannot
    have any. Loaders of shmloader's classes keep their own arguments.

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

    Iterators that are in use deliver the rest of their epochs. May be called again, or without
    :func:`install`.
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
