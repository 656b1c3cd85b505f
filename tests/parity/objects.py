"""Things that can be in a batch, each made from a number."""

# ruff: noqa: PLW0108 - "lambda: x.to_sparse()" is what quietly() calls

import array
import collections
import dataclasses
import datetime as dt
import decimal
import enum
import fractions
import io
import pathlib
import types
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch


class Point(NamedTuple):
    x: Any
    y: Any


@dataclasses.dataclass
class Record:
    name: str
    values: torch.Tensor
    array: np.ndarray
    inner: Any = None


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    number: int
    tensor: torch.Tensor


class Plain:
    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


class Slotted:
    __slots__ = ("left", "right")

    def __init__(self, left: Any, right: Any) -> None:
        self.left = left
        self.right = right


class Reduced:
    """Pickles by calling its class."""

    def __init__(self, tensor: torch.Tensor, label: str) -> None:
        self.tensor = tensor
        self.label = label

    def __reduce__(self) -> tuple[Any, ...]:
        return Reduced, (self.tensor, self.label)


class Stateful:
    """Pickles by __getstate__ and __setstate__."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.rebuilt = False

    def __getstate__(self) -> tuple[int, torch.Tensor]:
        return self.number, torch.tensor([self.number])

    def __setstate__(self, state: tuple[int, torch.Tensor]) -> None:
        self.number = state[0]
        self.rebuilt = bool(state[1] == self.number)


class Settings(Mapping[str, Any]):
    """A mapping that is not mutable and is made from a dict."""

    def __init__(self, content: dict[str, Any]) -> None:
        self.content = dict(content)

    def __getitem__(self, key: str) -> Any:
        return self.content[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.content)

    def __len__(self) -> int:
        return len(self.content)


class Stubborn(Mapping[str, Any]):
    """A mapping that cannot be made from a dict."""

    def __init__(self, *, left: Any, right: Any) -> None:
        self.pair = (left, right)

    def __getitem__(self, key: str) -> Any:
        return self.pair[("left", "right").index(key)]

    def __iter__(self) -> Iterator[str]:
        return iter(("left", "right"))

    def __len__(self) -> int:
        return 2


class Tagged(dict[str, Any]):
    """A dict with an attribute."""

    tag: str = "none"


class Row(list[Any]):
    """A list with an attribute."""

    tag: str = "none"


class Fixed(Sequence[Any]):
    """A sequence that is not mutable and is made from a list."""

    def __init__(self, items: Sequence[Any]) -> None:
        self.items = tuple(items)

    def __getitem__(self, index: Any) -> Any:
        return self.items[index]

    def __len__(self) -> int:
        return len(self.items)


class Interval(Sequence[Any]):
    """A sequence that cannot be made from a list."""

    def __init__(self, start: int, stop: int) -> None:
        self.start = start
        self.stop = stop

    def __getitem__(self, index: int) -> int:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self.start + index

    def __len__(self) -> int:
        return self.stop - self.start


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


class Image(torch.Tensor):
    """A tensor subclass with an attribute."""

    @staticmethod
    def named(tensor: torch.Tensor, name: str) -> "Image":
        image = tensor.as_subclass(Image)
        image.name_of_image = name  # type: ignore[attr-defined]
        return image


class Tagged8(np.ndarray):
    """An array subclass."""


def quietly(make: Callable[[], Any]) -> Any:
    """Sparse and nested tensors warn that they are young."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make()


def let(value: Any, make: Callable[[Any], Any]) -> Any:
    """What is made of a value that is needed more than once."""
    return make(value)


def floats(*shape: int, start: float = 0.0) -> torch.Tensor:
    count = int(np.prod(shape))
    return (torch.arange(count, dtype=torch.float32) / 3 + start).reshape(shape)


STRUCTURE = np.dtype([("id", "<i4"), ("xy", "<f8", (2,)), ("tag", "S3"), ("deep", [("k", "u1")])])


def structured(n: int) -> np.ndarray:
    out = np.zeros(3, STRUCTURE)
    out["id"] = [n, n + 1, n + 2]
    out["xy"] = n / 7
    out["tag"] = [b"ab", b"", b"xyz"]
    out["deep"]["k"] = n
    return out


def object_array(n: int) -> np.ndarray:
    out = np.empty(4, dtype=object)
    out[:] = [n, "text", None, Point(n, [n])]
    return out


def read_only(n: int) -> np.ndarray:
    out = np.arange(n + 4)
    out.setflags(write=False)
    return out


