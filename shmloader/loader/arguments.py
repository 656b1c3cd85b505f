"""Checks of the arguments that torch's loader does not have, and the reasons for their defaults.

torch's constructor checks torch's own arguments. Only their types are checked here as well, where
torch does not check them or its message is unclear. The module is long because all texts about
wrong arguments stand in it, one function for each argument.
"""

import concurrent.futures
import contextlib
import inspect
import itertools
import math
import mmap
import multiprocessing
import operator
import re
import reprlib
import warnings
from collections.abc import Iterable, Sequence, Sized
from fractions import Fraction
from multiprocessing.process import BaseProcess
from numbers import Integral, Real
from typing import Any, Literal, NoReturn, get_args

import numpy as np
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

from shmloader.batch.arrays import is_plain_data
from shmloader.batch.collator import describe_coroutines
from shmloader.device.backend import parse_device
from shmloader.memory.arena import describe_shm_size
from shmloader.probing import probe
from shmloader.sampling.checks import whole_number
from shmloader.sampling.sampler_order import SamplerOrder
from shmloader.sampling.seeded_order import SeededOrder
from shmloader.sampling.steps import LastBatch

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

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY_UNITS = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
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


def lend_limit(*, has_device: bool, device_prefetch: int) -> int:
    """Return how many batches may be lent at once; at least ``device_prefetch + 2`` on a device."""
    return max(LEND_LIMIT, device_prefetch + 2) if has_device else LEND_LIMIT


class FixedArgument:
    """A loader's argument that only its constructor reads.

    Setting it later would have no effect, so it raises. A user's subclass may have an attribute of
    the same name.

    Args:
        default: The value of a loader that has none of its own.
    """

    def __init__(self, default: object = None) -> None:
        self._default = default
        self._name = ""

    def __set_name__(self, _: type, name: str) -> None:
        self._name = name

    def __get__(self, loader: Any, _: type | None = None) -> Any:
        return self._default if loader is None else self.value_of(loader)

    def value_of(self, loader: Any) -> Any:
        """Return the loader's value."""
        return loader.__dict__.get(self._name, self._default)

    def __set__(self, loader: Any, value: object) -> None:
        kind = type(loader)
        if kind.__module__.partition(".")[0] == "shmloader":
            self.refuse(kind.__name__)
        loader.__dict__[self._name] = value

    def refuse(self, kind: str) -> NoReturn:
        """Raise a ValueError with torch's text."""
        raise ValueError(f"{self._name} attribute should not be set after {kind} is initialized")


# Before torch's constructor ------------------------------------------------------------------


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


def check_auto(
    dataset: object, *, thread_pool: bool, is_seeded: bool, has_executor: bool = False
) -> None:
    """Check what goes with ``num_workers="auto"``; called by a loader's constructor.

    Raises:
        ValueError: If the dataset is not map-style, or workers are threads or an executor's.
    """
    if not is_map_style(dataset):
        raise ValueError(
            "num_workers cannot be 'auto' for an IterableDataset or a data pipe: each worker "
            "iterates a stream of its own there, so the batches depend on the number of workers"
        )
    if thread_pool:
        raise ValueError(
            "num_workers cannot be 'auto' with thread_pool=True: give the number of threads"
        )
    if has_executor:
        raise ValueError(
            "num_workers cannot be 'auto' with executor=: give the number of batches that are in "
            "flight there"
        )
    if not is_seeded:
        warn_of_random_numbers(dataset, "num_workers='auto'", stacklevel=5)


def warn_of_random_numbers(dataset: object, given: str, *, stacklevel: int = 3) -> None:
    """Warn that samples' random numbers depend on their worker; called by a constructor.

    Args:
        dataset: The dataset. There is no warning if loading its samples runs no code of the user's.
        given: The argument that lets any worker take the next batch, as text: "executor=".
        stacklevel: Where the warning is placed: at the call of the constructor.
    """
    if not is_plain_data(dataset):
        warnings.warn(
            f"{given} lets any idle worker take the next batch, so random numbers that "
            "samples draw depend on the worker, and so on the machine's speed. seed= makes them "
            "independent of that; safe to ignore if your samples use no random numbers.",
            stacklevel=stacklevel,
        )


