"""What an op is: which of four kinds, and what it is called."""

import enum
import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

from shmloader.probing import probe


class OpKind(enum.Enum):
    """How an op is called."""

    FUNCTION = "a function"
    GENERATOR = "a generator function"
    COROUTINE = "a coroutine function"
    ASYNC_GENERATOR = "an async generator function"

    @property
    def is_async(self) -> bool:
        """Whether it runs on the event loop."""
        return self in {OpKind.COROUTINE, OpKind.ASYNC_GENERATOR}

    @property
    def gives_many(self) -> bool:
        """Whether one item in may be many out."""
        return self in {OpKind.GENERATOR, OpKind.ASYNC_GENERATOR}


def kind_of(op: Callable[..., Any]) -> OpKind:
    """The kind of an op: a function, a bound method, a partial, or an object with ``__call__``."""
    while isinstance(op, functools.partial):
        op = op.func
    looked_at = [op]
    if not isinstance(op, type) and not inspect.isroutine(op):
        looked_at.append(type(op).__call__)
    for function in looked_at:
        if inspect.isasyncgenfunction(function):
            return OpKind.ASYNC_GENERATOR
        if inspect.iscoroutinefunction(function):
            return OpKind.COROUTINE
        if inspect.isgeneratorfunction(function):
            return OpKind.GENERATOR
    return OpKind.FUNCTION


def name_of(op: Callable[..., Any]) -> str:
    """What an op is called in texts, unless its stage has a name."""
    while isinstance(op, functools.partial):
        op = op.func
    name = probe(op, "__name__")
    return name if isinstance(name, str) else type(op).__name__


def refuse_coroutine(result: object, name: str) -> None:
    """Look at what an op has returned, or awaited.

    Args:
        result: It.
        name: The stage's.

    Raises:
        TypeError: If it is a coroutine.
    """
    if type(result) is types.CoroutineType:
        result.close()
        raise TypeError(
            f"the op of stage '{name}' returned a coroutine, which nobody would await: give an "
            "async def, and await there"
        )


def call_all(op: Callable[[Any], Any], item: Any) -> list[Any]:
    """All that a generator function gives for an item, but for None; where it runs elsewhere."""
    return [value for value in op(item) if value is not None]
