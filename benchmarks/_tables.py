"""A tokenised ``datasets.Dataset`` in an Arrow file, what pads its lists, and the bare gather."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

TOKENS, SHORTEST = 1_024, 64
_CHUNK_ROWS = 1_000  # as datasets writes them

# The columns and dtypes that datasets makes of what a tokenizer returns.
_COLUMNS = {"input_ids": np.int32, "attention_mask": np.int8}


def make_tokens(rows: int) -> dict[str, np.ndarray]:
    """Make the columns: arrays of rows × tokens."""
    rng = np.random.default_rng(0)
    made = (rng.integers(0, 50_000, (rows, TOKENS)), rng.random((rows, TOKENS)) < 0.9)
    return {
        name: values.astype(dtype)
        for (name, dtype), values in zip(_COLUMNS.items(), made, strict=True)
    }


def make_table(
    folder: Path, rows: int, *, is_ragged: bool = False, chunk_rows: int = _CHUNK_ROWS
) -> Any:
    """Write a dataset of lists of one length, or of several, and map it into memory."""
    import datasets
    import pyarrow as pa

    lengths = np.full(rows, TOKENS)
    if is_ragged:
        lengths = np.random.default_rng(1).integers(SHORTEST, TOKENS + 1, rows)
    columns = make_tokens(rows)
    types = {name: pa.list_(pa.from_numpy_dtype(dtype)) for name, dtype in _COLUMNS.items()}
    path = folder / "tokens.arrow"
    with pa.ipc.new_stream(path, pa.schema(types)) as stream:
        for first in range(0, rows, chunk_rows):
            chunk = lengths[first : first + chunk_rows]
            offsets = pa.array(np.append(0, chunk.cumsum()), pa.int32())
            is_token = np.arange(TOKENS) < chunk[:, None]
            arrays = [
                pa.ListArray.from_arrays(offsets, pa.array(one[first:][: len(chunk)][is_token]))
                for one in columns.values()
            ]
            stream.write_batch(pa.record_batch(arrays, list(types)))
    return datasets.Dataset.from_file(str(path)).with_format("torch")


def pad_by_torch(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Pad each field by ``pad_sequence``."""
    return {
        key: pad_sequence([sample[key] for sample in samples], batch_first=True)
        for key in samples[0]
    }


def read_columns(folder: Path, rows: int) -> dict[str, np.ndarray]:
    """Return the columns of such a file, in one chunk, so that each column is one array."""
    table = make_table(folder, rows, chunk_rows=rows).data
    return {
        name: table.column(name).chunk(0).values.to_numpy().reshape(rows, TOKENS)
        for name in _COLUMNS
    }


def batches_of(rows: int, batch_size: int) -> np.ndarray:
    """Return the rows of each batch of an epoch, drawn at random."""
    order = np.random.default_rng(2).permutation(rows)
    return order[: rows // batch_size * batch_size].reshape(-1, batch_size)


def row_gatherer(folder: Path, rows: int, batch_size: int) -> Callable[[int], object]:
    """Return a function that copies the rows of a batch, as int64, into arrays that stay."""
    columns = list(read_columns(folder, rows).values())
    indices = batches_of(rows, batch_size)
    out = [np.empty((batch_size, TOKENS), np.int64) for _ in columns]

    def gather(number: int) -> None:
        chosen = indices[number % len(indices)]
        for column, place in zip(columns, out, strict=True):
            place[...] = column.take(chosen, axis=0)

    return gather
