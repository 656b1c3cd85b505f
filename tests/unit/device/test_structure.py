"""Types beside torch's own `pin_memory`, which says what becomes of a container."""

import array
import collections
import copy
import dataclasses
import itertools
import threading
import types
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data._utils.pin_memory import pin_memory

from shmloader.device.stage import all_tensors, map_tensors
from tests.late import switched_on


class Point(NamedTuple):
    x: Any
    y: Any


class Marked(dict):
    mark = None


class FixedMapping(collections.abc.Mapping):
    def __init__(self, items) -> None:
        self.items_ = dict(items)

    def __getitem__(self, key):
        return self.items_[key]

    def __iter__(self):
        return iter(self.items_)

    def __len__(self) -> int:
        return len(self.items_)


class UnbuiltMapping(FixedMapping):
    def __init__(self, one, two) -> None:
        super().__init__({"one": one, "two": two})


class Shelf(collections.UserList):
    pass


class UnbuiltSequence(collections.abc.Sequence):
    def __init__(self, one, two) -> None:
        self.parts = [one, two]

    def __getitem__(self, index):
        return self.parts[index]

    def __len__(self) -> int:
        return 2


class Row(list):
    pass


class Line(tuple):
    __slots__ = ()


def tensor(value: int = 1) -> torch.Tensor:
    return torch.full((3,), value)


def marked() -> Marked:
    made = Marked(a=tensor(), b=1)
    made.mark = "kept"
    return made


MAKERS = {
    "tensor": tensor,
    "list": lambda: [tensor(), [tensor(2), "text"], None],
    "list of its own type": lambda: [tensor(), Row([tensor(2), 2])],
    "tuple": lambda: (tensor(), (tensor(2),)),
    "tuple of its own type": lambda: Line((tensor(), 1)),
    "named tuple": lambda: Point(tensor(), Point(tensor(2), b"bytes")),
    "dict": lambda: {"a": tensor(), 1: {"b": tensor(2)}},
    "dict of its own type": marked,
    "ordered dict": lambda: collections.OrderedDict(a=tensor(), b=tensor(2)),
    "default dict": lambda: collections.defaultdict(list, a=[tensor()]),
    "read-only mapping": lambda: types.MappingProxyType({"a": tensor()}),
    "mapping": lambda: FixedMapping({"a": tensor()}),
    "mapping that is not built anew": lambda: UnbuiltMapping(tensor(), 2),
    "user list": lambda: Shelf([tensor(), 2]),
    "deque": lambda: collections.deque([tensor(), 2], maxlen=5),
    "sequence that is not built anew": lambda: UnbuiltSequence(tensor(), 2),
    "range": lambda: range(3),
    "bytearray": lambda: bytearray(b"abc"),
    "array": lambda: array.array("i", [1, 2]),
    "size": lambda: torch.Size([2, 3]),
    "numbers": lambda: [1, 2.5, True, None, 1j, "text", b"bytes", torch.float32],
    "nothing": list,
    "set": lambda: {1, 2},
}


def shape_of(value: Any) -> Any:
    """Types all the way down, with the tensors' content."""
    kind = type(value)
    if isinstance(value, torch.Tensor):
        return (kind, value.tolist())
    if isinstance(value, collections.abc.Mapping):
        extra = getattr(value, "default_factory", None), getattr(value, "mark", None)
        return (kind, [(key, shape_of(part)) for key, part in value.items()], extra)
    if isinstance(value, collections.abc.Sequence) and not isinstance(value, str | bytes):
        return (kind, [shape_of(part) for part in value], getattr(value, "maxlen", None))
    return (kind, value)


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_a_batch_has_the_types_that_torch_s_pinning_gives(make) -> None:
    with switched_on():
        torchs = pin_memory(make())
    ours = map_tensors(lambda part: part.clone(), make())
    assert shape_of(ours) == shape_of(torchs)


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_nothing_of_the_batch_itself_is_changed(make) -> None:
    batch = make()
    before = shape_of(batch)
    map_tensors(lambda part: part + 1, batch)
    assert shape_of(batch) == before


