"""share() finds the bulk in an object, and returns a copy that behaves like the object."""

import collections
import dataclasses
import enum
import mmap
import pickle
import threading
from multiprocessing import resource_sharer
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, StackDataset, Subset, TensorDataset

import shmloader
from shmloader.memory import segment as segment_module
from shmloader.memory.limits import Free
from shmloader.memory.pickled import reducers_of_multiprocessing
from shmloader.memory.segment import find_segment
from shmloader.process_state import PROCESS
from shmloader.shared import sharing
from shmloader.shared.containers import SharedDict, SharedList
from shmloader.shared.sharing import describe_long
from tests.process.support import Calls

LONG = 1_000


def lies_shared(value: Any) -> bool:
    array = value.detach().numpy() if isinstance(value, torch.Tensor) else value
    return find_segment(array.__array_interface__["data"][0], array.nbytes) is not None


class Point(NamedTuple):
    x: Any
    y: Any


@dataclasses.dataclass
class Record:
    array: Any
    name: str = "name"
    derived: int = dataclasses.field(init=False, default=7)


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    tensor: Any
    number: int


class Texts(Dataset):
    """With a lock and a function, which cannot be pickled."""

    def __init__(self) -> None:
        self.texts = [f"line {number}" for number in range(LONG)]
        self.lengths = {text: len(text) for text in self.texts}
        self.matrix = np.arange(12.0).reshape(3, 4)
        self.weights = torch.arange(6.0)
        self.lock = threading.Lock()
        self.transform = lambda text: text.upper()

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> Any:
        text = self.texts[index]
        return self.transform(text), self.lengths[text], self.matrix[index % 3]


class Wrapper:
    """Looks like a dataset, and holds one."""

    __slots__ = ("__dict__",)

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.itself = self

    def __getitem__(self, index: int) -> Any:
        return self.inner[index]


def test_a_dataset_s_attributes_are_shared_and_it_reads_the_same():
    dataset = Texts()
    ours = shmloader.share(dataset)
    assert type(ours) is Texts
    assert ours is not dataset
    assert isinstance(ours.texts, SharedList)
    assert isinstance(ours.lengths, SharedDict)
    assert type(ours.matrix) is np.ndarray
    assert lies_shared(ours.matrix)
    assert lies_shared(ours.weights)
    assert ours.lock is dataset.lock
    assert len(ours) == len(dataset)
    for index in (0, 5, -1):
        for found, expected in zip(ours[index], dataset[index], strict=True):
            assert np.array_equal(found, expected)
    assert type(dataset.texts) is list
    assert not lies_shared(dataset.matrix)


def test_bulk_is_found_in_containers_of_every_kind():
    array, tensor = np.arange(4), torch.arange(4)
    value = {
        "list": [array, "text"],
        "tuple": (tensor, 1),
        "point": Point(array, tensor),
        "record": Record(array),
        "frozen": Frozen(tensor, 3),
        "ordered": collections.OrderedDict(b=array, a=1),
        "deeper": [{"list": [(array,)]}],
        "long": tuple(range(LONG)),
        "sorted": tensor.sort(),
    }
    ours = shmloader.share(value)
    assert {name: type(inner) for name, inner in ours.items()} == {
        **{name: type(inner) for name, inner in value.items()},
        "long": SharedList,
    }
    assert ours["record"].name == "name"
    assert ours["record"].derived == 7
    assert ours["frozen"].number == 3
    assert list(ours["ordered"]) == ["b", "a"]
    shared_array, shared_tensor = ours["list"][0], ours["tuple"][0]
    assert lies_shared(shared_array)
    assert lies_shared(shared_tensor)
    # What was one object is one.
    assert ours["point"].x is ours["record"].array is ours["ordered"]["b"] is shared_array
    assert ours["deeper"][0]["list"][0][0] is shared_array
    assert ours["point"].y is ours["frozen"].tensor is shared_tensor
    assert ours["long"] == value["long"]
    assert lies_shared(ours["sorted"].values)
    assert value["list"][0] is array


