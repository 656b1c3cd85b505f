"""Batches that are read from Arrow buffers are what ``datasets`` and torch make, bit for bit."""

import itertools
import warnings

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import Subset, default_collate

from shmloader.batch.arrays import ArrayFetcher, Arrays, find_columns, is_plain_data, samples_of
from shmloader.batch.collator import Timer
from shmloader.collate import Pad, RaggedBatch
from shmloader.memory.arena import Arena
from shmloader.memory.flat import FlatLayout, FlatReader
from shmloader.memory.writer import SlotWriter
from shmloader.sampling.indices import IndexArray
from tests import hugging_face as datasets
from tests.hugging_face import Array2D, ClassLabel, Features, LargeList, List, Value
from tests.parity.compare import assert_same

INTS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32")
FLOATS = ("float16", "float32", "float64")
LISTS = {
    "list": (List, pa.list_),
    "large": (LargeList, pa.large_list),
    "fixed": (lambda kind: List(kind, length=3), lambda kind: pa.list_(kind, 3)),
}


def samples_by_datasets(dataset, indices):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # numpy warns of overflows, torch of read-only arrays
        return dataset.__getitems__(indices)


class Plain:
    """What torch does with a dataset, and whether it was asked."""

    def __init__(self, dataset):
        self.dataset, self.was_asked = dataset, False

    def fetch(self, indices):
        self.was_asked = True
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return default_collate(samples_by_datasets(self.dataset, indices))


def outcome(call):
    try:
        return call()
    except Exception as error:
        return type(error), str(error)


def fetched(dataset, indices, writer):
    """The batch, by a worker's fetcher or (without a writer) by the main process's."""
    plain = Plain(dataset)
    fetcher = ArrayFetcher(Arrays(dataset, writer), plain, Timer())
    if writer is not None:
        writer.open(writer.slot)
    batch = outcome(lambda: fetcher.fetch(indices))
    if isinstance(batch, FlatLayout):
        batch = FlatReader(batch).read(writer.slot, None)
    return batch, plain.was_asked


def assert_same_batches(dataset, indices, *, is_read=True):
    expected = outcome(lambda: Plain(dataset).fetch(indices))
    given_as = [indices, IndexArray(np.array(indices, np.int32))]
    if indices == list(range(indices[0], indices[-1] + 1)):
        given_as.append(range(indices[0], indices[-1] + 1))
    arena = Arena.create(1 << 20, 1)
    try:
        for one in given_as:
            for writer in (None, SlotWriter(arena)):
                batch, was_left = fetched(dataset, one, writer)
                if isinstance(expected, tuple):
                    assert batch == expected
                else:
                    assert_same(batch, expected)
                assert was_left != is_read
    finally:
        arena.close()


def assert_same_value(ours, theirs):
    assert type(ours) is type(theirs)
    if isinstance(theirs, torch.Tensor | np.ndarray):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        assert ours.tolist() == theirs.tolist()
    else:
        assert ours == theirs


def assert_same_samples(dataset, indices):
    columns = find_columns(dataset)
    ours, theirs = samples_of(columns, np.array(indices)), samples_by_datasets(dataset, indices)
    assert isinstance(ours, RaggedBatch)
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert list(one) == list(other)
        for key in one:
            assert_same_value(one[key], other[key])


# Any table ---------------------------------------------------------------------------------


@st.composite
def columns(draw, length):
    """Values of a column and its feature: numbers, lists of numbers or texts."""
    kind = draw(st.sampled_from(["number", "text", *LISTS]))
    if kind == "text":
        some = st.text("ab\0é", max_size=3)
        large = draw(st.booleans())
        type_ = pa.large_string() if large else pa.string()
        return (
            draw(st.lists(some, min_size=length, max_size=length)),
            Value("large_string" if large else "string"),
            type_,
        )
    name = draw(st.sampled_from(INTS + FLOATS))
    if name in INTS:
        info = np.iinfo(name)
        one = st.integers(int(info.min), int(info.max))
    else:
        one = st.floats(allow_nan=False, width=int(name[5:]))
    number_type = getattr(pa, name)()
    if kind == "number":
        return (
            draw(st.lists(one, min_size=length, max_size=length)),
            Value(name),
            number_type,
        )
    least, most = draw(st.sampled_from([(0, 3), (2, 2), (0, 0)]))
    if kind == "fixed":
        least = most = 3
    lists = st.lists(one, min_size=least, max_size=most)
    feature, make_type = LISTS[kind]
    values = draw(st.lists(lists, min_size=length, max_size=length))
    return values, feature(Value(name)), make_type(number_type)


