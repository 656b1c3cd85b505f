"""``shmloader.TokenBlocks``: a file of tokens as a dataset of blocks."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset

from shmloader.sampling.arguments import flag, whole_number

_Tokens = np.ndarray[Any, np.dtype[Any]]


class TokenBlocks(Dataset[Any]):
    """Documents that are concatenated, then cut into blocks of equal length, for pre-training.

    Block i has the tokens from ``i * block`` on. There is no padding and no packing, and every
    token is used. But documents are cut at the ends of blocks, and a block may have several. To
    keep documents whole, use :class:`shmloader.sampling.TokenBatches` instead.

    The tokens stay in their file, of any size, and are mapped into memory in each process. Samples
    are int64, as embeddings take them, whatever the file has. Without ``boundaries``, a loader of
    shmloader gathers a batch in one step, as of an array. The last tokens, too few for a block, are
    left out.

    Attributes:
        tokens: The tokens, as a one-dimensional array.
        block, next_token: The arguments.
        boundaries: The argument, as an int64 array or None.

    Args:
        tokens: Path of a ``.npy`` file, or of another file that holds only the tokens. Or a
            one-dimensional array, memory map or tensor of ints.
        block: Number of tokens in a block, at least 1.
        boundaries: For each document, where it begins among the tokens, ascending. Samples are then
            dicts of ``input_ids`` and ``position_ids``, both int64 of the block's length. Positions
            count from the beginning of the document, or of the block if the document has begun
            before. None for samples of tokens alone.
        dtype: Type of the tokens in a file that is not ``.npy``, such as "uint16".
        next_token: Whether a sample also has the first token of the next block, so that each token
            of the block has a label.

    Raises:
        TypeError: If the tokens are not ints, or an argument has a wrong type.
        ValueError: If the array has another shape, or there are too few tokens for a block. If a
            file needs ``dtype``, or ends within a token. If boundaries do not ascend, or lie
            outside the tokens.
    """

    __module__ = "shmloader"  # users import it from there

    def __init__(
        self,
        tokens: Any,
        block: int,
        boundaries: Any = None,
        *,
        dtype: npt.DTypeLike | None = None,
        next_token: bool = False,
    ) -> None:
        self.block = whole_number(block, "block", minimum=1)
        self.next_token = flag(next_token, "next_token")
        # Absolute, since workers may have another working directory.
        self._path = Path(tokens).absolute() if isinstance(tokens, str | os.PathLike) else None
        self._dtype = None if dtype is None else np.dtype(dtype)
        self.tokens = _read(tokens if self._path is None else self._path, self._dtype)
        if len(self.tokens) < self.width:
            raise ValueError(
                f"there should be at least {self.width} tokens for a block, but got "
                f"{len(self.tokens)}"
            )
        self.boundaries = None if boundaries is None else _check(boundaries, len(self.tokens))

    def __getstate__(self) -> dict[str, Any]:
        """Return everything, with a file's path in place of its tokens."""
        return {**self.__dict__, **({} if self._path is None else {"tokens": None})}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Map the file again."""
        self.__dict__.update(state)
        if self._path is not None:
            self.tokens = _read(self._path, self._dtype)

    @property
    def width(self) -> int:
        """Number of tokens in a sample: ``block``, or one more with ``next_token``."""
        return self.block + self.next_token

    @property
    def rows(self) -> _Tokens:
        """The blocks as a view of the tokens, of shape (blocks, width). Do not write to it."""
        size = self.tokens.strides[0]
        return np.lib.stride_tricks.as_strided(
            self.tokens.view(np.ndarray),
            (len(self), self.width),
            (size * self.block, size),
            writeable=False,
        )

    def __len__(self) -> int:
        """Return the number of blocks."""
        return (len(self.tokens) - self.next_token) // self.block

    def __getitem__(self, index: int) -> Any:
        """Return a block: an int64 tensor, or a dict of two if there are boundaries."""
        start = self._start_of(index)
        tokens = torch.from_numpy(self.tokens[start : start + self.width].astype(np.int64))
        if self.boundaries is None:
            return tokens
        edges = self._edges(start)
        positions = np.arange(self.width) - np.repeat(edges[:-1], np.diff(edges))
        return {"input_ids": tokens, "position_ids": torch.from_numpy(positions)}

    def cu_seq_lens(self, index: int) -> torch.Tensor:
        """Return where the documents of a block begin, and the block's length at the end.

        Args:
            index: Number of the block.

        Returns:
            int32 tensor of 0, the inner boundaries, and the length of a sample, as kernels of
            variable-length attention take it.

        Raises:
            ValueError: If there are no boundaries.
        """
        if self.boundaries is None:
            raise ValueError("cu_seq_lens() needs boundaries, and this TokenBlocks was given none")
        return torch.from_numpy(self._edges(self._start_of(index)).astype(np.int32))

    def _start_of(self, index: int) -> int:
        count = len(self)
        if not -count <= index < count:
            raise IndexError(f"block {index} of {count}")
        return int(index % count) * self.block

    def _edges(self, start: int) -> npt.NDArray[np.int64]:
        """Return the ends of documents in the block that begins here, from 0 to its length."""
        assert self.boundaries is not None
        first, last = np.searchsorted(self.boundaries, [start + 1, start + self.width])
        inner = np.unique(self.boundaries[first:last]) - start
        return np.concatenate([[0], inner, [self.width]])


def _read(tokens: Any, dtype: np.dtype[Any] | None) -> _Tokens:
    """Return the tokens as a one-dimensional integer array; those of a file as a memory map."""
    if isinstance(tokens, torch.Tensor):
        tokens = tokens.detach().cpu().numpy()
    array: _Tokens
    if not isinstance(tokens, Path):
        if dtype is not None:
            raise ValueError("dtype is that of a file's tokens: leave it out for an array")
        array = np.asanyarray(tokens)
    elif tokens.suffix == ".npy":
        array = np.load(tokens, mmap_mode="r")
        if dtype is not None and dtype != array.dtype:
            raise ValueError(f"{tokens} has tokens of {array.dtype}, not {dtype}: leave dtype out")
    else:
        if dtype is None:
            raise ValueError(f"dtype should be given for the tokens of {tokens}, such as 'uint16'")
        size = tokens.stat().st_size
        if size % dtype.itemsize or not size:
            raise ValueError(
                f"{tokens} has {size} bytes, which are no whole number of {dtype} tokens of "
                f"{dtype.itemsize} bytes"
            )
        array = np.memmap(tokens, dtype, "r")
    if array.dtype.kind not in "iu":
        raise TypeError(f"tokens should be ints, but got tokens of dtype {array.dtype}")
    if array.ndim != 1:
        raise ValueError(f"tokens should have one dimension, but got shape {array.shape}")
    return array


def _check(boundaries: Any, count: int) -> npt.NDArray[np.int64]:
    """Return where documents begin, as an ascending int64 array."""
    given = boundaries.numpy() if isinstance(boundaries, torch.Tensor) else boundaries
    array = np.asarray(given)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise TypeError(
            f"boundaries should be a sequence of ints, but got shape {array.shape} of {array.dtype}"
        )
    array = array.astype(np.int64)
    wrong = (array < 0) | (array > count)
    wrong[1:] |= np.diff(array) < 0
    if wrong.any():
        first = int(wrong.argmax())
        raise ValueError(
            f"boundaries should ascend from 0 to at most {count}, the number of tokens, but got "
            f"boundaries[{first}]={array[first]}"
        )
    return array
