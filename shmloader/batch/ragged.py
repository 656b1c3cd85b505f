"""Explains the error for samples that cannot be collated, most often since they differ.

For samples that differ in shape, torch names two places in the batch. It names none for samples
that differ in type or dtype, lack a key, have a type that it cannot collate (such as an image
without a transform), or require grad. A note on its exception names the samples' indices, what they
have, where in the samples that is, and what to do.
"""

from collections.abc import Mapping, Sequence
from numbers import Number
from typing import Any

import numpy as np
import torch
from torch.utils.data._utils.collate import default_collate_fn_map

from shmloader.batch.failures import describe_indices
from shmloader.batch.remote_error import note_sample
from shmloader.interruptions import Suppressed

_SHAPES = ("shape", "length", "type")  # a number among arrays is stacked as an array without shape
_TYPES = ("type", "unknown type")

# In what samples differ, by the beginning of the error of torch's default_collate, torch.stack or
# numpy.stack.
_CAUSES = {
    "stack expects each tensor to be equal size": _SHAPES,
    "each element in list of batch should be of equal size": _SHAPES,
    "all input arrays must have the same shape": _SHAPES,
    "expected Tensor as element": _TYPES,
    "default_collate: batch must contain": _TYPES,
    "Could not infer dtype of ": _TYPES,
    "must be real number, not ": _TYPES,
    "new(): invalid data type ": _TYPES,
    "only one element tensors can be converted to Python scalars": _TYPES,
    "torch.cat(): input types can't be cast": ("dtype",),
    "stack(): functions with out=... arguments don't support automatic": ("requires_grad",),
}

_PAD = (
    " Pad them in collate_fn= (torch.nn.utils.rnn.pad_sequence pads along the first dimension), or "
    "bring them to one {} in the dataset."
)

# What to do about differences.
_REMEDIES = {
    "shape": _PAD.format("shape"),
    "length": _PAD.format("length"),
    "dtype": " Convert them to one dtype in the dataset.",
    "requires_grad": " Autograd does not cross processes: detach() them in the dataset.",
    "unknown type": (
        " Convert them to tensors in the dataset (images by a transform such as torchvision's "
        "ToTensor), or give a collate_fn=."
    ),
}

# How many different shapes, types, ... the text names.
_SHOWN = 4

# How deep in a sample a difference is looked for.
_DEPTH = 8


def explain(error: Exception, samples: Any, indices: Any) -> None:
    """Add a note to an exception that collating raised, if samples differ in what it says.

    Args:
        error: What the collate function raised.
        samples: What the dataset returned for the batch.
        indices: The samples' indices; None for those of an iterable dataset.
    """
    causes: tuple[str, ...] = ("keys",) if type(error) is KeyError else ()
    if type(error) in (RuntimeError, TypeError, ValueError):
        found = (kinds for text, kinds in _CAUSES.items() if str(error).startswith(text))
        causes = next(found, ())
    if not causes or not isinstance(samples, list) or not samples:
        return
    with Suppressed(Exception):  # a container of the user's may raise anything
        difference = _find(samples, "sample", _DEPTH, causes)
        if difference is not None:
            path, what, values = difference
            text = f"the {what.removeprefix('unknown ')} of {path}: {_describe(values, indices)}."
            note_sample(error, f"In this batch, {text}{_REMEDIES.get(what, '')}")


def _describe(values: list[str], indices: Any) -> str:
    """Return which samples have which value: "[3] for indices 0, 2; [4] for index 1"."""
    keys: list[Any] = list(range(len(values)))
    is_known = isinstance(indices, Sequence) and len(indices) == len(values)
    if is_known and set(map(type, indices)) != {type(None)}:  # of an iterable dataset
        keys = list(indices)
    else:
        is_known = False
    by_value: dict[str, list[Any]] = {}
    for value, key in zip(values, keys, strict=True):
        by_value.setdefault(value, []).append(key)
    parts = []
    for value, alike in list(by_value.items())[:_SHOWN]:
        which = describe_indices(alike[0] if len(alike) == 1 else alike)
        if not is_known:
            which = which.replace("index", "sample").replace("indices", "samples")
            which += " of the batch"
        parts.append(f"{value} for {which}")
    if len(by_value) > _SHOWN:
        parts.append(f"and {len(by_value) - _SHOWN} more")
    return "; ".join(parts)