@st.composite
def hugging_face_datasets(draw):
    """A dataset of some columns in chunks, with a format, whose samples are mapped to rows."""
    length = draw(st.integers(1, 12))
    made = [draw(columns(length)) for _ in range(draw(st.integers(1, 3)))]
    cuts = sorted(draw(st.lists(st.integers(0, length), max_size=3)))
    arrays, features = {}, {}
    for number, (values, feature, type_) in enumerate(made):
        whole = pa.array([values[0], *values], type_)  # so that chunks have offsets
        bounds = [0, *cuts, length] if number < 2 else [0, length]
        chunks = [whole.slice(1 + a, b - a) for a, b in itertools.pairwise(bounds)]
        arrays[f"c{number}"], features[f"c{number}"] = pa.chunked_array(chunks, type_), feature
    dataset = datasets.Dataset(
        datasets.table.InMemoryTable(pa.table(arrays)),
        info=datasets.DatasetInfo(features=Features(features)),
    )
    names = draw(st.none() | st.lists(st.sampled_from(list(arrays)), min_size=1, unique=True))
    dataset = dataset.with_format(
        draw(st.sampled_from(["torch", "numpy", None])),
        columns=names,
        output_all_columns=draw(st.booleans()),
    )
    for change in draw(st.lists(st.sampled_from(["shuffle", "select", "split", "subset"]))):
        if isinstance(dataset, Subset):
            break
        if change == "shuffle":
            dataset = dataset.shuffle(seed=draw(st.integers(0, 9)))
        elif change == "split" and len(dataset) > 1:
            dataset = dataset.train_test_split(0.5, seed=1)["test"]
        else:
            some = st.integers(0, len(dataset) - 1)
            chosen = draw(st.lists(some, min_size=1, max_size=9))
            subset = change == "subset"
            dataset = Subset(dataset, chosen) if subset else dataset.select(chosen)
    return dataset


def has_formatted_texts(dataset):
    whole = dataset.dataset if isinstance(dataset, Subset) else dataset
    form, types = (
        whole.format,
        {key: getattr(one, "dtype", "") for key, one in whole.features.items()},
    )
    return form["type"] and any("string" in types[name] for name in form["columns"])


def is_read(dataset, indices):
    """Whether a batch of these indices is read: numbers, lists of one length, and texts."""
    samples = samples_by_datasets(dataset, indices)
    for key, first in samples[0].items():
        values = [sample[key] for sample in samples]
        if isinstance(first, list):
            return False  # Python's, which torch transposes
        if isinstance(first, torch.Tensor | np.ndarray) and first.ndim:
            sizes = {len(value) for value in values}
            if len(sizes) > 1 or 0 in sizes:
                return False
    return True


