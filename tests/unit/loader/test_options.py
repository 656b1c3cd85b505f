"""Arguments that torch's loader does not have: sizes as users write them, bad samples, threads."""

import mmap
import operator
import re
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import IterableDataset

from shmloader import DataLoader, ShardedDataLoader
from shmloader.loader.options import (
    MINIMUM_SLOT_BYTES,
    parse_max_failures,
    parse_size,
    slot_share,
)


@pytest.mark.parametrize(
    ("value", "nbytes"),
    [
        (1, 1),
        (123456789, 123456789),
        ("1", 1),
        ("512", 512),
        ("512B", 512),
        ("1k", 1000),
        ("1kB", 1000),
        ("1KB", 1000),
        ("1KiB", 1024),
        ("1kib", 1024),
        ("2Ki", 2048),
        ("512MiB", 512 << 20),
        ("512 MiB", 512 << 20),
        ("  8GiB ", 8 << 30),
        ("8gb", 8 * 10**9),
        ("1.5 GB", 15 * 10**8),
        ("0.5KiB", 512),
        ("2T", 2 * 10**12),
        ("1TiB", 1 << 40),
    ],
)
def test_a_size_is_read(value, nbytes):
    size = parse_size(value, "shm_size")
    assert size == nbytes
    assert type(size) is int


@pytest.mark.parametrize("value", [None, True, False, 1.5, b"1MiB", [1], object()])
def test_a_size_that_is_neither_an_int_nor_text_is_a_type_error(value):
    with pytest.raises(TypeError, match="shm_size should be a number of bytes") as caught:
        parse_size(value, "shm_size")
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize(
    "value",
    [
        *("", " ", "MiB", "1 2", "1,5GB", "-1", "+1", "1e9", "1MB/s", "1 mebibyte", "0x10", ".5G"),
        *("1.", "1PB", "nan", "inf", "1i", "1bB", "1ibB"),
    ],
)
def test_text_that_is_not_a_size_is_a_value_error(value):
    with pytest.raises(ValueError, match="shm_size should be a number of bytes") as caught:
        parse_size(value, "shm_size")
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize("value", [0, -1, -(10**12), "0", "0GiB", "0.0001"])
def test_a_size_must_be_positive(value):
    with pytest.raises(ValueError, match="positive"):
        parse_size(value, "shm_size")


def test_the_message_names_the_argument():
    with pytest.raises(ValueError, match="other_size=0"):
        parse_size(0, "other_size")


@given(st.integers(1, 2**62))
@settings(derandomize=True)
def test_a_number_of_bytes_is_itself_as_an_int_and_as_text(nbytes):
    assert parse_size(nbytes, "shm_size") == nbytes


@given(st.integers(1, 2**53))
@settings(derandomize=True)
def test_text_of_a_whole_number_is_exact(nbytes):
    assert parse_size(str(nbytes), "shm_size") == nbytes


@given(shm_bytes=st.integers(1, 2**40), slot_count=st.integers(1, 200))
@settings(derandomize=True)
def test_shares_are_equal_and_stay_under_the_cap(shm_bytes, slot_count):
    if shm_bytes // slot_count < MINIMUM_SLOT_BYTES:
        with pytest.raises(ValueError, match="shm_size of") as caught:
            slot_share(shm_bytes, slot_count)
        # What it says to do helps.
        assert f"Raise shm_size to {slot_count * MINIMUM_SLOT_BYTES} or more" in str(caught.value)
        assert slot_share(slot_count * MINIMUM_SLOT_BYTES, slot_count) == MINIMUM_SLOT_BYTES
        (enough,) = re.findall(r"\(shm_size='(\d+MiB)' suffices\)", str(caught.value))
        assert slot_share(parse_size(enough, "shm_size"), slot_count) >= MINIMUM_SLOT_BYTES
    else:
        share = slot_share(shm_bytes, slot_count)
        assert share % mmap.PAGESIZE == 0
        assert share * slot_count <= shm_bytes < (share + mmap.PAGESIZE) * slot_count


@pytest.mark.parametrize("on_error", ["", "Skip", "ignore", "raise ", None, True, 0, b"skip"])
def test_what_to_do_about_bad_samples_is_a_word_or_a_function(on_error):
    kind = ValueError if isinstance(on_error, str) else TypeError
    with pytest.raises(kind, match="on_error should be 'raise', 'skip' or a") as caught:
        DataLoader(range(4), on_error=on_error)
    assert f"on_error={on_error!r}" in str(caught.value)


