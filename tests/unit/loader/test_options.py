"""Arguments that torch's loader does not have, as iterators see them; a loader's repr()."""

import inspect
import mmap
import operator
import re
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset, IterableDataset

from shmloader import DataLoader, ShardedDataLoader
from shmloader.loader.config import config_of
from shmloader.loader.options import DEFAULTS, MINIMUM_SLOT_BYTES, OPTIONS, slot_share

THREADS = {"num_workers": 1, "thread_pool": True}


class Stream(IterableDataset):
    """A dataset without indices."""

    def __iter__(self):
        return iter(())


@pytest.mark.parametrize(
    ("value", "nbytes"),
    [
        (1, 1),
        (123456789, 123456789),
        ("512", 512),
        ("512B", 512),
        ("1k", 1000),
        ("1KB", 1000),
        ("1kib", 1024),
        ("2Ki", 2048),
        ("512 MiB", 512 << 20),
        ("  8GiB ", 8 << 30),
        ("1.5 GB", 15 * 10**8),
        ("0.5KiB", 512),
        ("2T", 2 * 10**12),
    ],
)
def test_a_size_is_read(value, nbytes):
    size = OPTIONS["shm_size"].check(value)
    assert (size, type(size)) == (nbytes, int)


@pytest.mark.parametrize(
    ("name", "wrong_types", "wrong_values"),
    [
        (
            "shm_size",
            [True, 1.5, b"1MiB", [1], object()],
            ["", "MiB", "1 2", "1,5GB", "-1", "1e9", "0x10", ".5G", "1PB", "nan", 0, -1, "0GiB"],
        ),
        ("worker_restarts", [None, True, 1.0, "1"], [-1]),
        ("device_transform", [1, "x"], []),
        ("device_prefetch", [None, True, 1.0], [0, -1]),
        ("on_error", [None, True, 0, b"skip"], ["", "Skip", "ignore", "raise "]),
        ("max_failures", [True, "5"], [-1, Fraction(0), Fraction(3, 2), 0.0, 1.5, float("nan")]),
        ("thread_pool", [0, 1, None, "yes", []], []),
        ("seed", [1.0, True, "0"], [-1]),
        ("snapshot_every_n_steps", [1.5, True], [-1, "often"]),
        ("fetch_concurrency", [1.5, True], [0]),
        ("sample_timeout", [True, "1"], [0, -1.0, float("inf"), float("nan")]),
        ("executor", [1, map], [ThreadPoolExecutor(1)]),
    ],
)
def test_a_wrong_value_is_refused_with_the_argument_s_name_and_value(
    name, wrong_types, wrong_values
) -> None:
    for kind, values in ((TypeError, wrong_types), (ValueError, wrong_values)):
        for value in values:
            with pytest.raises(kind, match=f"^{name} should be .*but got {name}="):
                OPTIONS[name].check(value)
    assert OPTIONS[name].check(DEFAULTS[name]) == DEFAULTS[name]


@given(shm_bytes=st.integers(1, 2**40), slot_count=st.integers(1, 200))
@settings(derandomize=True)
def test_shares_are_equal_and_stay_under_the_cap(shm_bytes, slot_count):
    if shm_bytes // slot_count < MINIMUM_SLOT_BYTES:
        with pytest.raises(ValueError, match="shm_size of") as caught:
            slot_share(shm_bytes, slot_count)
        # What it says to do helps.
        given = re.search("Give shm_size='(.+)' or more", str(caught.value))[1]
        enough = OPTIONS["shm_size"].check(given)
        assert slot_share(enough, slot_count) == MINIMUM_SLOT_BYTES
    else:
        share = slot_share(shm_bytes, slot_count)
        assert share % mmap.PAGESIZE == 0
        assert share * slot_count <= shm_bytes < (share + mmap.PAGESIZE) * slot_count


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"max_failures": 0}, "no effect with on_error='raise'"),
        ({"worker_restarts": 1}, "worker_restarts needs num_workers > 0"),
        ({"sample_timeout": 1}, "sample_timeout needs num_workers > 0"),
        ({"thread_pool": True}, "thread_pool needs num_workers > 0"),
        (
            {**THREADS, "sample_timeout": 1},
            "sample_timeout needs worker processes: a thread cannot be ended",
        ),
        (
            {**THREADS, "multiprocessing_context": "fork", "worker_restarts": 1},
            "thread_pool cannot be combined with multiprocessing_context, worker_restarts",
        ),
        ({**THREADS, "dataset": Stream()}, "thread_pool needs a map-style dataset"),
        ({"dataset": Stream(), "on_error": "skip"}, "on_error needs a map-style dataset"),
        ({"dataset": Stream(), "num_workers": "auto"}, "needs a map-style dataset"),
        ({"seed": 0, "generator": torch.Generator()}, "cannot be combined with generator"),
        ({"device_transform": list}, "needs device="),
    ],
)
def test_what_does_not_fit_together_is_named(options, text):
    with pytest.raises(ValueError, match=text):
        DataLoader(**{"dataset": [1], **options})


