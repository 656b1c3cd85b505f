"""Rows are gathered as torch gathers and converts them, with the compiled part and without it."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shmloader.memory import rows as rows_module
from shmloader.memory.rows import DIRECT, GATHERED_DTYPES, RowSource

LETTERS = rows_module._LETTERS
needs_compiler = pytest.mark.skipif(
    rows_module._gather_fields is None, reason="installed without a compiler"
)


@pytest.fixture(params=["as it is", "always streaming", "without the compiled part"])
def way(request, monkeypatch):
    if request.param == "always streaming":
        monkeypatch.setattr(rows_module, "STREAM_BYTES", 0)
        monkeypatch.setattr(rows_module, "ROW_BYTES", 0)
    elif request.param == "without the compiled part":
        monkeypatch.setattr(rows_module, "_gather_fields", None)


def numbers(dtype, *shape):
    """Return numbers whose signs and high bits are all in use."""
    generator = torch.Generator().manual_seed(len(shape))
    count = torch.Size(shape).numel() * dtype.itemsize
    bits = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator)
    if dtype is torch.bool:
        bits = bits % 2
    return bits.view(dtype).view(shape)


def same(one, other):
    return one.dtype == other.dtype and torch.equal(
        one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8)
    )


def gather(source, step, kind, to, target):
    """Have the compiled part copy three rows of eight elements; return whether it could."""
    entry = [target, source, step, 8, ord(kind), ord(to), 0, *DIRECT]
    return rows_module._gather_fields(0, np.array(entry), 3, np.arange(3))


AT = [7, 0, 0, 69, 33, 68, 1]


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("dtype", sorted(GATHERED_DTYPES, key=str))
def test_rows_are_those_of_indexing(dtype):
    for width in [(), (1,), (3,), (65,), (5, 13), (0,), (2049,)]:
        source = numbers(dtype, 70, *width)
        expected = source[torch.tensor(AT)]
        for index_dtype in (np.int32, np.int64):
            case, at = (width, index_dtype), np.array(AT, index_dtype)
            assert same(RowSource(source).copy(at), expected), case
            memory = torch.full((len(AT) + 2, *width), 1).to(dtype)
            assert same(RowSource(source).copy(at, memory[1:-1]), expected), case
            assert (memory[0] == 1).all(), case
            assert (memory[-1] == 1).all(), case


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("to", [torch.int64, torch.float32, torch.float64])
def test_rows_are_converted_as_torch_does(to):
    for dtype in LETTERS:
        source = numbers(dtype, 70, 300)
        if dtype.is_floating_point:  # not all bits are numbers, nor all numbers ints
            scale = 1e300 if to is torch.float32 and dtype is torch.float64 else 1e6
            source = (torch.randn(70, 300, dtype=torch.float64) * scale).to(dtype)
        out = torch.empty((len(AT), 300), dtype=to)
        assert RowSource(source, to).copy(np.array(AT), out) is out
        assert torch.equal(out, source[torch.tensor(AT)].to(to)), dtype
        assert torch.equal(RowSource(source, to).copy(np.array(AT)), out), dtype
        assert torch.equal(RowSource(source, to).copy(slice(3, 9)), source[3:9].to(to)), dtype


STRIDED = {
    "transposed": lambda: torch.arange(120).view(4, 30).t(),
    "every second row": lambda: torch.arange(240).view(60, 4)[::2],
    "expanded": lambda: torch.arange(4).expand(30, 4),
    "overlapping": lambda: torch.arange(40).as_strided((30, 4), (1, 1)),
    "of a larger array": lambda: torch.arange(300).view(30, 10)[:, 3:7],
    "narrow": lambda: torch.arange(300, dtype=torch.int32).view(30, 10)[:, 3:7],
    "misaligned": lambda: torch.from_numpy(
        np.frombuffer(bytes(range(241)), np.int16, 120, 1).reshape(30, 4).copy()
    ),
}


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("kind", STRIDED)
def test_rows_may_lie_anywhere(kind):
    source, at = STRIDED[kind](), np.array([29, 0, 5, 5])
    for dtype in (None, torch.int64, torch.float64):
        expected = source[torch.from_numpy(at)].to(dtype or source.dtype)
        out = torch.empty(expected.shape, dtype=expected.dtype)
        assert torch.equal(RowSource(source, dtype).copy(at, out), expected), dtype


@needs_compiler
def test_elements_that_are_not_aligned_are_left_to_numpy():
    memory = torch.zeros(801, dtype=torch.uint8)
    address = memory.data_ptr()
    assert gather(address + 400, 32, "i", "q", address)
    assert not gather(address + 400, 32, "i", "q", address + 4)
    assert not gather(address + 402, 32, "i", "q", address)
    assert not gather(address + 400, 30, "i", "q", address)
    assert not gather(address + 400, 32, "q", "i", address)


@needs_compiler
@pytest.mark.parametrize("change", ["resized", "replaced", "transposed"])
def test_a_tensor_that_has_changed_is_looked_at_again(change):
    """Its memory may be shorter, or gone."""
    tensor = torch.arange(16.0).view(4, 4)
    source, out = RowSource(tensor), torch.empty(2, 4)
    if change == "resized":
        tensor.resize_(2, 4)
    else:
        tensor.data = tensor.clone() + 1 if change == "replaced" else tensor.t()
    present = source.present()
    assert present is not source
    assert not present.write(np.array([1, 0]), out.data_ptr())
    assert torch.equal(present.copy(np.array([1, 0]), out), tensor[[1, 0]])
    with pytest.raises((IndexError, RuntimeError), match="out of"):
        present.copy(np.array([4]), torch.empty(1, 4))


@needs_compiler
def test_memory_that_has_moved_is_found():
    tensor = torch.arange(16.0).view(4, 4)
    source, out = RowSource(tensor), torch.empty(2, 4)
    tensor.share_memory_()
    tensor += 1
    assert source.present() is source
    assert source.write(np.array([3, 0]), out.data_ptr())
    assert torch.equal(out, tensor[[3, 0]])


@needs_compiler
@given(rows=st.lists(st.integers(0, 199), min_size=1, max_size=300), width=st.integers(1, 3000))
def test_any_number_of_rows_of_any_width_is_gathered(rows, width):
    """The rows ahead, which are fetched early, end where the batch ends."""
    source = torch.arange(200 * width).view(200, width)
    out = torch.empty((len(rows), width), dtype=torch.int64)
    assert RowSource(source).write(np.array(rows, np.int32), out.data_ptr())
    assert torch.equal(out, source[torch.tensor(rows)])