class Slots:
    """A dataset whose attributes lie in slots, some of them private, and one without a value."""

    __slots__ = ("__private", "rows", "unset")

    def __init__(self) -> None:
        self.rows = np.arange(4)
        self.__private = [f"line {number}" for number in range(LONG)]

    def __getitem__(self, index: int) -> tuple[int, str]:
        return int(self.rows[index]), self.__private[index]


class SlotsAndMore(Slots):
    """With a dict of attributes, too."""

    def __init__(self) -> None:
        super().__init__()
        self.more = np.arange(3)


@pytest.mark.parametrize("kind", [Slots, SlotsAndMore])
def test_attributes_in_slots_are_shared_as_others_are(kind):
    dataset = kind()
    ours = shmloader.share(dataset)
    assert ours[3] == dataset[3] == (3, "line 3")
    assert lies_shared(ours.rows)
    assert isinstance(ours._Slots__private, SharedList)
    assert not hasattr(ours, "unset")
    assert kind is Slots or lies_shared(ours.more)


class Color(enum.Enum):
    RED = 1


class Indexed:
    def __init__(self) -> None:
        self.short = ["a"]

    def __getitem__(self, index: int) -> str:
        return self.short[index]


def test_what_holds_no_bulk_stays_the_very_same_beside_what_does():
    same = [Color.RED, Indexed(), [1, ["b"]], {"c": []}, collections.deque(), torch.nn.Linear(1, 1)]
    same.append([same[1], same[2]])
    holds_itself = ["d"]
    holds_itself.append(holds_itself)
    ours = shmloader.share({"same": [*same, holds_itself], "rows": np.arange(3)})
    assert ours["same"] is not same
    assert all(one is other for one, other in zip(ours["same"], [*same, holds_itself], strict=True))