def check_seed(seed: object, dataset: object, *, has_generator: bool) -> int | None:
    """Check ``seed``, and return it as an int.

    Raises:
        TypeError: If it is not a whole number.
        ValueError: If it is negative, there is a generator as well, or the dataset is a data pipe.
    """
    if seed is None:
        return None
    number = whole_number(seed, "seed", minimum=0)
    if has_generator:
        raise ValueError(
            "seed is mutually exclusive with generator: seed= orders the epoch and sets the random "
            "generators for each sample, from the seed and the epoch; generator= is what torch's "
            "own shuffling and the workers' base seed are drawn from, one epoch after the other"
        )
    if is_data_pipe(dataset):
        raise ValueError(
            "seed cannot be given for a data pipe, which torch's own iterator loads, "
            f"but got seed={number}"
        )
    return number


def describe_epoch_remedy(dataset: object, *, has_generator: bool) -> str:
    """Say how to make a loader without a seed depend on the number of the epoch."""
    if is_data_pipe(dataset):  # cannot be combined with a seed
        return "Set the epoch in the data pipe itself."
    return f"Give seed={' in place of generator=' if has_generator else ''}."


def check_last_batch(
    last_batch: object,
    batch_size: int | None,
    *,
    drop_last: bool,
    batch_sampler: object = None,
    is_map_style: bool = True,
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
    if last_batch not in get_args(LastBatch):
        raise ValueError(f"last_batch should be 'keep', 'discard', 'rollover' or 'pad', {got}")
    if drop_last and last_batch != "discard":
        raise ValueError(
            "last_batch is mutually exclusive with drop_last, which is torch's word for 'discard', "
            f"{got}"
        )
    if is_sharded:
        if batch_sampler is not None:
            raise ValueError(
                "last_batch is mutually exclusive with batch_sampler, which makes the batches: the "
                f"ranks always get equally many, {got}"
            )
        return
    if last_batch == "pad":
        raise ValueError(
            "last_batch='pad' is for ShardedDataLoader, whose ranks need equally many batches; its "
            "padding property counts the repeated samples, which a DataLoader does not"
        )
    drops = _drop_last_of(batch_sampler)
    if drops is not None:
        if last_batch != ("discard" if drops else "keep"):
            warnings.warn(
                f"last_batch={last_batch!r} has no effect: the batch_sampler makes the batches, "
                f"and its drop_last is {drops}",
                stacklevel=3,  # past the constructor
            )
        return
    if batch_sampler is not None or batch_size is None:
        raise ValueError(
            f"last_batch needs batch_size: without it, the loader makes no batches, {got}"
        )
    if not is_map_style and last_batch == "rollover":
        raise ValueError(
            "last_batch cannot be 'rollover' for an IterableDataset or a data pipe, which make "
            f"their own batches, {got}"
        )


def _drop_last_of(batch_sampler: object) -> bool | None:
    """Return ``drop_last`` of a batch sampler, or of the one that it wraps; None if unknown."""
    for each in (batch_sampler, probe(batch_sampler, "batch_sampler")):
        drops = probe(each, "drop_last")
        if isinstance(drops, bool):
            return drops
    return None


def warn_of_empty_epochs(order: SeededOrder | SamplerOrder, samples: object, what: str) -> None:
    """Warn if all samples are discarded; called by a loader's constructor.

    Args:
        order: The order of the epochs.
        samples: The loader's sampler, or the dataset of a sharded loader. Its length, if it has
            one, is the number of samples in the warning.
        what: What the samples have to fill, such as "a batch of 8".
    """
    with contextlib.suppress(TypeError, NotImplementedError):  # a dataset without a length
        sample_count = len(samples) if isinstance(samples, Sized) else 0
        if sample_count and order.count_batches() == 0:
            warnings.warn(
                f"each epoch is empty: samples that do not fill {what} are discarded, and there "
                f"are only {sample_count}. Lower batch_size, or keep them with last_batch='keep'.",
                stacklevel=3,  # past the constructor
            )


# After torch's constructor -------------------------------------------------------------------


def check_arguments(loader: Any, devices: Sequence[object], most_window: int) -> None:
    """Check the arguments of a loader that torch's loader does not have.

    Args:
        loader: The loader, which has its arguments as attributes; torch has checked its own.
        devices: The devices as the user gave them, one for each batch of a step.
        most_window: Maximum number of batches in flight.

    Raises:
        TypeError: If an argument is of a wrong type.
        ValueError: If an argument has a wrong value, or cannot be combined with another one.
    """
    restarts = loader.worker_restarts
    _check_count(restarts, "worker_restarts", "a non-negative number of workers", minimum=0)
    if restarts and loader.num_workers == 0:
        raise ValueError("worker_restarts needs num_workers > 0")
    _check_sample_timeout(loader)
    names: Iterable[str] = itertools.repeat("device")
    if getattr(loader, "devices", None) is not None:
        names = (f"devices[{number}]" for number in range(len(devices)))
    parsed = [parse_device(*each) for each in zip(devices, names, strict=False)]
    _check_device_transform(
        loader.device_transform, has_device=any(device is not None for device in devices)
    )
    prefetch = loader.device_prefetch
    _check_count(prefetch, "device_prefetch", "a positive number of batches", minimum=1)
    if loader.shm_size is not None:
        has_device = any(device is not None for device in parsed)
        lent = lend_limit(has_device=has_device, device_prefetch=prefetch)
        slot_share(parse_size(loader.shm_size, "shm_size"), most_window + lent)
    check_on_error(loader.on_error)
    check_max_failures(parse_max_failures(loader.max_failures), loader.on_error)
    _check_skippable(loader.on_error, loader.dataset)
    check_thread_pool(loader)
    check_executor(loader)
    interval = loader.snapshot_every_n_steps
    if interval not in (None, "auto"):
        what = "a number of batches, or 0 or None for never"
        _check_count(interval, "snapshot_every_n_steps", what, minimum=0)
    concurrency = loader.fetch_concurrency
    if concurrency is not None:
        _check_count(concurrency, "fetch_concurrency", "a positive number of samples", minimum=1)
        if not is_map_style(loader.dataset):
            raise ValueError(
                "fetch_concurrency needs a map-style dataset: an iterable one, or a data pipe, "
                f"yields one sample after the other, but got fetch_concurrency={concurrency!r}"
            )


def check_not_async(loader: Any) -> None:
    """Raise TypeError for an ``async def __getitem__`` that nothing can await.

    A collate function of the user's may await its samples, as with torch's loader. If the samples
    come from another dataset inside this one, this is not seen here: the first batch raises.
    """
    kind = type(loader.dataset)
    is_async = inspect.iscoroutinefunction(getattr(kind, "__getitem__", None))
    if not is_async or loader.fetch_concurrency is not None:
        return
    has_lists = loader._auto_collation and hasattr(kind, "__getitems__")
    is_torchs = loader.collate_fn in (default_collate, default_convert)
    if is_torchs and not has_lists and is_map_style(loader.dataset):
        raise TypeError(describe_coroutines(f"dataset {kind.__name__}"))


def _check_count(value: object, name: str, what: str, *, minimum: int) -> None:
    text = f"{name} should be {what}, but got {name}={value!r}"
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(text)
    if value < minimum:
        raise ValueError(text)


def _check_sample_timeout(loader: Any) -> None:
    timeout = loader.sample_timeout
    if timeout is None:
        return
    got = f"but got sample_timeout={timeout!r}"
    if isinstance(timeout, bool) or not isinstance(timeout, Real):
        raise TypeError(f"sample_timeout should be a number of seconds or None, {got}")
    if not 0 < float(timeout) < math.inf:
        raise ValueError(f"sample_timeout should be a positive number of seconds, {got}")
    if loader.num_workers == 0:
        raise ValueError(
            "sample_timeout needs num_workers > 0: without workers this process loads the samples, "
            f"and cannot be replaced, {got}"
        )
    if is_data_pipe(loader.dataset):
        raise ValueError(
            "sample_timeout cannot be given for a data pipe, which torch's own iterator loads, "
            f"{got}"
        )


def _check_device_transform(transform: object, *, has_device: bool) -> None:
    if transform is None:
        return
    if not callable(transform):
        raise TypeError(
            f"device_transform should be callable, but got device_transform={transform!r}"
        )
    if not has_device:
        raise ValueError(
            "device_transform is called with the batch on the device and needs device=; on the "
            "CPU, transform in the dataset or collate_fn, where workers do it"
        )


def check_thread_pool(loader: Any) -> None:
    """Check ``thread_pool``: whether workers are threads.

    Raises:
        TypeError: If it is not a bool.
        ValueError: If there are no workers, threads cannot load the dataset, or an argument is
            given that is for processes only.
    """
    thread_pool = loader.thread_pool
    if not isinstance(thread_pool, bool):
        raise TypeError(f"thread_pool should be a bool, but got thread_pool={thread_pool!r}")
    if not thread_pool:
        return
    if loader.num_workers == 0:
        raise ValueError("thread_pool needs num_workers > 0: the number of threads")
    if not is_map_style(loader.dataset):
        raise ValueError(
            "thread_pool needs a map-style dataset: threads would share the iterator of an "
            "iterable one, or of a data pipe"
        )
    given = {
        "multiprocessing_context": loader.multiprocessing_context is not None,
        "shm_size": loader.shm_size is not None,
        "worker_restarts": bool(loader.worker_restarts),
    }
    for_processes = [name for name, is_given in given.items() if is_given]
    if for_processes:
        raise ValueError(
            f"thread_pool=True cannot be combined with {', '.join(for_processes)}: workers are "
            "threads of this process, and share its memory"
        )


def why_no_process(context: Any) -> str:
    """Return why a multiprocessing context starts no processes; "" if it does, or is None."""
    kind = getattr(context, "Process", BaseProcess)
    if isinstance(kind, type) and issubclass(kind, BaseProcess):
        return ""
    name = getattr(kind, "__qualname__", repr(kind))
    return f"{name}, the Process of {type(context).__qualname__}, is no process"


def check_context(loader: Any) -> None:
    """Check that ``multiprocessing_context`` starts processes.

    Raises:
        ValueError: If its ``Process`` is something else, such as a thread.
    """
    context = loader.multiprocessing_context
    why = "" if context is None else why_no_process(context)
    if why:
        raise ValueError(
            f"multiprocessing_context should start processes, but {why}. thread_pool=True loads on "
            "threads"
        )


def check_executor(loader: Any) -> None:
    """Check ``executor``: whether an executor of the user's makes the batches.

    Raises:
        TypeError: If it is not an executor.
        ValueError: If it runs threads of this process, no batch would be in flight there, the
            dataset is not map-style, or an argument is given that is for workers of our own.
    """
    executor = loader.executor
    if executor is None:
        return
    got = f"but got executor={reprlib.repr(executor)}"
    if not isinstance(executor, concurrent.futures.Executor):
        hint = ""
        if callable(probe(executor, "get_executor")):  # a Client of Dask's
            hint = ": give its get_executor()"
        raise TypeError(f"executor should be a concurrent.futures.Executor, {got}{hint}")
    if isinstance(executor, concurrent.futures.ThreadPoolExecutor):
        raise ValueError(
            "executor cannot be a ThreadPoolExecutor: thread_pool=True makes batches on threads of "
            "this process, without copies"
        )
    if loader.num_workers == 0:
        raise ValueError(
            "executor needs num_workers > 0: the number of batches that are in flight there"
        )
    if not is_map_style(loader.dataset):
        raise ValueError(
            "executor needs a map-style dataset: any process makes the next batch, and an iterable "
            "dataset, or a data pipe, is one stream for each worker"
        )
    given = {
        "thread_pool": loader.thread_pool,
        "multiprocessing_context": loader.multiprocessing_context is not None,
        "sample_timeout": loader.sample_timeout is not None,
        "shm_size": loader.shm_size is not None,
    }
    for_own = [name for name, is_given in given.items() if is_given]
    if for_own:
        raise ValueError(
            f"executor cannot be combined with {', '.join(for_own)}: the executor starts and ends "
            "its processes itself, and carries their batches"
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


def check_worker_scope(
    worker_scope: object,
    *,
    num_workers: object,
    thread_pool: bool,
    executor: object,
    multiprocessing_context: Any,
    saves_dataset: bool,
) -> None:
    """Check ``worker_scope``, and the arguments that cannot be combined with "host".

    Raises:
        ValueError: If it is neither "rank" nor "host", or "host" cannot be combined with another
            argument.
    """
    got = f"but got worker_scope={worker_scope!r}"
    if worker_scope not in get_args(WorkerScope):
        raise ValueError(f"worker_scope should be 'rank' or 'host', {got}")
    if worker_scope == "rank":
        return
    if executor is not None:
        raise ValueError(f"executor is mutually exclusive with worker_scope='host', {got}")
    if thread_pool or not num_workers:
        raise ValueError(f"worker_scope='host' needs worker processes: num_workers > 0, {got}")
    method = getattr(multiprocessing_context, "get_start_method", lambda: multiprocessing_context)()
    if method is not None:
        raise ValueError(
            "multiprocessing_context cannot be combined with worker_scope='host', whose workers "
            f"are forked by a fresh process without devices, but got {method!r}"
        )
    if saves_dataset:
        raise ValueError(
            "a dataset with state_dict() cannot be combined with worker_scope='host', since its "
            "state in a worker would be that of several ranks; snapshot_every_n_steps=0 leaves it "
            "out of the loader's state"
        )


def check_on_error(on_error: object) -> None:
    """Check ``on_error``: what to do about a sample that fails.

    Raises:
        TypeError: If it is neither a str nor callable.
        ValueError: If it is a str other than "raise" and "skip".
    """
    text = (
        "on_error should be 'raise', 'skip' or a function (index, exception) -> sample, "
        f"but got on_error={on_error!r}"
    )
    if isinstance(on_error, str):
        if on_error not in ("raise", "skip"):
            raise ValueError(text)
    elif not callable(on_error):
        raise TypeError(text)


def _check_skippable(on_error: object, dataset: object) -> None:
    if on_error == "raise" or is_map_style(dataset):
        return
    if is_data_pipe(dataset):
        why = "a data pipe, which torch's own iterator loads"
    else:
        why = (
            "an IterableDataset, whose samples have no index, and whose iterator usually yields "
            "nothing after an exception: catch the exception in the dataset's __iter__"
        )
    raise ValueError(f"on_error should be 'raise' for {why}, but got on_error={on_error!r}")


def parse_max_failures(max_failures: object) -> int | Fraction | None:
    """Return the loader's ``max_failures``: a number of samples, or a share of them as a Fraction.

    A float is the decimal fraction that it is written as: 0.1 is one tenth exactly.

    Raises:
        TypeError: If it is neither None, an int, a float nor a Fraction.
        ValueError: If it is a float outside (0, 1].
    """
    if max_failures is None:
        return None
    got = f"but got max_failures={max_failures!r}"
    if isinstance(max_failures, float | np.floating):
        if not 0 < max_failures <= 1:
            raise ValueError(
                "max_failures should be a share above 0 and at most 1 if it is a float, and an int "
                f"if it is a number of samples, {got}"
            )
        return Fraction(str(max_failures))
    if isinstance(max_failures, Fraction):
        return max_failures
    if isinstance(max_failures, bool) or not isinstance(max_failures, Integral):
        raise TypeError(
            f"max_failures should be an int, or for a share a float or a fractions.Fraction, {got}"
        )
    return int(max_failures)


def check_max_failures(max_failures: object, on_error: object) -> None:
    """Check ``max_failures``: how many samples may fail.

    Raises:
        TypeError: If it is neither None, an int nor a Fraction.
        ValueError: If it is negative, a share outside (0, 1], or ``on_error`` is "raise".
    """
    if max_failures is None:
        return
    got = f"but got max_failures={max_failures!r}"
    if isinstance(max_failures, float):
        raise TypeError(
            "max_failures should be an int, or for a share a fractions.Fraction such as "
            f"Fraction(1, 100), which is exact, {got}"
        )
    if isinstance(max_failures, bool) or not isinstance(max_failures, int | Fraction):
        raise TypeError(f"max_failures should be an int or a fractions.Fraction, {got}")
    if isinstance(max_failures, int):
        if max_failures < 0:
            raise ValueError(f"max_failures should not be negative, {got}")
    elif not 0 < max_failures <= 1:
        raise ValueError(f"max_failures should be above 0 and at most 1 as a Fraction, {got}")
    if on_error == "raise":
        raise ValueError(
            "max_failures counts samples that on_error='skip' leaves out or a function replaces; "
            "with on_error='raise' the first one raises"
        )


# Sizes ---------------------------------------------------------------------------------------


def parse_size(value: object, name: str) -> int:
    """Read a number of bytes: an int, or text such as ``"512MiB"``, ``"8GiB"``, ``"1.5 GB"``.

    Args:
        value: What the user wrote.
        name: The argument's name, for the message.

    Raises:
        TypeError: If it is neither an int nor a str.
        ValueError: If the text is not a size, or the size is not positive.
    """
    got = f"but got {name}={value!r}"
    text = f"{name} should be a number of bytes or a text such as '512MiB' or '8GiB', {got}"
    if isinstance(value, str):
        match = _SIZE.fullmatch(value)
        if match is None:
            raise ValueError(text)
        unit = (match[2] or "").lower()
        size = int(float(match[1]) * (_BINARY_UNITS.get(unit) or _UNITS[unit]))
    elif isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(text)
    else:
        size = int(value)
    if size <= 0:
        raise ValueError(f"{name} should be positive, {got}")
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
