"""Errors cross a process, whatever the user's classes do, and name samples and parts."""

import pickle
import threading
from collections import namedtuple

import numpy as np
import pytest
import torch
from torch.utils.data import Subset, default_collate

from shmloader.batch.explain import explain_collate_error, find_unpicklable
from shmloader.batch.failures import LISTED, BadSample, RemoteError, SampleReport

WHERE = "in DataLoader worker process 3"
NOTE = "Worker 3 (pid 812) was loading batch 41 (indices 2624 to 2687)."


class TwoArgumentsError(Exception):
    def __init__(self, code, text):
        super().__init__(f"{code}: {text}")


class KeywordOnlyError(Exception):
    message = "set on the class"

    def __init__(self, *, code):
        super().__init__(code)


class Shy:
    """Neither its pickle nor its text can be had."""

    def __reduce__(self):
        raise ZeroDivisionError

    def __repr__(self):
        raise ZeroDivisionError


def caught(error: BaseException) -> RemoteError:
    """Return an exception as it arrives in the main process."""
    try:
        raise error
    except BaseException:
        arrived: RemoteError = pickle.loads(pickle.dumps(RemoteError.caught(WHERE)))
        return arrived


def bad(index: object, error: Exception) -> BadSample:
    try:
        raise error
    except Exception:
        return BadSample.caught(index, WHERE)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ValueError("x"), ValueError),
        (KeyError("x"), KeyError),
        (TwoArgumentsError(1, "x"), RuntimeError),
        (KeywordOnlyError(code=1), RuntimeError),
        (StopIteration(), RuntimeError),
        (KeyboardInterrupt(), RuntimeError),
    ],
)
def test_the_class_arrives_where_a_text_makes_one_and_the_note_is_added(error, kind):
    arrived = caught(error).rebuilt(NOTE)
    assert type(arrived) is kind
    assert arrived.__notes__ == [NOTE]
    assert str(arrived).startswith(f"Caught {type(error).__name__} {WHERE}.\nOriginal Traceback (")
    assert NOTE not in str(arrived)


def test_the_worker_s_traceback_and_the_cause_are_in_the_text():
    def broken():
        raise ValueError("the cause")

    try:
        try:
            broken()
        except ValueError as error:
            raise TypeError("the effect") from error
    except TypeError as error:
        text = str(RemoteError.of(error, WHERE).rebuilt(NOTE))
    for part in ("in broken", "the cause", "direct cause", "the effect", __file__.split("/")[-1]):
        assert part in text


def test_ten_megabytes_of_text_are_shortened_to_their_beginning_and_end():
    error = caught(ValueError("begin " + "x" * 10_000_000 + " end"))
    short = error.shortened(4096)
    assert len(pickle.dumps(short)) < 6000
    text = str(short.rebuilt(NOTE))
    assert "Traceback (most recent call last)" in text
    assert text.rstrip().endswith("x end")
    assert " characters …]" in text
    assert short.summary.startswith("ValueError: begin xxx")
    assert short.shortened(100_000) == short


def test_a_report_names_the_newest_and_counts_all():
    report = SampleReport(300)
    for index in range(250):
        report.add(bad(index, ValueError("bad")))
    assert (report.failed_count, len(report.newest)) == (250, LISTED)
    assert [one.index for one in report.newest] == list(range(150, 250))


def test_keys_that_cannot_cross_are_named_by_their_text():
    assert bad(Shy(), ValueError()).index.startswith("<Shy ")
    assert str(bad("x" * 100_000, ValueError()).index).startswith("'xxx")


Pair = namedtuple("Pair", ["image", "label"])


def error_of(collate_fn, samples, indices=None):
    with pytest.raises((RuntimeError, ValueError, TypeError, LookupError)) as raised:
        collate_fn(samples)
    explain_collate_error(raised.value, samples, indices)
    return raised.value


def note_of(samples, indices=(7, 8), collate_fn=default_collate):
    (note,) = error_of(collate_fn, samples, indices).__notes__
    assert note.endswith("detach() ends autograd.)")
    return note.removeprefix("In this batch, ").partition(". Give them one type, dtype and")[0]


def zeros(*lengths):
    return [torch.zeros(length) for length in lengths]


THREE_AND_FOUR = (
    "is a float32 Tensor of shape [3] for index 7; a float32 Tensor of shape [4] for index 8"
)


class PngImage:
    """Stands for an image that was not transformed."""


