"""Samples of all kinds that mean the same, and transformers' collate functions to compare with."""

import functools
import itertools

import numpy as np
import torch
from hypothesis import strategies as st

from shmloader.collate import Ragged

#: Batches of lists of ints.
TOKENS = st.integers(0, 99)
BATCHES = st.lists(st.lists(TOKENS, max_size=120), min_size=1, max_size=6)

KINDS = ("list", "tuple", "array", "tensor", "mixed", "ragged")


def as_kind(lists, kind):
    """The same samples as lists, arrays, tensors, or slices of one array."""
    arrays = [np.array(each, np.int64) for each in lists]
    match kind:
        case "list":
            return lists
        case "tuple":
            return [tuple(each) for each in lists]
        case "array":
            return arrays
        case "tensor":
            return [torch.from_numpy(each) for each in arrays]
        case "mixed":
            kinds = itertools.cycle((np.asarray, torch.from_numpy))
            return [make(each) for make, each in zip(kinds, arrays, strict=False)]
        case "ragged":
            return ragged(arrays)


def ragged(arrays, dtype=None):
    """The samples backwards in one array, with gaps between them."""
    lengths = [len(each) for each in arrays]
    gap = np.full((3, *arrays[0].shape[1:]), 77, arrays[0].dtype)
    parts = [part for each in reversed(arrays) for part in (gap, each)]
    ends = np.cumsum([3 + length for length in reversed(lengths)])[::-1]
    return Ragged(np.concatenate([*parts, gap]), ends - lengths, lengths, dtype)


@functools.cache
def tokenizer(side="right", pad_token="[PAD]"):
    """A tokenizer whose padding has the id 0."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    model = WordLevel({pad_token: 0, "[UNK]": 1}, unk_token="[UNK]")
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(model), pad_token=pad_token, padding_side=side
    )
