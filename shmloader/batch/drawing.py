"""Finds out which datasets draw no random numbers, so that no seed need be set for their samples.

In this module, *to draw* means to draw random numbers. Python does not tell when ``random``, numpy
or torch is used, so a proof is made in advance. A dataset of the user's draws nothing if its
``__getitem__`` only looks up, such as ``return self.images[index], self.labels[index]``. Its
bytecode is followed with the dataset's present attributes and an unknown index. Each step has to be
one of a few that are known to run no code of the user's:

* reading an attribute of the dataset from its ``__dict__`` or a slot, or a plain value from its
  class;
* indexing or slicing a list, tuple, dict, str, range, array or tensor, a list or dict of
  :func:`share` that unpickles nothing, or another dataset that draws nothing;
* building tuples, lists and dicts, and arithmetic with numbers, arrays and tensors;
* an ``if`` whose outcome is certain, such as ``if self.transform is not None`` where
  ``self.transform`` is None;
* ``len``, and conversions of numbers and arrays such as ``int``, ``torch.from_numpy`` and
  ``Tensor.float``.

Anything else may draw: any other call, opcode or jump, a property, ``__getattr__``,
``__getattribute__`` or ``__getitems__``, and a subclass of a container. An item of a list may only
be returned or used as a key; any other use of it may draw.

Guarantees:
    * What the proof has read is compared before each batch (:meth:`Proof.holds`). So a
      ``transform`` or a list that is assigned in mid-epoch is noticed at the next batch.
    * No code of the user's is called, either to find a proof or to compare.

Assumes:
    * Using an object as an index or a key draws nothing, even if the object's class is the user's.
    * While an epoch runs, no class gains a property or an ``__getattr__``, and torch's own datasets
      keep their parts. torch and numpy are not patched, and no mode of torch's that draws is
      active.

The module is long because each opcode that a proof may contain has a method of its own.
"""

import abc
import dis
import enum
import functools
import inspect
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from shmloader.batch.arrays import is_plain_data
from shmloader.interruptions import is_interruption
from shmloader.shared.arrays import SharedArray
from shmloader.shared.containers import SharedDict, SharedList

# A dataset for which more values have to be compared before each batch counts as one that may draw.
_MOST_READS = 100

_ARRAYS = (np.ndarray, np.memmap, SharedArray)
_CONTAINERS = (list, tuple, dict, str, bytes, range)
_NUMBERS = (int, float, complex, bool)
_CONSTANTS = (*_NUMBERS, str, bytes, slice, types.NoneType, types.EllipsisType)

# Functions whose results are numbers, arrays or tensors if their arguments are.
_CONVERTERS = (
    *(int, float, bool),
    *(np.array, np.asarray, np.ascontiguousarray),
    *(torch.tensor, torch.as_tensor, torch.from_numpy),
)
# Methods of numbers, arrays and tensors of which the same is true.
_CONVERTING = frozenset(
    (
        *("astype", "clone", "contiguous", "copy", "float", "int", "item", "long", "numpy"),
        *("permute", "reshape", "to", "transpose", "unsqueeze", "view"),
    )
)

_OTHER_ARGUMENTS = (
    inspect.CO_VARARGS
    | inspect.CO_VARKEYWORDS
    | inspect.CO_GENERATOR
    | inspect.CO_COROUTINE
    | inspect.CO_ITERABLE_COROUTINE
    | inspect.CO_ASYNC_GENERATOR
)


class _MayDraw(Exception):  # noqa: N818 - never leaves this module
    """A step may run code of the user's."""


class _Unknown(enum.Enum):
    """A value that is not known before the code runs."""

    #: An index, or what is used like one: a slice or a tuple of indices.
    INDEX = enum.auto()
    #: A number, array or tensor, or a scalar of numpy's; not an object of a subclass.
    NUMBERS = enum.auto()
    #: Any object.
    OTHER = enum.auto()
    #: The NULL that Python puts on the stack beside a function that it calls.
    NULL = enum.auto()
    #: A method of NUMBERS whose name is in ``_CONVERTING``.
    METHOD = enum.auto()


class _Known(NamedTuple):
    """A value that is known before the code runs."""

    value: Any


_Value = _Known | _Unknown


