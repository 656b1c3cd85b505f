"""Samples that cannot be stacked: the error names their indices, their shapes and the field."""

from collections import namedtuple

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

from shmloader.batch.collator import Collator
from shmloader.batch.timer import Timer

Pair = namedtuple("Pair", ["image", "label"])

PADDING = (
    "Pad them in collate_fn= (torch.nn.utils.rnn.pad_sequence pads along the first dimension), or "
    "bring them to one shape in the dataset."
)
TORCHS = "stack expects each tensor to be equal size, but got [3] at entry 0 and [4] at entry 1"


def collate(collate_fn, samples, indices):
    return Collator(collate_fn, Timer(), takes_list=isinstance(samples, list))(samples, indices)


def zeros(*lengths):
    return [torch.zeros(length) for length in lengths]


def error_of(samples, indices=None, collate_fn=default_collate):
    with pytest.raises((RuntimeError, ValueError)) as raised:
        collate(collate_fn, samples, indices)
    return raised.value


def note_of(error):
    (note,) = error.__notes__
    return note


def test_the_whole_text():
    error = error_of(zeros(3, 4, 3, 3), [17, 4, 5, 6])
    assert (type(error), str(error)) == (RuntimeError, TORCHS)
    assert note_of(error) == (
        f"In this batch, the shape of sample: [3] for indices 17, 5, 6; [4] for index 4. {PADDING}"
    )


@pytest.mark.parametrize(
    ("samples", "where"),
    [
        ([{"id": 1, "image": one} for one in zeros(3, 4)], "shape of sample['image']"),
        ([(1, one) for one in zeros(3, 4)], "shape of sample[1]"),
        ([Pair(one, 1) for one in zeros(3, 4)], "shape of sample.image"),
        ([{"x": [0, {"y": one}]} for one in zeros(3, 4)], "shape of sample['x'][1]['y']"),
        ([np.zeros(length) for length in (3, 4)], "shape of sample"),
        ([{"x": np.zeros(length)} for length in (3, 4)], "shape of sample['x']"),
        ([(1, torch.zeros(3)), (1.5, torch.zeros(4))], "shape of sample[1]"),
    ],
)
def test_the_field_is_named(samples, where):
    text = note_of(error_of(samples, [0, 1]))
    assert text == f"In this batch, the {where}: [3] for index 0; [4] for index 1. {PADDING}"


def test_lists_have_lengths():
    text = note_of(error_of([{"ids": [1, 2]}, {"ids": [1, 2, 3]}], [8, 9]))
    assert text == (
        "In this batch, the length of sample['ids']: 2 for index 8; 3 for index 9. "
        f"{PADDING.replace('one shape', 'one length')}"
    )


@pytest.mark.parametrize("indices", [None, [None, None], iter(())])
def test_without_indices_the_places_in_the_batch_are_named(indices):
    text = note_of(error_of(zeros(3, 4), indices))
    assert "[3] for sample 0 of the batch; [4] for sample 1 of the batch. Pad" in text
    text = note_of(error_of(zeros(3, 4, 4), None))
    assert "[4] for samples 1 to 2 of the batch. Pad" in text


def test_a_function_of_the_users_own_that_stacks_is_explained_too():
    text = "In this batch, the shape of sample: [3] for index 0; [4] for index 1. "
    assert note_of(error_of(zeros(3, 4), [0, 1], torch.stack)) == text + PADDING
    assert note_of(error_of([np.zeros(3), np.zeros(4)], [0, 1], np.stack)) == text + PADDING


def test_many_shapes_and_indices_are_not_all_listed():
    text = note_of(error_of(zeros(*range(1, 200)), list(range(199))))
    assert text.endswith(f"; [4] for index 3; and 195 more. {PADDING}")
    text = note_of(error_of(zeros(*[3, 4] * 100), list(range(200))))
    assert "[3] for 100 indices: 0, 2, 4, 6, 8, 10, 12, 14, …; [4] for" in text


def outcome_of(call):
    try:
        return call()
    except Exception as error:
        return error


@pytest.mark.parametrize(
    ("samples", "collate_fn"),
    [
        (["a", "b"], lambda samples: torch.stack(zeros(3, 4))),  # not of the samples
        (zeros(3, 3), lambda samples: torch.stack(zeros(3, 4))),
        (zeros(3, 4), lambda samples: int("no number")),
        (zeros(3, 4), lambda samples: {}[0]),
        (object(), lambda samples: torch.stack(zeros(3, 4))),
    ],
)
def test_any_other_error_is_raised_as_it_is(samples, collate_fn):
    plain = outcome_of(lambda: collate_fn(samples))
    raised = outcome_of(lambda: collate(collate_fn, samples, [0, 1]))
    assert (type(raised), str(raised)) == (type(plain), str(plain))
    assert not hasattr(raised, "__notes__")


def test_a_subclass_of_the_users_own_is_raised_as_it_is():
    class OwnError(RuntimeError):
        pass

    def fail(samples):
        raise OwnError(TORCHS)

    with pytest.raises(OwnError) as raised:
        collate(fail, zeros(3, 4), [0, 1])
    assert not hasattr(raised.value, "__notes__")


class PngImage:
    """Stands for an image that was not transformed."""


class JpegImage:
    """Another."""


TO_TENSORS = (
    "Convert them to tensors in the dataset (images by a transform such as torchvision's "
    "ToTensor), or give a collate_fn=."
)


@pytest.mark.parametrize(
    ("samples", "note"),
    [
        ([1, None, 3], "the type of sample: int for indices 7, 9; NoneType for index 8."),
        ([1.0, 2.0, None], "the type of sample: float for indices 7 to 8; NoneType for index 9."),
        ([1, "a", 3], "the type of sample: int for indices 7, 9; str for index 8."),
        (
            [1, torch.zeros(2), 3],
            "the type of sample: int for indices 7, 9; Tensor for index 8.",
        ),
        (
            [(1, np.zeros(2)), (1.5, 0), (1, np.zeros(2))],
            "the type of sample[1]: ndarray for indices 7, 9; int for index 8.",
        ),
        (
            [np.zeros(2), 0, np.zeros(2)],
            "the type of sample: ndarray for indices 7, 9; int for index 8.",
        ),
        ([None, None, None], "the type of sample: NoneType for indices 7 to 9."),
        (
            [(torch.zeros(2), 1), (2, 1), (torch.zeros(2), 1)],
            "the type of sample[0]: Tensor for indices 7, 9; int for index 8.",
        ),
        (
            [{"a": 1}, {"a": 2}, {"b": 3}],
            "the keys of sample: ['a'] for indices 7 to 8; ['b'] for index 9.",
        ),
        (
            [{"x": {"a": 1}}, {"x": {}}, {"x": {"a": 1, "b": 2}}],
            "the keys of sample['x']: ['a'] for index 7; [] for index 8; ['a', 'b'] for index 9.",
        ),
        (
            [(PngImage(), 0)] * 3,
            f"the type of sample[0]: PngImage for indices 7 to 9. {TO_TENSORS}",
        ),
        (
            [{"x": PngImage()}, {"x": JpegImage()}, {"x": JpegImage()}],
            "the type of sample['x']: PngImage for index 7; JpegImage for indices 8 to 9. "
            + TO_TENSORS,
        ),
    ],
)
def test_samples_that_differ_otherwise_are_named_in_a_note(samples, note):
    error = outcome_of(lambda: default_collate(samples))
    noted = outcome_of(lambda: collate(default_collate, samples, [7, 8, 9]))
    assert (type(noted), str(noted)) == (type(error), str(error))
    assert noted.__notes__ == [f"In this batch, {note}"]
