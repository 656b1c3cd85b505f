"""Padded, jagged and packed batches: those of torch, of transformers, and in a worker's slot."""

import functools
import itertools
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import Dataset, IterableDataset

from shmloader import DataLoader
from shmloader.collate import AsList, Fields, Jagged, Pack, Pad, Ragged, RaggedBatch, Stack
from tests.parity.compare import assert_same
from tests.unit.memory.support import installed, open_bench, tensors_of

#: Batches of lists of ints.
TOKENS = st.integers(0, 99)
BATCHES = st.lists(st.lists(TOKENS, max_size=120), min_size=1, max_size=6)

KINDS = ("list", "tuple", "array", "tensor", "mixed", "ragged")
ANY_KIND = st.sampled_from(KINDS)


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
def tokenizer(side):
    """A tokenizer whose padding has the id 0."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    model = WordLevel({"[PAD]": 0, "[UNK]": 1}, unk_token="[UNK]")
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(model), pad_token="[PAD]", padding_side=side
    )


# Pads and jagged batches -------------------------------------------------------------------------

DTYPES = (torch.int64, torch.int32, torch.uint8, torch.bool, torch.float32, torch.bfloat16)


@given(lists=BATCHES, kind=ANY_KIND, side=st.sampled_from(["right", "left"]))
def test_a_padded_batch_is_that_of_pad_sequence(lists, kind, side):
    expected = pad_sequence(as_kind(lists, "tensor"), True, -3, side)
    assert_same(Pad(-3, side)(as_kind(lists, kind)), expected)


@given(
    lengths=st.lists(st.integers(0, 5), min_size=1, max_size=5),
    tail=st.sampled_from([(), (2,), (2, 3), (0,)]),
    dtype=st.sampled_from(DTYPES),
    side=st.sampled_from(["right", "left"]),
)
def test_elements_of_any_dtype_and_shape_are_padded_as_by_pad_sequence(lengths, tail, dtype, side):
    samples = [torch.arange(1.0, n + 1).to(dtype) for n in lengths]
    samples = [each.reshape(-1, *[1] * len(tail)).expand(-1, *tail).clone() for each in samples]
    expected = pad_sequence(samples, True, 1, side)
    assert_same(Pad(1, side)(samples), expected)
    if dtype is not torch.bfloat16:
        arrays = [each.numpy() for each in samples]
        assert_same(Pad(1, side)(arrays), expected)
        assert_same(Pad(1, side)(ragged(arrays)), expected)


@given(
    lists=BATCHES.filter(any),
    kind=ANY_KIND,
    side=st.sampled_from(["right", "left"]),
    multiple_of=st.sampled_from([None, 1, 8]),
)
def test_a_batch_of_dicts_is_that_of_transformers(lists, kind, side, multiple_of):
    from transformers import DataCollatorWithPadding

    theirs = DataCollatorWithPadding(tokenizer(side), pad_to_multiple_of=multiple_of)
    samples = [{"input_ids": each, "label": n} for n, each in enumerate(lists)]
    expected = theirs(samples)
    ours = Fields(input_ids=Pad(0, side, multiple_of, with_mask=True), labels=Stack())
    column = as_kind(lists, kind)
    samples = [{"input_ids": each, "labels": n} for n, each in enumerate(column)]
    assert_same(ours(samples), dict(expected))


def test_a_batch_of_one_shape_is_cut_and_filled_to_its_length():
    pad = Pad(9, multiple_of=4, max_length=4, with_mask=True, with_lengths=True)
    for samples in ([[1], [1, 2, 3, 4, 5]], [np.array([1]), np.arange(1, 6)]):
        padded, mask, lengths = pad(samples)
        assert padded.tolist() == [[1, 9, 9, 9], [1, 2, 3, 4]]
        assert mask.tolist() == [[1, 0, 0, 0], [1, 1, 1, 1]]
        assert lengths.tolist() == [1, 4]
    assert Pad(multiple_of=4)([[1]]).shape == (1, 4)
    left = Pad(9, "left", max_length=2, with_mask=True)([[1], [1, 2, 3]])
    assert [each.tolist() for each in left] == [[[9, 1], [1, 2]], [[0, 1], [1, 1]]]


def test_the_mask_and_the_lengths_are_named_after_their_field():
    batch = Fields(input_ids=Pad(with_mask=True, with_lengths=True), pixels=Pad(with_mask=True))(
        [{"input_ids": [1], "pixels": [0.5]}, {"input_ids": [1, 2], "pixels": []}]
    )
    assert {key: part.tolist() for key, part in batch.items()} == {
        "input_ids": [[1, 0], [1, 2]],
        "attention_mask": [[1, 0], [1, 1]],
        "input_ids_lengths": [1, 2],
        "pixels": [[0.5], [0.0]],
        "pixels_mask": [[1], [0]],
    }


@pytest.mark.parametrize("length", [1, 200])
def test_numbers_too_large_for_a_float_are_infinite_without_a_warning(length):
    slices = Ragged(np.full(length, 1e300), [0], [length], np.float32)
    assert Pad()(slices).isinf().all()


def test_slices_of_an_array_are_converted():
    values = np.arange(200, dtype=np.int32)
    for lengths in ([150, 100], [3, 2]):  # by slices, and by indices
        column = Ragged(values, [10, 20], lengths, np.int64)
        assert_same(Pad()(column), pad_sequence([torch.from_numpy(each) for each in column], True))


@given(lists=BATCHES, kind=ANY_KIND)
def test_a_jagged_batch_is_torchs_nested_tensor(lists, kind):
    expected = torch.nested.nested_tensor(as_kind(lists, "tensor"), layout=torch.jagged)
    ours = Jagged()(as_kind(lists, kind))
    assert_same(ours, expected)
    assert ours.layout is torch.jagged
    assert_same(ours.offsets(), expected.offsets())
    assert ours.is_contiguous()
    assert (ours._max_seqlen, ours._min_seqlen) == (expected._max_seqlen, expected._min_seqlen)


BAD = [
    ([[1], [1, 2.5]], r"sample 1 of the batch begins with an int, but not all"),
    ([[1], [2**63]], r"sample 1 of the batch begins with an int, but not all its items are ints"),
    ([[1], "text"], r"sample 1 of the batch is a str, but should be a tensor"),
    ([{"a": [1]}], r"sample 0 of the batch is a dict with the keys \['a'\].*Fields has a function"),
    ([[1], None], r"sample 1 of the batch is a NoneType"),
    ([torch.tensor([1]), torch.tensor(1)], r"sample 1 of the batch is a number, but should have a"),
    (
        [torch.zeros(2), torch.zeros(2, 3)],
        r"sample 1 .* is a float32 Tensor of shape \[2, 3\], but sample 0 is a float32 Tensor of",
    ),
    (
        [np.zeros((1, 2)), np.zeros((1, 3))],
        r"sample 1 .* is a float64 ndarray of shape \[1, 3\], but sample 0 is a float64 ndarray of",
    ),
    (
        [np.zeros(2), np.zeros(2, np.int64), np.zeros(2, np.int8)],
        r"sample 1 of the batch is an int64 ndarray of shape \[2\], but sample 0 is a float64",
    ),
    ([np.array(["a"])], r"sample 0 of the batch has the dtype <U1, which torch lacks"),
]


@pytest.mark.parametrize(("samples", "text"), BAD)
def test_samples_that_cannot_be_joined_are_named(samples, text):
    for collate in (Pad(), Jagged()):
        with pytest.raises(ValueError, match=text):
            collate(samples)
    with pytest.raises(ValueError, match="field 'x': " + text):
        Fields(x=Pad())([{"x": each} for each in samples])


@pytest.mark.parametrize(
    ("kind", "arguments", "text"),
    [
        (Pad, {"value": "x"}, "value should be a number, but is 'x'"),
        (Pad, {"side": "top"}, 'side should be "right" or "left", but is \'top\''),
        (Pad, {"multiple_of": 0}, "multiple_of should be a positive int or None, but is 0"),
        (Pad, {"max_length": 1.5}, "max_length should be a positive int or None, but is 1.5"),
        (Pack, {"fixed_tokens": 0}, "fixed_tokens should be a positive int or None, but is 0"),
        (Pack, {"fixed_sequences": "3"}, "fixed_sequences should be a .*, but is '3'"),
        (Pack, {"stacked": "id"}, "stacked should be a collection of keys, but is 'id'"),
    ],
)
def test_bad_arguments_are_refused(kind, arguments, text):
    with pytest.raises(TypeError if "value" in arguments else ValueError, match=text):
        kind(**arguments)


@pytest.mark.parametrize(("dtype", "value"), [(torch.uint8, -100), (torch.int8, 128)])
def test_a_value_that_the_samples_cannot_have_is_refused(dtype, value):
    samples = [torch.ones(2, dtype=dtype), torch.ones(1, dtype=dtype)]
    with pytest.raises(ValueError, match=f"'x': samples of {str(dtype)[6:]} cannot .* {value}"):
        Fields(x=Pad(value))([{"x": each} for each in samples])
    assert Pad(value)(samples[:1]).tolist() == [[1, 1]]  # nothing is padded


@pytest.mark.parametrize("kind", [Pad, Jagged])
def test_a_sample_that_requires_a_gradient_is_refused(kind):
    samples = [torch.ones(2), torch.ones(3, requires_grad=True)]
    with pytest.raises(ValueError, match=r"sample 1 of the batch requires a gradient.*detach"):
        kind()(samples)


# Packs -----------------------------------------------------------------------------------------


def in_columns(columns):
    """A batch of dicts; by fields, if one is ragged."""
    if any(isinstance(column, Ragged) for column in columns.values()):
        return RaggedBatch(columns)
    items = zip(*columns.values(), strict=True)
    return [dict(zip(columns, each, strict=True)) for each in items]


@given(
    lists=BATCHES.filter(any),
    kind=ANY_KIND,
    label_kind=st.none() | ANY_KIND,
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


@given(
    lists=BATCHES.filter(any),
    kind=ANY_KIND,
    spare=st.integers(0, 9),
    more=st.integers(1, 3),
)
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


# Loaders ---------------------------------------------------------------------------------------

LENGTHS = [9000, 5, 0, 7000, 12, 8000, 1, 3]  # some fields are lent, some are copied out
LISTS = [list(range(length)) for length in LENGTHS]

COLLATES = {
    "Pad": lambda: Fields(
        x=Pad(-1, "left", with_mask=True, with_lengths=True), id=Stack(), s=AsList()
    ),
    "Pack": lambda: Fields(x=Pack(), id=Stack()),
    "Pack, fixed": lambda: Fields(x=Pack(fixed_tokens=30_000, fixed_sequences=9), id=Stack()),
    "Jagged": lambda: Fields(x=Jagged(), id=Stack()),
}


class Texts(Dataset):
    """Dicts with samples of a kind; with "ragged", batches by fields."""

    def __init__(self, kind):
        self.x = as_kind(LISTS, kind)

    def __len__(self):
        return len(LENGTHS)

    def __getitem__(self, index):
        return {"x": self.x[index], "id": index, "s": str(index)}


class Columns(Texts):
    """The same, by fields."""

    def __getitems__(self, indices):
        x = Ragged(self.x.values, self.x.starts[indices], self.x.lengths[indices])
        return RaggedBatch({"x": x, "id": np.array(indices), "s": [*map(str, indices)]})


@pytest.mark.parametrize("kind", ["list", "array", "ragged"])
@pytest.mark.parametrize("name", COLLATES)
def test_both_loaders_make_the_same_batches(kind, name):
    dataset = (Columns if kind == "ragged" else Texts)(kind)
    options = {"batch_size": 4, "collate_fn": COLLATES[name]()}
    expected = list(TorchLoader(Texts("array"), **options))
    assert_same(list(DataLoader(dataset, num_workers=2, **options)), expected)
    if kind == "list":
        assert_same(list(TorchLoader(dataset, num_workers=1, **options)), expected)
    else:
        assert_same(list(DataLoader(dataset, **options)), expected)


@pytest.mark.parametrize("name", COLLATES)
def test_a_pickled_function_makes_the_same_batches(name):
    samples = list(Texts("tensor"))
    copy = pickle.loads(pickle.dumps(COLLATES[name]()))
    assert_same(copy(samples), COLLATES[name]()(samples))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", COLLATES)
def test_a_worker_writes_large_fields_into_the_slot_once(kind, name):
    """Writing the batch to the slot copies nothing: what collate put there is only referred to."""
    with open_bench() as bench, installed(bench.writer):
        samples = (Columns if kind == "ragged" else Texts)(kind)
        batch = samples.__getitems__(range(8)) if kind == "ragged" else list(samples)
        bench.writer.is_offered = True
        made = COLLATES[name]()(batch)
        del made["id"]  # numbers have no memory that could be written to
        used_bytes = bench.writer.used_bytes
        bench.encode(made)
        assert bench.writer.used_bytes == used_bytes
        parts = tensors_of(made)
        nested = [each for each in parts if each.is_nested]
        parts += [part for each in nested for part in (each.values(), each.offsets())]
        for each in parts:
            if not each.is_nested:
                assert bench.writer.offset_of(each.data_ptr(), each.nbytes) is not None
        del made, parts, nested, each


def test_an_error_has_the_index_of_the_sample_in_the_dataset():
    samples = [{"x": torch.ones(2)}, {"x": torch.ones(1)}, {"x": torch.ones(1, 1)}]
    loader = DataLoader(samples, 2, sampler=[0, 1, 1, 2], num_workers=1, collate_fn=Fields(x=Pad()))
    batches = iter(loader)
    next(batches)
    with pytest.raises(ValueError, match="field 'x': sample 1 of the batch is a float32") as caught:
        next(batches)
    text = "".join(getattr(caught.value, "__notes__", [])) + str(caught.value)
    assert "Sample 1 of the batch is index 2 of the dataset." in text
    del batches


class Unindexed(IterableDataset):
    def __iter__(self):
        return iter([[1], 2])


def test_an_error_has_no_index_where_samples_have_none():
    with pytest.raises(ValueError, match="sample 1 of the batch is a number") as caught:
        list(DataLoader(Unindexed(), 2, collate_fn=Pad()))
    assert "of the dataset" not in "".join(getattr(caught.value, "__notes__", []))