def with_grad(n: int) -> torch.Tensor:
    tensor = torch.full((2,), float(n), requires_grad=True)
    tensor.grad = torch.ones(2)
    return tensor


def cyclic(n: int) -> list[Any]:
    out: list[Any] = [n, floats(2)]
    out.append(out)
    return out


def nan_with_payload() -> torch.Tensor:
    bits = torch.tensor([0x7FC00000, 0x7FC00123, -0x3FFEDD], dtype=torch.int32)
    return bits.view(torch.float32)


DTYPES = [
    *(torch.bool, torch.uint8, torch.int16, torch.uint16, torch.float16, torch.bfloat16),
    *(torch.complex64, torch.float64, torch.int8, torch.int32, torch.uint32, torch.int64),
    *(torch.uint64, torch.float32, torch.complex32, torch.complex128, torch.float8_e4m3fn),
    torch.float8_e5m2,
]
WHOLE: dict[str, Callable[[int], Any]] = {
    # plain Python
    "None": lambda n: None,
    "a bool": lambda n: n % 2 == 0,
    "an int": lambda n: n,
    "a huge int": lambda n: 10**400 + n,
    "a float": lambda n: n / 3,
    "special floats": lambda n: [float("nan"), float("inf"), -0.0, 5e-324],
    "a complex number": lambda n: complex(n, -0.0),
    "a string": lambda n: f"batch {n} \0 \N{GREEK SMALL LETTER PI} \N{SNOWMAN}",
    "a lone surrogate": lambda n: "\ud800",
    "an empty string": lambda n: "",
    "bytes": lambda n: bytes(range(n, n + 20)),
    "a megabyte of bytes": lambda n: bytes([n]) * 2**20,
    "ten megabytes of text": lambda n: str(n) * 10_000_000,
    "a bytearray": lambda n: bytearray(b"abc" * (n + 1)),
    "an array.array": lambda n: array.array("d", [n, n / 3]),
    "a set and a frozenset": lambda n: ({n, 1, 2}, frozenset({(n, "x")})),
    "a range and a slice": lambda n: (range(n, 9), slice(1, n, None)),
    "Ellipsis and NotImplemented": lambda n: [..., NotImplemented],
    "functions and classes": lambda n: [len, Point, torch.sum, np.float32, quietly],
    "a date, a decimal, a fraction": lambda n: [
        dt.datetime(2024, 2, 29, n, tzinfo=dt.UTC),
        dt.timedelta(seconds=n),
        decimal.Decimal("0.10"),
        fractions.Fraction(n, 7),
    ],
    "a path, a uuid, an enum": lambda n: [
        pathlib.PurePosixPath("a") / str(n),
        uuid.UUID(int=n),
        Colour(n % 2 + 1),
    ],
    "an exception": lambda n: Plain(kind=ValueError, arguments=ValueError("x", n).args),
    "a SimpleNamespace": lambda n: types.SimpleNamespace(n=n, t=floats(3)),
    "a BytesIO": lambda n: io.BytesIO(b"content" * n),
    # containers
    "nothing": lambda n: [],
    "empty containers": lambda n: {"list": [], "tuple": (), "dict": {}, "set": set()},
    "nested containers": lambda n: {"a": [{"b": (n, [floats(2), {"c": {floats: n}}])}], 5: "x"},
    "an OrderedDict": lambda n: collections.OrderedDict([("z", floats(2)), ("a", n)]),
    "a defaultdict": lambda n: collections.defaultdict(list, {"x": [floats(n + 1)]}),
    "a Counter and a deque": lambda n: [
        collections.Counter("hello"),
        collections.deque([n, floats(2)], maxlen=4),
    ],
    "a ChainMap": lambda n: collections.ChainMap({"a": n}, {"b": floats(2)}),
    "a mapping of one's own": lambda n: Settings({"x": floats(2), "n": n}),
    "a dict with an attribute": lambda n: tagged(Tagged(x=floats(3)), f"tag {n}"),
    "a list with an attribute": lambda n: tagged(Row([floats(3), n]), f"tag {n}"),
    "a sequence of one's own": lambda n: Fixed([floats(2), n]),
    "a named tuple": lambda n: Point(floats(2, 3), Point(n, "y")),
    "a torch.Size": lambda n: floats(n + 1, 2).shape,
    "torch's return types": lambda n: torch.max(floats(3, 4), 0),
    "a list of 5,000 numbers": lambda n: list(range(n, n + 5000)),
    "deep nesting": lambda n: nested(n, 60),
    "a list that holds itself": cyclic,
    "one list twice": lambda n: let([n, floats(2)], lambda inner: {"a": inner, "b": inner}),
    "one string twice": lambda n: let(f"{n}" * 99, lambda text: [text, text]),
    # objects of the user's own
    "a dataclass": lambda n: Record(str(n), floats(3), np.arange(n + 1), Record("", floats(1), [])),
    "a frozen dataclass with slots": lambda n: Frozen(n, floats(2, 2)),
    "an object": lambda n: Plain(tensor=floats(4), array=np.ones((2, n + 1)), none=None),
    "an object with slots": lambda n: Slotted(floats(3), Slotted("x", n)),
    "an object that reduces itself": lambda n: Reduced(floats(5), f"label {n}"),
    "an object with its own state": Stateful,
    # arrays
    "arrays of all number types": lambda n: [
        np.arange(n, n + 5).astype(code) for code in "?bBhHiIlLqQefdgFDG"
    ],
    "an array of another byte order": lambda n: np.arange(n, n + 4, dtype=">i4"),
    "a 0-d array": lambda n: np.array(n / 3),
    "numpy scalars": lambda n: [np.float32(n / 3), np.int8(n), np.bool_(True), np.str_("x")],
    "a numpy time": lambda n: [np.datetime64("2024-02-29") + n, np.timedelta64(n, "ns")],
    "a numpy void": lambda n: structured(n)[0],
    "empty arrays": lambda n: [np.empty((0, 3)), np.empty((2, 0, 4), np.int8), np.array([])],
    "an array in Fortran order": lambda n: np.asfortranarray(np.arange(12.0).reshape(3, 4) + n),
    "every other row": lambda n: np.arange(40).reshape(8, 5)[n % 2 :: 2],
    "a transposed array": lambda n: (
        np.arange(24, dtype=np.int16).reshape(2, 3, 4).transpose(2, 0, 1)
    ),
    "a reversed array": lambda n: np.arange(10 + n)[::-1],
    "a broadcast array": lambda n: np.broadcast_to(np.arange(3.0) + n, (4, 3)),
    "a read-only array": read_only,
    "a large read-only array": lambda n: np.broadcast_to(np.arange(90_000.0), (1, 90_000))[0],
    "a structured array": structured,
    "a record array": lambda n: structured(n).view(np.recarray),
    "datetimes": lambda n: np.array(["2024-02-29", "NaT"], "M8[ns]") + np.timedelta64(n, "h"),
    "an array of strings": lambda n: np.array(["a", "bcd", "\N{SNOWMAN}" * (n + 1)]),
    "an array of bytes": lambda n: np.array([b"a", b"bcd"]),
    "an array of objects": object_array,
    "a masked array": lambda n: np.ma.masked_array(np.arange(4.0) + n, [0, 1, 0, 1], fill_value=9),
    "an array subclass": lambda n: np.arange(n + 3).view(Tagged8),
    "an array that is one of a batch of arrays": lambda n: [np.full(2, k + n) for k in range(50)],
    "one array twice": lambda n: let(np.arange(5) + n, lambda a: [a, {"again": a}]),
    "overlapping arrays": lambda n: let(np.arange(9.0) + n, lambda a: [a, a[2:], a[:4]]),
    "a large array": lambda n: np.arange(2_000_000, dtype=np.float32) + n,
    "a large array in Fortran order": lambda n: np.asfortranarray(
        np.arange(600_000.0).reshape(600, 1000) + n
    ),
    "a dtype and a Generator of numpy": lambda n: [STRUCTURE, np.dtype("f4")],
    # tensors
    "tensors of all types": lambda n: [(torch.arange(6) + n).to(dtype) for dtype in DTYPES],
    "NaNs with their payload": lambda n: [nan_with_payload(), torch.tensor([float("nan"), -0.0])],
    "0-d tensors": lambda n: [torch.tensor(n), torch.tensor(True), torch.tensor(n / 3)],
    "empty tensors": lambda n: [torch.empty(0, 3), torch.empty(2, 0, dtype=torch.int8)],
    "a transposed tensor": lambda n: floats(3, 5, start=n).t(),
    "an expanded tensor": lambda n: floats(3, 1, start=n).expand(3, 4),
    "every other column": lambda n: floats(4, 10, start=n)[:, ::2],
    "a slice of a long tensor": lambda n: floats(100_000, start=n)[500:510],
    "channels_last": lambda n: floats(2, 3, 4, 5, start=n).to(memory_format=torch.channels_last),
    "large channels_last": lambda n: floats(8, 3, 64, 64, start=n).to(
        memory_format=torch.channels_last
    ),
    "strides with gaps": lambda n: torch.empty_strided((2, 3), (7, 2)).fill_(n),
    "a tensor that overlaps itself": lambda n: floats(10, start=n).as_strided((4, 4), (2, 1)),
    "strides of a 1 long dimension": lambda n: floats(4, start=n).as_strided((1, 4), (99, 1)),
    "one tensor twice": lambda n: let(floats(4, start=n), lambda t: {"a": t, "b": [t]}),
    "two views of one storage": lambda n: let(floats(10, start=n), lambda t: [t[:6], t[4:]]),
    "a tensor and its transpose": lambda n: let(floats(4, 6, start=n), lambda t: [t, t.t(), t[1]]),
    "views apart from each other": lambda n: let(floats(1000, start=n), lambda t: [t[:2], t[-2:]]),
    "one storage as two types": lambda n: let(floats(8), lambda t: [t, t.view(torch.int32)]),
    "large views of one storage": lambda n: let(floats(500, 400), lambda t: [t[:300], t[200:]]),
    "a tensor made from an array": lambda n: let(
        np.ones(n + 3), lambda a: [a, torch.from_numpy(a)]
    ),
    "a tensor that requires grad": lambda n: floats(3, start=n).requires_grad_(),
    "a tensor with a grad": with_grad,
    "a Parameter": lambda n: torch.nn.Parameter(floats(3, start=n), requires_grad=n % 2 == 0),
    "a tensor subclass": lambda n: Image.named(floats(2, 2, start=n), f"image {n}"),
    "a meta tensor": lambda n: torch.empty(3, n + 1, device="meta"),
    "a storage": lambda n: floats(4, start=n).untyped_storage(),
    "sparse COO": lambda n: quietly(lambda: (torch.eye(3) * (n + 1)).to_sparse()),
    "uncoalesced sparse COO": lambda n: quietly(
        lambda: torch.sparse_coo_tensor([[0, 0, 1]], [1.0, 2.0, n], (3,))
    ),
    "hybrid sparse COO": lambda n: quietly(
        lambda: torch.sparse_coo_tensor([[0, 2]], floats(2, 4, start=n), (3, 4))
    ),
    "sparse CSR": lambda n: quietly(lambda: (torch.eye(3) * (n + 1)).to_sparse_csr()),
    "sparse CSC": lambda n: quietly(lambda: (torch.eye(3) * (n + 1)).to_sparse_csc()),
    "sparse BSR": lambda n: quietly(lambda: (torch.eye(4) * (n + 1)).to_sparse_bsr((2, 2))),
    "a nested tensor": lambda n: quietly(
        lambda: torch.nested.nested_tensor([floats(2, 3), floats(n + 1, 3)])
    ),
    "a jagged tensor": lambda n: quietly(
        lambda: torch.nested.nested_tensor([floats(2, 3), floats(n + 1, 3)], layout=torch.jagged)
    ),
    "a packed sequence": lambda n: torch.nn.utils.rnn.pack_sequence([floats(n + 3), floats(2)]),
    "a module": lambda n: {k: v * 0 + n for k, v in torch.nn.Linear(2, 3).state_dict().items()},
    "a torch.Generator": lambda n: torch.Generator().manual_seed(n),
    "types, devices and layouts": lambda n: [torch.float32, torch.device("cpu"), torch.strided],
    "three hundred tensors": lambda n: {f"field {k}": floats(5, start=k + n) for k in range(300)},
    "twenty megabytes": lambda n: floats(5_000_000, start=n),
    "small and large together": lambda n: [floats(3), floats(300, 400), torch.tensor(n), "x"],
}