def test_the_table_and_the_constructor_have_one_order() -> None:
    parameters = inspect.signature(DataLoader).parameters
    assert list(parameters)[-len(OPTIONS) :] == list(OPTIONS)
    assert {name: parameters[name].default for name in OPTIONS} == DEFAULTS


def test_an_option_that_is_set_later_is_checked_when_an_epoch_begins():
    loader = DataLoader([1], **THREADS)
    loader.shm_size = 1 << 30
    with pytest.raises(ValueError, match="thread_pool cannot be combined with shm_size"):
        iter(loader)


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
    parsed = OPTIONS["max_failures"].check(given)
    assert (parsed, type(parsed)) == (exact, type(exact))
    loader = DataLoader(range(4), on_error="skip", max_failures=given)
    assert loader.max_failures is given
    assert config_of(loader).max_failures == exact


class OnlyLists:
    def __len__(self):
        return 2

    def __getitems__(self, indices):
        return indices


def test_lists_alone_and_subclasses_of_the_users_own_are_not_refused():
    assert [batch.tolist() for batch in DataLoader(OnlyLists())] == [[0], [1]]

    class Own(DataLoader):
        pass

    assert Own(None).dataset is None


@pytest.mark.parametrize(
    "name", ["dataset", "sampler", "batch_sampler", "generator", "collate_fn", "worker_init_fn"]
)
def test_what_torchs_constructor_takes_fails_no_earlier_than_with_torch(name):
    for kind in (torch.utils.data.DataLoader, DataLoader):
        kind(**{"dataset": range(4), name: None if name == "dataset" else 3})


def test_numbers_of_other_types_that_torch_takes_are_taken():
    one = np.int64(1)
    options = {"num_workers": one, "prefetch_factor": one, "timeout": np.float32(5)}
    assert DataLoader(range(4), **options).num_workers == 1
    assert len(list(DataLoader(range(4), num_workers=0.0))) == 4


@pytest.mark.parametrize("kind", [DataLoader, ShardedDataLoader])
@pytest.mark.parametrize(
    ("name", "given", "path", "expected"),
    [
        ("worker_restarts", np.int64(2), "worker_restarts", 2),
        ("device_prefetch", np.int32(3), "device_prefetch", 3),
        ("shm_size", np.int64(2**26), "shm_size", 2**26),
        ("sample_timeout", np.float32(1.5), "fetch.sample_timeout_s", 1.5),
        ("sample_timeout", np.int64(2), "fetch.sample_timeout_s", 2.0),
        ("fetch_concurrency", np.int64(4), "fetch.concurrency", 4),
    ],
)
def test_numbers_of_numpys_types_are_taken_by_our_own_arguments_too(
    kind, name, given, path, expected
):
    loader = kind(range(4), num_workers=1, **{name: given})
    found = operator.attrgetter(path)(config_of(loader))
    assert (found, type(found)) == (expected, type(expected))


@pytest.mark.parametrize("options", [{}, {"num_workers": 1}, THREADS])
def test_a_wrong_word_that_is_set_later_does_not_skip_bad_samples(options):
    loader = DataLoader({0: 0}, sampler=[0, 1], **options)
    loader.on_error = "Raise"
    with pytest.raises(ValueError, match=r"^on_error should be 'raise', 'skip' or a function"):
        iter(loader)
    loader.on_error = "skip"
    assert len(list(loader)) == 1


