"""The loaders' options: one table of the arguments that torch's loader does not have.

The table says of each option what values it takes, what it needs, and what it excludes. The
constructors and each epoch check a loader by it, and :func:`shmloader.install` finds there what
does not fit a loader of torch's. torch's constructor checks torch's own arguments; of these, only
types are checked here that torch accepts, or refuses with an unclear text.
"""

import concurrent.futures
import contextlib
import math
import mmap
import multiprocessing
import operator
import re
import reprlib
from collections.abc import Callable, Sized
from dataclasses import dataclass
from fractions import Fraction
from multiprocessing.process import BaseProcess
from numbers import Integral, Real
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch.utils.data import IterableDataset, IterDataPipe, MapDataPipe
from torch.utils.data.datapipes.datapipe import (
    _IterDataPipeSerializationWrapper,
    _MapDataPipeSerializationWrapper,
)

from shmloader.batch.arrays import is_plain_data
from shmloader.memory.arena import describe_shm_size
from shmloader.pools.adapting import AutoCount
from shmloader.probing import probe
from shmloader.sampling.checks import whole_number
from shmloader.sampling.steps import LastBatch
from shmloader.tracebacks import warn_user

#: Whether each rank has its own workers, or all ranks of a host share workers.
WorkerScope = Literal["rank", "host"]

#: After how many batches a dataset's own state is saved.
SnapshotInterval = int | Literal["auto"] | None

#: Batches that a plain loop holds at the moment of ``next()``: the one in hand and the new one.
LOOP_HOLDS = 2

#: Batches that may be lent to the user, uncopied, at the same time. Two more than a plain loop
#: holds leave some for a prefetcher of the user's own. Batches kept beyond the limit are copied
#: out, so the limit decides how much shared memory may be used, never whether the loader continues.
LEND_LIMIT = LOOP_HOLDS + 2

#: Batches that may be ready on the device before the user asks: the one that the GPU will need
#: next, and the one that is being copied meanwhile.
DEVICE_PREFETCH = 2

#: With a smaller share, not even the message about a failure would fit in a slot.
MINIMUM_SLOT_BYTES = 64 * 1024

_BYTES = {"": 1} | {
    unit + suffix: base**power
    for suffix, base in (("", 10**3), ("i", 2**10))
    for power, unit in enumerate("kmgt", 1)
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?\s*", re.IGNORECASE)

# As tuples, since isinstance() would make a union of the classes for each call.
_NOT_MAP_STYLE = (IterableDataset, MapDataPipe)
_DATA_PIPES = (IterDataPipe, MapDataPipe)

#: The classes that torch's constructor wraps data pipes in.
WRAPPED_DATA_PIPES = _IterDataPipeSerializationWrapper, _MapDataPipeSerializationWrapper


def is_map_style(dataset: object) -> bool:
    """Return whether samples are loaded by index: neither an iterable dataset nor a data pipe."""
    return not isinstance(dataset, _NOT_MAP_STYLE)


def is_data_pipe(dataset: object) -> bool:
    """Return whether torch's own iterator has to load the dataset, for its graph of data pipes."""
    return isinstance(dataset, _DATA_PIPES)


# Values ----------------------------------------------------------------------------------------
# Each function takes a value and the option's name, and returns the value as loaders use it.


def _count(minimum: int, what: str) -> Callable[[Any, str], int]:
    def check(value: Any, name: str) -> int:
        text = f"{name} should be {what}, but got {name}={value!r}"
        if isinstance(value, bool) or not isinstance(value, Integral):
            raise TypeError(text)
        if value < minimum:
            raise ValueError(text)
        return int(value)

    return check


def _seconds(value: Any, name: str) -> float:
    got = f"but got {name}={value!r}"
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} should be a number of seconds or None, {got}")
    if not 0 < float(value) < math.inf:
        raise ValueError(f"{name} should be a positive number of seconds, {got}")
    return float(value)


def _bool(value: Any, name: str) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{name} should be a bool, but got {name}={value!r}")
    return value


def _one_of(words: tuple[str, ...], what: str) -> Callable[[Any, str], Any]:
    def check(value: Any, name: str) -> Any:
        if value not in words:
            raise ValueError(f"{name} should be {what}, but got {name}={value!r}")
        return value

    return check