def tagged(container: Any, tag: str) -> Any:
    container.tag = tag
    return container


def nested(n: int, depth: int) -> Any:
    value: Any = floats(2, start=n)
    for level in range(depth):
        value = [value] if level % 2 else {"level": value}
    return value


# What torch's own loader spoils when it is a whole batch, and ours may not.
TORCH_FAILS: dict[str, Callable[[int], Any]] = {
    "a tensor and its array": lambda n: let(floats(4, start=n), lambda t: [t, t.numpy()]),
    "a conjugated tensor": lambda n: torch.tensor([complex(n, 2), complex(3, -n)]).conj(),
    "a negated tensor": lambda n: torch.tensor([complex(n, 2), complex(3, -n)]).conj().imag,
    "a quantized tensor": lambda n: quietly(
        lambda: torch.quantize_per_tensor(floats(4, start=n), 0.1, 2, torch.quint8)
    ),
    "a tensor quantized by channel": lambda n: quietly(
        lambda: torch.quantize_per_channel(
            floats(2, 4), torch.tensor([0.1, 0.2]), torch.tensor([0, n]), 0, torch.qint8
        )
    ),
}

# The kinds of samples that differ from the first one.
DTYPES_OF_INTS = [torch.int32, torch.int64, torch.int8, torch.bool]
DTYPES_OF_FLOATS = [torch.float32, torch.float64]
LATER: list[type[torch.Tensor]] = [torch.Tensor, Image]

