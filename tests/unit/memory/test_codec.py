"""Any batch into a slot and out of it, in one process: pickled, or the short way."""

import copy
import enum
import pickle
import warnings
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shmloader.memory import writer as writer_module
from shmloader.memory.arena import ALIGNMENT, Arena
from shmloader.memory.flat import COPY_OUT_BYTES, FlatLayout, FlatPacker, FlatReader
from shmloader.memory.pickled import PickledReader
from shmloader.memory.writer import SlotWriter, stack_into
from tests.parity.compare import assert_same
from tests.parity.objects import WHOLE
from tests.unit.memory.support import (
    LARGE,
    MIB,
    assert_storages_are_aligned,
    collated_by_torch,
    collated_by_us,
    is_in,
    open_bench,
)

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
both_ways = pytest.mark.parametrize("lent", [False, True], ids=["copied", "lent"])


# Kinds that arrive as they were sent; tests/parity has all kinds, and what torch makes of them.
KINDS = (
    *("None", "nested containers", "an OrderedDict", "a named tuple", "a dataclass"),
    *("one list twice", "arrays of all number types"),
    *("a structured array", "an array of objects", "datetimes", "a large array", "0-d tensors"),
    *("tensors of all types", "NaNs with their payload", "one tensor twice", "large channels_last"),
    *("two views of one storage", "a tensor and its transpose", "one storage as two types"),
    *("large views of one storage", "a Parameter", "a tensor that requires grad"),
    *("a list of 5,000 numbers", "a megabyte of bytes", "small and large together"),
)


@pytest.mark.sampled(4)
@both_ways
@pytest.mark.parametrize("kind", KINDS)
def test_any_batch_arrives_as_it_was_sent(bench, kind, lent):
    expected = WHOLE[kind](1)
    arrived = bench.send(WHOLE[kind](1), lent=lent)
    assert_storages_are_aligned(arrived)
    if not lent:  # what is copied out does not change with its slot
        bench.slot.memory[: bench.writer.used_bytes] = b"\xff" * bench.writer.used_bytes
    assert_same(arrived, expected)
    del arrived
    assert len(bench.ended) == lent, "the slot is still held"


def test_a_tensor_brings_only_the_bytes_that_it_spans(bench):
    base = torch.arange(10**6, dtype=torch.int32)
    part = bench.send(base[1000:1010], lent=False)
    assert bench.writer.used_bytes == ALIGNMENT
    assert part.untyped_storage().nbytes() == 40
    assert part.storage_offset() == 0
    assert part.tolist() == list(range(1000, 1010))


@both_ways
def test_a_sparse_tensor_holds_its_slot_no_longer_than_the_user_does(bench, lent):
    """torch keeps what pickle makes of sparse tensors, until it loads a file."""
    kept = torch._utils._sparse_tensors_to_validate
    kept.append(None)  # as while a file is loaded
    expected = torch.ones(LARGE).to_sparse()
    arrived = bench.send(expected, lent=lent)
    assert_same(arrived, expected)
    assert kept == [None]
    kept.clear()
    del arrived
    assert len(bench.ended) == lent


def test_a_tensor_with_a_graph_is_refused_with_the_remedy(bench):
    tensor = torch.zeros(3, requires_grad=True) * 2
    with pytest.raises(RuntimeError, match=r"detach\(\) it .*: autograd does not cross processes"):
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


def test_encoding_leaves_the_batch_as_it_was(bench):
    batch = {"t": torch.arange(5.0).requires_grad_(), "a": np.arange(5)}
    before = copy.deepcopy(batch)
    bench.encode(batch)
    assert_same(batch, before)
    assert not is_in(bench.slot, batch["t"])
    assert batch["t"].is_leaf


@pytest.fixture
def packer(bench):
    return FlatPacker(bench.writer)


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


# Where torch refuses a mixture of scalars (of uint16 with others, of bool arrays with numbers),
# the short way takes some: those dtypes stand in the tables below.
TENSOR_DTYPES = [
    *(torch.bool, torch.uint8, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64),
]
ARRAY_DTYPES = [*("u1", "i2", "i4", "i8", "f2", "f4", "f8", "c8", ">i4", "M8[s]", "U2")]
SHAPES = [(), (1,), (3,), (0,), (2, 3), (3, 0), (70, 30)]
NUMBERS = [
    *(0, 1, -7, True, False, 2**31, 2**62, 2**63, 2**64, -(2**63), 10**30),
    *(0.5, -0.0, 1e300, float("inf"), float("nan"), 3 + 4j),
    *(np.int32(3), np.float32(0.1), np.uint64(2**63), Level.HIGH),
]