def _handler(value: Any, name: str) -> Any:
    text = (
        f"{name} should be 'raise', 'skip' or a function (index, exception) -> sample, "
        f"but got {name}={value!r}"
    )
    if isinstance(value, str):
        if value not in ("raise", "skip"):
            raise ValueError(text)
    elif not callable(value):
        raise TypeError(text)
    return value


def _function(value: Any, name: str) -> Any:
    if not callable(value):
        raise TypeError(f"{name} should be callable, but got {name}={value!r}")
    return value


def _snapshot_interval(value: Any, name: str) -> Any:
    if value in (None, "auto"):
        return value
    return _count(0, "a number of batches, or 0 or None for never")(value, name)


def _executor(value: Any, name: str) -> Any:
    got = f"but got {name}={reprlib.repr(value)}"
    if not isinstance(value, concurrent.futures.Executor):
        # A Client of Dask's has get_executor().
        hint = ": give its get_executor()" if callable(probe(value, "get_executor")) else ""
        raise TypeError(f"{name} should be a concurrent.futures.Executor, {got}{hint}")
    if isinstance(value, concurrent.futures.ThreadPoolExecutor):
        raise ValueError(
            f"{name} cannot be a ThreadPoolExecutor: thread_pool=True makes batches on threads of "
            "this process, without copies"
        )
    return value


def parse_max_failures(value: Any, name: str = "max_failures") -> int | Fraction | None:
    """Return how many samples may fail: a number, or a share as a Fraction; None for any number.

    A float is the decimal fraction that it is written as: 0.1 is one tenth exactly.

    Raises:
        TypeError: If it is neither None, an int, a float nor a Fraction.
        ValueError: If it is negative, or a share outside (0, 1].
    """
    if value is None:
        return None
    got = f"but got {name}={value!r}"
    if isinstance(value, float | np.floating | Fraction):
        if not 0 < value <= 1:
            raise ValueError(
                f"{name} should be a share above 0 and at most 1 if it is no int, {got}"
            )
        return value if isinstance(value, Fraction) else Fraction(str(value))
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(
            f"{name} should be an int, or for a share a float or a fractions.Fraction, {got}"
        )
    if value < 0:
        raise ValueError(f"{name} should not be negative, {got}")
    return int(value)


def parse_size(value: Any, name: str) -> int:
    """Read a number of bytes: an int, or text such as ``"512MiB"``, ``"8GiB"``, ``"1.5 GB"``.

    Args:
        value: What the user wrote.
        name: The argument's name, for the message.

    Raises:
        TypeError: If it is neither an int nor a str.
        ValueError: If the text is not a size, or the size is not positive.
    """
    text = (
        f"{name} should be a number of bytes or a text such as '512MiB' or '8GiB', "
        f"but got {name}={value!r}"
    )
    if isinstance(value, str):
        match = _SIZE.fullmatch(value)
        if match is None:
            raise ValueError(text)
        size = int(float(match[1]) * _BYTES[(match[2] or "").lower()])
    elif isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(text)
    else:
        size = int(value)
    if size <= 0:
        raise ValueError(f"{name} should be positive, but got {name}={value!r}")
    return size


def slot_share(shm_bytes: int, slot_count: int) -> int:
    """Return each slot's share of ``shm_bytes``, in bytes: a multiple of the page size.

    Raises:
        ValueError: If the share would be under :data:`MINIMUM_SLOT_BYTES`.
    """
    share = shm_bytes // slot_count // mmap.PAGESIZE * mmap.PAGESIZE
    if share < MINIMUM_SLOT_BYTES:
        raise ValueError(
            f"shm_size of {shm_bytes} bytes leaves {share} bytes for each of {slot_count} slots "
            f"(prefetch_factor * num_workers + {LEND_LIMIT}, or + device_prefetch + 2 if that is "
            f"more); a slot needs at least {MINIMUM_SLOT_BYTES}. Raise shm_size to "
            f"{slot_count * MINIMUM_SLOT_BYTES} or more "
            f"({describe_shm_size(slot_count, MINIMUM_SLOT_BYTES)} suffices), or lower "
            "num_workers or prefetch_factor."
        )
    return share


# The table -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Option:
    """One argument that torch's loader does not have.

    Attributes:
        name: The argument.
        default: Its default, which needs no check.
        read: Checks a value, and returns it as loaders use it.
        workers: Why it needs workers; "" if it is clear. None if it needs none.
        indices: Why it needs a map-style dataset; "" if it does not.
        excludes: The options that it cannot be combined with.
        because: Why it cannot be combined with them.
        is_fixed: Whether only the constructor reads it, so that setting it later raises.
    """

    name: str
    default: Any
    read: Callable[[Any, str], Any]
    workers: str | None = None
    indices: str = ""
    excludes: tuple[str, ...] = ()
    because: str = ""
    is_fixed: bool = False