@pytest.mark.parametrize(
    ("most", "kind", "text"),
    [
        (True, TypeError, "an int, or for a share a float"),
        ("5", TypeError, "an int, or for a share a float"),
        (-1, ValueError, "not be negative"),
        (Fraction(0), ValueError, "above 0 and at most 1"),
        (Fraction(3, 2), ValueError, "above 0 and at most 1"),
    ],
)
def test_a_wrong_limit_of_failures_is_refused(most, kind, text):
    with pytest.raises(kind, match=f"max_failures should.*{text}") as caught:
        DataLoader(range(4), on_error="skip", max_failures=most)
    assert f"max_failures={most!r}" in str(caught.value)


@pytest.mark.parametrize("most", [0, 5, Fraction(1, 2)])
def test_a_limit_of_failures_makes_no_sense_where_the_first_one_raises(most):
    with pytest.raises(ValueError, match="on_error='raise' the first one raises"):
        DataLoader(range(4), max_failures=most)


class Stream(IterableDataset):
    """A dataset without indices."""

    def __iter__(self):
        return iter(())


def test_what_cannot_be_combined_with_threads_is_named():
    text = (
        "thread_pool=True cannot be combined with multiprocessing_context, worker_restarts: "
        "workers are threads of this process, and share its memory"
    )
    options = {"num_workers": 1, "thread_pool": True}
    with pytest.raises(ValueError, match=re.escape(text)):
        DataLoader([1], multiprocessing_context="fork", worker_restarts=1, **options)
    with pytest.raises(ValueError, match="needs a map-style dataset"):
        DataLoader(Stream(), **options)
    with pytest.raises(ValueError, match="needs num_workers > 0: the number of threads"):
        DataLoader([1], thread_pool=True)


def test_an_option_that_is_set_later_is_checked_when_an_epoch_begins():
    loader = DataLoader([1], num_workers=1, thread_pool=True)
    loader.shm_size = 1 << 30
    with pytest.raises(ValueError, match="thread_pool=True cannot be combined with shm_size"):
        iter(loader)


@pytest.mark.parametrize("value", [0, 1, None, "yes", "", [], 1.0])
def test_whether_workers_are_threads_is_a_bool(value):
    text = f"thread_pool should be a bool, but got thread_pool={value!r}"
    with pytest.raises(TypeError) as caught:
        DataLoader([1], num_workers=1, thread_pool=value)
    assert str(caught.value) == text


@pytest.mark.parametrize(
    ("given", "exact"),
    [
        (None, None),
        (3, 3),
        (Fraction(1, 3), Fraction(1, 3)),
        (0.1, Fraction(1, 10)),
        (1.0, Fraction(1)),
        (1e-7, Fraction(1, 10**7)),
        (np.float64(0.25), Fraction(1, 4)),
        (np.float32(0.1), Fraction(1, 10)),
        (np.int64(3), 3),
    ],
)
def test_a_float_is_the_share_that_it_is_written_as(given, exact) -> None:
    parsed = parse_max_failures(given)
    assert (parsed, type(parsed)) == (exact, type(exact))
    loader = DataLoader(range(4), on_error="skip", max_failures=given)
    assert loader.max_failures is given
    assert loader._config().max_failures == exact


@pytest.mark.parametrize("share", [0.0, -0.1, 1.5, float("nan"), float("inf")])
def test_a_float_that_is_no_share_is_told_so(share) -> None:
    with pytest.raises(ValueError, match=f"above 0 and at most 1 .* max_failures={share}"):
        DataLoader(range(4), on_error="skip", max_failures=share)


class OnlyLists:
    def __len__(self):
        return 2

    def __getitems__(self, indices):
        return indices


@pytest.mark.parametrize(
    ("dataset", "text"),
    [
        (None, "but got dataset=None"),
        (5, "but got dataset=5"),
        ({1, 2}, "but got dataset={1, 2}: make a list of it, which has an order"),
        (
            iter([1]),
            (
                ": make a list of it, or write an IterableDataset whose __iter__ begins such an "
                "iterator"
            ),
        ),
        (OnlyLists, ": give an object of that class, such as OnlyLists(...)"),
    ],
    ids=["None", "int", "set", "iterator", "class"],
)
def test_an_object_that_is_no_dataset_cannot_be_sharded(dataset, text):
    with pytest.raises(TypeError, match="dataset should have __getitem__ and __len__") as raised:
        ShardedDataLoader(dataset)
    begin = (
        "dataset should have __getitem__ and __len__, or be a torch.utils.data.IterableDataset, "
        "but got dataset="
    )
    assert str(raised.value).startswith(begin)
    assert str(raised.value).endswith(text)