def tensor_like(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return (torch.arange(np.prod(shape, dtype=int)).reshape(shape) * 7 + seed).to(dtype)


def array_like(dtype: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    return np.asarray(np.arange(np.prod(shape, dtype=int)).reshape(shape) * 7 + seed, dtype)


def two_kinds(draw, dtypes):
    """Draw two pairs of a dtype and a shape."""
    return [(draw(st.sampled_from(dtypes)), draw(st.sampled_from(SHAPES))) for _ in range(2)]


def tensor_fields(draw):
    """How a sample's tensor is made, and how an odd one."""
    kind, other = two_kinds(draw, TENSOR_DTYPES)
    dtype, shape = kind
    odd = [
        lambda seed: tensor_like(other[0], shape, seed),
        lambda seed: tensor_like(dtype, other[1], seed),
        lambda seed: tensor_like(dtype, shape, seed).expand(2, *shape)[0],
        lambda seed: tensor_like(dtype, shape[::-1], seed).permute(
            tuple(reversed(range(len(shape))))
        ),
        lambda seed: tensor_like(torch.float32, shape, seed).requires_grad_(),
        lambda seed: 1 if dtype is torch.bfloat16 else tensor_like(dtype, shape, seed).numpy(),
        lambda seed: seed,
        lambda seed: None,
    ]
    return lambda seed: tensor_like(*kind, seed), draw(st.sampled_from(odd))


def array_fields(draw):
    kind, other = two_kinds(draw, ARRAY_DTYPES)
    dtype, shape = kind
    odd = [
        lambda seed: array_like(other[0], shape, seed),
        lambda seed: array_like(dtype, other[1], seed),
        lambda seed: np.asfortranarray(array_like(dtype, shape, seed)),
        # Even of a single element, torch refuses a negative stride, which the short way takes.
        lambda seed: array_like(dtype, shape, seed)[..., ::-1] if shape[-1:] > (1,) else 0,
        lambda seed: torch.ones(shape),
        lambda seed: seed,
        lambda seed: 2.5,
    ]
    return lambda seed: array_like(*kind, seed), draw(st.sampled_from(odd))


def number_fields(draw):
    first, odd = draw(st.sampled_from(NUMBERS)), draw(st.sampled_from([*NUMBERS, None, "7", [1]]))
    stays = type(first) in {bool, Level} or (isinstance(first, int) and first > 2**60)
    return lambda seed: first if stays else first + seed, lambda seed: odd


@st.composite
def batches(draw):
    """Samples of one kind, of which at most a few are odd."""
    makers = [
        draw(st.sampled_from([tensor_fields, tensor_fields, array_fields, number_fields]))(draw)
        for _ in range(draw(st.integers(1, 4)))
    ]
    if draw(st.booleans()):  # fields of one kind lie side by side
        makers = [makers[0]] * len(makers)
    container = draw(st.sampled_from(["bare", "tuple", "list", "dict", "nested"]))
    count = draw(st.integers(1, 5))
    places = st.tuples(st.integers(0, count - 1), st.integers(0, len(makers) - 1))
    odd = draw(st.just(set()) | st.sets(places, min_size=1, max_size=2))
    samples = []
    for number in range(count):
        values = [maker[(number, place) in odd](number) for place, maker in enumerate(makers)]
        names = [f"f{place}" for place in range(len(values))]
        if (number, 0) in odd:
            names.reverse()
        match container:
            case "bare":
                samples.append(values[0])
            case "tuple":
                samples.append(tuple(values))
            case "list":
                samples.append(values)
            case "dict":
                by_name = dict(zip(sorted(names), values, strict=True))
                samples.append({name: by_name[name] for name in names})
            case "nested":
                samples.append((values[0], {"more": values}))
    return samples


def outcome(call):
    """What came of it, value or kind of error, and the kinds of warnings."""
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        try:
            result = call()
        except Exception as error:
            result = type(error).__name__
    return result, {warning.category for warning in heard}


@pytest.mark.slow
@both_ways
@given(samples=batches())
@settings(max_examples=500, derandomize=True)
def test_any_samples_collate_as_in_a_worker_of_torch(samples, lent):
    theirs, torch_warns = outcome(lambda: collated_by_torch(samples))
    with open_bench() as bench:
        ours, we_warn = outcome(lambda: collated_by_us(samples, bench, lent=lent))
        if theirs == "AttributeError":  # torch stumbles over a sample that is no tensor
            theirs = "TypeError"
        assert_same(ours, theirs)
        assert we_warn <= torch_warns


FLAT = {
    "tensors": [torch.arange(3), torch.arange(3) * 2],
    "0-d tensors": [torch.tensor(1.5), torch.tensor(2.5)],
    "tensors of no elements": [torch.empty(0, 3), torch.empty(0, 3)],
    "tensors of any strides": [torch.arange(6).reshape(2, 3).T, torch.arange(6).reshape(3, 2)],
    "one sample": [torch.arange(3)],
    "bfloat16": [torch.ones(2, 2, dtype=torch.bfloat16)] * 2,
    "ints": [1, -2, 2**62],
    "bools": [True, False],
    "bools and ints": [True, 2],
    "ints and bools": [1, True],
    "floats": [1.5, -0.0, float("nan")],
    "floats and ints": [1.5, 2],
    "arrays": [np.arange(3), np.arange(3)],
    "0-d arrays": [np.array(1.5), np.array(2.5)],
    "arrays of another order": [
        np.arange(6).reshape(2, 3),
        np.asfortranarray(np.ones((2, 3), int)),
    ],
    "bool arrays": [np.array([True, False])] * 2,
    "0-d bool arrays": [np.array(True), np.array(False)],
    "uint16 tensors": [torch.arange(3).to(torch.uint16)] * 2,
    "0-d uint16 tensors": [torch.tensor(2**16 - 1, dtype=torch.uint16)] * 2,
    "uint16 arrays": [np.arange(3, dtype=np.uint16)] * 2,
    "tuples": [(torch.arange(3), 1, 2.5), (torch.arange(3), 2, 3.5)],
    "large and small": [(torch.full((20_000,), n, dtype=torch.int32), n) for n in (1, 2)],
    "lists": [[torch.arange(3), 1], [torch.arange(3), 2]],
    "dicts": [{"x": torch.arange(3), "y": 1}, {"x": torch.arange(3), "y": 2}],
    "dicts of another key order": [{"x": 1, "y": 2}, {"y": 3, "x": 4}],
    "dicts with a key too many": [{"x": 1}, {"x": 2, "y": 3}],
    "keys of two types": [{1: 1, "a": 2}] * 2,
    "fields of one kind": [(torch.tensor([n, n]), torch.tensor([9, n])) for n in range(5)],
    "small fields between others": [
        (torch.tensor([1.0, n]), n, torch.tensor([n]), torch.tensor([2.0, n]), torch.zeros(3000))
        for n in range(4)
    ],
    "arrays, tensors and numbers of one kind": [
        (np.full(2, n), torch.tensor([n, n + 1]), n, torch.tensor(n), np.full(2, -n), n > 1)
        for n in range(3)
    ],
    "float32 and float64": [torch.ones(2), torch.ones(2, dtype=torch.float64) / 3],
    "0-d float32 and int": [torch.tensor(1.5), torch.tensor(2)],
    "arrays and tensors": [np.arange(3), torch.arange(3)],
    "int32 and int64 arrays": [np.arange(3, dtype="i4"), np.arange(3, dtype="i8")],
}


@pytest.mark.sampled(47)
@both_ways
@pytest.mark.parametrize("samples", FLAT.values(), ids=FLAT.keys())
def test_flat_samples_go_the_short_way_and_arrive_as_torch_s(bench, packer, samples, lent):
    for batch in (samples, samples, samples * 2, samples[:1]):
        bench.writer.open(bench.slot)
        layout = packer.pack(batch)
        assert isinstance(layout, FlatLayout)
        arrived = bench.read(pickle.loads(pickle.dumps(layout)), lent=lent)
        assert_same(arrived, collated_by_torch(batch))


@pytest.mark.parametrize("shape", [(), (2,)])
def test_numbers_that_torch_does_not_promote_are_left_to_it(packer, shape):
    samples = [torch.ones(shape, dtype=dtype) for dtype in (torch.int64, torch.uint32)]
    assert packer.pack(samples) is None


def test_arrays_of_other_lengths_are_not_taken_for_a_batch_of_as_many_numbers(packer):
    assert packer.pack([np.arange(3), np.arange(2), np.arange(4)]) is None


def test_the_layout_is_the_same_object_while_batches_are_alike(bench, packer):
    def sample(seed):
        return {"x": torch.full((2, 3), seed), "y": seed, "z": np.full(4, seed)}

    first = packer.pack([sample(1), sample(2)])
    bench.writer.open(bench.slot)
    second = packer.pack([sample(3), sample(4)])
    assert second is first
    assert bench.read(second, lent=False)["y"].tolist() == [3, 4]


@pytest.mark.parametrize(
    "other",
    [
        [(torch.zeros(2), 1)],
        [(torch.zeros(3), 1), (torch.zeros(3), 2)],
        [(torch.zeros(2, dtype=torch.float64), 1), (torch.zeros(2), 2)],
        [(torch.zeros(2), 1.5), (torch.zeros(2), 2.5)],
        [(torch.zeros(2), torch.tensor(1)), (torch.zeros(2), torch.tensor(2))],
        [{"a": torch.zeros(2), "b": 1}, {"a": torch.zeros(2), "b": 2}],
        [(torch.zeros(2), 1, 2), (torch.zeros(2), 2, 3)],
    ],
    ids=["count", "shape", "dtype", "number", "0-d tensor", "container", "more fields"],
)
def test_a_batch_of_another_kind_gets_a_layout_of_its_own(bench, packer, other):
    first = packer.pack([(torch.zeros(2), 1), (torch.zeros(2), 2)])
    second = packer.pack(other)
    assert second is not first
    assert_same(bench.read(second, lent=False), collated_by_torch(other))


def test_each_slot_gets_the_batch_that_was_packed_into_it():
    arena = Arena.create(MIB, 2)
    writer = SlotWriter(arena)
    packer, (one, other) = FlatPacker(writer), arena.slots
    for slot, value in ((one, 1.0), (other, 2.0), (one, 3.0)):
        writer.open(slot)
        layout = packer.pack([torch.full((5,), value)])
    reader = FlatReader(layout)
    assert reader.read(one, None)[0].tolist() == [3] * 5
    assert reader.read(other, None)[0].tolist() == [2] * 5
    owner = weakref.ref(other.mapping.owner)
    other.unmap()
    assert owner() is None, "a packer or reader still holds the slot"
    arena.close()


def test_a_packed_batch_is_not_held(bench, packer):
    packer.pack([torch.zeros(LARGE)])
    assert not bench.writer.part()


def test_a_batch_that_cannot_be_packed_leaves_those_before_it(bench, packer) -> None:
    good = [torch.arange(3.0), torch.arange(3.0)]
    layout = packer.pack(good)
    used = bench.writer.used_bytes
    assert packer.pack([torch.arange(3.0), torch.arange(4.0)]) is None
    assert bench.writer.used_bytes == used
    other = packer.pack([torch.arange(5.0)])
    assert_same(bench.read(layout, lent=False), collated_by_torch(good))
    assert_same(bench.read(other, lent=False), collated_by_torch([torch.arange(5.0)]))


ROW = 20_011  # odd, so that rows begin at every alignment


def tensors_of(dtype: torch.dtype, count: int, length: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(count)
    return [
        torch.randint(0, 256, (length * dtype.itemsize,), dtype=torch.uint8, generator=generator)
        .view(dtype)
        .view(1, length)
        for _ in range(count)
    ]


@pytest.fixture(params=["as it is", "always streaming", "without the compiled part"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "always streaming":
        if writer_module._copy_rows is None:
            pytest.skip("installed without a compiler")
        monkeypatch.setattr(writer_module, "STREAM_BYTES", 0)
        monkeypatch.setattr(writer_module, "ROW_BYTES", 0)
    elif request.param == "without the compiled part":
        monkeypatch.setattr(writer_module, "_copy_rows", None)
    return request.param


@pytest.mark.parametrize(
    ("dtype", "length", "offset"),
    [
        *((torch.uint8, length, 0) for length in (1, 15, 63, 64, 65, 127, 128, 4097)),
        *((dtype, ROW, 0) for dtype in (torch.uint8, torch.int16, torch.float32, torch.bfloat16)),
        *((dtype, ROW, offset) for dtype in (torch.uint8, torch.float32) for offset in (1, 7)),
    ],
)
def test_bytes_are_those_of_torchs_stack(way: str, dtype, length: int, offset: int) -> None:
    tensors = tensors_of(dtype, 9, length)
    memory = torch.full((offset + 9 * length + 16,), 3).to(dtype)
    out = memory[offset : offset + 9 * length].view(9, 1, length)
    stack_into(tensors, out)
    assert torch.equal(out.view(torch.uint8), torch.stack(tensors).view(torch.uint8))
    assert (memory[:offset] == 3).all()
    assert (memory[offset + 9 * length :] == 3).all()


IRREGULAR = {
    "another dtype": lambda t: t.double(),
    "not contiguous": lambda t: t.t().contiguous().t(),
    "a subclass": torch.nn.Parameter,
    "the neg bit": torch._neg_view,
    "expanded": lambda t: t[:1, :1].expand(t.shape),
}


@pytest.mark.parametrize("kind", IRREGULAR)
def test_tensors_that_are_not_alike_come_out_as_torch_has_them(way: str, kind: str) -> None:
    tensors = [torch.randn(40, 41) for _ in range(4)]
    tensors[2] = IRREGULAR[kind](tensors[2])
    out = torch.zeros(4, 40, 41)
    with torch.no_grad():
        stack_into(tensors, out)
        assert torch.equal(out, torch.stack([tensor.float() for tensor in tensors]))


def test_large_batches_are_streamed_where_the_compiled_part_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if writer_module._copy_rows is None:
        pytest.skip("installed without a compiler")
    asked = []
    monkeypatch.setattr(writer_module, "_copy_rows", lambda *arguments: asked.append(arguments))
    row = torch.zeros(1 << 20, dtype=torch.uint8)
    small = torch.empty(4, 1 << 20, dtype=torch.uint8)
    stack_into([row] * 4, small)
    assert asked == []
    large = torch.empty(8, 1 << 20, dtype=torch.uint8)
    stack_into([row] * 8, large)
    assert asked == [(large.data_ptr(), [row.data_ptr()] * 8, 1 << 20)]


def large_and_small(count=4):
    return [
        {"image": torch.full((LARGE // 4,), float(n)), "label": n, "box": torch.tensor([n, n])}
        for n in range(count)
    ]


@both_ways
def test_every_field_has_a_storage_of_its_own_which_the_user_may_write_into(bench, packer, lent):
    samples = [
        (*sample.values(), torch.tensor([7.0, 7.0, 7.0]), torch.tensor([8.0, 8.0, 8.0]))
        for sample in large_and_small(3)
    ]
    arrived = bench.read(packer.pack(samples), lent=lent)
    starts = [tensor.untyped_storage().data_ptr() for tensor in arrived]
    assert all(start % 16 == 0 for start in starts)
    assert len(set(starts)) == len(arrived)
    for tensor in arrived:
        assert tensor.storage_offset() == 0
        assert tensor.is_contiguous()
        assert not tensor._is_view()
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    for number, tensor in enumerate(arrived):
        tensor.fill_(number)
    assert [tensor.unique().tolist() for tensor in arrived] == [[0], [1], [2], [3], [4]]
    assert samples[0][-1].eq(8).all()
    assert all(sample[0].eq(n).all() for n, sample in enumerate(samples))


def test_a_kept_label_holds_no_slot_and_a_kept_image_which_is_a_view_of_it_does(bench, packer):
    layout = packer.pack(large_and_small())
    assert FlatReader(layout).lends
    arrived = bench.read(layout, lent=True)
    assert [name for name, tensor in arrived.items() if is_in(bench.slot, tensor)] == ["image"]
    image, label = arrived["image"][1:2], arrived["label"]
    del arrived
    assert not bench.ended
    assert (image == 1).all()
    del image
    assert len(bench.ended) == 1
    assert label.tolist() == [0, 1, 2, 3]


def test_a_slot_whose_layout_changes_is_read_by_the_new_one_each_time(bench, packer):
    layouts = packer.pack([1, 2, 3]), packer.pack([(0.5, True)] * 2)
    readers = [FlatReader(layout) for layout in layouts]
    for round_number in range(2):
        numbers, (halves, flags) = (reader.read(bench.mapped(), None) for reader in readers)
        assert numbers.tolist() == [1 + 10 * round_number, 2, 3]
        assert (halves.tolist(), flags.tolist()) == ([0.5, 0.5], [True, True])
        bench.mapped().memory[0] += 10