class Proof:
    """The values that were read to prove that a dataset draws nothing."""

    def __init__(self) -> None:
        self._reads: list[tuple[Callable[[Any], object], object, object]] = []
        # The types and the attributes of the objects that were read, keyed by id(); the reads keep
        # the objects alive.
        self._types: dict[int, type] = {}
        self._attributes: dict[int, dict[str, Any]] = {}

    @property
    def is_lasting(self) -> bool:
        """Whether the dataset runs no code of the user's at all, so that nothing was read."""
        return not self._reads

    def read(self, get: Callable[[Any], Any], key: object) -> Any:
        """Return ``get(key)``. The proof holds as long as this returns the same object.

        Raises:
            _MayDraw: If there is no such value, or too much was read.
        """
        try:
            value = get(key)
        except (AttributeError, LookupError, TypeError) as error:
            if is_interruption(error):
                raise
            raise _MayDraw from error
        if len(self._reads) == _MOST_READS:
            raise _MayDraw
        self._reads.append((get, key, value))
        return value

    def read_type(self, owner: object) -> type:
        """Return the class of an object, as :meth:`read` does."""
        if id(owner) not in self._types:
            self._types[id(owner)] = self.read(type, owner)
        return self._types[id(owner)]

    def read_attributes(self, owner: object) -> dict[str, Any]:
        """Return the ``__dict__`` of an object, as :meth:`read` does.

        The object's class has passed :func:`_usual_type`.
        """
        if id(owner) not in self._attributes:
            get = functools.partial(object.__getattribute__, owner)
            self._attributes[id(owner)] = self.read(get, "__dict__")
            if type(self._attributes[id(owner)]) is not dict:
                raise _MayDraw
        return self._attributes[id(owner)]

    def holds(self) -> bool:
        """Whether all values that were read are still the same objects."""
        try:
            for get, key, value in self._reads:
                if get(key) is not value:
                    return False
        except (AttributeError, LookupError, TypeError) as error:
            if is_interruption(error):
                raise
            return False
        return True


def prove(dataset: object) -> Proof | None:
    """Prove that loading a sample of a map-style dataset draws nothing; None if it may draw."""
    proof = Proof()
    try:
        return proof if is_plain_data(dataset, functools.partial(_look_up, proof)) else None
    except _MayDraw:
        return None


def _look_up(proof: Proof, dataset: object) -> bool:
    """Return True if the code of a dataset's ``__getitem__`` draws nothing, or raise _MayDraw."""
    kind = _usual_type(proof, dataset)
    if _has(kind, "__getattr__") or _has(kind, "__getitems__"):
        raise _MayDraw
    if _has(kind, "__dict__") and proof.read(
        proof.read_attributes(dataset).__contains__, "__getitems__"
    ):
        raise _MayDraw
    function = proof.read(functools.partial(_of_class, kind), "__getitem__")
    if type(function) is not types.FunctionType:
        raise _MayDraw
    proof.read(function.__getattribute__, "__code__")
    _Reading(proof, function, dataset).run()
    return True


_ABSENT = object()


def _of_class(kind: type, name: str) -> Any:
    """Return a name's value from the first class that has it, in the order of lookup.

    Returns ``_ABSENT`` if neither the class nor a base has the name.
    """
    for base in type.__dict__["__mro__"].__get__(kind):
        found = type.__dict__["__dict__"].__get__(base).get(name, _ABSENT)
        if found is not _ABSENT:
            return found
    return _ABSENT


def _has(kind: type, name: str) -> bool:
    return _of_class(kind, name) is not _ABSENT


def _usual_type(proof: Proof, owner: object) -> type:
    """Return the class of an object.

    Raises:
        _MayDraw: If the class has a ``__getattribute__`` or a metaclass of its own.
    """
    kind = proof.read_type(owner)
    is_usual = type(kind) in (type, abc.ABCMeta)
    if not is_usual or _of_class(kind, "__getattribute__") is not object.__getattribute__:
        raise _MayDraw
    return kind


def _attribute(proof: Proof, owner: object, name: str) -> Any:
    """Return an attribute that is read without running code of the user's.

    Raises:
        _MayDraw: If reading it may run code of the user's.
    """
    if type(owner) is types.ModuleType:
        return proof.read(vars(owner).__getitem__, name)
    kind = _usual_type(proof, owner)
    found = _of_class(kind, name)
    if type(found) is types.MemberDescriptorType:  # a slot
        return proof.read(functools.partial(object.__getattribute__, owner), name)
    if _has(type(found), "__set__") or _has(type(found), "__delete__"):
        raise _MayDraw
    attributes = proof.read_attributes(owner)
    if name in attributes:
        return proof.read(attributes.__getitem__, name)
    if found is _ABSENT or _has(type(found), "__get__"):
        raise _MayDraw
    proof.read(attributes.__contains__, name)
    return proof.read(functools.partial(_of_class, kind), name)


