"""Stacking gives what ``torch.stack`` gives, whichever way it takes."""

import pytest
import torch

from shmloader.memory import stacking
from shmloader.memory.stacking import stack_into

ROW = 20_011  # odd, so that rows begin at every alignment


def tensors_of(dtype: torch.dtype, count: int, length: int = ROW) -> list[torch.Tensor]:
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
        if stacking._copy_rows is None:
            pytest.skip("installed without a compiler")
        monkeypatch.setattr(stacking, "STREAM_BYTES", 0)
        monkeypatch.setattr(stacking, "_ROW_BYTES", 0)
    elif request.param == "without the compiled part":
        monkeypatch.setattr(stacking, "_copy_rows", None)
    return request.param


@pytest.mark.sampled(21)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("offset", [0, 1, 7])
def test_bytes_are_those_of_torchs_stack(way: str, dtype: torch.dtype, offset: int) -> None:
    tensors = tensors_of(dtype, 5)
    memory = torch.full((offset + 5 * ROW + 16,), 3).to(dtype)
    out = memory[offset : offset + 5 * ROW].view(5, 1, ROW)
    stack_into(tensors, out)
    assert torch.equal(out.view(torch.uint8), torch.stack(tensors).view(torch.uint8))
    assert (memory[:offset] == 3).all()
    assert (memory[offset + 5 * ROW :] == 3).all()


@pytest.mark.parametrize("length", [1, 15, 63, 64, 65, 127, 128, 4097])
def test_rows_of_any_length_are_copied_whole(way: str, length: int) -> None:
    tensors = tensors_of(torch.uint8, 9, length)
    out = torch.zeros((9, 1, length), dtype=torch.uint8)
    stack_into(tensors, out)
    assert torch.equal(out, torch.stack(tensors))


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


def test_unequal_shapes_are_torchs_error(way: str) -> None:
    with pytest.raises(RuntimeError, match="equal size"):
        stack_into([torch.zeros(4), torch.zeros(5)], torch.zeros(2, 4))


def test_tensors_that_require_grad_are_torchs_error(way: str) -> None:
    tensors = [torch.zeros(4), torch.zeros(4, requires_grad=True)]
    with pytest.raises(RuntimeError, match="automatic differentiation"):
        stack_into(tensors, torch.zeros(2, 4))


def test_large_batches_are_streamed_where_the_compiled_part_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if stacking._copy_rows is None:
        pytest.skip("installed without a compiler")
    asked = []
    monkeypatch.setattr(stacking, "_copy_rows", lambda *arguments: asked.append(arguments))
    row = torch.zeros(1 << 20, dtype=torch.uint8)
    small = torch.empty(4, 1 << 20, dtype=torch.uint8)
    stack_into([row] * 4, small)
    assert asked == []
    large = torch.empty(8, 1 << 20, dtype=torch.uint8)
    stack_into([row] * 8, large)
    assert asked == [(large.data_ptr(), [row.data_ptr()] * 8, 1 << 20)]
