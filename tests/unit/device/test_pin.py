"""Beside torch's own `pin_memory`, on the late device's pinned memory."""

import collections
import warnings
from typing import Any

import pytest
import torch
from torch.utils.data._utils.pin_memory import pin_memory

from shmloader.device.stage import PinStage, is_small, pin_batch
from tests.late import LateDevice
from tests.parity.compare import assert_same
from tests.unit.device.test_structure import MAKERS


@pytest.fixture(autouse=True)
def _accelerator(late: LateDevice) -> None:
    """There is pinned memory, and torch's own allocator of it."""


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


@pytest.mark.parametrize("kind", MAKERS)
def test_a_batch_becomes_what_torch_makes_of_it(kind) -> None:
    ours, torchs = pin_batch(MAKERS[kind](1), "cuda"), pin_memory(MAKERS[kind](1), "cuda")
    assert_same(ours, torchs)
    for tensor in tensors_in(ours):
        assert tensor.is_pinned()


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