SAMPLES: dict[str, Callable[[int], Any]] = {
    "ints": lambda n: n,
    "huge ints": lambda n: 2**62 + n,
    "bools": lambda n: n % 2 == 0,
    "floats": lambda n: n / 3,
    "strings": lambda n: "abc" * n,
    "bytes": lambda n: b"abc" * n,
    "numpy scalars": lambda n: (np.float32(n / 3), np.int16(n), np.bool_(n), np.float16(n)),
    "0-d arrays": lambda n: np.array(n, dtype=np.uint8),
    "arrays": lambda n: np.full((2, 3), n, dtype=np.float32),
    "arrays of many types": lambda n: tuple(np.full(3, n).astype(c) for c in "?bBhHiIlLefdFD"),
    "arrays in Fortran order": lambda n: np.asfortranarray(np.arange(6.0).reshape(2, 3) + n),
    "sliced arrays": lambda n: np.arange(30).reshape(5, 6)[::2, 1::2] + n,
    "empty arrays": lambda n: np.empty((0, 4), dtype=np.int32),
    "tensors": lambda n: floats(3, 4, start=n),
    "tensors of many types": lambda n: [torch.full((2,), n).to(dtype) for dtype in DTYPES[:8]],
    "0-d tensors": lambda n: torch.tensor(n / 3),
    "0-d tensors, then integers of other sizes": lambda n: torch.tensor(
        n, dtype=DTYPES_OF_INTS[n % 4]
    ),
    "0-d tensors, then wider ones": lambda n: torch.tensor(n / 3, dtype=DTYPES_OF_FLOATS[n % 2]),
    "0-d tensors, then wider ones that become infinite": lambda n: torch.tensor(
        1e300 * (n % 2), dtype=DTYPES_OF_FLOATS[n % 2]
    ),
    "0-d tensors, then a subclass": lambda n: torch.tensor(n / 3).as_subclass(LATER[n % 2]),
    "tensors, then a subclass": lambda n: floats(2, start=n).as_subclass(LATER[n % 2]),
    "empty tensors": lambda n: torch.empty(0, 3),
    "transposed tensors": lambda n: floats(3, 4, start=n).t(),
    "expanded tensors": lambda n: floats(3, 1, start=n).expand(3, 4),
    "channels_last tensors": lambda n: floats(1, 3, 4, 5, start=n).to(
        memory_format=torch.channels_last
    )[0],
    "ints, then floats": lambda n: n if n % 2 == 0 else n / 2,
    "ints, then bools": lambda n: n if n % 2 == 0 else True,
    "large tensors": lambda n: floats(3, 200, 200, start=n),
    "Parameters without grad": lambda n: torch.nn.Parameter(floats(2), requires_grad=False),
    "tensor subclasses": lambda n: floats(2, start=n).as_subclass(Image),
    "tuples": lambda n: (n, floats(2, start=n), "x"),
    "lists": lambda n: [n, [floats(2, start=n), np.ones(2) * n]],
    "named tuples": lambda n: Point(n, Point(floats(2), str(n))),
    "dicts": lambda n: {"a": n, "b": {"c": floats(2, start=n)}, "d": [str(n)]},
    "dicts with other keys later": lambda n: {"a": n, "b": n, **({n: n} if n % 2 else {})},
    "OrderedDicts": lambda n: collections.OrderedDict([("z", n), ("a", floats(2))]),
    "defaultdicts": lambda n: collections.defaultdict(list, {"x": n, "y": floats(2)}),
    "dicts with an attribute": lambda n: tagged(Tagged(x=floats(2, start=n)), f"tag {n}"),
    "lists with an attribute": lambda n: tagged(Row([floats(2, start=n), n]), f"tag {n}"),
    "mappings of one's own": lambda n: Settings({"x": floats(2, start=n), "n": n}),
    "mappings not made from a dict": lambda n: Stubborn(left=n, right=floats(2, start=n)),
    "sequences of one's own": lambda n: Fixed([n, floats(2, start=n)]),
    "sequences not made from a list": lambda n: Interval(n, n + 3),
    "ranges": lambda n: range(n, n + 2),
    "empty tuples": lambda n: (),
    "empty dicts": lambda n: {},
    "a hundred fields": lambda n: {f"f{k}": torch.tensor([n, k]) for k in range(100)},
    "one tensor in two fields": lambda n: let(floats(2, start=n), lambda t: {"a": t, "b": t}),
}