def _device(value: object, name: str) -> torch.device | None:
    if value is None:
        return None
    from shmloader.device.backend import parse_device  # noqa: PLC0415 - few loaders have a device

    return parse_device(value, name)


_TABLE = (
    Option("shm_size", None, parse_size),
    Option("worker_restarts", 0, _count(0, "a non-negative number of workers"), workers=""),
    Option("device", None, _device),
    Option("device_transform", None, _function),
    Option("device_prefetch", DEVICE_PREFETCH, _count(1, "a positive number of batches")),
    Option(
        "on_error",
        "raise",
        _handler,
        indices="samples of an IterableDataset have no index, and its iterator usually yields "
        "nothing after an exception: catch the exception in the dataset's __iter__",
    ),
    Option(
        "max_failures",
        None,
        parse_max_failures,
        indices="an iterable one cannot go on after a failure",
    ),
    Option(
        "last_batch",
        None,
        _one_of(get_args(LastBatch), "'keep', 'discard', 'rollover' or 'pad'"),
        is_fixed=True,
    ),
    Option(
        "thread_pool",
        False,
        _bool,
        workers="the number of threads",
        indices="threads would share the iterator of an iterable one, or of a data pipe",
        excludes=("multiprocessing_context", "shm_size", "worker_restarts"),
        because="workers are threads of this process, and share its memory",
    ),
    Option("seed", None, lambda value, name: whole_number(value, name, minimum=0), is_fixed=True),
    Option("snapshot_every_n_steps", "auto", _snapshot_interval),
    Option(
        "fetch_concurrency",
        None,
        _count(1, "a positive number of samples"),
        indices="an iterable one, or a data pipe, yields one sample after the other",
    ),
    Option(
        "sample_timeout",
        None,
        _seconds,
        workers="without workers this process loads the samples, and cannot be replaced",
    ),
    Option(
        "executor",
        None,
        _executor,
        workers="the number of batches that are in flight there",
        indices="any process makes the next batch, and an iterable dataset, or a data pipe, is "
        "one stream for each worker",
        excludes=("thread_pool", "multiprocessing_context", "sample_timeout", "shm_size"),
        because="the executor starts and ends its processes itself, and carries their batches",
    ),
)

_AUTO = Option(
    "num_workers='auto'",
    0,
    lambda value, _: value,
    indices="the workers of others iterate streams of their own, so the batches depend on the "
    "number of workers",
    excludes=("thread_pool", "executor"),
    because="give the number of threads, or of the batches that are in flight there",
)

# Only ShardedDataLoader has it.
_SCOPE = Option(
    "worker_scope",
    "rank",
    _one_of(get_args(WorkerScope), "'rank' or 'host'"),
    workers="the number of worker processes of the host",
    excludes=("thread_pool", "executor", "multiprocessing_context"),
    because="a fresh process without devices forks the workers that a host's ranks share",
)

#: The arguments that torch's loader does not have, in the order of the constructor.
OPTIONS = {option.name: option for option in _TABLE}

#: Their defaults.
DEFAULTS = {option.name: option.default for option in _TABLE}

_ABSENT = DEFAULTS | {"multiprocessing_context": None}