@settings(max_examples=50, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_any_dataset_gives_the_batches_and_samples_of_datasets(data):
    dataset = data.draw(hugging_face_datasets())
    some = st.integers(0, len(dataset) - 1)
    indices = data.draw(st.lists(some, min_size=1, max_size=6))
    if has_formatted_texts(dataset):
        assert_same_batches(dataset, indices, is_read=False)
    else:
        assert_same_batches(dataset, indices, is_read=is_read(dataset, indices))
        assert_same_samples(dataset, indices)
    assert is_plain_data(dataset)


# What is left to datasets ------------------------------------------------------------------


def patched():
    dataset = made(Value("int32"), [1, 2, 3])
    dataset.__getitems__ = lambda indices: [{"c": torch.tensor(0)} for _ in indices]
    return dataset


def made(feature, values, form="torch", **options):
    features = Features({"c": feature})
    return datasets.Dataset.from_dict({"c": values}, features).with_format(form, **options)


def doubled(batch):
    return {"c": [2 * value for value in batch["c"]]}


TEXTS = ["a", "b\0", "\0é\0\0", ""]
NUMBERS = [[1, 2], [3, 4], [5, 6]]
LEFT = {
    "bools": lambda: made(Value("bool"), [True, False, True]),
    "None": lambda: made(Value("int32"), [1, None, 3]),
    "None in a list": lambda: made(List(Value("int32")), [[1, 2], [3, None], [5, 6]]),
    "None for a list": lambda: made(List(Value("int32")), [[1, 2], None, [5, 6]]),
    "None for a text": lambda: made(Value("string"), ["a", None, "b"]),
    "large numbers": lambda: made(Value("uint64"), [1, 2, 3]),
    "lists of lists": lambda: made(List(List(Value("int32"))), [NUMBERS] * 3),
    "arrays": lambda: made(Array2D((3, 2), "int32"), [NUMBERS] * 3),
    "dicts": lambda: made({"a": Value("int32")}, [{"a": 1}, {"a": 2}, {"a": 3}]),
    "lists of texts": lambda: made(List(Value("string")), [["a"], ["b"], ["c"]]),
    "bytes": lambda: made(Value("binary"), [b"a", b"b", b"c"]),
    "a transform": lambda: made(Value("int32"), [1, 2, 3]).with_transform(doubled),
    "options of a format": lambda: made(Value("int32"), [1, 2, 3], dtype=torch.int8),
    "lists of Python's": lambda: made(List(Value("int32")), NUMBERS, None),
    "texts with a format": lambda: made(Value("string"), TEXTS),
    "texts of numpy's": lambda: made(Value("string"), TEXTS, "numpy"),
    "a subclass": lambda: type("Own", (datasets.Dataset,), {})(pa.table({"c": [1, 2, 3]})),
    "a method of its own": patched,
}


@pytest.mark.parametrize("name", LEFT)
def test_what_is_not_read_is_left_to_datasets(name):
    assert_same_batches(LEFT[name](), [2, 0, 2], is_read=False)


def test_texts_are_those_of_the_table():
    dataset = made(Value("string"), TEXTS, None)
    assert_same_batches(dataset, [2, 1, 3])
    assert_same_samples(dataset, [2, 1, 3])


def test_lists_of_floats_are_collated_as_lists_and_not_as_arrays():
    dataset = made(List(Value("float64")), [[0.1, 1 / 3], [2.5], []], None)
    assert_same_samples(dataset, [1, 0, 2])
    fields = samples_of(find_columns(dataset), np.array([1, 0, 2])).fields
    padded = Pad()(fields["c"])
    assert_same(padded, Pad()(dataset[[1, 0, 2]]["c"]))
    assert padded.dtype == torch.float32


def test_labels_are_read_and_other_formats_of_one_dataset_are_seen_at_once():
    dataset = made(ClassLabel(names=["no", "yes"]), [1, 0, 1])
    arrays = Arrays(dataset)
    assert arrays.find() is arrays.find() is not None
    assert_same_batches(dataset, [2, 0])
    assert is_plain_data(dataset)
    before = arrays.find()
    dataset.set_format("numpy")
    assert arrays.find() is not before
    dataset.set_transform(doubled)
    assert arrays.find() is None
    assert not is_plain_data(dataset)


def test_a_mapping_beyond_the_table_is_not_followed():
    dataset = made(Value("int32"), [1, 2, 3]).select([2, 0])
    outside = pa.table({"indices": pa.array([2, 3], pa.uint64())})
    dataset._indices = datasets.table.InMemoryTable(outside)
    with pytest.raises(IndexError, match="rows beyond the table's 3"):
        Arrays(dataset).gather(find_columns(dataset), np.array([0, 1]))