def _find(
    parts: Sequence[Any], path: str, depth: int, causes: tuple[str, ...]
) -> tuple[str, str, list[str]] | None:
    """Return where samples differ, in what, and the value of each; None if nowhere.

    Args:
        parts: The same part of each sample.
        path: Where the part is in a sample.
        depth: How many levels deeper to look.
        causes: In what they may differ.
    """
    first = parts[0]
    found = _compare(parts, causes)
    if found is not None or depth == 0 or isinstance(first, str | bytes):
        return None if found is None or found[0] not in causes else (path, *found)
    steps: list[tuple[str, Any]] = []
    if isinstance(first, Mapping):
        steps = [(f"[{key!r}]", key) for key in first]
    elif isinstance(first, Sequence):
        names = getattr(first, "_fields", None)
        steps = [(f"[{at}]" if names is None else f".{names[at]}", at) for at in range(len(first))]
    inner = (
        _find([one[key] for one in parts], path + step, depth - 1, causes) for step, key in steps
    )
    return next((one for one in inner if one is not None), None)


def _compare(parts: Sequence[Any], causes: tuple[str, ...]) -> tuple[str, list[str]] | None:
    """Return in what the samples differ here, and the value for each; None if they are alike."""
    first, kinds = parts[0], list(map(_kind_of, parts))
    is_known = first is None or isinstance(first, (Mapping, Sequence, *_collated_types()))
    if "unknown type" in causes and not is_known:
        return "unknown type", kinds
    are_numbers = all(isinstance(part, Number) for part in parts)  # an int and a float are stacked
    if (len(set(kinds)) > 1 and not are_numbers) or kinds[0] == "NoneType":
        return "type", kinds
    if isinstance(first, torch.Tensor | np.ndarray):
        dtypes = [torch.as_tensor(part).dtype for part in parts] if "dtype" in causes else []
        # A worker's batch has the dtype of the first sample.
        if not all(torch.can_cast(dtype, dtypes[0]) for dtype in dtypes):
            return "dtype", list(map(str, dtypes))
        needs = [isinstance(part, torch.Tensor) and part.requires_grad for part in parts]
        if "requires_grad" in causes and any(needs):
            return "requires_grad", list(map(str, needs))
        what, values = "shape", [str(list(part.shape)) for part in parts]
    elif isinstance(first, Mapping):
        # torch ignores keys that the first sample does not have.
        is_alike = all(set(first) <= set(part) for part in parts)
        what, values = "keys", [] if is_alike else [str(list(part)) for part in parts]
    elif isinstance(first, Sequence) and not isinstance(first, str | bytes):
        what, values = "length", [str(len(part)) for part in parts]
    else:
        return None
    is_wanted = what in causes or what not in ("shape", "length")
    return (what, values) if len(set(values)) > 1 and is_wanted else None


def _collated_types() -> list[type]:
    """Return the types that torch's ``default_collate`` collates, besides containers."""
    types: list[type] = []
    for kinds in default_collate_fn_map:
        types += kinds if isinstance(kinds, tuple) else (kinds,)
    return types


def _kind_of(part: Any) -> str:
    """Return the name of a part's type. Types that are stacked alike get the same name."""
    if isinstance(part, torch.Tensor | np.ndarray):
        return "Tensor" if isinstance(part, torch.Tensor) else "ndarray"
    if isinstance(part, Mapping):
        return "dict"
    if isinstance(part, Sequence) and not isinstance(part, str | bytes):
        return "list"
    return type(part).__name__