@pytest.mark.parametrize(
    ("samples", "note"),
    [
        (zeros(3, 4), f"sample {THREE_AND_FOUR}"),
        ([{"id": 1, "image": one} for one in zeros(3, 4)], f"sample['image'] {THREE_AND_FOUR}"),
        ([(1, one) for one in zeros(3, 4)], f"sample[1] {THREE_AND_FOUR}"),
        ([Pair(one, 1) for one in zeros(3, 4)], f"sample.image {THREE_AND_FOUR}"),
        ([{"x": [0, {"y": one}]} for one in zeros(3, 4)], f"sample['x'][1]['y'] {THREE_AND_FOUR}"),
        ([(1, zeros(3)[0]), (1.5, zeros(4)[0])], f"sample[1] {THREE_AND_FOUR}"),
        (
            [{"x": np.zeros(length)} for length in (3, 4)],
            f"sample['x'] {THREE_AND_FOUR}".replace("32 Tensor", "64 ndarray"),
        ),
        (
            [{"ids": [1, 2]}, {"ids": [1, 2, 3]}],
            "sample['ids'] is a list of length 2 for index 7; a list of length 3 for index 8",
        ),
        ([1, "a"], "sample is an int for index 7; a str for index 8"),
        ([None, None], "sample is a NoneType for index 7"),
        (
            [(np.zeros(2), 0), (0, 0)],
            "sample[0] is a float64 ndarray of shape [2] for index 7; an int for index 8",
        ),
        (
            [{1: 1}, {2: 2}],
            "sample is a dict with the keys [1] for index 7; a dict with the keys [2] for index 8",
        ),
        ([(PngImage(), 0)] * 2, "sample[0] is a PngImage for index 7"),
    ],
)
def test_the_place_in_the_samples_and_their_indices_are_named(samples, note):
    assert note_of(samples) == note


def test_what_the_user_s_own_function_stacks_is_explained_too():
    assert note_of(zeros(3, 4), collate_fn=torch.stack) == f"sample {THREE_AND_FOUR}"
    arrays = [np.zeros(length, np.float32) for length in (3, 4)]
    expected = f"sample {THREE_AND_FOUR}".replace("Tensor", "ndarray")
    assert note_of(arrays, collate_fn=np.stack) == expected


def test_many_kinds_and_indices_are_not_all_listed():
    assert note_of(zeros(*range(1, 200)), list(range(199))).endswith("[4] for index 3")
    note = note_of(zeros(*[3, 4] * 100), list(range(200)))
    assert note.endswith("[3] for index 0; a float32 Tensor of shape [4] for index 1")


@pytest.mark.parametrize(
    ("samples", "collate_fn"),
    [
        (["a", "b"], lambda samples: torch.stack(zeros(3, 4))),  # not of the samples
        (zeros(3, 3), lambda samples: torch.stack(zeros(3, 4))),
        (zeros(3, 4), lambda samples: int("no number")),
        (zeros(3, 3), lambda samples: {}[0]),
        (object(), lambda samples: torch.stack(zeros(3, 4))),
    ],
)
def test_any_other_error_is_raised_as_it_is(samples, collate_fn):
    assert not hasattr(error_of(collate_fn, samples, [0, 1]), "__notes__")


LOCK = threading.Lock()


class Holder:
    """A dataset or a transform with some attributes."""

    def __init__(self, **attributes):
        self.__dict__.update(attributes)

    def __call__(self, value):
        return value

    def __len__(self):
        return 2


class OwnState:
    """Leaves out its lock, but pickles something of its own."""

    def __init__(self, parts):
        self.lock = LOCK
        self.parts = parts

    def __getstate__(self):
        return self.parts


class OwnReduce:
    def __reduce__(self):
        return Holder, (LOCK,)


class Refusing:
    def __reduce__(self):
        raise TypeError("I stay here")

    def __repr__(self):
        return "I"


def function_with(lock):
    def collate(samples):
        return lock, samples

    return collate


@pytest.mark.parametrize(
    ("dataset", "path"),
    [
        (LOCK, "dataset"),
        (Refusing(), "dataset"),
        (Holder(a=1, connection=LOCK), "dataset.connection"),
        (Holder(transforms=[Holder(), 3, Holder(client=LOCK)]), "dataset.transforms"),
        ({"x": 1, "train": LOCK}, "dataset['train']"),
        ([0, (1, LOCK)], "dataset[1]"),
        (Subset(Holder(connection=LOCK), [0]), "dataset.dataset"),
        (OwnState([LOCK]), "dataset"),
        (OwnReduce(), "dataset"),
        (function_with(LOCK), "dataset"),
    ],
)  # fmt: skip
def test_the_path_to_what_cannot_be_pickled(dataset, path):
    found = find_unpicklable((Holder(), dataset), ("sampler", "dataset"))
    assert found is not None
    assert found[0] == path


def test_nothing_is_found_where_all_can_be_pickled():
    objects = (Holder(a=1), function_with(3), None)
    assert find_unpicklable(objects, ("dataset", "collate_fn", "worker_init_fn")) is None
