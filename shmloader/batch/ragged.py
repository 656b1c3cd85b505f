"""Explains the error for samples that cannot be collated, most often since they differ.

For samples that differ in shape, torch names two places in the batch. The explanation names the
samples' indices, all shapes, and where in the samples the tensors are. Torch names no place for
samples that differ in type or dtype, lack a key, have a type that it cannot collate (such as an
image without a transform), or require grad. A note on its exception then names the same things.
"""

from collections.abc import Mapping, Sequence
from numbers import Number
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data._utils.collate import default_collate_fn_map

from shmloader.batch.failures import describe_indices
from shmloader.batch.remote_error import note_sample
from shmloader.interruptions import Suppressed
from shmloader.tracebacks import without_ours

# How errors of torch's default_collate, torch.stack and numpy.stack begin.
_BEGINNINGS = (
    "stack expects each tensor to be equal size",
    "each element in list of batch should be of equal size",
    "all input arrays must have the same shape",
)

# How torch's errors for samples of several types begin.
_OF_TYPES = (
    "expected Tensor as element",
    "default_collate: batch must contain",
    "Could not infer dtype of ",
    "must be real number, not ",
    "new(): invalid data type ",
    "only one element tensors can be converted to Python scalars",
)

_OF_DTYPES = "torch.cat(): input types can't be cast"
_OF_GRAD = "stack(): functions with out=... arguments don't support automatic differentiation"

# What to do about differences that a note names.
_REMEDIES = {
    "dtype": " Convert them to one dtype in the dataset.",
    "requires_grad": " Autograd does not cross processes: detach() them in the dataset.",
    "unknown type": (
        " Convert them to tensors in the dataset (images by a transform such as torchvision's "
        "ToTensor), or give a collate_fn=."
    ),
}

# How many shapes the text names.
_SHAPES_SHOWN = 4

# How deep in a sample a difference is looked for.
_DEPTH = 8


class _Difference(NamedTuple):
    """A part of the samples in which they differ.

    Attributes:
        path: Where it is in a sample, such as "sample['image']".
        what: In what they differ: "shape", "length" (of lists), "type", "dtype" or "keys"; or
            "unknown type" or "requires_grad", which may be the same in all samples.
        values: The shape, length, type, ... in each sample, as text.
    """

    path: str
    what: str
    values: list[str]


def explain(error: Exception, samples: Any, indices: Any) -> Exception | None:
    """Return an exception to raise in place of one that collating raised; None to raise that one.

    If the samples differ in shape or length, that is an exception of the same class with a longer
    text. If they differ in type, dtype or keys, are of a type that cannot be collated, or require
    grad, ``error`` gets a note.

    Args:
        error: What the collate function raised.
        samples: What the dataset returned for the batch.
        indices: The samples' indices; None for those of an iterable dataset.
    """
    difference = _difference_behind(error, samples)
    if difference is None:
        return None
    path, what, values = difference
    if what not in ("shape", "length"):
        name = what.removeprefix("unknown ")
        note = f"In this batch, the {name} of {path}: {_describe(values, indices)}."
        note_sample(error, note + _REMEDIES.get(what, ""))
        return None
    explained = type(error)(
        f"{error}\nThe samples of this batch have different {what}s of {path}: "
        f"{_describe(values, indices)}. Pad them in collate_fn= "
        "(torch.nn.utils.rnn.pad_sequence pads along the first dimension), or bring them to one "
        f"{what} in the dataset."
    )
    return explained.with_traceback(without_ours(error.__traceback__))


def _difference_behind(error: Exception, samples: Any) -> _Difference | None:
    """Return the difference between samples that caused an error; None for any other error."""
    if not isinstance(samples, list) or not samples:
        return None
    kind = type(error)
    wanted: tuple[tuple[str, ...], ...] = ()
    if kind is KeyError:
        wanted = (("keys",),)
    elif kind in (RuntimeError, ValueError) and str(error).startswith(_BEGINNINGS):
        # Type, too, since a number among arrays is stacked as an array without dimensions.
        wanted = ("shape", "length"), ("type",)
    elif kind in (RuntimeError, TypeError, ValueError) and str(error).startswith(_OF_TYPES):
        wanted = (("type", "unknown type"),)
    elif kind is TypeError and str(error).startswith(_OF_DTYPES):
        wanted = (("dtype",),)
    elif kind is RuntimeError and str(error).startswith(_OF_GRAD):
        wanted = (("requires_grad",),)
    with Suppressed(Exception):  # a container of the user's may raise anything
        found = (_find(samples, "sample", _DEPTH, each) for each in wanted)
        return next((one for one in found if one is not None), None)
    return None


