"""One row of all tokens of a batch, for attention over sequences of different lengths.

**The filler.** With ``fixed_tokens``, kernels read the filler, too: what they leave out stays
uninitialised. So it is a sequence of its own, the last one: ``cu_seq_lens`` end at
``fixed_tokens``, its positions count from the first again, its labels are ignored, and
``max_length`` is not less than its length. ``cu_seq_lens`` still differ in length, as batches have
different numbers of sequences. With ``fixed_sequences``, sequences without tokens follow, which end
where the filler does; kernels have nothing to do for these.
"""

from collections.abc import Collection, Mapping
from itertools import compress
from typing import Any

import numpy as np
import torch

from shmloader.collate.fields import Stack, column_of
from shmloader.collate.pad import check_positive
from shmloader.collate.ragged import Ragged, RaggedBatch
from shmloader.collate.sequences import (
    Collate,
    Sequences,
    bad_sample,
    check_samples,
    read_sequences,
)
from shmloader.grammar import counted
from shmloader.memory.writer import empty

_Array = np.ndarray[Any, np.dtype[Any]]

# What is made of the lengths alone, and so not taken from the samples.
_MADE = frozenset({
    *("attention_mask", "position_ids", "seq_idx"),
    *("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"),
})  # fmt: skip

# The largest number that cu_seq_lens can have.
_MOST_TOKENS = 2**31 - 1


class Pack(Collate):
    """Joins the sequences of a batch into one row of shape (1, tokens).

    Samples are sequences, which are the ``input_ids``, or dicts with these. The batch is a dict, of
    what transformers' models take, and what its ``DataCollatorWithFlattening`` makes:

    - ``input_ids``, and ``labels``: those of the samples, or else the ``input_ids``. Labels of
      whole sequences, which are numbers or among ``stacked``, are stacked;
    - ``position_ids``: the position of each token in its sequence, int64;
    - ``seq_idx``: the number of each token's sequence, int32;
    - ``cu_seq_lens_q`` and ``cu_seq_lens_k``: where each sequence begins, and where the last one
      ends, as int32 of shape (sequences + 1,);
    - ``max_length_q`` and ``max_length_k``: the length of the longest sequence, an int;
    - other fields: those with an item for each token are packed as well, numbers are stacked.
      ``attention_mask`` is left out, since nothing is padded.

    Samples without tokens are left out of the batch, with all their fields. Call a model of
    transformers with ``use_cache=False``: with a cache, it does not keep sequences apart.

    Args:
        separator: The label of each sequence's first token, so that no loss predicts it from the
            sequence before. With None, labels stay as they are, and there are none if the samples
            have none.
        fixed_tokens: Fill up to this number of tokens, for models that are compiled for one shape.
            The filler is one more sequence, whose labels are ``ignored``.
        fixed_sequences: Fill ``cu_seq_lens`` up to this number of sequences, which have no tokens.
            The filler counts as one.
        value: What the filler has in ``input_ids``; other fields have 0.
        ignored: What it has in ``labels``.
        first_position: The first token's position.
        stacked: Fields that are stacked although they have a dimension.

    Raises:
        ValueError: If a number is not positive.
    """

    def __init__(
        self,
        *,
        separator: int | None = -100,
        fixed_tokens: int | None = None,
        fixed_sequences: int | None = None,
        value: int = 0,
        ignored: int = -100,
        first_position: int = 0,
        stacked: Collection[str] = (),
    ) -> None:
        check_positive("fixed_tokens", fixed_tokens)
        check_positive("fixed_sequences", fixed_sequences)
        if isinstance(stacked, str):
            raise ValueError(f"stacked should be a collection of keys, but is {stacked!r}")
        self._separator, self._first_position = separator, first_position
        self._fixed_tokens, self._fixed_sequences = fixed_tokens, fixed_sequences
        self._fillers = {"input_ids": value, "labels": ignored}
        self._stacked = frozenset(stacked)

    def collate(self, samples: Any, field: object) -> dict[str, Any]:
        """Return the batch."""
        columns = _columns_of(samples, field)
        tokens = read_sequences(columns["input_ids"], "input_ids")
        is_kept = tokens.lengths > 0
        if not is_kept.any():
            raise ValueError("no sample of the batch has tokens, so there is nothing to pack")
        starts = tokens.lengths.cumsum() - tokens.lengths
        lengths = self._with_filler(tokens.lengths[is_kept])
        total = int(lengths.sum())
        if total > _MOST_TOKENS:
            raise ValueError(
                f"a batch has {total} tokens, but cu_seq_lens are int32 and end at most at "
                f"{_MOST_TOKENS}: make smaller batches"
            )
        batch: dict[str, Any] = {"input_ids": self._pack("input_ids", tokens, starts, total)}
        if "labels" in columns and not self._is_stacked("labels", columns["labels"]):
            labels = _read(columns, "labels", tokens)
            batch["labels"] = self._pack("labels", labels, starts, total)
        elif "labels" not in columns and self._separator is not None:
            batch["labels"] = empty((1, total), torch.int64).copy_(batch["input_ids"])
            self._fill("labels", batch["labels"], tokens)
        if "labels" in batch and self._separator is not None:
            batch["labels"].numpy()[0, starts[is_kept]] = self._separator
        batch |= self._bounds(lengths, total)
        for key, column in columns.items():
            if key in batch or key in _MADE:
                continue
            if self._is_stacked(key, column):
                batch[key] = _stack(column, key, is_kept)
            else:
                batch[key] = self._pack(key, _read(columns, key, tokens), starts, total)
        return batch

    def _is_stacked(self, key: str, column: Any) -> bool:
        """Whether a field is stacked, since it has no item for each token."""
        return key in self._stacked or _are_numbers(column)

    def _with_filler(self, lengths: _Array) -> _Array:
        """Return the lengths of the sequences, and of the filler if there is any."""
        count, fixed = int(lengths.sum()), self._fixed_tokens
        if fixed is not None and count > fixed:
            raise ValueError(
                f"a batch of {counted(len(lengths), 'sequence')} has {count} tokens, more than "
                f"fixed_tokens={fixed}. Give the loader a batch_sampler with that budget, such as "
                f"shmloader.sampling.TokenBatches(lengths, max_tokens={fixed})."
            )
        if fixed is not None and count < fixed:
            lengths = np.append(lengths, fixed - count)
        if self._fixed_sequences is not None and len(lengths) > self._fixed_sequences:
            raise ValueError(
                f"a batch has {counted(len(lengths), 'sequence')} with the filler, more than "
                f"fixed_sequences={self._fixed_sequences}: raise it"
            )
        return lengths

    def _pack(self, key: str, sequences: Sequences, starts: _Array, total: int) -> torch.Tensor:
        """Return a field's row of so many tokens."""
        is_id = key in self._fillers and not sequences.dtype.is_floating_point
        dtype, tail = torch.int64 if is_id else sequences.dtype, sequences.tail
        row = empty((1, total, *tail), dtype)
        sequences.write(row.view(total, *tail), starts, sequences.lengths)
        self._fill(key, row, sequences)
        return row

    def _fill(self, key: str, row: torch.Tensor, sequences: Sequences) -> None:
        """Write what the filler has in a field, if there is any."""
        if self._fixed_tokens is not None:
            row[0, int(sequences.lengths.sum()) :] = self._fillers.get(key, 0)

    def _bounds(self, lengths: _Array, total: int) -> dict[str, Any]:
        """Return what says where the sequences, and the filler, begin and end."""
        ends, count, most = lengths.cumsum(), len(lengths), int(lengths.max())
        shape = ((self._fixed_sequences or count) + 1,)
        positions, numbers = empty((1, total), torch.int64), empty((1, total), torch.int32)
        # Both are running sums: of steps of one, and of where sequences begin.
        steps, sequence, firsts = positions.numpy()[0], numbers.numpy()[0], ends[:-1]
        steps[:], sequence[:] = 1, 0
        steps[0], steps[firsts], sequence[firsts] = self._first_position, 1 - lengths[:-1], 1
        steps.cumsum(out=steps)
        sequence.cumsum(dtype=np.int32, out=sequence)
        bounds = [empty(shape, torch.int32), empty(shape, torch.int32)]
        for each in bounds:
            array = each.numpy()
            array[0], array[1 : count + 1], array[count + 1 :] = 0, ends, total
        return {
            "position_ids": positions, "seq_idx": numbers,
            "cu_seq_lens_q": bounds[0], "cu_seq_lens_k": bounds[1],
            "max_length_q": most, "max_length_k": most,
        }  # fmt: skip


