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
import logging
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Unpack

import torch
import torch.utils.data
from torch.utils.data.dataloader import _BaseDataLoaderIter

from shmloader.loader.by_torch import describe_unsupported
from shmloader.loader.calls import CountingIterator
from shmloader.loader.dataloader import DataLoader
from shmloader.loader.options import is_data_pipe, why_no_process
from shmloader.memory.system_support import is_supported
from shmloader.process_state import PROCESS
from shmloader.stand_in import InstallOptions, StandIn

_log = logging.getLogger("shmloader")

_TorchLoader = torch.utils.data.DataLoader


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
    """What the loaders of this process ran on since :func:`install`. Any thread may read it.

    ``str(report)`` has a line for each kind of loader. Epochs that were begun in other processes
    are not in the report.
    """

    __module__ = "shmloader"  # users import it from there

    def __init__(self) -> None:
        self._epochs: Counter[tuple[str, str, int, str, str]] = Counter()

    @property
    def loaders(self) -> tuple[InstalledLoader, ...]:
        """The kinds of loaders, in the order of their first epochs."""
        return tuple(InstalledLoader(*key, count) for key, count in self._epochs.copy().items())

    def note(self, kind: type, loader: Any, engine: str, why: str) -> None:
        """Note that an epoch of a loader has begun.

        Args:
            kind: The class of the loader.
            loader: The loader, or its stand-in.
            engine: "shmloader" or "torch".
            why: Why the engine is torch's, or which arguments were left out and why; or "".
        """
        name = f"{kind.__module__}.{kind.__qualname__}"
        key = (name, type(loader.dataset).__qualname__, loader.num_workers, engine, why)
        self._epochs[key] += 1
        # An argument that was left out is logged once as a warning, everything else for debugging.
        is_news = engine == "shmloader" and why and self._epochs[key] == 1
        _log.log(
            logging.WARNING if is_news else logging.DEBUG,
            "a %s of %s with num_workers=%s runs on %s%s",
            *key[:4],
            f": {why}" if why else "",
        )

    def __str__(self) -> str:
        """Return a line for each kind of loader."""
        lines = [
            f"{one.loader} of {one.dataset}, num_workers={one.num_workers}: on {one.engine}, "
            f"{one.epochs} epochs" + (f" ({one.why})" if one.why else "")
            for one in self.loaders
        ]
        return "\n".join(lines) or "no loader has begun an epoch since shmloader.install()"

    __repr__ = __str__


