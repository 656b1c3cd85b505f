"""Blocks of a file of tokens, with and without a loader."""

import pickle

import numpy as np
import pytest
import torch
from torch.utils.data import Subset

from shmloader import DataLoader, TokenBlocks
from shmloader.batch.arrays import find_columns, is_plain_data

TOKENS = np.random.default_rng(0).integers(0, 60_000, 1003).astype(np.uint16)


@pytest.fixture(params=["raw", "npy", "array", "tensor"])
def source(request, tmp_path):
    """The tokens, and the arguments that say how to read them."""
    match request.param:
        case "raw":
            TOKENS.tofile(tmp_path / "train.bin")
            return tmp_path / "train.bin", {"dtype": "uint16"}
        case "npy":
            np.save(tmp_path / "train.npy", TOKENS)
            return str(tmp_path / "train.npy"), {}
        case "array":
            return TOKENS, {}
    return torch.from_numpy(TOKENS.astype(np.int32)), {}


@pytest.mark.parametrize("next_token", [False, True])
def test_blocks_are_cut_from_the_tokens_in_order(source, next_token):
    tokens, options = source
    blocks = TokenBlocks(tokens, 50, next_token=next_token, **options)
    assert len(blocks) == 20
    for index in (0, 7, 19, -1):
        start = index % 20 * 50
        expected = TOKENS[start : start + 50 + next_token].tolist()
        assert blocks[index].tolist() == expected
        assert blocks[index].dtype == torch.int64
    for index in (20, -21):
        with pytest.raises(IndexError):
            blocks[index]


def test_the_next_token_is_one_that_there_is():
    assert len(TokenBlocks(TOKENS[:100], 50)) == 2
    assert len(TokenBlocks(TOKENS[:100], 50, next_token=True)) == 1
    assert len(TokenBlocks(TOKENS[:101], 50, next_token=True)) == 2


@pytest.mark.parametrize("options", [{}, {"shuffle": True, "seed": 3}])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_gathers_what_it_would_collate(source, workers, options):
    tokens, given = source
    blocks = TokenBlocks(tokens, 50, next_token=True, **given)
    assert find_columns(blocks) is not None
    assert is_plain_data(blocks)
    plain = torch.stack(list(blocks))
    with DataLoader(blocks, batch_size=6, num_workers=workers, **options) as loader:
        batches = list(loader)
    order = [int(np.flatnonzero((plain == row).all(1))[0]) for batch in batches for row in batch]
    assert sorted(order) == list(range(20))
    assert (order == list(range(20))) == (not options)
    assert {batch.dtype for batch in batches} == {torch.int64}
    assert [len(batch) for batch in batches] == [6, 6, 6, 2]


@pytest.mark.parametrize("dtype", ["int8", "uint16", "int32", "uint32", "int64", "uint64", ">u2"])
def test_tokens_of_any_int_are_int64(dtype):
    blocks = TokenBlocks((TOKENS % 100).astype(dtype), 50)
    for loader in (DataLoader(blocks, 4), DataLoader(Subset(blocks, range(20)), 4)):
        batch = next(iter(loader))
        assert batch.dtype == torch.int64
        assert batch.tolist() == (TOKENS[:200] % 100).reshape(4, 50).tolist()


def test_the_gathered_are_those_that_are_mapped_and_no_copy():
    blocks = TokenBlocks(TOKENS, 50)
    assert np.shares_memory(blocks.rows, TOKENS)
    assert not blocks.rows.flags.writeable


def test_a_pickle_names_the_file(tmp_path, monkeypatch):
    TOKENS.tofile(tmp_path / "train.bin")
    monkeypatch.chdir(tmp_path)
    blocks = TokenBlocks("train.bin", 50, dtype="uint16")
    data = pickle.dumps(blocks)
    monkeypatch.chdir("/")
    copy = pickle.loads(data)
    assert len(data) < 500
    assert torch.equal(copy[3], blocks[3])
    assert isinstance(copy.tokens, np.memmap)


# Documents ---------------------------------------------------------------------------------


