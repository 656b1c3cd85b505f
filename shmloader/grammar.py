"""Words for the user: names, numbers and sizes, and the line of their code that a warning names."""

import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import _utils, dataloader

#: Stands for the unknown id of a process of the user's executor.
UNKNOWN_PID = -1

_PACKAGE = str(Path(__file__).parent) + "/"

# The files of torch that call a dataset and a collate function.
_TORCHS = frozenset({_utils.fetch.__file__, dataloader.__file__})

_TIMES = (("s", 1.0), ("ms", 1e3), ("µs", 1e6), ("ns", 1e9))
# From this number on, three digits round up to 1.
_ROUNDED_UP = 0.9995
_SIZES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def with_article(noun: str) -> str:
    """Return "a" or "an" and a noun, such as the name of a class: "an int", "a list"."""
    article = "an" if noun.lstrip("_")[:1].lower() in tuple("aeiou") else "a"
    return f"{article} {noun}"


def described_type(value: object) -> str:
    """Return the name of an object's class with its article: "an int"."""
    return with_article(type(value).__name__)


def described_data(part: Any) -> str:
    """Return the kind of a part of a sample: "a float32 Tensor of shape [3]"."""
    kind = type(part).__name__
    if isinstance(part, torch.Tensor | np.ndarray):
        dtype = str(part.dtype).removeprefix("torch.")
        grad = " that requires grad" if getattr(part, "requires_grad", False) else ""
        return f"{with_article(f'{dtype} {kind}')} of shape {list(part.shape)}{grad}"
    if isinstance(part, Mapping):
        return f"{with_article(kind)} with the keys {list(part)}"
    if isinstance(part, Sequence) and not isinstance(part, str | bytes):
        return f"{with_article(kind)} of length {len(part)}"
    return with_article(kind)


def describe_worker(worker_id: int, pid: int | None) -> str:
    """Name a worker by its number and process id. A thread has no process id."""
    if pid == UNKNOWN_PID:
        return f"worker {worker_id} (of the executor)"
    if pid is None:
        return f"worker thread {worker_id}"
    # The process id of a shared worker may not have come yet.
    return f"worker {worker_id} (pid {pid})" if pid else f"worker {worker_id}"


def seconds(duration_s: float) -> str:
    """Return a duration in seconds with two decimals, or in ms, µs or ns with three digits."""
    for unit, factor in _TIMES:
        if duration_s * factor >= _ROUNDED_UP:
            return f"{duration_s:.2f} s" if unit == "s" else f"{duration_s * factor:.3g} {unit}"
    return "0 s"


def with_share(duration_s: float, share: float) -> str:
    """Return a duration and what share of the whole it is: "1.20 s (12%)"."""
    return f"{seconds(duration_s)} ({share:.0%})"


def counted(count: int, one: str, many: str = "") -> str:
    """Return a number of things; ``many`` is the plural if that is not ``one`` with an s."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def size(nbytes: float) -> str:
    """Return a number of bytes with a fitting unit."""
    for factor, unit in _SIZES:
        if nbytes >= factor:
            return f"{nbytes / factor:.1f} {unit}"
    return f"{nbytes:.0f} B"


def warn_user(text: str, category: type[Warning] = UserWarning) -> None:
    """Warn, with the line of the user's code that has called into the package."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and _is_our_file(frame.f_code.co_filename):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, category, stacklevel=level)


def _is_our_file(file: str) -> bool:
    return file.startswith(_PACKAGE) or file in _TORCHS