def _why_not(loader: Any, options: InstallOptions) -> str:
    """Return why a loader of torch's cannot be taken over; "" if it can."""
    if is_data_pipe(loader.dataset):
        return "the dataset is a data pipe"
    why = why_no_process(loader.multiprocessing_context)
    if why:
        return why
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
        # torch's iterators and ours that were made since.
        self._made: weakref.WeakSet[Any] = weakref.WeakSet()

    def begin(self, by_torch: Callable[[Any], Any], loader: Any) -> Any:
        """Begin an epoch of any loader of torch's class, and return its iterator.

        Args:
            by_torch: torch's own ``__iter__``, which calls ``_get_iterator`` for new workers.
            loader: The loader.
        """
        iterator: Any = getattr(loader, "_iterator", None)
        goes_on = loader.persistent_workers and loader.num_workers > 0 and iterator is not None
        if not goes_on or isinstance(loader, DataLoader) or _why_not(loader, self.options):
            begun = by_torch(loader)
        elif hasattr(iterator, "_stand_in"):
            loader._iterator = self._begin(iterator._stand_in, loader, iterator)
            return loader._iterator
        else:
            if isinstance(iterator, _BaseDataLoaderIter) and iterator not in self._made:
                iterator._shutdown_workers()  # type: ignore[attr-defined]
                loader._iterator = None  # it is from before install()
            begun = by_torch(loader)
        if goes_on and begun is iterator:
            self.note(iterator, loader)
        return begun

    def get_iterator(self, by_torch: Callable[[Any], Any], loader: Any) -> Any:
        """Return a new iterator of any loader of torch's class.

        Args:
            by_torch: torch's own ``_get_iterator``.
            loader: The loader.
        """
        if isinstance(loader, DataLoader) or _why_not(loader, self.options):
            return by_torch(loader)
        return self._begin(StandIn(loader, self.options), loader, None)

    def _begin(self, stand_in: StandIn, loader: Any, iterator: Any) -> Any:
        begun = stand_in.begin(loader, iterator)
        self._made.add(begun)
        self.report.note(stand_in.kind, loader, "shmloader", stand_in.left_out)
        if loader.persistent_workers and loader.num_workers > 0:
            begun._stand_in = stand_in  # which would otherwise be garbage
        return begun

    def make(
        self, by_torch: Callable[..., None], iterator: Any, loader: Any, *args: Any, **named: Any
    ) -> None:
        """Make an iterator of torch's, by torch's own ``__init__``."""
        by_torch(iterator, loader, *args, **named)
        self.note(iterator, loader)

    def note(self, iterator: Any, loader: Any) -> None:
        """Note that an iterator of torch's, or of a loader of our classes, has begun an epoch."""
        is_ours = isinstance(iterator, CountingIterator)
        if isinstance(loader, StandIn) or (is_ours and not isinstance(loader, DataLoader)):
            return  # noted where the stand-in's epoch begins
        self._made.add(iterator)
        engine = "shmloader" if is_ours else "torch"
        why = ""
        if engine == "torch":
            is_torchs = isinstance(loader, _TorchLoader)
            why = _why_not(loader, self.options) if is_torchs else ""
            if is_torchs and type(loader)._get_iterator is not _TorchLoader._get_iterator:
                why = why or f"{type(loader).__qualname__} has its own _get_iterator"
            why = why or "its iterator is made without the __iter__ of torch's DataLoader"
        self.report.note(type(loader), loader, engine, why)

    def let_go(self) -> None:
        """Make the loaders forget the iterators that keep our persistent workers.

        An iterator that is in use delivers the rest of its epoch. Its workers end when it is
        dropped.
        """
        for iterator in list(self._made):
            stand_in = getattr(iterator, "_stand_in", None)
            loader = None if stand_in is None else stand_in._owner()
            if loader is not None and loader._iterator is iterator:
                loader._iterator = None


# The methods of torch's that are replaced, and what is called with them in their places.
_REPLACED: tuple[tuple[type, str, Callable[..., Any]], ...] = (
    (_TorchLoader, "__iter__", _Installation.begin),
    (_TorchLoader, "_get_iterator", _Installation.get_iterator),
    (_BaseDataLoaderIter, "__init__", _Installation.make),
)


def _replace(owner: type, name: str, call: Callable[..., Any]) -> None:
    """Replace a method of torch's by a function that calls it, unless it is replaced already."""
    original = getattr(owner, name)
    if hasattr(original, "_shmloader"):
        return

    def replacement(self: Any, *args: Any, **named: Any) -> Any:
        installation = PROCESS.installation
        if installation is None:
            return original(self, *args, **named)
        return call(installation, original, self, *args, **named)

    made: Any = replacement
    made.__name__, made.__qualname__, made.__doc__ = name, original.__qualname__, original.__doc__
    made._shmloader = original
    setattr(owner, name, made)


def _restore(owner: type, name: str) -> None:
    """Put torch's method back, unless other code has replaced ours and may still call it."""
    method = getattr(owner, name)
    original = getattr(method, "_shmloader", None)
    # A wrapper that functools.wraps() made has our attributes, too.
    if original is not None and not hasattr(method, "__wrapped__"):
        setattr(owner, name, original)


def _set(installation: _Installation | None) -> None:
    """Set the installation of this process; None uninstalls."""
    before, PROCESS.installation = PROCESS.installation, installation
    if before is not None:
        before.let_go()
    for owner, name, call in _REPLACED:
        if installation is None:
            _restore(owner, name)
        else:
            _replace(owner, name, call)


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

    Some loaders run on torch's iterators as before: loaders whose ``__iter__`` or ``_get_iterator``
    does not call torch's, loaders of data pipes, and loaders with a ``multiprocessing_context``
    whose ``Process`` is no process, but a thread. So do loaders with worker processes on a system
    where shmloader cannot have any. Loaders of shmloader's classes keep their own arguments.

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