def _columns_of(samples: Any, field: object) -> dict[str, Any]:
    """Return the samples' fields, each with an item for each sample."""
    check_samples(samples)
    if isinstance(samples, RaggedBatch):
        keys: Any = samples.fields
    elif isinstance(samples, Ragged) or not isinstance(samples[0], Mapping):
        return {"input_ids": samples}
    else:
        keys = samples[0]
    return {key: column_of(samples, key, field) for key in {"input_ids": None, **keys}}


def _stack(column: Any, key: str, is_kept: _Array) -> Any:
    """Stack the items of a field for which ``is_kept`` has True."""
    stack = Stack()
    if is_kept.all():
        return stack.collate(column, key)
    try:
        return stack.collate(list(compress(column, is_kept)), key)
    except ValueError:
        stack.collate(column, key)  # its error has the sample's number
        raise


def _are_numbers(column: Any) -> bool:
    """Whether a field has no dimension of its own: numbers, or texts."""
    if isinstance(column, Ragged):
        return False
    return not isinstance(column[0], list | tuple) and not getattr(column[0], "ndim", 0)


def _read(columns: dict[str, Any], key: str, tokens: Sequences) -> Sequences:
    """Return the reader of a field that has an item for each token."""
    sequences = read_sequences(columns[key], key)
    differ = np.flatnonzero(sequences.lengths != tokens.lengths)
    if len(differ):
        number = int(differ[0])
        raise bad_sample(
            key, number, f"has {sequences.lengths[number]} items, but {tokens.lengths[number]} "
            f'input_ids; Pack(stacked=["{key}"]) stacks a field',
        )  # fmt: skip
    return sequences