def by_token(boundaries, start, width):
    """Positions and ends, token by token."""
    positions, ends = [], [0]
    for token in range(start, start + width):
        if token in boundaries and token > start:
            ends.append(token - start)
        positions.append(token - start - ends[-1])
    return positions, [*ends, width]


@pytest.mark.parametrize("next_token", [False, True])
@pytest.mark.parametrize("boundaries", [[], [0, 7, 7, 50, 51, 103, 150, 200, 999], [1003]])
def test_positions_count_from_the_beginning_of_a_document_or_block(boundaries, next_token):
    blocks = TokenBlocks(TOKENS, 50, boundaries, next_token=next_token)
    assert find_columns(blocks) is None
    for index in range(len(blocks)):
        positions, ends = by_token(boundaries, 50 * index, 50 + next_token)
        sample = blocks[index]
        assert sample["input_ids"].tolist() == TOKENS[50 * index :][: 50 + next_token].tolist()
        assert sample["position_ids"].tolist() == positions
        assert blocks.cu_seq_lens(index).tolist() == ends
        assert blocks.cu_seq_lens(index).dtype == torch.int32


def test_a_loader_collates_blocks_with_positions():
    blocks = TokenBlocks(TOKENS, 50, [0, 70])
    with DataLoader(blocks, batch_size=2, num_workers=1) as loader:
        batch = next(iter(loader))
    assert batch["position_ids"].tolist() == [[*range(50)], [*range(20), *range(30)]]
    assert batch["input_ids"].tolist() == TOKENS[:100].reshape(2, 50).tolist()


def test_without_boundaries_there_are_no_ends_of_documents():
    with pytest.raises(ValueError, match="needs boundaries"):
        TokenBlocks(TOKENS, 50).cu_seq_lens(0)


# Wrong arguments ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "options", "error", "text"),
    [
        (TOKENS, {"block": 0}, ValueError, "block should be 1 or more"),
        (TOKENS, {"next_token": 1}, TypeError, "next_token should be True"),
        (TOKENS, {"dtype": "uint16"}, ValueError, "leave it out for an array"),
        (TOKENS[:49], {}, ValueError, "at least 50 tokens for a block, but got 49"),
        (TOKENS[:50], {"next_token": True}, ValueError, "at least 51 tokens"),
        (TOKENS * 1.0, {}, TypeError, "dtype float64"),
        (TOKENS[:1000].reshape(2, 500), {}, ValueError, r"shape \(2, 500\)"),
        (TOKENS, {"boundaries": [3, 2]}, ValueError, r"boundaries\[1\]=2"),
        (TOKENS, {"boundaries": [3, 1004]}, ValueError, r"boundaries\[1\]=1004"),
        (TOKENS, {"boundaries": [-1, 4]}, ValueError, r"boundaries\[0\]=-1"),
        (TOKENS, {"boundaries": [0.5]}, TypeError, "boundaries should be a sequence of ints"),
    ],
)
def test_wrong_arguments_are_named(tokens, options, error, text):
    with pytest.raises(error, match=text):
        TokenBlocks(tokens, **{"block": 50, **options})


def test_another_dtype_than_that_of_an_npy_file_is_refused(tmp_path):
    path = tmp_path / "train.npy"
    np.save(path, np.arange(30, dtype=np.uint16))
    assert TokenBlocks(path, 10, dtype="uint16")[1].tolist() == list(range(10, 20))
    with pytest.raises(ValueError, match=r"train.npy has tokens of uint16, not int32: leave"):
        TokenBlocks(path, 10, dtype="int32")


def test_a_file_needs_a_dtype_and_whole_tokens(tmp_path):
    path = tmp_path / "train.bin"
    path.write_bytes(b"abc")
    with pytest.raises(ValueError, match=r"dtype should be given for the tokens of .*train.bin"):
        TokenBlocks(path, 2)
    with pytest.raises(ValueError, match="has 3 bytes, which are no whole number of uint16"):
        TokenBlocks(path, 2, dtype="uint16")
    with pytest.raises(FileNotFoundError):
        TokenBlocks(tmp_path / "none.bin", 2, dtype="uint16")
