"""Any picklable batch, into a slot and out of it, in one process."""

import collections
import copy
import dataclasses
import io
import pickle
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shmloader.errors import SharedMemoryError
from shmloader.memory.arena import ALIGNMENT
from shmloader.memory.flat import COPY_OUT_BYTES
from shmloader.memory.pickled import PickledReader
from tests.parity.compare import assert_same
from tests.unit.memory.support import (
    LARGE,
    MIB,
    assert_storages_are_aligned,
    is_in,
    open_bench,
    tensors_of,
)

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
both_ways = pytest.mark.parametrize("lent", [False, True], ids=["copied", "lent"])


class Point(NamedTuple):
    x: object
    y: object


@dataclasses.dataclass
class Record:
    name: str
    value: object


NUMPY_DTYPES = [
    *("?", "b", "B", "h", "H", "i", "I", "q", "Q", "e", "f", "d", "F", "D", "g"),
    *(">i4", ">f8", ">u2", "M8[ns]", "m8[s]", ">M8[D]", "S5", "U3", "V7"),
    [("a", "u1"), ("b", ">f4", (2,))],
    np.dtype([("a", "i2"), ("b", "f8")], align=True),
]
TORCH_DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint16, torch.uint32, torch.uint64, torch.float16, torch.bfloat16, torch.float32),
    *(torch.float64, torch.complex32, torch.complex64, torch.complex128, torch.float8_e5m2),
]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64]

SHAPES = st.sampled_from(
    [(), (0,), (1,), (3,), (2, 3), (3, 0, 2), (1, 4, 1), (2, 3, 4), (16000,), (40, 50, 9)]
)


def random_bytes(seed: int, nbytes: int) -> bytes:
    return np.random.default_rng(seed).bytes(nbytes)


@st.composite
def arrays(draw):
    dtype = np.dtype(draw(st.sampled_from(NUMPY_DTYPES)))
    shape = draw(SHAPES)
    count = int(np.prod(shape))
    raw = bytearray(random_bytes(draw(st.integers(0, 99)), count * dtype.itemsize))
    if dtype.kind in "?U" or dtype.kind == "b":
        raw = bytearray(count * dtype.itemsize)
    array = np.frombuffer(raw, dtype, count).reshape(shape).copy()
    change = draw(st.sampled_from(["F", "transposed", "stepped", "reversed", "read-only", ""]))
    if change == "read-only":
        array.setflags(write=False)
    return CHANGES[change](array) if change in CHANGES and array.ndim else array


CHANGES = {
    "F": np.asfortranarray,
    "transposed": lambda array: array.T,
    "stepped": lambda array: array[::2],
    "reversed": lambda array: array[::-1],
}