def test_a_batch_sampler_that_yields_no_lists_is_named():
    with pytest.raises(TypeError, match=r"batch_sampler should yield lists of indices.*yielded 1"):
        list(DataLoader(range(4), batch_sampler=[1, 2]))


DATA = torch.arange(12)


def made(kind=DataLoader, **options):
    return config_of(kind(DATA, 2, **options))


@pytest.mark.parametrize(
    ("options", "window", "most"),
    [({}, 0, 0), ({"num_workers": 2}, 4, 4), ({"num_workers": 2, "prefetch_factor": 5}, 10, 10)],
)
def test_the_window_is_that_of_the_workers(options, window, most) -> None:
    found = made(**options)
    assert (found.window, found.most_window) == (window, most)


@pytest.mark.parametrize(
    ("workers", "ranks", "window"), [(64, 8, 17), (16, 4, 9), (4, 4, 3), (5, 2, 6), (4, 2, 4)]
)
def test_of_a_hosts_workers_a_rank_has_its_share_in_the_window_and_one_more_where_it_lacks_some(
    workers, ranks, window
) -> None:
    found = made(num_workers=workers)
    found.host_ranks = ranks
    assert found.window == window


def test_with_auto_the_window_grows_with_the_workers() -> None:
    found = made(num_workers="auto", seed=0)
    assert found.most_workers > found.num_workers
    assert found.window == 2 * found.num_workers
    assert found.most_window == 2 * found.most_workers


@pytest.mark.parametrize("num_workers", [2, "auto"])
def test_all_slots_together_stay_below_shm_size(num_workers) -> None:
    loader = DataLoader(DATA, 2, num_workers=num_workers, seed=0, shm_size="512MiB")
    found = config_of(loader)
    assert found.slot_bytes is not None
    assert found.slot_bytes * (found.most_window + found.lend_limit) <= 512 << 20


def test_an_shm_size_too_small_for_the_maximum_of_workers_raises_in_the_constructor() -> None:
    most = made(num_workers="auto", seed=0).most_window + 4
    with pytest.raises(ValueError, match=f"each of {most} slots"):
        DataLoader(DATA, num_workers="auto", seed=0, shm_size=most * MINIMUM_SLOT_BYTES - 1)


def test_states_of_the_dataset_are_taken_where_they_are_saved() -> None:
    class Stateful(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index):
            return index

        def state_dict(self):
            return {}

        def load_state_dict(self, state) -> None:
            pass

    for options, interval in [({}, 1), ({"snapshot_every_n_steps": 0}, 0)]:
        found = config_of(DataLoader(Stateful(), **options))
        assert (found.saves_dataset, found.fetch.snapshot_every) == (interval > 0, interval)
    assert made().fetch.snapshot_every == 0


class Unfit(Dataset):
    def __len__(self) -> int:
        raise RuntimeError("the length is not known")

    def __repr__(self) -> str:
        raise RuntimeError("nor is what it is")


SHOWN = {
    "DataLoader(<Tensor of length 12>, batch_size=1, num_workers=0)": DataLoader(DATA),
    "DataLoader(<list of length 2>, batch_size=2, num_workers=1)": (
        DataLoader([1, 2], 2, True, num_workers=1)
    ),
    "DataLoader(<Stream>, batch_size=1, num_workers=0)": DataLoader(Stream()),
    "DataLoader(<Unfit>, batch_size=None, num_workers=0)": DataLoader(Unfit(), None),
    "ShardedDataLoader(<Tensor of length 12>, batch_size=2, num_workers=0)": ShardedDataLoader(
        DATA, 2
    ),
}


def test_a_loader_shows_its_dataset_batch_size_and_workers() -> None:
    for text, loader in SHOWN.items():
        assert repr(loader) == text


def test_a_loader_of_the_user_s_shows_even_if_its_constructor_raises() -> None:
    class Mine(DataLoader):
        def __init__(self) -> None:
            self.text = repr(self)
            super().__init__(DATA)

    loader = Mine()
    assert loader.text == "Mine(<NoneType>, batch_size=1, num_workers=0)"
    assert repr(loader) == "Mine(<Tensor of length 12>, batch_size=1, num_workers=0)"