def test_lists_alone_and_subclasses_of_the_users_own_are_not_refused():
    assert [batch.tolist() for batch in DataLoader(OnlyLists())] == [[0], [1]]

    class Own(DataLoader):
        pass

    assert Own(None).dataset is None


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"num_workers": 1.5}, "num_workers should be an int or 'auto', but got num_workers=1.5"),
        (
            {"num_workers": 1, "prefetch_factor": "2"},
            "prefetch_factor should be an int, but got prefetch_factor='2'",
        ),
        (
            {"num_workers": 1, "prefetch_factor": 1.5},
            "prefetch_factor should be an int, but got prefetch_factor=1.5",
        ),
        ({"timeout": "3"}, "timeout should be a number of seconds, but got timeout='3'"),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", [DataLoader, ShardedDataLoader])
def test_a_value_of_a_wrong_type_is_refused_at_once(kind, arguments, text):
    with pytest.raises(TypeError, match="should be") as raised:
        kind(range(4), **arguments)
    assert str(raised.value) == text


@pytest.mark.parametrize(
    "arguments",
    [
        {"dataset": None},
        {"sampler": 3},
        {"batch_sampler": 3},
        {"generator": 3},
        {"collate_fn": 3},
        {"worker_init_fn": 3},
    ],
    ids=str,
)
def test_what_torchs_constructor_takes_fails_no_earlier_than_with_torch(arguments):
    for kind in (torch.utils.data.DataLoader, DataLoader):
        kind(**{"dataset": range(4), **arguments})


def test_numbers_of_other_types_that_torch_takes_are_taken():
    one = np.int64(1)
    options = {"num_workers": one, "prefetch_factor": one, "timeout": np.float32(5)}
    assert DataLoader(range(4), **options).num_workers == 1
    assert len(list(DataLoader(range(4), num_workers=0.0))) == 4


@pytest.mark.parametrize("kind", [DataLoader, ShardedDataLoader])
@pytest.mark.parametrize(
    ("arguments", "fields"),
    [
        ({"worker_restarts": np.int64(2)}, {"worker_restarts": 2}),
        ({"device_prefetch": np.int32(3)}, {"device_prefetch": 3}),
        ({"shm_size": np.int64(2**26)}, {"shm_bytes": 2**26}),
        ({"sample_timeout": np.float32(1.5)}, {"fetch.sample_timeout_s": 1.5}),
        ({"sample_timeout": np.int64(2)}, {"fetch.sample_timeout_s": 2.0}),
        ({"fetch_concurrency": np.int64(4)}, {"fetch.concurrency": 4}),
    ],
    ids=str,
)
def test_numbers_of_numpys_types_are_taken_by_our_own_arguments_too(kind, arguments, fields):
    loader = kind(range(4), num_workers=1, **arguments)
    (name, value), *_ = arguments.items()
    assert f"{name}={value!r}" in repr(loader)
    for path, expected in fields.items():
        found = operator.attrgetter(path)(loader._config())
        assert (found, type(found)) == (expected, type(expected))


@pytest.mark.parametrize(
    "options", [{}, {"num_workers": 1}, {"num_workers": 1, "thread_pool": True}]
)
def test_a_wrong_word_that_is_set_later_does_not_skip_bad_samples(options):
    loader = DataLoader({0: 0}, sampler=[0, 1], **options)
    loader.on_error = "Raise"
    with pytest.raises(ValueError, match=r"^on_error should be 'raise', 'skip' or a function"):
        iter(loader)
    loader.on_error = "skip"
    assert len(list(loader)) == 1


def test_a_batch_sampler_that_yields_no_lists_is_named():
    with pytest.raises(TypeError, match="is not iterable") as raised:
        list(DataLoader(range(4), batch_sampler=[1, 2]))
    assert str(raised.value) == (
        "'int' object is not iterable: batch_sampler should yield lists of indices, but it "
        "yielded 1"
    )


def test_a_timeout_without_workers_says_why_it_cannot_be():
    with pytest.raises(AssertionError) as raised:
        iter(DataLoader(range(4), timeout=3))
    assert str(raised.value) == (
        "_SingleProcessDataLoaderIter requires timeout == 0: with num_workers=0, batches are "
        "loaded in this process, which cannot stop waiting for itself"
    )