def _describe(shapes: list[str], indices: Any) -> str:
    """Return which samples have which shape: "[3] for indices 0, 2; [4] for index 1"."""
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


def _find(
    parts: Sequence[Any], path: str, depth: int, wanted: tuple[str, ...]
) -> _Difference | None:
    """Return the first part of the samples in which they differ; None if there is none.

    Args:
        parts: The same part of each sample.
        path: Where the part is in a sample.
        depth: How many levels deeper to look.
        wanted: The kinds of difference to look for; see ``what`` of :class:`_Difference`.
    """
    first = parts[0]
    found = _compare(parts, wanted)
    if found is not None:
        return _Difference(path, *found) if found[0] in wanted else None
    if depth == 0 or isinstance(first, str | bytes):
        return None
    inner: list[tuple[str, Any]] = []
    if isinstance(first, Mapping):
        inner = [(f"[{key!r}]", key) for key in first]
    elif isinstance(first, Sequence):
        names = getattr(first, "_fields", None)
        inner = [(f"[{at}]" if names is None else f".{names[at]}", at) for at in range(len(first))]
    for step, key in inner:
        deeper = _find([part[key] for part in parts], f"{path}{step}", depth - 1, wanted)
        if deeper is not None:
            return deeper
    return None


def _compare(parts: Sequence[Any], wanted: tuple[str, ...]) -> tuple[str, list[str]] | None:
    """Return in what the samples differ here, and the value for each; None if they are alike."""
    kinds = [_kind_of(part) for part in parts]
    if "unknown type" in wanted and not _is_known(parts[0]):
        return "unknown type", kinds
    are_numbers = all(isinstance(part, Number) for part in parts)  # an int and a float are stacked
    if (len(set(kinds)) > 1 and not are_numbers) or kinds[0] == "NoneType":
        return "type", kinds
    first = parts[0]
    if isinstance(first, torch.Tensor | np.ndarray):
        return _compare_tensors(parts, wanted)
    if isinstance(first, Mapping):
        # torch ignores keys that the first sample does not have.
        if all(set(first) <= set(part) for part in parts):
            return None
        what, values = "keys", [str(list(part)) for part in parts]
    elif isinstance(first, Sequence) and not isinstance(first, str | bytes):
        what, values = "length", [str(len(part)) for part in parts]
    else:
        return None
    return (what, values) if len(set(values)) > 1 else None


def _compare_tensors(parts: Sequence[Any], wanted: tuple[str, ...]) -> tuple[str, list[str]] | None:
    what, values = "shape", [str(list(part.shape)) for part in parts]
    is_alike = len(set(values)) == 1
    if "dtype" in wanted:
        dtypes = [torch.as_tensor(part).dtype for part in parts]
        what, values = "dtype", [str(dtype) for dtype in dtypes]
        # A worker's batch has the dtype of the first sample.
        is_alike = all(torch.can_cast(dtype, dtypes[0]) for dtype in dtypes)
    elif "requires_grad" in wanted:
        needs = [isinstance(part, torch.Tensor) and part.requires_grad for part in parts]
        what, values, is_alike = "requires_grad", [str(each) for each in needs], not any(needs)
    return None if is_alike else (what, values)


def _is_known(part: Any) -> bool:
    """Whether torch's ``default_collate`` collates the type of a part. None counts as missing."""
    if part is None or isinstance(part, Mapping | Sequence):
        return True
    return any(isinstance(part, kinds) for kinds in default_collate_fn_map)


def _kind_of(part: Any) -> str:
    """Return the name of a part's type. Types that are stacked alike get the same name."""
    if isinstance(part, torch.Tensor | np.ndarray):
        return "Tensor" if isinstance(part, torch.Tensor) else "ndarray"
    if isinstance(part, Mapping):
        return "dict"
    if isinstance(part, str | bytes):
        return type(part).__name__
    return "list" if isinstance(part, Sequence) else type(part).__name__