# Samples that torch collates in-process only; its out= buffer in a worker is in the way.
IN_PROCESS_ONLY: dict[str, Callable[[int], Any]] = {
    "conjugated tensors": lambda n: torch.tensor([complex(n, 2), complex(3, -n)]).conj(),
    "negated tensors": lambda n: torch.tensor([complex(n, 2), complex(3, -n)]).conj().imag,
    "tensors of mixed types": lambda n: torch.full(
        (2,), n, dtype=[torch.int32, torch.float64][n % 2]
    ),
    "arrays of mixed types": lambda n: np.full(2, n, dtype=[np.int32, np.float64][n % 2]),
}

# Samples that torch's default_collate refuses.
REFUSED: dict[str, Callable[[int], Any]] = {
    "None": lambda n: None,
    "objects": lambda n: Plain(n=n),
    "complex numbers": lambda n: complex(n),
    "arrays of strings": lambda n: np.array(["a", "b"]),
    "arrays of objects": object_array,
    "datetimes": lambda n: np.array(["2024-02-29"], "M8[ns]"),
    "structured arrays": structured,
    "None deep inside": lambda n: {"a": [floats(2), None]},
    "sets": lambda n: {n},
    "lists of different lengths": lambda n: [1] * (n + 1),
    "missing keys": lambda n: {"a": n} if n == 0 else {"b": n},
    "sparse tensors": lambda n: quietly(lambda: torch.eye(2).to_sparse()),
    "nested tensors": lambda n: quietly(lambda: torch.nested.nested_tensor([floats(2), floats(3)])),
    "ints too large": lambda n: 2**70,
    "strings, then ints": lambda n: 0 if n % 2 == 0 else "x",
}

