"""Which frames of a traceback the user is shown."""

import traceback

import pytest
from torch.utils.data import default_collate

from shmloader.batch.collator import Timer
from shmloader.batch.fetch import FetchConfig
from shmloader.batch.maker import BatchMaker
from shmloader.grammar import format_for_user, user_part
from shmloader.sampling.arguments import whole_number


class Dataset:
    """A dataset that calls ours in turn."""

    def __getitem__(self, index):
        return whole_number(index, "index", minimum=0)


def raised_by(call):
    """What a call raises, without the frame of this function."""
    with pytest.raises((TypeError, ValueError)) as raised:
        call()
    error = raised.value
    return error.with_traceback(error.__traceback__.tb_next)


def names_of(entry):
    return [frame.name for frame in traceback.extract_tb(entry)]


def maker_of(dataset):
    plan = FetchConfig(is_iterable=False, auto_collation=True, drop_last=False)
    return BatchMaker(plan, dataset, default_collate, where="here", timer=Timer())


def fetch(*indices):
    return raised_by(lambda: maker_of(Dataset()).make(indices))


def test_frames_before_the_users_first_are_left_out_and_later_ones_are_kept():
    entry = fetch(0, -1).__traceback__.tb_next
    assert names_of(entry)[0] == "make"
    assert names_of(entry)[-3:] == ["_load_each", "__getitem__", "whole_number"]
    assert names_of(user_part(entry)) == ["__getitem__", "whole_number"]


def test_an_error_of_our_own_keeps_its_frames():
    entry = raised_by(lambda: whole_number(-1, "index", minimum=0)).__traceback__.tb_next
    assert names_of(user_part(entry)) == ["whole_number"]


def test_the_text_is_python_s_but_for_those_frames():
    error = fetch("x")
    error.__traceback__ = error.__traceback__.tb_next
    first, frame, *_, last, note = format_for_user(error).splitlines()
    assert first == "Traceback (most recent call last):"
    assert frame.endswith("in __getitem__")
    assert last == "TypeError: index should be an int, but got index='x'"
    assert note == "The sample of index 'x' failed."
