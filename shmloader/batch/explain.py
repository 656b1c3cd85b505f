"""Explains two errors that do not say which part of the user's data they are about.

Samples that cannot be collated: torch's error names no sample. A note on it names the place in the
samples, and the samples' indices. The place is found by collating the samples part by part.

Objects that cannot be pickled: pickle's error names a type. The error that is raised instead names
the item or attribute, which is found by pickling each.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.utils.data import default_collate

from shmloader.batch.failures import add_note, describe_index
from shmloader.batch.payload import Recorder, reduce_bulk, spawning
from shmloader.grammar import described_data, with_article
from shmloader.interruptions import Caught, Suppressed, attempt
from shmloader.memory.pickled import (
    PICKLE_ERRORS,
    OutOfBand,
    dump,
    pickle_batch,
    reducers_of_multiprocessing,
)

# How errors of torch's default_collate, torch.stack and numpy.stack begin that are about the
# samples themselves.
_COLLATE_ERRORS = (
    "stack expects each tensor to be equal size",
    "each element in list of batch should be of equal size",
    "all input arrays must have the same shape",
    "expected Tensor as element",
    "default_collate: batch must contain",
    "Could not infer dtype of ",
    "must be real number, not ",
    "new(): invalid data type ",
    "only one element tensors can be converted to Python scalars",
    "torch.cat(): input types can't be cast",
    "stack(): functions with out=... arguments don't support automatic",
)

_COLLATE_REMEDY = (
    "Give them one type, dtype and shape in the dataset, or a collate_fn= that does. "
    "(pad_sequence pads tensors, a transform makes tensors of images, detach() ends autograd.)"
)

# How many different kinds of samples a note names.
_SHOWN = 4


# Samples that cannot be collated ----------------------------------------------------------


def explain_collate_error(error: Exception, samples: Any, indices: Any) -> None:
    """Add a note to an exception of collating that is about the samples."""
    number = getattr(error, "shmloader_sample", None)
    if number is not None:  # the error is of shmloader.collate
        if _have_names(samples, indices):
            index = describe_index(indices[number])
            add_note(error, f"Sample {number} of the batch is index {index} of the dataset.")
        return
    is_known = type(error) in (RuntimeError, TypeError, ValueError)
    is_known = is_known and str(error).startswith(_COLLATE_ERRORS)
    if not isinstance(samples, list) or not (is_known or type(error) is KeyError):
        return
    with Suppressed(Exception):  # a container of the user's may raise anything
        found = _find_uncollatable(samples, "sample")
        if found is not None:
            text = f"In this batch, {found[0]} is {_describe(found[1], indices)}. "
            add_note(error, text + _COLLATE_REMEDY)


def _find_uncollatable(parts: list[Any], path: str) -> tuple[str, list[Any]] | None:
    """Return the innermost place where samples cannot be collated, and what they have there."""
    first, steps = parts[0], []
    if isinstance(first, Mapping):
        steps = [(f"[{key!r}]", key) for key in first]
    elif isinstance(first, Sequence) and not isinstance(first, str | bytes):
        names = getattr(first, "_fields", None)
        steps = [(f"[{at}]" if names is None else f".{names[at]}", at) for at in range(len(first))]
    try:
        inner = [(path + step, [part[key] for part in parts]) for step, key in steps]
        if not steps:
            default_collate(parts)
        elif len({len(part) for part in parts}) > 1 and not isinstance(first, Mapping):
            return path, parts
    except Exception:  # noqa: BLE001 - that is what is asked
        return path, parts
    found = (_find_uncollatable(column, place) for place, column in inner)
    return next((one for one in found if one is not None), None)


def _have_names(parts: Any, indices: Any) -> bool:
    """Whether each sample has an index. The indices of an iterable dataset are None."""
    is_known = isinstance(indices, Sequence) and len(indices) == len(parts)
    return is_known and indices[0] is not None


def _describe(parts: list[Any], indices: Any) -> str:
    """Return what some samples have: "a float32 Tensor of shape [3] for index 0; …"."""
    names = [f"sample {number}" for number in range(len(parts))]
    if _have_names(parts, indices):
        names = [f"index {describe_index(index)}" for index in indices]
    kinds: dict[str, str] = {}
    for part, name in zip(parts, names, strict=True):
        kinds.setdefault(described_data(part), name)
    return "; ".join(f"{kind} for {name}" for kind, name in list(kinds.items())[:_SHOWN])


# Objects that cannot be pickled -----------------------------------------------------------


#: A part that cannot be pickled: its path, such as "dataset.transforms", and the value.
Unpicklable = tuple[str, object]


def _dump_for_workers(value: object) -> None:
    with spawning(Recorder()):
        dump(value, reduce_bulk, reducers_of_multiprocessing(with_torch=True), by_value=True)


def find_unpicklable(
    objects: Sequence[object],
    names: Sequence[str],
    pickle_part: Callable[[Any], object] = _dump_for_workers,
) -> Unpicklable | None:
    """Return the part that cannot be pickled; None if each of the objects can be.

    ``names`` is what the user calls each of the objects, and ``pickle_part`` pickles as they were.
    Of such an object, the first item or attribute that cannot be pickled is returned.
    """
    for name, value in zip(names, objects, strict=False):
        if not isinstance(attempt(pickle_part, value), Caught):
            continue
        parts: Any = {}
        if isinstance(value, dict):
            parts = {f"[{describe_index(key)}]": part for key, part in value.items()}
        elif isinstance(value, list | tuple):
            parts = {f"[{number}]": part for number, part in enumerate(value)}
        elif isinstance(state := attempt(type(value).__getstate__, value), dict):
            parts = {f".{attribute}": part for attribute, part in state.items()}
        for step, part in parts.items():
            if isinstance(attempt(pickle_part, part), Caught):
                return name + step, part
        return name, value
    return None


def explain_unpicklable(
    error: Exception, found: Unpicklable | None, receiver: str, remedy: str
) -> Exception:
    """Return the exception to raise for objects that cannot be pickled.

    If ``error`` is an instance of a class in ``PICKLE_ERRORS``, it is a new exception of that
    class, whose text begins with the text of ``error``. Otherwise it is ``error`` itself, with a
    note.

    Args:
        error: What pickling raised.
        found: The part that cannot be pickled, if it was found.
        receiver: What the pickle was to be sent to, in words.
        remedy: What to do, as sentences.
    """
    where = "A part of the dataset, or of a function given to the loader,"
    if found is not None:
        where = f"{found[0]} (of type {_type_name(found[1])})"
    text = f"{where} cannot be pickled, so it cannot be sent to {receiver}. {remedy}"
    for kind in PICKLE_ERRORS:
        if isinstance(error, kind):
            return kind(f"{error}\n{text}")
    error.add_note(text)
    return error


def _type_name(value: object) -> str:
    kind = type(value)
    return f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")


def pickle_or_explain(batch: object) -> tuple[bytes, OutOfBand]:
    """Pickle a batch; raise a TypeError that names the part that cannot be pickled."""
    try:
        return pickle_batch(batch)
    except MemoryError:
        raise
    except Exception as error:
        path, part = find_unpicklable([batch], ["batch"], pickle_batch) or ("batch", batch)
        raise TypeError(
            f"a batch cannot be sent from its worker: {path} is {with_article(_type_name(part))} "
            f"and cannot be pickled ({type(error).__name__}: {error}). Return something picklable "
            "from the dataset or collate_fn."
        ) from error
