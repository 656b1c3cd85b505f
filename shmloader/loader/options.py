"""The loaders' options: one table of the arguments that torch's loader does not have.

The table says of each option what values it takes, what it needs, and what it excludes. The
constructors and each epoch check a loader by it, and :func:`shmloader.install` finds there what
does not fit a loader of torch's. torch's constructor checks torch's own arguments.

The module is long because the table and the checks of single values belong together.
"""

import concurrent.futures
import contextlib
import inspect
import math
import mmap
import re
import reprlib
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from multiprocessing.process import BaseProcess
from numbers import Integral, Real
from typing import Any, Literal, get_args

import torch
from torch.utils.data import (
    IterableDataset,
    IterDataPipe,
    MapDataPipe,
    default_collate,
    default_convert,
)
from torch.utils.data.datapipes.datapipe import (
    _IterDataPipeSerializationWrapper,
    _MapDataPipeSerializationWrapper,
)

from shmloader.grammar import size
from shmloader.interruptions import probe
from shmloader.memory.limits import why_unsupported
from shmloader.streams.stream import Stream

#: Whether each rank has its own workers, or all ranks of a host share workers.
WorkerScope = Literal["rank", "host"]

#: After how many batches a dataset's own state is saved.
SnapshotInterval = int | Literal["auto"] | None

#: Batches that may be ready on the device before the user asks: the one that the GPU will need
#: next, and the one that is being copied meanwhile.
DEVICE_PREFETCH = 2

#: With a smaller share, not even the message about a failure would fit in a slot.
MINIMUM_SLOT_BYTES = 64 * 1024

#: How messages begin about what does not go with a stream.
NOT_WITH_STREAM = "a stream of shards cannot be combined with "

#: The classes that torch's constructor wraps data pipes in.
WRAPPED_DATA_PIPES = _IterDataPipeSerializationWrapper, _MapDataPipeSerializationWrapper

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(?:([kmgt])(i?))?b?\s*", re.IGNORECASE)


def is_map_style(dataset: object) -> bool:
    """Return whether samples are loaded by index: neither an iterable dataset nor a data pipe."""
    return not isinstance(dataset, (IterableDataset, MapDataPipe))


def is_data_pipe(dataset: object) -> bool:
    """Return whether torch's own iterator has to load the dataset, for its graph of data pipes."""
    return isinstance(dataset, (IterDataPipe, MapDataPipe))


def describe_unsupported() -> str:
    """Return why a loader runs on torch's own workers."""
    return (
        f"shmloader cannot have worker processes of its own here, since {why_unsupported()}; this "
        "loader runs on torch's own workers instead."
    )


# The table -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Option:
    """One argument that torch's loader does not have.

    Attributes:
        name: The argument.
        default: Its default, which needs no check.
        what: What it should be, for the message.
        kinds: The types that it may have.
        is_right: Whether a value of these types is right.
        read: Returns a right value as loaders use it.
        needs: "workers", "indices" (a map-style dataset), both or neither.
        excludes: The options that it cannot be combined with.
    """

    name: str
    default: Any
    what: str
    kinds: Any
    is_right: Callable[[Any], object] = lambda _: True
    read: Callable[[Any], Any] = lambda value: value
    needs: str = ""
    excludes: tuple[str, ...] = ()

    def check(self, value: Any) -> Any:
        """Return a value as loaders use it.

        Raises:
            TypeError: If it has a wrong type.
            ValueError: If it is a wrong value.
        """
        if value is self.default is None:
            return None
        text = f"{self.name} should be {self.what}, but got {self.name}={reprlib.repr(value)}"
        is_bool = isinstance(value, bool) and self.kinds not in (bool, object)
        if is_bool or not isinstance(value, self.kinds):
            raise TypeError(text)
        if not self.is_right(value):
            raise ValueError(text)
        return self.read(value)

    def check_needs(self, loader: Any) -> None:
        """Raise ValueError if a loader lacks what the option needs, or has what it excludes."""
        if missing := self.missing(loader):
            raise ValueError(f"{self.name} needs {missing}")
        wrong = [each for each in self.excludes if getattr(loader, each) != DEFAULTS.get(each)]
        if wrong:
            raise ValueError(f"{self.name} cannot be combined with {', '.join(wrong)}")

    def missing(self, loader: Any) -> str:
        """Return what a loader lacks for the option; "" for nothing."""
        if "workers" in self.needs and loader.num_workers == 0:
            return "num_workers > 0"
        is_found = is_map_style(loader.dataset) or isinstance(loader.dataset, Stream)
        return "" if is_found or "indices" not in self.needs else "a map-style dataset"


def _share_or_count(value: Any) -> int | Fraction:
    # A float is the decimal fraction that it is written as: 0.1 is one tenth exactly.
    return int(value) if isinstance(value, Integral) else Fraction(str(value))


