"""What ``repr()`` of a loader shows: the dataset, and the arguments that are not the default."""

import contextlib
import inspect
import reprlib
from multiprocessing.context import BaseContext
from numbers import Number
from typing import Any

import torch
from torch.utils.data import default_collate, default_convert

# Shown in this order, first and in any case.
_ALWAYS = ("batch_size", "num_workers")

#: The attributes do not show which of these the user gave: torch makes samplers of its own.
ORDER_ARGUMENTS = ("shuffle", "sampler", "batch_sampler")

# Types whose values are shown by their repr.
_PLAIN = (Number, str)

_shortener = reprlib.Repr()
_shortener.maxother = _shortener.maxstring = 60


def describe_loader(loader: Any, order: tuple[str, ...]) -> str:
    """Return the loader as a call of its constructor, as its attributes are now.

    Args:
        loader: The loader. Its constructor may have raised, so attributes may be missing.
        order: Those of :data:`ORDER_ARGUMENTS` that the user gave.
    """
    ours = next(kind for kind in type(loader).__mro__ if kind.__module__ == "shmloader")
    parameters = inspect.signature(ours).parameters
    shown = [describe_source(getattr(loader, "dataset", None))]
    for name in dict.fromkeys((*_ALWAYS, *parameters)):
        default = parameters[name].default
        value = getattr(loader, name, default)
        if name in ORDER_ARGUMENTS:
            is_shown = name in order
            value = True if name == "shuffle" else value
        else:
            is_shown = name in _ALWAYS or not _is_default(loader, name, value, default)
        if is_shown and name != "dataset":
            shown.append(f"{name}={_describe_value(loader, name, value)}")
    return f"{type(loader).__name__}({', '.join(shown)})"


def _is_default(loader: Any, name: str, value: Any, default: Any) -> bool:
    """Return whether an attribute is what the constructor makes of the argument's default."""
    match name:
        case "collate_fn":
            usual = (None, default_collate, default_convert, getattr(loader, "batchify_fn", None))
            return any(value is one for one in usual)
        case "prefetch_factor":
            return value in (None, 2)  # torch's default if there are workers
        case "drop_last":
            return not value or getattr(loader, "last_batch", None) == "discard"
        case "rank" | "world_size":
            return getattr(loader, "world_size", 1) in (None, 1)
        case _:
            return value is None if default is None else bool(value == default)


def describe_source(source: object) -> str:
    """Return the type of a dataset, or of a pipeline's source, and its length if it has one."""
    length = None
    with contextlib.suppress(Exception):  # it may have no length, or not know it yet
        length = len(source)  # type: ignore[arg-type]
    name = type(source).__name__
    return f"<{name}>" if length is None else f"<{name} of length {length}>"


def _describe_value(loader: Any, name: str, value: object) -> str:
    if name == "num_workers" and getattr(loader, "_adapter", None) is not None:
        return f"'auto' ({value} now)"
    if value is None or isinstance(value, _PLAIN):
        return _shortener.repr(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(_describe_value(loader, '', one) for one in value)}]"
    if isinstance(value, torch.device):
        return repr(str(value))
    if isinstance(value, BaseContext):
        return repr(value.get_start_method())
    own = getattr(value, "__qualname__", None)
    return own if isinstance(own, str) else f"<{type(value).__name__}>"
