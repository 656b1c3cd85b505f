"""Samples of 10 to 500 tokens, and what pads or packs them: ours, and what others use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

_BATCHES = 5  # different ones, again and again

SHORTEST, LONGEST = 10, 500


class Tokens(Dataset[Any]):
    """Samples of tokens, again and again: arrays or lists of ints, in dicts if they have a key."""

    def __init__(self, samples: Sequence[Any], length: int) -> None:
        self.samples = samples
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return self.samples[index % len(self.samples)]


def make_samples(batch_size: int, kind: str, key: str | None, total: int | None) -> list[Any]:
    """Make the samples of some batches.

    Args:
        batch_size: Samples in a batch.
        kind: "lists" of ints, or "arrays" of int64.
        key: Key of the tokens in dicts; None for bare samples.
        total: Tokens of each batch; None for as many as come.
    """
    rng = np.random.default_rng(0)
    samples: list[Any] = []
    for _ in range(_BATCHES):
        lengths = rng.integers(SHORTEST, LONGEST + 1, batch_size)
        while total is not None and (missing := total - lengths.sum()):
            one = rng.integers(batch_size)
            lengths[one] = np.clip(lengths[one] + missing, SHORTEST, LONGEST)
        samples += [rng.integers(0, 50_000, length) for length in lengths]
    if kind == "lists":
        samples = [sample.tolist() for sample in samples]
    return samples if key is None else [{key: sample} for sample in samples]


def pad_by_torch(samples: Sequence[Any]) -> torch.Tensor:
    """Pad arrays or lists as users of torch do."""
    return pad_sequence([torch.as_tensor(sample) for sample in samples], batch_first=True)


class ByTransformers:
    """Calls one of transformers' collate functions, and makes a dict of its batch."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self.collate = collate

    def __call__(self, samples: Any) -> dict[str, Any]:
        return dict(self.collate(samples))


def padding_of_transformers() -> ByTransformers:
    """Return ``DataCollatorWithPadding``, with a tokenizer that pads with 0."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import DataCollatorWithPadding, PreTrainedTokenizerFast

    model = Tokenizer(WordLevel({"[PAD]": 0, "[UNK]": 1}, unk_token="[UNK]"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=model, pad_token="[PAD]")
    return ByTransformers(DataCollatorWithPadding(tokenizer))


def flattening_of_transformers() -> ByTransformers:
    """Return ``DataCollatorWithFlattening`` with all that variable-length attention reads."""
    from transformers import DataCollatorWithFlattening

    return ByTransformers(
        DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)
    )