# The same, where torch's text in a worker is about its own out= buffer.
REFUSED_IN_OTHER_WORDS: dict[str, Callable[[int], Any]] = {
    "tensors of different shapes": lambda n: floats(n + 1),
    "tensors of different ranks": lambda n: floats(*[1] * (n + 1)),
    "large tensors of different shapes": lambda n: floats(n + 1, 100_000),
    "arrays of different shapes": lambda n: np.ones(n + 1),
}

CONVERTED: dict[str, Callable[[int], Any]] = {
    "numbers": lambda n: (n, n / 3, True, None, 2j, "x", b"y"),
    "numpy scalars": lambda n: [np.float32(n / 3), np.int8(n)],
    "arrays": lambda n: {"a": np.arange(n + 1), "b": [np.ones((2, 2), np.float16)]},
    "arrays of strings and objects": lambda n: [np.array(["a"]), object_array(n)],
    "arrays in Fortran order": lambda n: np.asfortranarray(np.arange(6.0).reshape(2, 3) + n),
    "large arrays": lambda n: {"large": np.arange(100_000) + n, "small": np.arange(3)},
    "tensors": lambda n: (floats(2, 3), floats(3, 2).t(), torch.tensor(n)),
    "one tensor twice": lambda n: let(floats(3, start=n), lambda t: [t, t]),
    "named tuples": lambda n: Point(np.ones(2), Point(n, "x")),
    "mappings": lambda n: tagged(Tagged(x=np.ones(2)), "t"),
    "mappings of one's own": lambda n: Settings({"x": np.ones(2), "n": n}),
    "mappings not made from a dict": lambda n: Stubborn(left=n, right=np.ones(2)),
    "sequences of one's own": lambda n: Fixed([np.ones(2), n]),
    "dataclasses": lambda n: Record("x", floats(2), np.ones(2)),
    "sets": lambda n: {n, "x"},
}
