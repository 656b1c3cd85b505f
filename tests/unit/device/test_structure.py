"""Types beside torch's own `pin_memory`, which says what becomes of a container."""

import collections
import copy
import dataclasses
import itertools
import threading
import types
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data._utils.pin_memory import pin_memory

from shmloader.device.stage import all_tensors, map_tensors
from tests.late import switched_on
from tests.parity.compare import assert_same
from tests.parity.objects import SAMPLES, WHOLE, Point, Tagged


class Shelf(collections.UserList):
    pass


class Line(tuple):
    __slots__ = ()


def tensor(value: int = 1) -> torch.Tensor:
    return torch.full((3,), value)


MAKERS = {
    **{name: WHOLE[name] for name in (
        "nothing", "nested containers", "an OrderedDict", "a defaultdict", "a mapping of one's own",
        "a dict with an attribute", "a list with an attribute", "a sequence of one's own",
        "a named tuple", "a torch.Size", "an array.array", "a bytearray", "a set and a frozenset",
        "a range and a slice",
    )},
    **{name: SAMPLES[name] for name in (
        "tensors", "tuples", "mappings not made from a dict", "sequences not made from a list",
    )},
    "a tuple of its own type": lambda n: Line((tensor(), 1)),
    "a read-only mapping": lambda n: types.MappingProxyType({"a": tensor()}),
    "a deque": lambda n: collections.deque([tensor(), 2], maxlen=5),
    "numbers": lambda n: [1, 2.5, True, None, 1j, "text", b"bytes", torch.float32],
}  # fmt: skip


@pytest.mark.parametrize("kind", MAKERS)
def test_a_batch_has_the_types_that_torch_s_pinning_gives_and_is_not_changed(kind) -> None:
    batch = MAKERS[kind](1)
    with switched_on():
        torchs = pin_memory(MAKERS[kind](1))
    assert_same(map_tensors(lambda part: part.clone(), batch), torchs)
    map_tensors(lambda part: part + 1, batch)
    assert_same(batch, MAKERS[kind](1))


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
        "marked": Tagged(b=1),
        "again": parts[1],
        "set": {parts[6]},
        "class": Pair,
        "range": range(10**12),
    }
    batch["marked"].tag = parts[7]
    found = all_tensors(batch)
    assert sorted(int(part[0]) for part in found) == list(range(8))


def test_with_another_function_attributes_of_containers_are_mapped_too() -> None:
    batch = Tagged(a=tensor(1), b=Tagged(c=tensor(2)))
    batch.tag = {"mask": tensor(3), "array": np.ones(2)}
    batch["b"].tag = tensor(4)
    shelf = Shelf([tensor(5)])
    shelf.tag = Pair(tensor(6), 0)
    batch["shelf"] = shelf
    mapped = map_tensors(lambda part: part + 10, batch, copy.deepcopy)
    assert [int(part[0]) for part in (mapped["a"], mapped["b"]["c"])] == [11, 12]
    assert int(mapped.tag["mask"][0]) == 13
    assert mapped.tag["array"] is not batch.tag["array"]
    assert int(mapped["b"].tag[0]) == 14
    assert int(mapped["shelf"][0][0]) == 15
    assert mapped["shelf"].tag.image is not shelf.tag.image
    assert [int(part[0]) for part in (batch["a"], batch.tag["mask"], batch["b"].tag)] == [1, 3, 4]


def test_an_attribute_that_is_an_item_too_becomes_what_the_item_became() -> None:
    batch = Tagged(a=tensor(1), b=Tagged(c=tensor(2)))
    batch.tag = [batch["b"]["c"], batch["a"], batch]
    count = itertools.count()
    mapped = map_tensors(lambda part: part + next(count), batch, copy.deepcopy)
    assert mapped.tag[0] is mapped["b"]["c"]
    assert mapped.tag[1] is mapped["a"]
    assert mapped.tag[2] is mapped
    assert next(count) == 2


def test_an_attribute_that_holds_no_memory_is_left_as_it_is() -> None:
    batch = Tagged(a=tensor())
    batch.tag = threading.Lock()  # cannot be copied
    mapped = map_tensors(torch.clone, batch, copy.deepcopy)
    assert mapped.tag is batch.tag
    assert map_tensors(torch.clone, batch).tag is batch.tag
