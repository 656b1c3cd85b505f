"""Explains the error for samples that cannot be stacked, since they differ in shape.

torch names two places in the batch. The explanation names the samples' indices, all shapes, and
where in the samples the tensors are.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from shmloader.batch.failures import describe_indices
from shmloader.tracebacks import without_ours

# What torch's default_collate and torch.stack say, and numpy.stack.
_BEGINNINGS = (
    "stack expects each tensor to be equal size",
    "each element in list of batch should be of equal size",
    "all input arrays must have the same shape",
)

# How many shapes the text names.
_SHAPES_SHOWN = 4

# How deep in a sample the tensors are looked for.
_DEPTH = 8


class _Ragged(NamedTuple):
    """A part of the samples whose shapes differ.

    Attributes:
        path: Where it is in a sample, such as "sample['image']".
        is_list: Whether it is a list, which has a length instead of a shape.
        shapes: The shape in each sample.
    """

    path: str
    is_list: bool
    shapes: list[str]


def collate(collate_fn: Callable[[Any], Any], samples: Any, indices: Any) -> Any:
    """Return ``collate_fn(samples)``.

    Args:
        collate_fn: The collate function.
        samples: What the dataset returned for a batch.
        indices: The samples' indices; None for those of an iterable dataset.

    Raises:
        RuntimeError, ValueError: As ``collate_fn``, with a longer text, if samples differ in shape.
        BaseException: What ``collate_fn`` raises.
    """
    try:
        return collate_fn(samples)
    except (RuntimeError, ValueError) as error:
        explained = _explain(error, samples, indices)
        if explained is None:
            raise
    try:
        # Not in the except block: the other one would be printed as well.
        raise explained
    finally:
        del explained  # its traceback holds this frame


def _explain(error: Exception, samples: Any, indices: Any) -> Exception | None:
    """Return an error that says which samples differ; None if the error is about other things."""
    text = str(error)
    kind = type(error)
    if kind not in (RuntimeError, ValueError) or not text.startswith(_BEGINNINGS):
        return None
    if not isinstance(samples, list) or not samples:
        return None
    ragged = _find(samples, "sample", _DEPTH)
    if ragged is None:
        return None
    what = "lengths" if ragged.is_list else "shapes"
    explained = kind(
        f"{text}\nThe samples of this batch have different {what} of {ragged.path}: "
        f"{_describe(ragged.shapes, indices)}. Pad them in collate_fn= "
        "(torch.nn.utils.rnn.pad_sequence pads along the first dimension), or bring them to one "
        f"{what[:-1]} in the dataset."
    )
    return explained.with_traceback(without_ours(error.__traceback__))


def _describe(shapes: list[str], indices: Any) -> str:
    """Return "[3] for indices 0, 2; [4] for index 1"."""
    is_known = isinstance(indices, Sequence) and len(indices) == len(shapes)
    keys = list(indices) if is_known else list(range(len(shapes)))
    if is_known and all(key is None for key in keys):  # of an iterable dataset
        is_known, keys = False, list(range(len(shapes)))
    by_shape: dict[str, list[Any]] = {}
    for shape, key in zip(shapes, keys, strict=True):
        by_shape.setdefault(shape, []).append(key)
    parts = []
    for shape, alike in list(by_shape.items())[:_SHAPES_SHOWN]:
        which = describe_indices(alike[0] if len(alike) == 1 else alike)
        if not is_known:
            which = which.replace("index", "sample").replace("indices", "samples")
            which += " of the batch"
        parts.append(f"{shape} for {which}")
    if len(by_shape) > _SHAPES_SHOWN:
        parts.append(f"and {len(by_shape) - _SHAPES_SHOWN} more")
    return "; ".join(parts)


def _find(parts: Sequence[Any], path: str, depth: int) -> _Ragged | None:
    """Return the first part of the samples in which they differ in shape.

    Args:
        parts: The same part of each sample.
        path: Where it is in a sample.
        depth: How much deeper to look.
    """
    first = parts[0]
    if depth == 0 or isinstance(first, str | bytes):
        return None
    if isinstance(first, torch.Tensor | np.ndarray):
        if not all(isinstance(part, torch.Tensor | np.ndarray) for part in parts):
            return None
        shapes = [str(list(part.shape)) for part in parts]
        return _Ragged(path, False, shapes) if len(set(shapes)) > 1 else None
    inner: list[tuple[str, Any]] = []
    if isinstance(first, Mapping):
        if all(isinstance(part, Mapping) for part in parts):
            inner = [(f"[{key!r}]", key) for key in first if all(key in part for part in parts)]
    elif isinstance(first, Sequence) and all(isinstance(part, Sequence) for part in parts):
        lengths = [str(len(part)) for part in parts]
        if len(set(lengths)) > 1:
            return _Ragged(path, True, lengths)
        names = getattr(first, "_fields", None)
        inner = [(f"[{at}]" if names is None else f".{names[at]}", at) for at in range(len(first))]
    for step, key in inner:
        found = _find([part[key] for part in parts], f"{path}{step}", depth - 1)
        if found is not None:
            return found
    return None
