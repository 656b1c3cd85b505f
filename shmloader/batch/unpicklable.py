"""Finds the part of a dataset, a function or a batch that cannot be pickled.

Runs in the process that pickles, and only after pickling has failed. pickle says what type it could
not pickle, but not where that object is. So the objects are pickled one by one, then the parts of
the first one that fails, and so on.
"""

import functools
import inspect
import pickle
import time
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from shmloader.batch.payload import pickle_to
from shmloader.grammar import with_article
from shmloader.interruptions import Caught, attempt
from shmloader.memory.codec import pickle_batch
from shmloader.memory.pickled import PICKLE_ERRORS, OutOfBand, Pickler, batch_reducers, reduce_data

# How long the search may take. After that it returns the part that it has found so far.
_SEARCH_S = 3.0

# How deep the search goes. A path of more steps would say little.
_DEPTH = 16

# The attributes that are pickled with objects whose reduction does not name them.
_ATTRIBUTES = {
    types.FunctionType: ("__defaults__", "__kwdefaults__", "__dict__"),
    types.MethodType: ("__self__",),
    functools.partial: ("func", "args", "keywords"),
}

# How much of a key's text a path shows.
_KEY_CHARACTERS = 60


class Unpicklable(NamedTuple):
    """A part that cannot be pickled.

    Attributes:
        path: Where the part is, such as "dataset.transforms[2].client".
        value: The part.
    """

    path: str
    value: object


class _TimeUpError(Exception):
    """The search has taken too long."""


class _Sink:
    """A file that drops what is written to it, and raises once the time is up."""

    def __init__(self, deadline: float) -> None:
        self._deadline = deadline

    def write(self, data: Any) -> int:
        if time.monotonic() > self._deadline:
            raise _TimeUpError
        return memoryview(data).nbytes


def find_unpicklable(
    objects: Sequence[object],
    names: Sequence[str],
    search_s: float = _SEARCH_S,
    pickle_to: Callable[[Any, Any], None] = pickle_to,
) -> Unpicklable | None:
    """Return the innermost part that cannot be pickled, as far as it is found in time.

    Args:
        objects: The objects that could not be pickled together.
        names: What the user calls each of the objects.
        search_s: The longest search, in seconds.
        pickle_to: Pickles a value into a file, as it was tried for all of them.

    Returns:
        None if each of the objects can be pickled by itself, or if the time was up before any of
        them failed.
    """
    sink = _Sink(time.monotonic() + search_s)
    found: Unpicklable | None = None
    parts: Any = list(zip(names, objects, strict=False))
    for _ in range(_DEPTH):
        failed = None
        for step, part in parts:
            outcome = attempt(pickle_to, part, sink)
            if isinstance(outcome, Caught):
                if isinstance(outcome.error, _TimeUpError):
                    return found
                failed = step, part
                break
        if failed is None:
            break
        step, part = failed
        found = Unpicklable(step if found is None else _joined(found.path, step), part)
        parts = attempt(lambda whole: list(_parts_of(whole)), part)
        if isinstance(parts, Caught):  # methods of the object failed
            break
    return found


def _joined(path: str, step: str) -> str:
    if step.startswith((".", "[")):
        return f"({path}){step}" if " of " in path else f"{path}{step}"
    return f"{step} {path}"  # "variable 'client' of dataset.function"


def _parts_of(value: Any) -> Iterator[tuple[str, object]]:
    """Yield the parts that are pickled with a value, each with the step that leads to it."""
    if isinstance(value, dict):
        yield from _items(value)
        yield from ((f"key {_short(key)} of", key) for key in value)
    elif isinstance(value, list | tuple):
        yield from ((f"[{number}]", part) for number, part in enumerate(value))
    elif isinstance(value, set | frozenset):
        yield from (("an element of", part) for part in value)
    elif isinstance(value, types.FunctionType):
        # cloudpickle pickles these with a function that cannot be imported by name.
        names = inspect.getclosurevars(value)
        for variables in (names.nonlocals, names.globals):
            yield from ((f"variable {name!r} of", part) for name, part in variables.items())
    for name in _ATTRIBUTES.get(type(value), ()):
        yield f".{name}", getattr(value, name)
    if not isinstance(value, (type, types.ModuleType, *_ATTRIBUTES)):
        yield from _reduced(value)


def _reduced(value: Any) -> Iterator[tuple[str, object]]:
    """Yield the parts that an object's ``__reduce_ex__`` returns."""
    reduced = value.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    if isinstance(reduced, str):  # the name of a global
        return
    _, args, state = (*reduced, None)[:3]  # the tuple may have only its first two items
    # Slots come as a second dict.
    states = state if type(state) is tuple and len(state) == 2 else (state,)  # noqa: PLR2004
    for one in states:
        if isinstance(one, dict):
            for name, part in one.items():
                is_name = isinstance(name, str) and name.isidentifier()
                yield (f".{name}" if is_name else f".__getstate__()[{_short(name)}]"), part
        elif one is not None:
            yield ".__getstate__()", one
    yield from ((f".__reduce__()[1][{at}]", part) for at, part in enumerate(args))


def _items(pairs: dict[Any, Any]) -> Iterator[tuple[str, object]]:
    return ((f"[{_short(key)}]", value) for key, value in pairs.items())


def _short(key: object) -> str:
    text = repr(key)
    return text if len(text) <= _KEY_CHARACTERS else f"{text[:_KEY_CHARACTERS]}…"


def explain(error: Exception, found: Unpicklable | None, receiver: str, remedy: str) -> Exception:
    """Return the exception to raise for objects that cannot be pickled.

    Args:
        error: What pickling raised.
        found: The part that cannot be pickled, if it was found.
        receiver: What the pickle was to be sent to, in words.
        remedy: What to do, as sentences.

    Returns:
        If ``error`` is an instance of a class in ``PICKLE_ERRORS``, a new exception of that class,
        whose text begins with the text of ``error``. Otherwise ``error`` itself, with a note.
    """
    where = "A part of the dataset, or of a function given to the loader,"
    if found is not None:
        where = f"{found.path} (of type {_type_name(found.value)})"
    text = f"{where} cannot be pickled, so it cannot be sent to {receiver}. {remedy}"
    for kind in PICKLE_ERRORS:
        if isinstance(error, kind):
            return kind(f"{error}\n{text}")
    error.add_note(text)
    return error


def _type_name(value: object) -> str:
    kind = type(value)
    return f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")


def pickle_or_explain(batch: object, *, by_value: bool) -> tuple[bytes, OutOfBand]:
    """Pickle a batch; see :func:`pickle_batch`.

    Raises:
        TypeError: If part of the batch cannot be pickled; names that part.
        MemoryError: If there is no memory for that.
    """
    try:
        return pickle_batch(batch, by_value=by_value)
    except MemoryError:
        raise
    except Exception as error:

        def pickle_to(value: object, file: Any) -> None:
            Pickler(file, reduce_data, OutOfBand(), batch_reducers(), by_value=by_value).dump(value)

        path, part = find_unpicklable([batch], ["batch"], pickle_to=pickle_to) or ("batch", batch)
        raise TypeError(
            f"a batch cannot be sent from its worker: {path} is {with_article(_type_name(part))} "
            f"and cannot be pickled ({type(error).__name__}: {error}). Return something picklable "
            "from the dataset or collate_fn."
        ) from error
