"""Checks of the arguments that torch's loader does not have, and the reasons for their defaults."""

import mmap
import re
from fractions import Fraction
from typing import Literal

#: Batches that a plain loop holds at the moment of ``next()``: the one in hand and the new one.
LOOP_HOLDS = 2

#: Batches that may be out with the user, uncopied, at the same time. Two more than a plain loop
#: holds leave room for a prefetcher of the user's own. What is kept beyond it is copied out, so
#: the limit decides how much shared memory may be used, never whether the loader goes on.
LEND_LIMIT = LOOP_HOLDS + 2

#: Batches that may be ready on the device before the user asks: the one that the GPU will need
#: next, and the one whose copy goes on meanwhile.
DEVICE_PREFETCH = 2

#: What becomes of samples that do not fill the last batch of an epoch.
LastBatch = Literal["keep", "discard", "rollover"]

#: A smaller cap would leave slots that not even the message about a failure fits.
MINIMUM_SLOT_BYTES = 64 * 1024

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY_UNITS = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?\s*", re.IGNORECASE)


def check_worker_restarts(value: object, num_workers: int) -> None:
    """Check ``worker_restarts``: how many dead workers may be replaced in an epoch.

    Raises:
        TypeError: If it is not an int.
        ValueError: If it is negative, or there are no workers.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(
            "worker_restarts option should be a number of workers, "
            f"but got worker_restarts={value!r}"
        )
    if value < 0:
        raise ValueError(
            f"worker_restarts option should be non-negative, but got worker_restarts={value}"
        )
    if value and num_workers == 0:
        raise ValueError("worker_restarts option needs num_workers > 0")


def check_auto(*, is_iterable: bool, thread_pool: bool) -> None:
    """Check ``num_workers="auto"``.

    Raises:
        ValueError: If it goes with a dataset or workers that it is not for.
    """
    if is_iterable:
        raise ValueError(
            "num_workers option can not be 'auto' for an IterableDataset or a data pipe: each "
            "worker has a stream of its own there, so the batches depend on how many there are"
        )
    if thread_pool:
        raise ValueError(
            "num_workers option can not be 'auto' with thread_pool=True: name the number of threads"
        )


def check_thread_pool(
    thread_pool: object, num_workers: int, *, is_iterable: bool, given: dict[str, bool]
) -> None:
    """Check ``thread_pool``: whether workers are threads.

    Args:
        thread_pool: It.
        num_workers: How many workers there are.
        is_iterable: Whether the dataset is iterated, rather than indexed.
        given: Which options for processes were given.

    Raises:
        TypeError: If it is not a bool.
        ValueError: If there are no workers, if threads cannot load the dataset, or have no use for
            an option.
    """
    if not isinstance(thread_pool, bool):
        raise TypeError(f"thread_pool option should be a bool, but got thread_pool={thread_pool!r}")
    if not thread_pool:
        return
    if num_workers == 0:
        raise ValueError("thread_pool option needs num_workers > 0: the number of threads")
    if is_iterable:
        raise ValueError(
            "thread_pool option needs a map-style dataset: threads would share the iterator of an "
            "iterable one, or of a data pipe"
        )
    useless = [name for name, is_given in given.items() if is_given]
    if useless:
        raise ValueError(
            f"thread_pool=True has no use for {', '.join(useless)}: workers are threads of this "
            "process, and share its memory"
        )


def check_device_options(device: object, transform: object, device_prefetch: object) -> None:
    """Check what goes with ``device``.

    Raises:
        TypeError: If ``transform`` is not callable, or ``device_prefetch`` not an int.
        ValueError: If ``device_prefetch`` is not positive, or one is given without a device.
    """
    if transform is not None and not callable(transform):
        raise TypeError(f"transform option should be callable, but got transform={transform!r}")
    if transform is not None and device is None:
        raise ValueError(
            "transform option runs on the device batch and needs device=; on the CPU, transform "
            "in the dataset or collate_fn, where workers do it"
        )
    if isinstance(device_prefetch, bool) or not isinstance(device_prefetch, int):
        raise TypeError(
            "device_prefetch option should be a number of batches, "
            f"but got device_prefetch={device_prefetch!r}"
        )
    if device_prefetch < 1:
        raise ValueError(
            f"device_prefetch option should be positive, but got device_prefetch={device_prefetch}"
        )


def check_snapshot_interval(value: object) -> None:
    """Check ``snapshot_every_n_steps``: after how many of a worker's batches its state is taken.

    Raises:
        TypeError: If it is neither an int nor None.
        ValueError: If it is negative.
    """
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(
            "snapshot_every_n_steps should be a number of batches, or 0 or None for never, "
            f"but got snapshot_every_n_steps={value!r}"
        )
    if value < 0:
        raise ValueError(
            "snapshot_every_n_steps should be a number of batches, or 0 or None for never, "
            f"but got snapshot_every_n_steps={value}"
        )


def check_fetch_concurrency(value: object, *, is_iterable: bool) -> None:
    """Check ``fetch_concurrency``: how many samples of a batch are loaded at once in a worker.

    Raises:
        TypeError: If it is not an int.
        ValueError: If it is not positive, or the dataset is not indexed.
    """
    if value is None:
        return
    got = f"but got fetch_concurrency={value!r}"
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"fetch_concurrency option should be a number of samples, {got}")
    if value < 1:
        raise ValueError(f"fetch_concurrency option should be positive, {got}")
    if is_iterable:
        raise ValueError(
            "fetch_concurrency option needs a map-style dataset: an iterable one, or a data pipe, "
            f"gives one sample after the other, {got}"
        )


def parse_size(value: int | str, name: str) -> int:
    """Read a number of bytes: an int, or text such as ``"512MiB"``, ``"8GiB"``, ``"1.5 GB"``.

    Args:
        value: What the user wrote.
        name: The argument's name, for the message.

    Raises:
        TypeError: If it is neither an int nor a str.
        ValueError: If the text is no size, or the size is not positive.
    """
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise TypeError(
            f"{name} option should be a number of bytes or a text such as '512MiB', "
            f"but got {name}={value!r}"
        )
    if isinstance(value, int):
        size = value
    else:
        match = _SIZE.fullmatch(value)
        if match is None:
            raise ValueError(
                f"{name} option should be a number of bytes or a text such as '512MiB' or "
                f"'8GiB', but got {name}={value!r}"
            )
        unit = (match[2] or "").lower()
        size = int(float(match[1]) * (_BINARY_UNITS.get(unit) or _UNITS[unit]))
    if size <= 0:
        raise ValueError(f"{name} option should be positive, but got {name}={value!r}")
    return size


def slot_share(shm_bytes: int, slot_count: int) -> int:
    """Bytes, whole pages, that each of ``slot_count`` slots may have under a cap of ``shm_bytes``.

    Raises:
        ValueError: If the share would be under :data:`MINIMUM_SLOT_BYTES`.
    """
    share = shm_bytes // slot_count // mmap.PAGESIZE * mmap.PAGESIZE
    if share < MINIMUM_SLOT_BYTES:
        raise ValueError(
            f"shm_size of {shm_bytes} bytes leaves {share} bytes for each of {slot_count} slots "
            f"(prefetch_factor * num_workers + {LEND_LIMIT}, or + device_prefetch + 2 if that is "
            f"more); a slot needs at least {MINIMUM_SLOT_BYTES}. Raise shm_size to "
            f"{slot_count * MINIMUM_SLOT_BYTES} or more, or lower num_workers or prefetch_factor."
        )
    return share


def check_on_error(on_error: object) -> None:
    """Check what is to be done about a bad sample.

    Raises:
        TypeError: If it is neither a str nor callable.
        ValueError: If it is another str than those known.
    """
    if isinstance(on_error, str):
        if on_error not in ("raise", "skip"):
            raise ValueError(
                "on_error option should be 'raise', 'skip' or a function (index, exception) -> "
                f"sample, but got on_error={on_error!r}"
            )
    elif not callable(on_error):
        raise TypeError(
            "on_error option should be 'raise', 'skip' or a function (index, exception) -> sample, "
            f"but got on_error={on_error!r}"
        )


def check_max_failures(max_failures: object, on_error: object) -> None:
    """Check how many bad samples are too many.

    Raises:
        TypeError: If it is neither None, an int nor a Fraction.
        ValueError: If it is negative, a share outside (0, 1], or ``on_error`` is "raise".
    """
    if max_failures is None:
        return
    got = f"but got max_failures={max_failures!r}"
    if isinstance(max_failures, float):
        raise TypeError(
            "max_failures option should be an int, or for a share a fractions.Fraction such as "
            f"Fraction(1, 100), which is exact, {got}"
        )
    if isinstance(max_failures, bool) or not isinstance(max_failures, int | Fraction):
        raise TypeError(f"max_failures option should be an int or a fractions.Fraction, {got}")
    if isinstance(max_failures, int):
        if max_failures < 0:
            raise ValueError(f"max_failures option should not be negative, {got}")
    elif not 0 < max_failures <= 1:
        raise ValueError(
            f"max_failures option should be above 0 and at most 1 as a Fraction, {got}"
        )
    if on_error == "raise":
        raise ValueError(
            "max_failures option counts samples that on_error='skip' leaves out or a function "
            "replaces; with on_error='raise' the first one raises"
        )


def check_seed(seed: object, *, has_generator: bool, is_data_pipe: bool) -> None:
    """Check what ``seed`` goes with; that it is a whole number is seen elsewhere.

    Raises:
        ValueError: If there is a generator, too, or the dataset is one that torch's own iterator
            loads.
    """
    if seed is None:
        return
    if has_generator:
        raise ValueError(
            "seed option is mutually exclusive with generator: seed= orders the epoch and sets the "
            "random streams of each sample, from the seed and the epoch; generator= is what "
            "torch's own shuffling and the workers' base seed are drawn from, one epoch after the "
            "other"
        )
    if is_data_pipe:
        raise ValueError(
            "seed option can not be given for a data pipe, which torch's own iterator loads, "
            f"but got seed={seed!r}"
        )


def check_last_batch(
    last_batch: object,
    batch_size: int | None,
    *,
    drop_last: bool = False,
    has_batch_sampler: bool = False,
    is_iterable: bool = False,
) -> None:
    """Check what is to become of samples that do not fill the last batch.

    Raises:
        ValueError: If it is none of the three, or does not go with the other arguments.
    """
    if last_batch is None:
        return
    got = f"but got last_batch={last_batch!r}"
    if last_batch not in ("keep", "discard", "rollover"):
        raise ValueError(f"last_batch option should be 'keep', 'discard' or 'rollover', {got}")
    if drop_last:
        raise ValueError(f"last_batch option is mutually exclusive with drop_last, {got}")
    if has_batch_sampler or batch_size is None:
        raise ValueError(
            f"last_batch option needs batch_size, which makes the batches that it speaks of, {got}"
        )
    if is_iterable and last_batch == "rollover":
        raise ValueError(
            "last_batch option can not be 'rollover' for an IterableDataset or a data pipe, which "
            f"make their own batches, {got}"
        )