def random_tensor(dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    count = int(np.prod(shape))
    if dtype is torch.bool:
        flat = torch.arange(count) % 3 == seed % 3
    else:
        raw = bytearray(random_bytes(seed, count * dtype.itemsize))
        flat = torch.frombuffer(raw, dtype=dtype).clone() if count else torch.empty(0, dtype=dtype)
    return flat.reshape(shape)


@st.composite
def tensors(draw):
    dtype = draw(st.sampled_from(TORCH_DTYPES))
    tensor = random_tensor(dtype, draw(SHAPES), draw(st.integers(0, 99)))
    views = [tensor, tensor.expand(3, *tensor.shape)]
    if tensor.ndim:
        views += [tensor[::2], tensor[1:]]
    if tensor.ndim > 1:
        views += [tensor.mT, tensor[:, 1:]]
    if dtype in FLOATS:
        views += [tensor.clone().requires_grad_(), torch.nn.Parameter(tensor, draw(st.booleans()))]
    return draw(st.sampled_from(views))


@st.composite
def views_of_one_storage(draw):
    """Several tensors that share memory: the same, overlapping, apart, of other dtypes."""
    base = random_tensor(torch.float32, (draw(st.sampled_from([16, 20000])),), 1)
    makers = [
        lambda t: t,
        lambda t: t[4:],
        lambda t: t[:8],
        lambda t: t[2:12:3],
        lambda t: t[3:3],
        lambda t: t.view(torch.int16),
        lambda t: t[1:].view(torch.uint8)[3:9],
        lambda t: t[4:].view(torch.complex128),
        lambda t: t.view(4, -1).T,
        lambda t: t.as_strided((3, 4), (2, 1)),
        lambda t: t[5].expand(7),
    ]
    return [make(base) for make in draw(st.lists(st.sampled_from(makers), min_size=1, max_size=6))]


LEAVES = st.one_of(
    arrays(),
    tensors(),
    views_of_one_storage(),
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(max_size=5),
    st.binary(max_size=5),
    st.sampled_from([b"x", "é"]).map(lambda part: part * LARGE),
    st.sampled_from([np.float32(2.5), np.str_("a"), 3 + 4j]),
)


def containers(children):
    return st.one_of(
        st.lists(children, max_size=4),
        st.tuples(children, children),
        st.dictionaries(st.text(max_size=3) | st.integers(), children, max_size=4),
        st.builds(Point, children, children),
        st.builds(Record, st.text(max_size=3), children),
        st.builds(lambda value: collections.OrderedDict(a=value, b=[value]), children),
        st.builds(lambda value: [value, value], children),  # one object, twice
    )


BATCHES = st.recursive(LEAVES, containers, max_leaves=8)


def without_storage(tensor: torch.Tensor) -> torch.Tensor:
    """An empty tensor, with a storage of its own rather than the tensor's."""
    nothing = torch.empty(0, dtype=tensor.dtype)
    nothing.set_(torch.UntypedStorage(0), 0, tensor.shape, tensor.stride())
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(nothing, tensor.requires_grad)
    return nothing.requires_grad_(tensor.requires_grad)


def as_torch_sends(batch):
    """The batch as it leaves torch's queue, but for tensors, which are left as they are.

    A queue pickles in-band. Of an empty view torch sends the storage, of which nothing is seen.
    """

    class Unpickler(pickle.Unpickler):
        def persistent_load(self, key):
            return tensors[key[1]]

    class Pickler(pickle.Pickler):
        def persistent_id(self, value):
            if not isinstance(value, torch.Tensor):
                return None
            tensors[id(value)] = value
            return ("tensor", id(value))

    tensors: dict[int, torch.Tensor] = {}
    file = io.BytesIO()
    Pickler(file, 4).dump(batch)
    seen = {t.untyped_storage().data_ptr() for t in tensors.values() if t.numel()}
    for key, tensor in tensors.items():
        if tensor.untyped_storage().data_ptr() not in seen:
            tensors[key] = without_storage(tensor)
    file.seek(0)
    return Unpickler(file).load()


@pytest.mark.slow
@both_ways
@given(batch=BATCHES)
@settings(max_examples=300, derandomize=True)
def test_any_batch_arrives_as_torch_sends_it(batch, lent):
    with open_bench() as bench:
        arrived = bench.send(batch, lent=lent)
        assert_same(arrived, as_torch_sends(batch))
        assert_storages_are_aligned(arrived)
        del arrived
        assert len(bench.ended) == lent, "the slot is still held"


@given(batch=BATCHES)
@settings(max_examples=20, derandomize=True)
def test_a_batch_that_is_copied_out_does_not_change_with_its_slot(batch):
    with open_bench() as bench:
        expected = as_torch_sends(batch)
        arrived = bench.send(batch, lent=False)
        bench.slot.memory[: bench.writer.used_bytes] = b"\xff" * bench.writer.used_bytes
        assert_same(arrived, expected)


def test_a_tensor_brings_only_the_bytes_that_it_spans(bench):
    base = torch.arange(10**6, dtype=torch.int32)
    part = bench.send(base[1000:1010], lent=False)
    assert bench.writer.used_bytes == ALIGNMENT
    assert part.untyped_storage().nbytes() == 40
    assert part.storage_offset() == 0
    assert part.tolist() == list(range(1000, 1010))


def test_a_tensor_with_a_graph_is_refused_with_the_remedy(bench):
    tensor = torch.zeros(3, requires_grad=True) * 2
    with pytest.raises(RuntimeError, match=r"autograd does not cross processes: detach\(\)"):
        bench.encode({"x": tensor})


@pytest.mark.parametrize(("nbytes", "is_lent"), [(COPY_OUT_BYTES, False), (LARGE, True)])
@pytest.mark.parametrize("make", [np.zeros, lambda n, dtype: torch.zeros(n, dtype=torch.uint8)])
def test_the_limit_of_copying_out_counts_bytes_of_a_part(bench, make, nbytes, is_lent):
    layout = bench.encode([make(nbytes, dtype=np.uint8), make(10, dtype=np.uint8)])
    assert PickledReader(layout).lends == is_lent


def test_a_part_outside_the_slot_is_copied_and_one_inside_is_not(bench):
    inside = bench.writer.empty((LARGE,), torch.uint8).fill_(1)
    used = bench.writer.used_bytes
    arrived = bench.send([inside, torch.full((LARGE,), 2, dtype=torch.uint8)], lent=False)
    assert bench.writer.used_bytes - used == -(-LARGE // 64) * 64
    assert [int(tensor[0]) for tensor in arrived] == [1, 2]


@pytest.mark.parametrize(
    "batch",
    [
        torch.zeros(MIB),
        np.zeros(MIB),
        [torch.zeros(MIB // 5), torch.zeros(MIB // 5)],
        list(range(MIB)),
    ],
    ids=["tensor", "array", "two tensors", "body"],
)
def test_a_batch_too_large_for_its_slot_is_a_shared_memory_error(batch):
    with open_bench(MIB) as bench, pytest.raises(SharedMemoryError, match="raise shm_size"):
        bench.encode(batch)


def test_encoding_leaves_the_batch_as_it_was(bench):
    batch = {"t": torch.arange(5.0).requires_grad_(), "a": np.arange(5)}
    before = copy.deepcopy(batch)
    bench.encode(batch)
    assert_same(batch, before)
    assert not is_in(bench.slot, batch["t"])
    assert tensors_of(batch)[0].is_leaf