class _Code(NamedTuple):
    """A function's code: its instructions, and each instruction's number by its offset."""

    instructions: list[dis.Instruction]
    at_offset: dict[int, int]


@functools.lru_cache(maxsize=256)
def _code_of(code: types.CodeType) -> _Code:
    # The instructions as compiled, not as tracers have patched or the interpreter specialized them.
    instructions = list(dis.get_instructions(code))
    return _Code(instructions, {each.offset: at for at, each in enumerate(instructions)})


class _Reading:
    """Follows the code of one ``__getitem__``, with an unknown index."""

    def __init__(self, proof: Proof, function: types.FunctionType, dataset: object) -> None:
        code = function.__code__
        has_more = code.co_kwonlyargcount or code.co_freevars or code.co_cellvars
        if code.co_argcount != 2 or has_more or code.co_flags & _OTHER_ARGUMENTS:  # noqa: PLR2004
            raise _MayDraw
        if code.co_exceptiontable:
            raise _MayDraw
        self._proof = proof
        self._function = function
        self._code = _code_of(code)
        self._next = 0
        own, index = code.co_varnames[:2]
        self._variables: dict[str, _Value] = {own: _Known(dataset), index: _Unknown.INDEX}
        self._stack: list[_Value] = []

    def run(self) -> None:
        """Follow the code to its end.

        Raises:
            _MayDraw: If a step may run code of the user's.
        """
        instructions = self._code.instructions
        while instructions[self._next].opname not in ("RETURN_VALUE", "RETURN_CONST"):
            instruction = instructions[self._next]
            self._next += 1
            step = _STEPS.get(instruction.opname)
            if step is None:
                raise _MayDraw
            step(self, instruction)

    def _push(self, value: Any) -> None:
        self._stack.append(value)

    def _pop(self, count: int) -> list[_Value]:
        """Remove the topmost values; the last one was on top."""
        first = len(self._stack) - count
        if first < 0:
            raise _MayDraw
        values = self._stack[first:]
        del self._stack[first:]
        return values

    # Opcodes -----------------------------------------------------------------------------

    def skip(self, _: dis.Instruction) -> None:
        """Do nothing."""

    def load_fast(self, instruction: dis.Instruction) -> None:
        for name in _names(instruction):
            self._load(name)

    def _load(self, name: str) -> None:
        if name not in self._variables:
            raise _MayDraw
        self._push(self._variables[name])

    def store_fast(self, instruction: dis.Instruction) -> None:
        for name in _names(instruction):
            (self._variables[name],) = self._pop(1)

    def store_and_load(self, instruction: dis.Instruction) -> None:
        stored, loaded = _names(instruction)
        (self._variables[stored],) = self._pop(1)
        self._load(loaded)

    def load_const(self, instruction: dis.Instruction) -> None:
        self._push(_Known(instruction.argval))

    def load_global(self, instruction: dis.Instruction) -> None:
        name, mapping = instruction.argval, self._function.__globals__
        if type(mapping) is not dict:
            raise _MayDraw
        if name not in mapping:
            self._proof.read(mapping.__contains__, name)
            # getattr, since not every version of the stubs has it
            mapping = getattr(self._function, "__builtins__")  # noqa: B009
            if type(mapping) is not dict:
                raise _MayDraw
        if (instruction.arg or 0) & 1:
            self._push(_Unknown.NULL)
        self._push(_Known(self._proof.read(mapping.__getitem__, name)))

    def load_attr(self, instruction: dis.Instruction) -> None:
        # In Python 3.11, the lowest bit belongs to the number of the name.
        is_method = sys.version_info >= (3, 12) and bool((instruction.arg or 0) & 1)
        self._load_attribute(instruction.argval, is_method=is_method)

    def load_method(self, instruction: dis.Instruction) -> None:
        self._load_attribute(instruction.argval, is_method=True)

    def _load_attribute(self, name: str, *, is_method: bool) -> None:
        (owner,) = self._pop(1)
        if isinstance(owner, _Known):
            if is_method:
                self._push(_Unknown.NULL)
            self._push(_Known(_attribute(self._proof, owner.value, name)))
            return
        if not is_method or owner is not _Unknown.NUMBERS or name not in _CONVERTING:
            raise _MayDraw
        self._stack += [_Unknown.METHOD, owner]

    def push_null(self, _: dis.Instruction) -> None:
        self._push(_Unknown.NULL)

    def pop_top(self, _: dis.Instruction) -> None:
        self._pop(1)

    def swap(self, instruction: dis.Instruction) -> None:
        between = self._pop(instruction.argval)
        between[0], between[-1] = between[-1], between[0]
        self._stack += between

    def build(self, instruction: dis.Instruction) -> None:
        parts = self._pop(instruction.argval)
        is_key = instruction.opname != "BUILD_LIST" and all(map(_is_key, parts))
        self._push(_Unknown.INDEX if is_key else _Unknown.OTHER)

    def build_map(self, instruction: dis.Instruction) -> None:
        self._check_keys(self._pop(2 * instruction.argval)[::2])
        self._push(_Unknown.OTHER)

    def build_const_key_map(self, instruction: dis.Instruction) -> None:
        self._pop(1)  # the keys, which are constants
        self._pop(instruction.argval)
        self._push(_Unknown.OTHER)

    @staticmethod
    def _check_keys(keys: list[_Value]) -> None:
        if not all(isinstance(key, _Known) and type(key.value) in _CONSTANTS for key in keys):
            raise _MayDraw

    def binary_op(self, instruction: dis.Instruction) -> None:
        if instruction.argrepr == "[]":  # since Python 3.14
            self.binary_subscr(instruction)
            return
        operands = self._pop(2)
        if not all(each is _Unknown.INDEX or _is_numeric(each) for each in operands):
            raise _MayDraw
        is_index = all(map(_is_key, operands)) and _Unknown.NUMBERS not in operands
        self._push(_Unknown.INDEX if is_index else _Unknown.NUMBERS)

    def binary_subscr(self, _: dis.Instruction) -> None:
        owner, key = self._pop(2)
        self._push(self._item(owner, key))

    def binary_slice(self, _: dis.Instruction) -> None:
        owner, start, stop = self._pop(3)
        if not (_is_key(start) and _is_key(stop)):
            raise _MayDraw
        self._push(self._item(owner, _Unknown.INDEX))

    def jump(self, instruction: dis.Instruction) -> None:
        """Jump forward. Raises _MayDraw for a jump backward, which might never reach the end."""
        target = self._code.at_offset.get(instruction.argval, -1)
        if target < self._next:
            raise _MayDraw
        self._next = target

    def to_bool(self, _: dis.Instruction) -> None:
        (value,) = self._pop(1)
        self._push(_Known(_truth(value)))

    def jump_if(self, instruction: dis.Instruction) -> None:
        (value,) = self._pop(1)
        if instruction.opname.endswith("NONE"):
            if not isinstance(value, _Known):
                raise _MayDraw
            is_wanted = (value.value is None) != instruction.opname.endswith("NOT_NONE")
        else:
            is_wanted = _truth(value) == instruction.opname.endswith("TRUE")
        if is_wanted:
            self.jump(instruction)

    def call(self, instruction: dis.Instruction) -> None:
        arguments = self._pop(instruction.argval)
        called = self._pop(2)
        if _Unknown.METHOD in called:
            self._check_arguments(arguments)
            self._push(_Unknown.NUMBERS)
            return
        # Where the NULL is depends on Python's version.
        called = [each for each in called if each is not _Unknown.NULL]
        if len(called) != 1 or not isinstance(called[0], _Known):
            raise _MayDraw
        function = called[0].value
        if function is len:
            if len(arguments) != 1 or not _has_length(arguments[0]):
                raise _MayDraw
            self._push(_Unknown.INDEX)
            return
        if not any(function is each for each in _CONVERTERS):
            raise _MayDraw
        self._check_arguments(arguments)
        self._push(_Unknown.NUMBERS)

    def call_kw(self, instruction: dis.Instruction) -> None:
        self._pop(1)  # the keywords, which are constants
        self.call(instruction)

    @staticmethod
    def _check_arguments(arguments: list[_Value]) -> None:
        if not all(_is_key(each) or _is_numeric(each) or _is_dtype(each) for each in arguments):
            raise _MayDraw

    # Items -------------------------------------------------------------------------------

    def _item(self, owner: _Value, key: _Value) -> _Value:
        """Return what an object has under a key."""
        if owner is _Unknown.NUMBERS and _is_key(key):
            return _Unknown.NUMBERS
        if not isinstance(owner, _Known):
            raise _MayDraw
        container = owner.value
        kind = self._proof.read_type(container)
        if kind in _ARRAYS or kind is torch.Tensor:
            if not _is_key(key):
                raise _MayDraw
            return _Unknown.NUMBERS if _is_numeric(owner) else _Unknown.OTHER
        if kind in (list, tuple, dict) and isinstance(key, _Known):
            if type(key.value) not in _CONSTANTS or type(key.value) is slice:
                raise _MayDraw
            return _Known(self._proof.read(container.__getitem__, key.value))
        if not (_is_key(key) or key is _Unknown.OTHER):
            raise _MayDraw
        is_read_only = kind in (SharedList, SharedDict) and container.is_simple
        if not (kind in _CONTAINERS or is_read_only):
            # It may be a dataset that draws nothing when it is indexed.
            if key is not _Unknown.INDEX:
                raise _MayDraw
            if not is_plain_data(container, functools.partial(_look_up, self._proof)):
                raise _MayDraw
        return _Unknown.OTHER


