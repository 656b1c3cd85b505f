"""Arguments of samplers and loaders: checked numbers, and the rank of this process.

Errors contain the argument's name and its value. The rank and the number of ranks are the user's
arguments, else those of ``torch.distributed``, else those of the environment variables that
``torchrun`` and others set, else those of a Slurm job step (``srun``), else those of a single
process. A sampler reads them when it is constructed, and a loader when its first epoch begins
(:class:`Ranks`).

The number of Slurm's tasks is read from ``SLURM_STEP_NUM_TASKS``, which only ``srun`` sets.
``SLURM_NTASKS`` is also set in a batch script, and there ``SLURM_PROCID`` is 0 in each process that
the script starts without ``srun``.
"""

import os
import reprlib
from collections.abc import Iterable
from numbers import Integral
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed
from torch.utils.data import DistributedSampler

from shmloader.interruptions import Caught, attempt, probe

# Attributes of samplers with their rank and the number of ranks: torch's, ours, accelerate's.
_NAMES = (
    ("rank", "num_replicas"),
    ("rank", "world_size"),
    ("process_index", "num_processes"),
)


def whole_number(value: object, name: str, *, minimum: int, below: int | None = None) -> int:
    """Check an integer argument and return it as an int.

    Args:
        value: The argument: an int or a numpy integer, but not a bool.
        name: Name of the argument.
        minimum: The smallest value allowed.
        below: The value must be smaller than this; None for no bound.

    Raises:
        TypeError: If it is not an integer.
        ValueError: If it is out of bounds.
    """
    got = f"but got {name}={value!r}"
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} should be an int, {got}")
    number = int(value)
    if number < minimum:
        raise ValueError(f"{name} should be {minimum} or more, {got}")
    if below is not None and number >= below:
        raise ValueError(f"{name} should be below {below}, {got}")
    return number


def flag(value: object, name: str) -> bool:
    """Check a bool argument and return it.

    Raises:
        TypeError: If it is not a bool.
    """
    if not isinstance(value, bool):
        raise TypeError(f"{name} should be True or False, but got {name}={value!r}")
    return value


def choice(value: object, name: str, words: tuple[str, ...]) -> Any:
    """Check an argument that is one of several words, and return it.

    Raises:
        ValueError: If it is none of them.
    """
    if value not in words:
        listed = ", ".join(map(repr, words[:-1]))
        raise ValueError(f"{name} should be {listed} or {words[-1]!r}, but got {name}={value!r}")
    return value


def as_numbers(values: object, name: str) -> npt.NDArray[Any]:
    """Return an argument as an array of ints or floats, without a copy if it is one.

    Raises:
        TypeError: If the values are not numbers.
    """
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu()
        # numpy has no bfloat16.
        values = (values.double() if values.is_floating_point() else values).numpy()
    try:
        array = np.asarray(values)
    except (TypeError, ValueError):  # such as rows of different lengths
        array = np.array(None)
    if array.dtype.kind not in "iuf":
        raise TypeError(
            f"{name} should be a sequence of ints or floats, but got {name}={reprlib.repr(values)}"
        )
    return array


# Ranks -----------------------------------------------------------------------------------


def resolve_ranks(rank: int | None = None, world_size: int | None = None) -> tuple[int, int]:
    """Return the rank of this process and the world size.

    Args:
        rank: The user's argument; None to find it out.
        world_size: The user's argument; None if ``rank`` is None, too.

    Returns:
        The rank, from 0, and the world size, from 1. If neither argument is given, they are those
        of the default group of ``torch.distributed`` if it is initialised. Otherwise they are the
        environment variables ``RANK`` and ``WORLD_SIZE``. If neither of these is set, they are
        ``SLURM_PROCID`` and ``SLURM_STEP_NUM_TASKS``. If the latter is not set, they are 0 and 1.

    Raises:
        TypeError: If an argument is not an int.
        ValueError: If only one argument is given, the rank is not below the world size, or the
            environment has only one variable of a pair, or values that are not such numbers.
    """
    if rank is None and world_size is None:
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return torch.distributed.get_rank(), torch.distributed.get_world_size()
        if any(name in os.environ for name in _TORCHRUN):
            return _ranks_of_variables(*_TORCHRUN)
        return _ranks_of_variables(*_SLURM) if _SLURM[1] in os.environ else (0, 1)
    if rank is None or world_size is None:
        raise ValueError(
            "rank and world_size should be given both or not at all, "
            f"but got rank={rank!r}, world_size={world_size!r}"
        )
    size = whole_number(world_size, "world_size", minimum=1)
    own = whole_number(rank, "rank", minimum=0)
    if own >= size:
        raise ValueError(f"rank should be below world_size={size}, but got rank={own}")
    return own, size


class Ranks:
    """The rank of this process and the world size, which are resolved when the first epoch begins.

    A loader may be made before the processes of a run are launched. If the user gives no ranks,
    each call of :meth:`find` looks them up again until :meth:`resolve` is called.
    """

    def __init__(self, rank: int | None, world_size: int | None) -> None:
        is_given = rank is not None or world_size is not None
        self._settled = resolve_ranks(rank, world_size) if is_given else None

    def find(self) -> tuple[int, int]:
        """Return the rank and the world size; raise ValueError if the environment is wrong."""
        return resolve_ranks() if self._settled is None else self._settled

    def resolve(self) -> None:
        """Fix the ranks as they are now."""
        self._settled = self.find()

    @property
    def known(self) -> tuple[int, int] | None:
        """The rank and the world size; None while :meth:`find` raises ValueError."""
        found = attempt(self.find)
        return None if isinstance(found, Caught) else found


# The variables of the rank and of the number of ranks: torchrun's, and those of a Slurm job step.
_TORCHRUN = ("RANK", "WORLD_SIZE")
_SLURM = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")

_OVERRIDE = "; rank= and world_size= override the environment"


def _ranks_of_variables(rank_name: str, size_name: str) -> tuple[int, int]:
    own, size = os.environ.get(rank_name), os.environ.get(size_name)
    if own is None or size is None:
        raise ValueError(
            f"environment variables {rank_name} and {size_name} should be set both or not at all, "
            f"but got {rank_name}={own!r}, {size_name}={size!r}{_OVERRIDE}"
        )
    # int() alone would accept "1_0" and digits of any script.
    are_numbers = all(text.strip().isascii() and text.strip().isdecimal() for text in (own, size))
    if not are_numbers or int(own) >= int(size):
        raise ValueError(
            f"environment variables {rank_name} and {size_name} should be whole numbers, the first "
            f"below the second, but got {rank_name}={own!r}, {size_name}={size!r}{_OVERRIDE}"
        )
    return int(own), int(size)


def is_cut_for_ranks(sampler: object) -> bool:
    """Whether a sampler yields only one rank's share, as torch's ``DistributedSampler`` does."""
    return _share_of(sampler) is not None


def divides_for_ranks(sampler: object) -> bool:
    """Whether a sampler is made to yield one rank's share, even if there is only one rank now."""
    return isinstance(sampler, DistributedSampler) or is_cut_for_ranks(sampler)


def rank_of(samplers: Iterable[object]) -> int | None:
    """Return the rank of the first sampler that yields only one rank's share; None if none does."""
    for sampler in samplers:
        rank = _share_of(sampler)
        if isinstance(rank, Integral):
            return int(rank)
    return None


def _share_of(sampler: object) -> object:
    """Return the rank whose share a sampler yields, from its attributes; None if it is not cut."""
    for own, size in _NAMES:
        rank, count = probe(sampler, own), probe(sampler, size)
        if rank is not None and isinstance(count, int) and count > 1:
            return rank
    return None