@dataclasses.dataclass
class Pair:
    image: Any
    label: Any


def test_other_objects_are_handed_to_the_other_function() -> None:
    seen = []

    def other(part):
        seen.append(part)
        return "other"

    pair = Pair(tensor(), 1)
    batch = {"pair": pair, "tensor": tensor(), "set": {1}, "none": None, "n": 3}
    mapped = map_tensors(lambda part: "tensor", batch, other)
    assert seen == [pair, {1}]
    assert mapped == {"pair": "other", "tensor": "tensor", "set": "other", "none": None, "n": 3}


def test_a_packed_sequence_is_an_object_that_moves_itself() -> None:
    packed = pack_sequence([torch.ones(3), torch.ones(2)])
    assert map_tensors(lambda part: part, packed, lambda part: part) is packed
    assert type(map_tensors(lambda part: part, [packed])[0]) is PackedSequence


class Slotted:
    __slots__ = ("__weakref__", "inner", "unset")

    def __init__(self, inner) -> None:
        self.inner = inner


class OneSlot(Slotted):
    __slots__ = "more"  # noqa: PLC0205 - what is tested

    def __init__(self, inner, more) -> None:
        super().__init__(inner)
        self.more = more


def test_tensors_are_found_in_containers_and_in_attributes_each_once() -> None:
    parts = [tensor(number) for number in range(8)]
    loop: list[Any] = [parts[0]]
    loop.append(loop)
    batch = {
        "loop": loop,
        "pair": Pair(parts[1], [parts[2]]),
        "slots": OneSlot(parts[3], Point(parts[4], {"a": parts[5]})),
        "marked": marked(),
        "again": parts[1],
        "set": {parts[6]},
        "class": Pair,
        "module": torch,
        "range": range(10**12),
    }
    batch["marked"].mark = parts[7]
    del batch["marked"]["a"]
    batch.pop("module")
    found = all_tensors(batch)
    assert sorted(int(part[0]) for part in found) == list(range(8))


def test_with_another_function_attributes_of_containers_are_mapped_too() -> None:
    batch = Marked(a=tensor(1), b=Marked(c=tensor(2)))
    batch.mark = {"mask": tensor(3), "array": np.ones(2)}
    batch["b"].mark = tensor(4)
    shelf = Shelf([tensor(5)])
    shelf.mark = Pair(tensor(6), 0)
    batch["shelf"] = shelf
    mapped = map_tensors(lambda part: part + 10, batch, copy.deepcopy)
    assert [int(part[0]) for part in (mapped["a"], mapped["b"]["c"])] == [11, 12]
    assert int(mapped.mark["mask"][0]) == 13
    assert mapped.mark["array"] is not batch.mark["array"]
    assert int(mapped["b"].mark[0]) == 14
    assert int(mapped["shelf"][0][0]) == 15
    assert mapped["shelf"].mark.image is not shelf.mark.image
    assert [int(part[0]) for part in (batch["a"], batch.mark["mask"], batch["b"].mark)] == [1, 3, 4]


def test_an_attribute_that_is_an_item_too_becomes_what_the_item_became() -> None:
    batch = Marked(a=tensor(1), b=Marked(c=tensor(2)))
    batch.mark = [batch["b"]["c"], batch["a"], batch]
    count = itertools.count()
    mapped = map_tensors(lambda part: part + next(count), batch, copy.deepcopy)
    assert mapped.mark[0] is mapped["b"]["c"]
    assert mapped.mark[1] is mapped["a"]
    assert mapped.mark[2] is mapped
    assert next(count) == 2


def test_an_attribute_that_holds_no_memory_is_left_as_it_is() -> None:
    batch = Marked(a=tensor())
    batch.mark = threading.Lock()  # cannot be copied
    mapped = map_tensors(torch.clone, batch, copy.deepcopy)
    assert mapped.mark is batch.mark
    assert map_tensors(torch.clone, batch).mark is batch.mark
