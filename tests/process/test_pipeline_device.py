"""``transfer``: the stages of ``device=``, on the late device."""

import concurrent.futures
import weakref

import pytest
import torch

from shmloader import PipelineBuilder
from tests.process.test_device import on

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


def test_an_op_after_the_transfer_waits_for_the_copy_on_its_own_stream(late):
    def look(batch):
        return [int(tensor.view(-1)[-1]) for tensor in batch.values()]

    async def look_soon(batch):
        return look(batch)

    for op in (look, look_soon):
        builder = PipelineBuilder().add_source(range(40))
        builder.pipe(make, executor="process", output_order="input").transfer("late").pipe(op)
        assert list(builder.add_sink().build()) == [[number] * 2 for number in range(40)]


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


def test_the_cpu_is_no_stage_and_what_does_not_fit_after_a_transfer_is_told(late):
    assert list(PipelineBuilder().add_source([1]).transfer("cpu").add_sink().build()) == [1]

    def transferred():
        return PipelineBuilder().add_source([1]).transfer("late")

    for build in (
        lambda: transferred().transfer("late"),
        lambda: transferred().aggregate(2),
        lambda: transferred().disaggregate(),
        lambda: transferred().pipe(make, executor="process"),
        lambda: transferred().pipe(make, executor=concurrent.futures.ThreadPoolExecutor(1)),
    ):
        with pytest.raises(ValueError, match="transfer"):
            build()


def test_a_device_that_is_not_there_is_told_when_it_is_named():
    if torch.cuda.is_available():
        pytest.skip("it is there")
    with pytest.raises(RuntimeError, match="finds 0 cuda devices"):
        PipelineBuilder().add_source([1]).transfer("cuda:0")


def copied(item):
    return {key: tensor.clone() for key, tensor in item.items()}


def copied_twice(item):
    yield copied(item)
    yield copied(item)


async def copied_soon(item):
    return copied(item)


async def copied_twice_soon(item):
    yield copied(item)
    yield copied(item)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("op", [copied, copied_twice, copied_soon, copied_twice_soon])
def test_what_an_op_after_the_transfer_computes_is_waited_for_on_the_consumers_stream(late, op):
    times = 2 if "twice" in op.__name__ else 1
    with on(torch.Stream("late:0")):
        builder = PipelineBuilder().add_source(range(100))
        builder.pipe(make, executor="process", output_order="input").transfer("late:0")
        builder.pipe(op, output_order="input").pipe(copied, output_order="input")
        found = late.contents(builder.add_sink(2).build())
        assert found == [[number] * 4 for number in range(100) for _ in range(times)]


def test_a_loop_behind_a_later_op_has_a_bounded_number_of_batches_on_the_device(late):
    builder = PipelineBuilder().add_source(range(60)).pipe(make, output_order="input")
    builder.transfer("late").pipe(copied, output_order="input")
    with on(torch.Stream("late:0")):
        for batch in builder.add_sink(1).build():
            batch["image"].clone()
    assert late.count("most used bytes") < 20 * 300_032


def test_what_comes_after_the_transfer_and_is_on_no_device_is_given_as_it_is(late):
    nothing = object()
    builder = PipelineBuilder().add_source(range(3)).pipe(make).transfer("late")
    assert list(builder.pipe(lambda _: nothing).add_sink().build()) == [nothing] * 3