def _size(value: Any) -> int:
    """Return a number of bytes; 0 for a text that is none."""
    if not isinstance(value, str):
        return int(value)
    match = _SIZE.fullmatch(value)
    if match is None:
        return 0
    number, prefix, is_binary = match.groups()
    base = 1024 if is_binary else 1000
    return int(float(number) * base ** " kmgt".index((prefix or " ").lower()))


def _device(value: object) -> torch.device | None:
    from shmloader.device.backend import parse_device  # noqa: PLC0415 - few loaders have a device

    return parse_device(value)


def _has_processes(executor: Any) -> bool:
    # Dask's own executor has futures that may stay pending for ever.
    is_dask = type(executor).__module__.partition(".")[0] == "distributed"
    return not is_dask and not isinstance(executor, concurrent.futures.ThreadPoolExecutor)


def _from(minimum: int) -> tuple[Any, Callable[[Any], object], Callable[[Any], int]]:
    """Return the kinds, the test and the reader of a whole number."""
    return Integral, lambda value: value >= minimum, int


_TABLE = (
    Option(
        "shm_size",
        None,
        "a positive number of bytes or a text such as '512MiB' or '8GiB'",
        (Integral, str),
        lambda value: _size(value) >= 1,
        _size,
    ),
    Option("worker_restarts", 0, "a number of workers, 0 or more", *_from(0), needs="workers"),
    Option("device", None, "a device", object, read=_device),
    Option("device_transform", None, "callable", Callable),
    Option("device_prefetch", DEVICE_PREFETCH, "a positive number", *_from(1)),
    Option(
        "on_error",
        "raise",
        "'raise', 'skip' or a function (index, exception) -> sample",
        (str, Callable),
        lambda value: callable(value) or value in ("raise", "skip"),
        needs="indices",
    ),
    Option(
        "max_failures",
        None,
        "an int, 0 or more, or a fraction of the samples, above 0 and at most 1",
        Real,
        lambda value: int(value) >= 0 if isinstance(value, Integral) else 0 < value <= 1,
        _share_or_count,
        "indices",
    ),
    Option(
        "thread_pool",
        False,
        "a bool",
        bool,
        needs="workers, indices",
        excludes=("multiprocessing_context", "shm_size", "worker_restarts"),
    ),
    Option("seed", None, "a whole number, 0 or more", *_from(0)),
    Option(
        "snapshot_every_n_steps",
        "auto",
        "'auto', a number of batches, or 0 or None for never",
        (Integral, str, type(None)),
        lambda value: value in (None, "auto") or (isinstance(value, Integral) and int(value) >= 0),
    ),
    Option("fetch_concurrency", None, "a positive number of samples", *_from(1), needs="indices"),
    Option(
        "sample_timeout",
        None,
        "a positive number of seconds or None",
        Real,
        lambda value: 0 < float(value) < math.inf,
        float,
        "workers",
    ),
    Option(
        "executor",
        None,
        "a concurrent.futures.Executor of processes (for Dask, "
        "shmloader.cluster.DaskExecutor(client); for threads, thread_pool=True)",
        concurrent.futures.Executor,
        _has_processes,
        needs="workers, indices",
        excludes=("thread_pool", "multiprocessing_context", "sample_timeout", "shm_size"),
    ),
)

_AUTO = Option(
    "num_workers='auto'", 0, "'auto'", object, needs="indices", excludes=("thread_pool", "executor")
)

# Only ShardedDataLoader has it.
_SCOPE = Option(
    "worker_scope",
    "rank",
    "'rank' or 'host'",
    object,
    lambda value: value in get_args(WorkerScope),
    needs="workers",
    excludes=("thread_pool", "executor", "multiprocessing_context"),
)

#: The arguments that torch's loader does not have, in the order of the constructor.
OPTIONS = {option.name: option for option in _TABLE}

#: Their defaults.
DEFAULTS = {option.name: option.default for option in _TABLE}

_NAMES = frozenset(OPTIONS)


def read_options(loader: Any) -> dict[str, Any]:
    """Check a loader's options as its attributes are now, and return their values.

    Returns:
        The values that are not the defaults, as loaders use them.
    """
    own, values = loader.__dict__, {}
    if not _NAMES.isdisjoint(own):  # many loaders have none, and may be made for a short epoch
        for name, default in DEFAULTS.items():
            if name in own and own[name] is not default:
                value = OPTIONS[name].check(own[name])
                if value != default:
                    values[name] = value
        for name in values:
            OPTIONS[name].check_needs(loader)
    if loader.worker_scope != "rank" and _SCOPE.check(loader.worker_scope) == "host":
        _check_host(loader)
    if loader._adapter is not None:
        _AUTO.check_needs(loader)
    context = loader.multiprocessing_context
    if context is not None and not starts_processes(context):
        raise ValueError(
            "multiprocessing_context should start processes; thread_pool=True loads on threads"
        )
    if values or Stream in type(loader.dataset).__mro__:
        _check_pairs(loader, values)
    needs_loop = "fetch_concurrency" not in values and loader.collate_fn is default_collate
    if needs_loop and not loader._is_iterable and _loads_by_coroutine(loader.dataset):
        raise ValueError("__getitem__ of the dataset is an async def: give fetch_concurrency=")
    return values


