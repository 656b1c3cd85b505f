"""One tensor of samples of different lengths: padded, or jagged."""

from numbers import Number
from typing import Any

import numpy as np
import torch

from shmloader.collate.sequences import Collate, read_sequences
from shmloader.memory.writer import empty


class Pad(Collate):
    """Pads samples to the length of the longest one, into a tensor of shape (batch, length, …).

    The result is that of ``torch.nn.utils.rnn.pad_sequence`` with ``batch_first=True``.

    Args:
        value: What is after (or before) the end of a shorter sample.
        side: Which side is padded, "right" or "left".
        multiple_of: The length is rounded up to a multiple of this; None to leave it. With the
            value of ``max_length``, all batches have one shape.
        max_length: Samples are cut to this length; None for any length.
        with_mask: Whether the result has a mask as well: 1 for elements, 0 for padding. It is
            int64, of shape (batch, length).
        with_lengths: Whether the result has the samples' lengths as well, after they are cut:
            int64, of shape (batch,).

    Calling it returns the padded tensor; with a mask or lengths, a tuple of it and these.
    :class:`Fields` makes fields of these: ``attention_mask`` for the field ``input_ids``, else
    ``<field>_mask``; and ``<field>_lengths``.

    Raises:
        TypeError: If ``value`` is no number.
        ValueError: If ``side`` is no side, or a length is not positive.
    """

    def __init__(
        self,
        value: float = 0,
        side: str = "right",
        multiple_of: int | None = None,
        max_length: int | None = None,
        with_mask: bool = False,
        with_lengths: bool = False,
    ) -> None:
        if side not in ("right", "left"):
            raise ValueError(f'side should be "right" or "left", but is {side!r}')
        if not isinstance(value, Number | torch.Tensor):
            raise TypeError(f"value should be a number, but is {value!r}")
        check_positive("multiple_of", multiple_of)
        check_positive("max_length", max_length)
        self.value, self.side, self.multiple_of, self.max_length = (
            value, side, multiple_of, max_length
        )  # fmt: skip
        self.with_mask, self.with_lengths = with_mask, with_lengths

    def collate(self, samples: Any, field: object) -> Any:
        """Return the batch."""
        sequences = read_sequences(samples, field)
        lengths, count = sequences.lengths, len(sequences.lengths)
        if self.max_length is not None:
            lengths = np.minimum(lengths, self.max_length)
        width = int(lengths.max())
        if self.multiple_of is not None:
            width = -(-width // self.multiple_of) * self.multiple_of
        starts = np.arange(count) * width
        if self.side == "left":
            starts += width - lengths
        out = empty((count, width, *sequences.tail), sequences.dtype)
        rows = out.view(count * width, *sequences.tail)
        is_ragged = int(lengths.min()) < width
        if is_ragged:
            _check_fits(self.value, sequences.dtype, field)
        sequences.write(rows, starts, lengths, self.value if is_ragged else None)
        parts = [out]
        if self.with_mask:
            parts.append(empty((count, width), torch.int64))
            ones = read_sequences([np.ones(width, np.int64)] * count, field)
            ones.write(parts[-1].view(count * width), starts, lengths, 0)
        if self.with_lengths:
            parts.append(empty((count,), torch.int64))
            parts[-1].numpy()[:] = lengths
        return tuple(parts) if len(parts) > 1 else out

    def fields(self, name: str, batch: Any) -> dict[str, Any]:
        """Return the fields that a batch makes, as ``name``."""
        keys = [name]
        if self.with_mask:
            keys.append("attention_mask" if name == "input_ids" else f"{name}_mask")
        if self.with_lengths:
            keys.append(f"{name}_lengths")
        return dict(zip(keys, batch if len(keys) > 1 else [batch], strict=True))


class Jagged(Collate):
    """Makes a nested tensor of torch's, in its jagged layout, without padding.

    Its values, of shape (tokens, …), and its offsets (int64) lie in the batch's shared memory. It
    equals ``torch.nested.nested_tensor(samples, layout=torch.jagged)``.
    """

    def __init__(self) -> None:
        # The first nested tensor of a process makes torch import 500 modules, which takes a second.
        # Workers that are forked have them, and so has the main process, which rebuilds batches.
        self.collate([torch.zeros(1)], None)

    def collate(self, samples: Any, field: object) -> torch.Tensor:
        """Return the batch."""
        sequences = read_sequences(samples, field)
        lengths = sequences.lengths
        offsets = empty((len(lengths) + 1,), torch.int64)
        ends = offsets.numpy()
        ends[0] = 0
        lengths.cumsum(out=ends[1:])
        values = empty((int(ends[-1]), *sequences.tail), sequences.dtype)
        sequences.write(values, ends[:-1], lengths)
        return torch.nested.nested_tensor_from_jagged(
            values, offsets, min_seqlen=int(lengths.min()), max_seqlen=int(lengths.max())
        )


def _check_fits(value: Any, dtype: torch.dtype, field: object) -> None:
    """Check that samples of a dtype can be padded with a value: torch would wrap it around."""
    if dtype.is_floating_point or dtype.is_complex or dtype is torch.bool:
        return
    limits = torch.iinfo(dtype)
    if not limits.min <= value <= limits.max:
        of_field = "" if field is None else f"field {field!r}: "
        name = str(dtype).removeprefix("torch.")
        raise ValueError(f"{of_field}samples of {name} cannot be padded with {value}")


def check_positive(name: str, value: int | None) -> None:
    """Check that an argument is None or a positive int."""
    if value is not None and (type(value) is not int or value < 1):
        raise ValueError(f"{name} should be a positive int or None, but is {value!r}")
