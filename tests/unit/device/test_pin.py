"""Types and tensors beside torch's own pin_memory, on the late device's pinned memory."""

import collections
import copy
import dataclasses
import itertools
import threading
import types
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data._utils.pin_memory import pin_memory

from shmloader.device.stage import PinStage, all_tensors, is_small, map_tensors, pin_batch
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


# With it there is pinned memory, and torch's own allocator of it.
on_the_late_device = pytest.mark.usefixtures("late")


def storages(*tensors: torch.Tensor) -> int:
    """How many pieces of memory some tensors lie in."""
    return len({tensor.untyped_storage().data_ptr() for tensor in tensors})


def tensors_in(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, collections.abc.Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple | collections.deque | collections.UserList):
        return [tensor for part in value for tensor in tensors_in(part)]
    return []


@on_the_late_device
@pytest.mark.parametrize("kind", MAKERS)
def test_a_batch_becomes_what_torch_makes_of_it_and_is_not_changed(kind) -> None:
    batch, torchs = MAKERS[kind](1), pin_memory(MAKERS[kind](1), "cuda")
    assert_same(map_tensors(lambda part: part.clone(), batch), torchs)
    ours = pin_batch(batch, "cuda")
    assert_same(ours, torchs)
    assert all(part.is_pinned() for part in tensors_in(ours))
    map_tensors(lambda part: part + 1, batch)
    assert_same(batch, MAKERS[kind](1))


ODD = {
    "bool": torch.tensor([True, False]),
    "complex": torch.tensor([1 + 2j]),
    "conjugate": torch.tensor([1 + 2j]).conj(),
    "negative view": torch.tensor([1 + 2j]).conj().imag,
    "bfloat16": torch.ones(3, dtype=torch.bfloat16),
    "transposed": torch.arange(6).view(2, 3).t(),
    "strided": torch.arange(12)[::3],
    "scalar": torch.tensor(5),
    "empty": torch.empty(0, 3),
    "channels last": torch.ones(1, 2, 3, 4).to(memory_format=torch.channels_last),
    "large": torch.arange(40_000),
}


@on_the_late_device
@pytest.mark.parametrize("kind", [list, dict])
@pytest.mark.parametrize("name", [*ODD, "all"])
def test_tensors_keep_dtype_shape_strides_and_content(name, kind) -> None:
    parts = list(ODD.values()) if name == "all" else [ODD[name], ODD[name]]
    batch = parts if kind is list else dict(enumerate(parts))
    ours, torchs = pin_batch(batch, "cuda"), pin_memory(batch, "cuda")
    assert type(ours) is type(torchs)
    for one, other in zip(tensors_in(ours), tensors_in(torchs), strict=True):
        assert (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
        assert torch.equal(one, other)
        assert one.is_pinned() or one.nbytes == 0


@pytest.mark.parametrize(
    "layout",
    [torch.strided, pytest.param(torch.jagged, marks=pytest.mark.slow)],  # imports much of torch
)
def test_a_nested_tensor_shares_no_block(layout) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nested tensors are young
        nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)
    assert not is_small(nested)


@on_the_late_device
def test_a_hundred_and_fourteen_small_tensors_take_one_allocation() -> None:
    batch = {f"field {number}": torch.full((8,), number) for number in range(114)}
    pinned = pin_batch(batch, "cuda")
    assert storages(*pinned.values()) == 1
    assert list(pinned) == list(batch)
    for number, tensor in enumerate(pinned.values()):
        assert tensor.is_pinned()
        assert tensor.tolist() == [number] * 8
        assert tensor.data_ptr() % 8 == 0
        assert tensor.data_ptr() != batch[f"field {number}"].data_ptr()
    pinned["field 3"].fill_(-1)
    assert pinned["field 4"].tolist() == [4] * 8


@on_the_late_device
def test_each_large_field_takes_an_allocation_of_its_own() -> None:
    large = [torch.full((20_000,), number) for number in range(3)]
    pinned = pin_batch([*large, torch.tensor(1), torch.tensor(2)], "cuda")
    assert storages(*pinned) == 4
    assert [int(tensor.flatten()[0]) for tensor in pinned] == [0, 1, 2, 1, 2]


class Own:
    def __init__(self) -> None:
        self.is_mine = False

    def pin_memory(self):
        self.is_mine = True
        return self


@on_the_late_device
def test_objects_pin_themselves() -> None:
    for batch in (Own(), [torch.ones(2), Own()], {"a": Own(), "b": torch.ones(2)}):
        pinned = pin_batch(batch, "cuda")
        parts = [pinned] if isinstance(pinned, Own) else pinned
        parts = list(parts.values()) if isinstance(parts, dict) else parts
        assert [part.is_mine for part in parts if isinstance(part, Own)] == [True]
        assert all(part.is_pinned() for part in parts if isinstance(part, torch.Tensor))


def test_the_thread_begins_as_torch_s_does(monkeypatch, late) -> None:
    names, threads, indices = [], [], []
    monkeypatch.setattr(torch.multiprocessing, "_set_thread_name", names.append)
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    monkeypatch.setattr(torch.accelerator, "set_device_index", indices.append)
    PinStage("late", 1).start()
    late.driver.restore_capture(0)  # this thread is no loader's
    assert (names, threads, indices) == (["pt_data_pin"], [1], [1])


@on_the_late_device
def test_an_error_keeps_its_type_and_holds_no_batch() -> None:
    class Stubborn:
        def pin_memory(self):
            raise KeyError("no")

    stage = PinStage("cuda", 2)
    with pytest.raises(KeyError, match="in pin memory thread for device 2") as caught:
        stage.run([Stubborn(), torch.ones(2)])
    trace = caught.value.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename.endswith("pin.py"):
            assert "batch" not in trace.tb_frame.f_locals
        trace = trace.tb_next
    assert caught.value.__context__ is None