def _names(instruction: dis.Instruction) -> tuple[str, ...]:
    """Return the names of an instruction's variables; since Python 3.13 there may be two."""
    names = instruction.argval
    return names if isinstance(names, tuple) else (names,)


def _is_key(value: _Value) -> bool:
    """Whether a value selects items of an array without code of the user's."""
    if isinstance(value, _Known):
        return type(value.value) in _CONSTANTS
    return value in (_Unknown.INDEX, _Unknown.NUMBERS)


def _is_numeric(value: _Value) -> bool:
    if not isinstance(value, _Known):
        return value is _Unknown.NUMBERS
    kind = type(value.value)
    if kind in _ARRAYS:
        return not value.value.dtype.hasobject
    return kind in _NUMBERS or kind is torch.Tensor


def _is_dtype(value: _Value) -> bool:
    if not isinstance(value, _Known):
        return False
    if type(value.value) is type:
        return value.value in (int, float, bool) or issubclass(value.value, np.generic)
    return isinstance(value.value, torch.dtype | np.dtype)


def _has_length(value: _Value) -> bool:
    if not isinstance(value, _Known):
        return value is _Unknown.NUMBERS
    return type(value.value) in (*_CONTAINERS, *_ARRAYS, torch.Tensor, SharedList, SharedDict)


