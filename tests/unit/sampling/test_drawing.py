"""Drawing an epoch from a position on."""

import pytest

from shmloader.sampling.drawing import pass_over, without_done


def test_what_comes_before_the_position_is_drawn_and_the_last_of_it_is_returned():
    batches = iter("abcdef")
    assert pass_over(batches, 3, "sampler") == "c"
    assert next(batches) == "d"
    assert pass_over(batches, 0, "sampler") is None
    assert next(batches) == "e"


def test_a_shorter_epoch_is_told_by_its_length():
    with pytest.raises(ValueError, match=r"after 5 batches.* the batch sampler .* yields only 2"):
        pass_over(iter("ab"), 5, "batch sampler")


def test_batches_that_were_delivered_early_are_left_out():
    assert list(without_done(iter("def"), 3, frozenset({4, 7}))) == ["d", "f"]
    assert list(without_done(iter("def"), 3, frozenset())) == ["d", "e", "f"]


def test_an_error_of_the_sampler_does_not_count_as_a_batch():
    def draw():
        item = items.pop()
        if item is None:
            raise LookupError("once")
        return item

    items = ["end", "e", "d", None]
    batches = without_done(iter(draw, "end"), 3, frozenset({4}))
    with pytest.raises(LookupError, match="once"):
        next(batches)
    assert list(batches) == ["d"]
