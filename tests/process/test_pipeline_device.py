"""``transfer``: the stages of ``device=``, on the late device."""

import weakref

import pytest
import torch

from shmloader import PipelineBuilder

LARGE = 300_000


def make(number):
    return {
        "image": torch.full((LARGE,), number, dtype=torch.uint8),
        "label": torch.tensor([number]),
    }


def ends(count: int) -> list[list[int]]:
    return [[number] * 4 for number in range(count)]


def test_batches_are_copied_from_their_slots_which_are_page_locked(late):
    builder = PipelineBuilder().add_source(range(40))
    builder.pipe(make, executor="process", concurrency=2, output_order="input")
    pipeline = builder.transfer("late").add_sink(2).build()
    with pipeline.auto_stop():
        for _ in range(2):
            assert late.contents(pipeline) == ends(40)
        assert late.count("late copies") == 160
        assert late.count("stream waits") == 80
        assert late.count("new streams") == 1
    assert late.count("registered bytes") == late.count("faults") == 0
    # The slots came back: not one for each batch.
    assert 0 < late.count("registered") <= 20


def test_batches_of_threads_are_copied_as_well(late):
    builder = PipelineBuilder().add_source(range(40)).pipe(make)
    assert late.contents(builder.transfer("late").add_sink().build()) == ends(40)
    assert late.count("registered") == late.count("pageable copies") == 0


def test_a_break_waits_for_the_copies_under_way(late):
    builder = PipelineBuilder().add_source(range(40)).pipe(make, executor="process")
    pipeline = builder.transfer("late").add_sink(1).build()
    for _ in range(3):
        for batch in pipeline:
            del batch
            break
    assert late.count("registered bytes") == late.count("faults") == 0


def test_nothing_of_an_epoch_is_held_after_its_end(late):
    made = []

    def note(number):
        tensor = torch.full((LARGE,), number, dtype=torch.uint8)
        made.append(weakref.ref(tensor))
        return tensor

    builder = PipelineBuilder().add_source(range(9)).pipe(note).transfer("late")
    with builder.add_sink().build().auto_stop() as pipeline:
        for tensor in pipeline:
            del tensor
        assert len(made) == 9
        assert all(reference() is None for reference in made)


@pytest.mark.parametrize("device", ["cpu", "late"])
def test_no_stage_follows_a_transfer_on_any_device(device, late):
    assert list(PipelineBuilder().add_source([1]).transfer("cpu").add_sink().build()) == [1]
    builder = PipelineBuilder().add_source([1]).transfer(device)
    for add in (
        lambda: builder.pipe(make),
        lambda: builder.aggregate(2),
        builder.disaggregate,
        lambda: builder.transfer("cpu"),
    ):
        with pytest.raises(ValueError, match="transfer, which should be the last stage"):
            add()


def test_a_device_that_is_not_there_is_told_when_it_is_named():
    if torch.cuda.is_available():
        pytest.skip("it is there")
    with pytest.raises(RuntimeError, match="finds 0 cuda devices"):
        PipelineBuilder().add_source([1]).transfer("cuda:0")