def _truth(value: _Value) -> bool:
    """Return what an ``if`` decides; raises _MayDraw if that is not certain."""
    if not isinstance(value, _Known) or type(value.value) not in (*_NUMBERS, types.NoneType):
        raise _MayDraw
    return bool(value.value)


# The opcodes of Python 3.11 to 3.14 that can be followed. Any other may draw.
_STEPS: Mapping[str, Callable[[_Reading, dis.Instruction], None]] = {
    **dict.fromkeys(
        ("RESUME", "NOP", "CACHE", "EXTENDED_ARG", "PRECALL", "KW_NAMES", "NOT_TAKEN"),
        _Reading.skip,
    ),
    **dict.fromkeys(
        (
            *("LOAD_FAST", "LOAD_FAST_CHECK", "LOAD_FAST_BORROW"),
            *("LOAD_FAST_LOAD_FAST", "LOAD_FAST_BORROW_LOAD_FAST_BORROW"),
        ),
        _Reading.load_fast,
    ),
    "STORE_FAST": _Reading.store_fast,
    "STORE_FAST_STORE_FAST": _Reading.store_fast,
    "STORE_FAST_LOAD_FAST": _Reading.store_and_load,
    "LOAD_CONST": _Reading.load_const,
    "LOAD_SMALL_INT": _Reading.load_const,
    "LOAD_GLOBAL": _Reading.load_global,
    "LOAD_ATTR": _Reading.load_attr,
    "LOAD_METHOD": _Reading.load_method,
    "PUSH_NULL": _Reading.push_null,
    "POP_TOP": _Reading.pop_top,
    "SWAP": _Reading.swap,
    "BUILD_TUPLE": _Reading.build,
    "BUILD_LIST": _Reading.build,
    "BUILD_SLICE": _Reading.build,
    "BUILD_MAP": _Reading.build_map,
    "BUILD_CONST_KEY_MAP": _Reading.build_const_key_map,
    "BINARY_OP": _Reading.binary_op,
    "BINARY_SUBSCR": _Reading.binary_subscr,
    "BINARY_SLICE": _Reading.binary_slice,
    "JUMP_FORWARD": _Reading.jump,
    **{
        f"POP_JUMP_{direction}IF_{condition}": _Reading.jump_if
        for direction in ("", "FORWARD_")
        for condition in ("NONE", "NOT_NONE", "TRUE", "FALSE")
    },
    "TO_BOOL": _Reading.to_bool,
    "CALL": _Reading.call,
    "CALL_KW": _Reading.call_kw,
}
