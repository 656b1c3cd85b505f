"""Packed batches, and what transformers makes of the same samples."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shmloader.collate import Fields, Pack, Pad, Ragged, RaggedBatch
from tests.parity.compare import assert_same
from tests.unit.collate.support import BATCHES, KINDS, as_kind

COLUMNS = st.sampled_from(KINDS)


def in_columns(columns):
    """A batch of dicts; by fields, if one is ragged."""
    if any(isinstance(column, Ragged) for column in columns.values()):
        return RaggedBatch(columns)
    items = zip(*columns.values(), strict=True)
    return [dict(zip(columns, each, strict=True)) for each in items]


@given(
    lists=BATCHES.filter(any),
    kind=COLUMNS,
    label_kind=st.none() | COLUMNS,
    separator=st.sampled_from([-100, 5]),
    first=st.sampled_from([0, 2]),
)
def test_a_packed_batch_is_that_of_transformers(lists, kind, label_kind, separator, first):
    from transformers import DataCollatorWithFlattening

    columns = {"input_ids": as_kind(lists, kind)}
    plain = {"input_ids": lists}
    if label_kind is not None:
        labels = [[7 - token for token in each] for each in lists]
        columns["labels"], plain["labels"] = as_kind(labels, label_kind), labels
    theirs = DataCollatorWithFlattening(
        return_flash_attn_kwargs=True, return_seq_idx=True,
        separator_id=separator, position_ids_start=first,
    )  # fmt: skip
    ours = Pack(separator=separator, first_position=first)(in_columns(columns))
    expected = theirs(in_columns(plain))
    # Arguments of ours are tensors of their own.
    expected["cu_seq_lens_k"] = expected["cu_seq_lens_q"].clone()
    assert_same({key: ours[key] for key in expected}, expected)
    assert set(ours) == set(expected)
    if label_kind is None:
        assert_same(Pack(separator=separator, first_position=first)(columns["input_ids"]), ours)


@given(lists=BATCHES.filter(any), kind=COLUMNS, spare=st.integers(0, 9), more=st.integers(1, 3))
def test_the_filler_is_a_last_sequence_of_its_own(lists, kind, spare, more):
    count = sum(map(len, lists))
    sequences = sum(map(bool, lists))
    plain = Pack()(lists)
    pack = Pack(fixed_tokens=count + spare, fixed_sequences=sequences + more, value=8, ignored=-100)
    batch = pack(as_kind(lists, kind))
    for key in ("input_ids", "labels", "position_ids", "seq_idx"):
        assert batch[key].shape == (1, count + spare)
        assert torch.equal(batch[key][:, :count], plain[key]), key
        assert batch[key].dtype == plain[key].dtype
    filler = {key: batch[key][0, count:].tolist() for key in ("input_ids", "labels")}
    assert filler == {"input_ids": [8] * spare, "labels": [-100] * spare}
    assert batch["position_ids"][0, count:].tolist() == list(range(spare))
    assert batch["seq_idx"][0, count:].tolist() == [sequences] * spare
    bounds = batch["cu_seq_lens_q"]
    assert torch.equal(bounds, batch["cu_seq_lens_k"])
    assert bounds.shape == (sequences + more + 1,)
    ends = plain["cu_seq_lens_q"].tolist()
    assert bounds.tolist() == ends + [count + spare] * (len(bounds) - len(ends))
    assert batch["max_length_q"] == batch["max_length_k"] == max(plain["max_length_q"], spare)


def test_a_model_of_transformers_reads_packed_sequences_as_it_reads_padded_ones():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=32, max_position_embeddings=64,
        num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    lists = [torch.randint(1, 50, (length,)).tolist() for length in (5, 17, 1, 9)]
    samples = [{"input_ids": each, "labels": each} for each in lists]
    pad = Fields(input_ids=Pad(0, with_mask=True), labels=Pad(-100))
    with torch.no_grad():
        padded = model(**pad(samples), use_cache=False)
        rows = zip(padded.logits, lists, strict=True)
        expected = torch.cat([row[: len(each)] for row, each in rows])
        for pack in (Pack(), Pack(fixed_tokens=40, fixed_sequences=7)):
            packed = model(**pack(samples), use_cache=False)
            torch.testing.assert_close(packed.logits[0, : len(expected)], expected)
            torch.testing.assert_close(packed.loss, padded.loss)


def test_other_fields_are_packed_or_stacked():
    samples = [
        {
            "input_ids": [1, 2],
            "weight": [0.5, 1.0],
            "id": 3,
            "text": "a",
            "image": np.zeros((2, 2)),
        },
        {"input_ids": [], "weight": [], "id": 4, "text": "b", "image": np.ones((2, 2))},
        {"input_ids": [4], "weight": [2.0], "id": 5, "text": "c", "image": np.ones((2, 2))},
    ]
    for one in samples:
        one |= {"attention_mask": [1] * len(one["input_ids"]), "position_ids": "not taken"}
    batch = Pack(stacked=["image"], fixed_tokens=4)(samples)
    assert_same(batch["weight"], torch.tensor([[0.5, 1.0, 2.0, 0.0]]))
    assert_same(batch["id"], torch.tensor([3, 5]))
    assert batch["text"] == ["a", "c"]
    assert_same(batch["image"], torch.stack([torch.zeros(2, 2), torch.ones(2, 2)]).double())
    assert "attention_mask" not in batch
    assert batch["position_ids"].tolist() == [[0, 1, 0, 0]]


def test_fields_of_columns_are_packed_or_stacked():
    batch = Pack()(
        RaggedBatch({
            "input_ids": Ragged(np.arange(9, dtype=np.int32), [4, 0], [2, 1]),
            "id": np.array([5, 6]),
            "score": torch.tensor([0.5, 1.5]),
            "text": ["a", "b"],
        })
    )  # fmt: skip
    assert_same(batch["input_ids"], torch.tensor([[4, 5, 0]]))
    assert_same(batch["id"], torch.tensor([5, 6]))
    assert_same(batch["score"], torch.tensor([0.5, 1.5]))
    assert batch["text"] == ["a", "b"]


def test_samples_without_tokens_may_have_other_fields():
    batch = Pack()([{"input_ids": [1]}, {"input_ids": [], "labels": []}, {"input_ids": [1, 2]}])
    assert batch["input_ids"].tolist() == [[1, 1, 2]]


def test_labels_stay_as_they_are_without_a_separator():
    pack = Pack(separator=None)
    assert "labels" not in pack([[1, 2], [3]])
    batch = pack([{"input_ids": [1, 2], "labels": [5, 6]}, {"input_ids": [3], "labels": [7]}])
    assert batch["labels"].tolist() == [[5, 6, 7]]


def test_ids_and_labels_are_int64_whatever_the_samples_are():
    for make in (np.array, torch.tensor):
        short = [make([1, 2]), make([3])]
        samples = [each.astype(np.int16) if make is np.array else each.short() for each in short]
        assert_same(Pack()(samples), Pack()([[1, 2], [3]]))


def test_a_batch_of_too_many_tokens_for_int32_is_refused():
    count = 1 << 20
    tokens = Ragged(np.zeros(count, np.int64), [0] * 2048, [count] * 2048)
    with pytest.raises(ValueError, match="2147483648 tokens, but cu_seq_lens are int32"):
        Pack()(tokens)


@pytest.mark.parametrize("separator", [-100, None])
def test_labels_of_whole_sequences_are_stacked(separator):
    def labels_of(samples, **options):
        return Pack(separator=separator, **options)(samples)["labels"]

    numbers = [{"input_ids": [1, 2], "labels": 3}, {"input_ids": [4], "labels": 5}]
    assert_same(labels_of(numbers), torch.tensor([3, 5]))
    scores = [{"input_ids": np.array([1]), "labels": np.array([0.5, 1.5])}] * 2
    expected = torch.tensor([[0.5, 1.5]] * 2, dtype=torch.float64)
    assert_same(labels_of(scores, stacked=["labels"]), expected)


@pytest.mark.parametrize(
    ("options", "samples", "text"),
    [
        ({}, [[], []], "no sample of the batch has tokens"),
        (
            {"fixed_tokens": 2},
            [[1, 2], [3]],
            r"a batch of 2 sequences has 3 tokens, more than fixed_tokens=2. .*TokenBatches",
        ),
        (
            {"fixed_tokens": 4, "fixed_sequences": 2},
            [[1, 2], [3]],
            r"a batch has 3 sequences with the filler, more than fixed_sequences=2",
        ),
        (
            {},
            [
                {"input_ids": [1], "labels": [1]},
                {"input_ids": [], "labels": []},
                {"input_ids": [1, 2], "labels": [1]},
            ],
            r"field 'labels': sample 2 of the batch has 1 items, but 2 input_ids; Pack\(stacked",
        ),
        ({}, [{"labels": [1]}], r"sample 0 of the batch has no key 'input_ids', but \['labels'\]"),
        ({}, [{"input_ids": [1]}, [1]], "sample 1 of the batch is a list of length 1, but should"),
        (
            {},
            [{"input_ids": [1], "id": 1}, {"input_ids": [], "id": 2}, {"input_ids": [1], "id": ""}],
            "field 'id': sample 2 of the batch is a str, but sample 0 is an int",
        ),
    ],
)
def test_samples_that_cannot_be_packed_are_named(options, samples, text):
    with pytest.raises(ValueError, match=text):
        Pack(**options)(samples)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"fixed_tokens": 0}, "fixed_tokens should be a positive int or None, but is 0"),
        ({"fixed_sequences": "3"}, "fixed_sequences should be a positive int or None, but is '3'"),
        ({"stacked": "id"}, "stacked should be a collection of keys, but is 'id'"),
    ],
)
def test_bad_arguments_are_refused(options, text):
    with pytest.raises(ValueError, match=text):
        Pack(**options)