def _loads_by_coroutine(dataset: object) -> bool:
    code = getattr(getattr(type(dataset), "__getitem__", None), "__code__", None)
    is_async = code is not None and code.co_flags & inspect.CO_COROUTINE
    return is_async and probe(dataset, "__getitems__") is None


def _check_host(loader: Any) -> None:
    """Check the arguments of a loader whose workers all ranks of a host share."""
    _SCOPE.check_needs(loader)
    refuse(
        {
            "num_workers='auto' cannot be combined with worker_scope='host': give a number.": (
                loader._adapter is not None
            ),
            "a dataset with state_dict() cannot be combined with worker_scope='host', whose "
            "workers load for several ranks. snapshot_every_n_steps=0 leaves the dataset out "
            "of the loader's state.": loader._saves_dataset,
        }
    )


def refuse(wrong: dict[str, object], before: str = "") -> None:
    """Raise ValueError with the first of some texts, after ``before``, whose value is true."""
    for text, is_wrong in wrong.items():
        if is_wrong:
            raise ValueError(before + text)


def _check_pairs(loader: Any, values: dict[str, Any]) -> None:
    """Check what depends on more than one argument in another way."""
    if isinstance(loader.dataset, Stream):
        batched = loader.dataset.is_batched
        own_collate = loader.collate_fn not in (default_collate, default_convert)
        refuse(
            {
                "batch_size after its method batch(): give None": batched and loader.batch_size,
                "collate_fn after its method batch(): give it collate=": batched and own_collate,
                "a function as on_error: give 'skip'": callable(values.get("on_error")),
                "fetch_concurrency": "fetch_concurrency" in values,
                "in_order=False": not loader.in_order,
                "num_workers='auto': give a number": loader._adapter is not None,
                "worker_scope='host': give 'rank'": loader.worker_scope != "rank",
                "last_batch='keep': give 'pad'": getattr(loader, "last_batch", None) == "keep",
            },
            NOT_WITH_STREAM,
        )
    has_seed, has_timeout = "seed" in values, "sample_timeout" in values
    refuse(
        {
            "max_failures has no effect with on_error='raise', since the first bad sample raises. "
            "Give on_error='skip' or a function.": (
                "max_failures" in values and "on_error" not in values
            ),
            "device_transform needs device=. On the CPU, transform in the dataset or in "
            "collate_fn, where workers do it.": (
                "device_transform" in values and loader.device is None
            ),
            "seed cannot be combined with generator. Give either seed= (recommended) or "
            "generator=, not both.": (
                has_seed and loader.generator is not None and loader._ranks is None
            ),
            "sample_timeout needs worker processes: a thread cannot be ended.": (
                has_timeout and "thread_pool" in values
            ),
            "seed and sample_timeout cannot be given for a data pipe, which torch itself loads": (
                (has_seed or has_timeout) and is_data_pipe(loader.dataset)
            ),
        }
    )


def starts_processes(context: Any) -> bool:
    """Return whether a multiprocessing context starts processes: not MONAI's, which has threads."""
    kind = getattr(context, "Process", BaseProcess)
    return isinstance(kind, type) and issubclass(kind, BaseProcess)


# Checks of other arguments ---------------------------------------------------------------------


def slot_share(shm_bytes: int, slot_count: int) -> int:
    """Return each slot's share of ``shm_bytes``, in bytes; raise ValueError if it is too small."""
    share = shm_bytes // slot_count // mmap.PAGESIZE * mmap.PAGESIZE
    if share < MINIMUM_SLOT_BYTES:
        raise ValueError(
            f"shm_size of {size(shm_bytes)} leaves {size(share)} for each of {slot_count} slots, "
            f"too little. Give shm_size='{-(-slot_count * MINIMUM_SLOT_BYTES >> 10)}KiB' or more."
        )
    return share


# What repr() shows -----------------------------------------------------------------------------


def describe_source(source: object) -> str:
    """Return the type of a dataset, or of a pipeline's source, and its length if it has one."""
    length = ""
    if not isinstance(source, Stream):  # which would read all shards for it
        with contextlib.suppress(Exception):  # it may have no length, or not know it yet
            length = f" of length {len(source)}"  # type: ignore[arg-type]
    return f"<{type(source).__name__}{length}>"