class FixedArgument:
    """A loader's argument that only its constructor reads.

    Setting it later would have no effect, so it raises. A user's subclass may have an attribute of
    the same name.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, loader: Any, _: type | None = None) -> Any:
        return None if loader is None else loader.__dict__.get(self._name)

    def __set__(self, loader: Any, value: object) -> None:
        kind = type(loader)
        if kind.__module__.partition(".")[0] == "shmloader":
            raise ValueError(
                f"{self._name} attribute should not be set after {kind.__name__} is initialized"
            )
        loader.__dict__[self._name] = value


def read_options(loader: Any) -> dict[str, Any]:
    """Check a loader's options as its attributes are now, and return their values.

    Returns:
        The value of each option, as loaders use it, and under "devices" the devices of a step.

    Raises:
        TypeError: If an option is of a wrong type.
        ValueError: If it has a wrong value, needs what the loader does not have, or cannot be
            combined with another option.
    """
    values, sharing = DEFAULTS.copy(), loader._sharing
    for option in OPTIONS.values():
        value = getattr(loader, option.name)
        if value is not option.default:
            values[option.name] = _read(loader, option, value)
    if sharing.scope != "rank":
        _read(loader, _SCOPE, sharing.scope)
        if loader._saves_dataset:
            raise ValueError(
                "a dataset with state_dict() cannot be combined with worker_scope='host', since "
                "its state in a worker would be that of several ranks; snapshot_every_n_steps=0 "
                "leaves it out of the loader's state"
            )
    if isinstance(loader.num_workers, AutoCount):
        _check_needs(loader, _AUTO, "")
    values["devices"] = (values["device"],)
    if sharing.devices is not None:
        values["devices"] = tuple(
            _device(device, f"devices[{number}]") for number, device in enumerate(sharing.devices)
        )
    _check_pairs(loader, values)
    return values


def _read(loader: Any, option: Option, value: Any) -> Any:
    read = None if value is option.default is None else option.read(value, option.name)
    if read != option.default:
        _check_needs(loader, option, f"={reprlib.repr(value)}")
    return read


def _check_needs(loader: Any, option: Option, value: str) -> None:
    name = option.name
    if option.workers is not None and loader.num_workers == 0:
        reason = f": {option.workers}" if option.workers else ""
        raise ValueError(f"{name} needs num_workers > 0{reason}")
    if option.indices and not is_map_style(loader.dataset):
        raise ValueError(f"{name} needs a map-style dataset: {option.indices}")
    wrong = [each for each in option.excludes if getattr(loader, each) != _ABSENT[each]]
    if wrong:
        others = ", ".join(wrong)
        raise ValueError(f"{name}{value} cannot be combined with {others}: {option.because}")


def _check_pairs(loader: Any, values: dict[str, Any]) -> None:
    """Check what depends on more than one argument in another way."""
    if values["max_failures"] is not None and values["on_error"] == "raise":
        raise ValueError(
            "max_failures counts samples that on_error='skip' leaves out or a function replaces; "
            "with on_error='raise' the first one raises"
        )
    if values["device_transform"] is not None and loader.device is loader._sharing.devices is None:
        raise ValueError(
            "device_transform is called with the batch on the device and needs device=; on the "
            "CPU, transform in the dataset or collate_fn, where workers do it"
        )
    if (
        values["seed"] is not None
        and loader.generator is not None
        and loader._sharing.ranks is None
    ):
        raise ValueError(
            "seed is mutually exclusive with generator: seed= orders the epoch and sets the random "
            "generators for each sample, from the seed and the epoch; generator= is what torch's "
            "own shuffling and the workers' base seed are drawn from, one epoch after the other"
        )
    for name in ("seed", "sample_timeout"):
        if values[name] is not None and is_data_pipe(loader.dataset):
            raise ValueError(
                f"{name} cannot be given for a data pipe, which torch's own iterator loads, "
                f"but got {name}={values[name]!r}"
            )
    why = why_no_process(loader.multiprocessing_context)
    if why:
        raise ValueError(
            f"multiprocessing_context should start processes, but {why}. thread_pool=True loads on "
            "threads"
        )


def why_no_process(context: Any) -> str:
    """Return why a multiprocessing context starts no processes; "" if it does, or is None."""
    kind = getattr(context, "Process", BaseProcess)
    if isinstance(kind, type) and issubclass(kind, BaseProcess):
        return ""
    name = getattr(kind, "__qualname__", repr(kind))
    return f"{name}, the Process of {type(context).__qualname__}, is no process"


# Checks of other arguments ---------------------------------------------------------------------


def check_numbers(num_workers: Any, prefetch_factor: Any, timeout: Any) -> None:
    """Check types that torch's constructor accepts, or refuses with a text about operators.

    Raises:
        TypeError: If an argument is of a wrong type.
    """
    # None is left to torch's constructor, which refuses it with a text that people search for.
    if num_workers not in (None, "auto") and not _is_whole(num_workers):
        raise TypeError(
            f"num_workers should be an int or 'auto', but got num_workers={num_workers!r}"
        )
    if prefetch_factor is not None and num_workers and not _is_whole(prefetch_factor):
        raise TypeError(
            f"prefetch_factor should be an int, but got prefetch_factor={prefetch_factor!r}"
        )
    if timeout is not None and not isinstance(timeout, Real | torch.Tensor):
        raise TypeError(f"timeout should be a number of seconds, but got timeout={timeout!r}")


def _is_whole(value: Any) -> bool:
    """Whether torch can use a value as a number of workers or batches; also for 0.0."""
    try:
        operator.index(value)
    except TypeError:
        return isinstance(value, Real) and value == 0
    return True


def check_last_batch(
    last_batch: object,
    batch_size: int | None,
    batch_sampler: object,
    *,
    drop_last: bool,
    dataset: object = None,
    is_sharded: bool = False,
) -> None:
    """Check ``last_batch``: what happens to samples that do not fill the last batch.

    A batch sampler decides that itself. One with ``drop_last`` is accepted together with
    ``last_batch``, since frameworks rebuild a loader from its attributes and such a batch sampler.

    Raises:
        ValueError: If it is none of the four, or cannot be combined with the other arguments.
    """
    if last_batch is None:
        return
    got = f"but got last_batch={last_batch!r}"
    OPTIONS["last_batch"].read(last_batch, "last_batch")
    if drop_last and last_batch != "discard":
        raise ValueError(
            "last_batch is mutually exclusive with drop_last, which is torch's word for 'discard', "
            f"{got}"
        )
    if is_sharded and batch_sampler is not None:
        raise ValueError(
            "last_batch is mutually exclusive with batch_sampler, which makes the batches: the "
            f"ranks always get equally many, {got}"
        )
    if is_sharded:
        return
    if last_batch == "pad":
        raise ValueError(
            "last_batch='pad' is for ShardedDataLoader, whose ranks need equally many batches; its "
            "padding property counts the repeated samples, which a DataLoader does not"
        )
    drops = probe(batch_sampler, "drop_last")
    if not isinstance(drops, bool):  # a framework may have wrapped it
        drops = probe(probe(batch_sampler, "batch_sampler"), "drop_last")
    if isinstance(drops, bool):
        if last_batch != ("discard" if drops else "keep"):
            warn_user(
                f"last_batch={last_batch!r} has no effect: the batch_sampler makes the batches, "
                f"and its drop_last is {drops}",
            )
    elif batch_sampler is not None or batch_size is None:
        raise ValueError(
            f"last_batch needs batch_size: without it, the loader makes no batches, {got}"
        )
    elif last_batch == "rollover" and not is_map_style(dataset):
        raise ValueError(
            "last_batch cannot be 'rollover' for an IterableDataset or a data pipe, which make "
            f"their own batches, {got}"
        )


def check_may_have_workers(dataset: object) -> None:
    """Check that this process may have worker processes; called when an iterator begins.

    Raises:
        AssertionError: If the process is a daemon. multiprocessing raises the same error without
            the remedy. If Python runs without assertions, neither raises: a daemon may then have
            children.
    """
    process = multiprocessing.current_process()
    if __debug__ and process.daemon:
        threads = " or thread_pool=True" if is_map_style(dataset) else ""
        raise AssertionError(
            f"daemonic processes are not allowed to have children, and {process.name} is daemonic, "
            "as the workers of a DataLoader and of a multiprocessing.Pool are: give a loader in "
            f"such a process num_workers=0{threads}"
        )


def warn_of_random_numbers(dataset: object, given: str) -> None:
    """Warn that samples' random numbers depend on their worker; called by a constructor.

    Args:
        dataset: The dataset. There is no warning if loading its samples runs no code of the user's.
        given: The argument that lets any worker take the next batch, as text: "executor=".
    """
    if not is_plain_data(dataset):
        warn_user(
            f"{given} lets any idle worker take the next batch, so random numbers that "
            "samples draw depend on the worker, and so on the machine's speed. seed= makes them "
            "independent of that; safe to ignore if your samples use no random numbers.",
        )


def warn_of_empty_epochs(batch_count: int | None, samples: object, what: str) -> None:
    """Warn if all samples are discarded; called by a loader's constructor.

    Args:
        batch_count: The number of batches of an epoch; None if it is not known.
        samples: The loader's sampler, or the dataset of a sharded loader. Its length, if it has
            one, is the number of samples in the warning.
        what: What the samples have to fill, such as "a batch of 8".
    """
    with contextlib.suppress(TypeError, NotImplementedError):  # a dataset without a length
        sample_count = len(samples) if isinstance(samples, Sized) else 0
        if sample_count and batch_count == 0:
            warn_user(
                f"each epoch is empty: samples that do not fill {what} are discarded, and there "
                f"are only {sample_count}. Lower batch_size, or keep them with last_batch='keep'.",
            )