class Lean:
    """Passes on what it lacks, and leaves its rows out of a pickle."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.rows = inner, np.arange(3)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def __getitem__(self, index: int) -> int:
        return int(self.rows[index])

    def __getstate__(self) -> dict[str, Any]:
        return {"inner": self.inner}


def test_a_dataset_is_copied_with_all_its_attributes_however_it_is_pickled():
    ours = shmloader.share(Lean([Lean([])]))
    assert ours[2] == ours.inner[0][2] == 2
    assert lies_shared(ours.inner[0].rows)


def test_a_tuple_that_holds_itself_still_does():
    value: Any = ([], np.arange(3))
    value[0].append(value)
    ours = shmloader.share(value)
    assert ours[0][0] is ours
    assert lies_shared(ours[1])


def test_a_tensor_without_memory_and_a_memory_map_stay(tmp_path):
    stay = [
        torch._efficientzerotensor((3,)),
        np.memmap(tmp_path / "file", np.int64, "w+", shape=(10,)),
    ]
    ours = shmloader.share([*stay, np.arange(3)])
    assert all(one is other for one, other in zip(ours, stay, strict=False))


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "make",
    [
        lambda: shmloader.share(np.arange(2_000)),
        lambda: shmloader.share(np.arange(2_000), writable=True),
        lambda: shmloader.share(torch.arange(2_000)),
        lambda: shmloader.share(list(range(2_000))),
    ],
    ids=["array", "writable array", "tensor", "list"],
)
def test_items_that_were_shared_before_last_as_long_as_their_list(make):
    others = set(PROCESS.segments)
    whole = make()
    once = shmloader.share([whole[number : number + 500] for number in range(LONG)])
    twice = shmloader.share([once[:2], *range(LONG)])
    tables = shmloader.share({number: whole[number:] for number in range(LONG)})
    del whole
    last = twice[0]
    for part in (once[7][:2], pickle.loads(pickle.dumps(once))[7][:2], tables[7][:2]):
        assert [int(number) for number in part] == [7, 8]
    del once, twice, tables
    assert [int(number) for number in last[1][:2]] == [1, 2]
    del last, part
    assert set(PROCESS.segments) == others


def test_what_holds_no_bulk_is_the_very_same():
    lock, tensor = threading.Lock(), torch.arange(3).share_memory_()
    for value in (5, "text", lock, [1, 2], {"a": lock}, tensor, np.array(["a"], dtype=object)):
        assert shmloader.share(value) is value
    inner = (1, 2)
    ours = shmloader.share([inner, np.arange(3)])
    assert ours[0] is inner
    once = shmloader.share([np.arange(3), list(range(LONG)), torch.arange(3)])
    assert shmloader.share(once) is once


def test_datasets_of_torch_s_and_wrappers_that_hold_themselves():
    rows = torch.arange(20).reshape(10, 2)
    dataset = Wrapper(Subset(StackDataset(TensorDataset(rows), np.arange(10)), [3, 1]))
    ours = shmloader.share(dataset)
    assert ours.itself is ours
    assert ours.inner.dataset is not dataset.inner.dataset
    assert lies_shared(ours.inner.dataset.datasets[1])
    (row,), number = ours[1]
    assert row.tolist() == [2, 3]
    assert number == 1


ARRAYS = {
    "matrix": np.arange(12, dtype=np.int16).reshape(3, 4),
    "fortran": np.asfortranarray(np.arange(12.0).reshape(3, 4)),
    "every other": np.arange(20)[::2],
    "backwards": np.arange(5)[::-1],
    "broadcast": np.broadcast_to(np.arange(3), (4, 3)),
    "scalar": np.array(5.5),
    "big endian": np.arange(3, dtype=">i4"),
    "dates": np.array(["2020-01-01", "NaT"], dtype="M8[D]"),
    "texts": np.array(["ab", "c"]),
    "records": np.array([(1, 2.5)], dtype=[("a", "i4"), ("b", "f8")]),
    "bools": np.array([[True, False]]),
    "complex": np.array([1 + 2j]),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_an_array_of_any_kind_is_equal_and_read_only(name):
    array = ARRAYS[name]
    before = array.copy()
    ours = shmloader.share(array)
    assert lies_shared(ours)
    assert (ours.dtype, ours.shape) == (array.dtype, array.shape)
    np.testing.assert_array_equal(ours, array)
    key: Any = (0,) * array.ndim
    with pytest.raises(ValueError, match="read-only"):
        ours[key] = array[key]
    writable = shmloader.share(array, writable=True)
    writable[key] = np.zeros((), array.dtype)[()]
    np.testing.assert_array_equal(array, before)
    again = pickle.loads(ForkingPickler.dumps(ours))
    np.testing.assert_array_equal(again, array)
    assert again.ctypes.data == ours.ctypes.data
    assert again.strides == ours.strides


def test_tensors_that_share_a_storage_still_do():
    whole = torch.arange(20.0)
    parts = shmloader.share({"head": whole[:5], "middle": whole[3:9].view(2, 3), "all": whole})
    parts["all"][4] = -1
    assert parts["head"][4] == -1
    assert parts["middle"][0, 1] == -1
    assert whole[4] == 4
    assert torch.equal(shmloader.share(whole[10:12]), whole[10:12])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.bool, torch.complex64, torch.uint8])
def test_a_tensor_of_any_kind_crosses_as_a_handle(dtype):
    tensor = torch.arange(20_000).to(dtype).view(100, 200).T[1:]
    ours = shmloader.share(tensor)
    assert torch.equal(ours, tensor)
    assert (ours.dtype, ours.stride()) == (tensor.dtype, tensor.stride())
    data = ForkingPickler.dumps(ours)
    assert len(data) < 1_000
    again = pickle.loads(data)
    assert torch.equal(again, tensor)
    assert again.data_ptr() == ours.data_ptr()
    # And one that does not lie there goes as ever: into torch's own shared memory.
    other = torch.arange(3)
    try:
        assert pickle.loads(ForkingPickler.dumps(other)).tolist() == [0, 1, 2]
    finally:
        resource_sharer.stop(timeout=5)
    assert other.is_shared()


def test_batches_are_pickled_as_before_once_tensors_have_handles():
    shmloader.share(torch.arange(3))
    assert {np.ndarray, torch.Tensor, torch.nn.Parameter}.isdisjoint(
        reducers_of_multiprocessing(with_torch=False)
    )


def test_parameters_keep_their_type_and_others_stay():
    parameter = torch.nn.Parameter(torch.ones(3))
    product = parameter * 2
    ours = shmloader.share([parameter, product, torch.ones(2, requires_grad=True)])
    assert type(ours[0]) is torch.nn.Parameter
    assert ours[0].requires_grad
    assert lies_shared(ours[0])
    assert ours[1] is product
    assert ours[2].requires_grad


def test_an_item_that_cannot_be_pickled_is_named_and_nothing_remains():
    items = [*range(LONG), threading.Lock()]
    with pytest.raises(TypeError, match=r"item 1000 of a long list .*_thread\.lock"):
        shmloader.share({"items": items})
    with pytest.raises(TypeError, match="value 1000 of a long list or dict"):
        shmloader.share(dict(enumerate(items)))


def test_memory_that_is_not_there_is_an_error_before_it_is_touched(monkeypatch):
    monkeypatch.setattr(
        segment_module, "free_memory", lambda *_: Free(1 << 20, "limit of the control group /job")
    )
    with pytest.raises(shmloader.SharedMemoryError, match=r"1\.0 MB are free \(limit of the"):
        shmloader.share(np.zeros(64 << 20, np.uint8))


def test_the_memory_is_gone_with_its_last_user():
    ours = shmloader.share([np.arange(1_000), list(range(LONG)), torch.arange(5)])
    segment = find_segment(ours[0].ctypes.data, 8)
    fd, token = segment.sealed.file.fileno(), segment.token
    assert token in PROCESS.segments
    del segment
    row, items = ours[0][3:4], ours[1][5:6]
    del ours
    assert row.tolist() == [3]
    del row
    assert list(items) == [5]
    del items
    assert token not in PROCESS.segments
    with pytest.raises(OSError, match="Bad file descriptor"):
        segment_module.os.fstat(fd)


def test_the_memory_can_be_changed_by_nobody_not_even_by_its_maker():
    ours = shmloader.share(np.arange(1_000))
    segment = find_segment(ours.ctypes.data, 8)
    with open(f"/proc/self/fd/{segment.sealed.file.fileno()}", "r+b", buffering=0) as file:  # noqa: PTH123
        for change in (
            lambda: file.write(b"x"),
            lambda: file.truncate(8),
            lambda: file.truncate(1 << 20),
            lambda: mmap.mmap(file.fileno(), 64),
        ):
            with pytest.raises(PermissionError):
                change()
    assert ours[-1] == 999


def test_a_handle_of_memory_that_is_gone_says_so():
    data = ForkingPickler.dumps(shmloader.share(np.arange(1_000)))
    with pytest.raises(shmloader.SharedMemoryError, match="has dropped it, or has ended"):
        pickle.loads(data)


TEXTS = [f"line {number}" for number in range(5_000)]


class OneSlot:
    __slots__ = ("many",)

    def __init__(self, many: object) -> None:
        self.many = many


def test_a_long_list_is_told_with_its_length(monkeypatch):
    monkeypatch.setattr(sharing, "MANY", 5_000)
    for value in (TEXTS, tuple(TEXTS), dict.fromkeys(TEXTS)):
        for dataset in (value, OneSlot(value)):
            text = describe_long(dataset)
            assert text is not None
            assert f"a {type(value).__name__} of 5,000 items" in text
    for few in (TEXTS[1:], shmloader.share(TEXTS), [TEXTS], "x" * 5_000, OneSlot(None), 7):
        assert describe_long(few) is None


def test_a_loader_says_it_once(monkeypatch):
    monkeypatch.setattr(sharing, "MANY", 5_000)
    dataset = Calls(TEXTS.__getitem__, 20)
    dataset.texts = TEXTS
    loader = shmloader.DataLoader(
        dataset, batch_size=10, num_workers=1, multiprocessing_context="fork"
    )
    with pytest.warns(UserWarning, match=r"5,000 items.*share\(dataset\)"):
        assert len(list(loader)) == 2
    assert len(list(loader)) == 2  # where a further warning would be an error
