"""Finds the part of a dataset, a function or a batch that cannot be pickled.

Runs in the process that pickles, and only after pickling has failed. pickle says what type it could
not pickle, but not where that object is. So the objects are pickled one by one, then the parts of
the first one that fails, and so on.
"""

import copyreg
import functools
import inspect
import pickle
import time
import types
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

from shmloader.batch.payload import pickle_to
from shmloader.grammar import with_article
from shmloader.interruptions import is_interruption
from shmloader.memory.codec import pickle_batch
from shmloader.memory.pickled import PICKLE_ERRORS, OutOfBand, Pickler, batch_reducers, reduce_data

# How long the search may take. After that it returns the part that it has found so far.
_SEARCH_S = 3.0

# How deep the search goes. A path of more steps would say little.
_DEPTH = 16

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
    parts: Iterator[tuple[str, object]] = zip(names, objects, strict=False)
    for _ in range(_DEPTH):
        try:
            inner = next((part for part in parts if _fails(part[1], sink, pickle_to)), None)
        except Exception as error:
            # Either the time is up, or methods of the object failed when its parts were listed.
            if is_interruption(error):
                raise
            break
        if inner is None:
            break
        path = inner[0] if found is None else _joined(found.path, inner[0])
        found = Unpicklable(path, inner[1])
        parts = _parts_of(found.value)
    return found


def _fails(value: object, sink: _Sink, pickle_to: Callable[[Any, Any], None]) -> bool:
    try:
        pickle_to(value, sink)
    except _TimeUpError:
        raise
    except Exception as error:
        if is_interruption(error):
            raise
        return True
    return False


def _joined(path: str, step: str) -> str:
    if step.startswith((".", "[")):
        return f"({path}){step}" if " of " in path else f"{path}{step}"
    return f"{step} {path}"  # "variable 'client' of dataset.function"


def _parts_of(value: Any) -> Iterator[tuple[str, object]]:
    """Yield the parts that are pickled with a value, each with the step that leads to it."""
    kind = type(value)
    if kind is dict:
        yield from _items(value.items())
        yield from ((f"key {_short(key)} of", key) for key in value)
    elif kind is list or kind is tuple or (isinstance(value, tuple) and hasattr(kind, "_fields")):
        yield from ((f"[{number}]", part) for number, part in enumerate(value))
    elif kind in (set, frozenset):
        yield from (("an element of", part) for part in value)
    elif kind is types.FunctionType:
        yield from _variables(value)
    elif kind is types.MethodType:
        yield ".__self__", value.__self__
    elif kind is functools.partial:
        yield ".func", value.func
        yield ".args", value.args
        yield ".keywords", value.keywords
    elif not isinstance(value, type | types.ModuleType):
        yield from _reduced(value)


def _variables(function: types.FunctionType) -> Iterator[tuple[str, object]]:
    """Yield the variables that a function uses, and its defaults and attributes.

    cloudpickle pickles them with a function that cannot be imported by name.
    """
    names = inspect.getclosurevars(function)
    for variables in (names.nonlocals, names.globals):
        yield from ((f"variable {name!r} of", value) for name, value in variables.items())
    yield ".__defaults__", function.__defaults__
    yield ".__kwdefaults__", function.__kwdefaults__
    yield ".__dict__", function.__dict__


def _reduced(value: Any) -> Iterator[tuple[str, object]]:
    """Yield the parts that an object's reducer or its ``__reduce_ex__`` returns."""
    kind = type(value)
    reducers: Any = {**copyreg.dispatch_table, **ForkingPickler._extra_reducers}  # type: ignore[attr-defined]
    reduce = reducers.get(kind)
    reduced = value.__reduce_ex__(pickle.HIGHEST_PROTOCOL) if reduce is None else reduce(value)
    if isinstance(reduced, str):  # the name of a global
        return
    # The tuple may have only its first two items.
    every: list[Any] = [*reduced, None, None, None]
    function, args, state, items, pairs = every[:5]
    if state is not None:
        # Slots come as a second dict.
        slots = state[1] if type(state) is tuple and len(state) == 2 else None  # noqa: PLR2004
        attributes = state[0] if isinstance(slots, dict) else state
        if isinstance(attributes, dict):
            yield from _attributes(attributes)
        elif attributes is not None:
            yield ".__getstate__()", attributes
        if isinstance(slots, dict):
            yield from _attributes(slots)
    yield from ((f"[{number}]", part) for number, part in enumerate(items or ()))
    yield from _items(pairs or ())
    first = 1 if function is copyreg.__newobj__ else 0  # type: ignore[attr-defined]
    yield from ((f".__reduce__()[1][{at}]", args[at]) for at in range(first, len(args)))


def _attributes(state: dict[Any, Any]) -> Iterator[tuple[str, object]]:
    for name, value in state.items():
        is_name = isinstance(name, str) and name.isidentifier()
        yield (f".{name}" if is_name else f".__getstate__()[{_short(name)}]"), value


def _items(pairs: Any) -> Iterator[tuple[str, object]]:
    return ((f"[{_short(key)}]", value) for key, value in pairs)


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
    if found is None:
        where = "A part of the dataset, or of a function given to the loader,"
    else:
        kind = type(found.value)
        name = kind.__qualname__
        if kind.__module__ != "builtins":
            name = f"{kind.__module__}.{name}"
        where = f"{found.path} (of type {name})"
    text = f"{where} cannot be pickled, so it cannot be sent to {receiver}. {remedy}"
    for kind in PICKLE_ERRORS:
        if isinstance(error, kind):
            return kind(f"{error}\n{text}")
    error.add_note(text)
    return error


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

        found = find_unpicklable([batch], ["batch"], pickle_to=pickle_to)
        path, part = found or ("batch", batch)
        kind = f"{type(part).__module__}.{type(part).__qualname__}"
        raise TypeError(
            f"a batch cannot be sent from its worker: {path} is {with_article(kind)} and cannot be "
            f"pickled ({type(error).__name__}: {error}). Return something picklable from the "
            "dataset or collate_fn."
        ) from error
