"""``transfer``: the stages of ``device=``, on the simulated device, which reads late."""

from __future__ import annotations

import weakref

import pytest
import torch

from shmloader import PipelineBuilder
from tests.simulated import host_checksum, pinning

LARGE = 300_000


def make(number):
    return {
        "image": torch.full((LARGE,), number, dtype=torch.uint8),
        "label": torch.tensor([number]),
    }


CHECKSUMS = [host_checksum(make(number)) for number in range(40)]


def test_batches_are_copied_from_their_slots_which_are_page_locked(sim):
    builder = PipelineBuilder().add_source(range(40))
    builder.pipe(make, executor="process", concurrency=2, output_order="input")
    pipeline = builder.transfer("sim").add_sink(2).build()
    with pipeline.auto_stop():
        for _ in range(2):
            results = []
            for batch in pipeline:
                results.append(sim.checksum(batch))
                del batch
            assert [result.value() for result in results] == CHECKSUMS
        assert sim.counts["lock"] > 0
        assert sim.counts["late copy"] >= 40
        assert sim.counts["wait"] == 80
    assert sim.locked == {}
    # The slots came back: not one for each batch.
    assert sim.counts["lock"] <= 20


def test_batches_of_threads_are_copied_as_well(sim):
    builder = PipelineBuilder().add_source(range(40)).pipe(make)
    results = [sim.checksum(batch) for batch in builder.transfer("sim").add_sink().build()]
    assert [result.value() for result in results] == CHECKSUMS
    assert sim.counts["lock"] == 0


@pytest.mark.parametrize("executor", ["thread", "process"])
def test_what_lies_in_no_slot_goes_by_way_of_pinned_memory(sim, executor):
    with pinning() as pinned:
        builder = PipelineBuilder().add_source(range(9)).pipe(make, executor=executor)
        results = [sim.checksum(batch) for batch in builder.transfer("sim").add_sink().build()]
        assert [result.value() for result in results] == CHECKSUMS[:9]
    if executor == "thread":
        assert sum(nbytes >= LARGE for nbytes in pinned.allocations) == 9
        assert pinned.threads == {"shmloader_device_0"}
    else:
        assert pinned.allocations == []


def test_an_op_after_the_transfer_waits_for_the_copy_on_its_own_stream(sim):
    def look(batch):
        return sim.checksum(batch)

    async def look_soon(batch):
        return sim.checksum(batch)

    for op in (look, look_soon):
        builder = PipelineBuilder().add_source(range(40))
        builder.pipe(make, executor="process", output_order="input").transfer("sim").pipe(op)
        results = list(builder.add_sink().build())
        assert [result.value() for result in results] == CHECKSUMS


def test_slots_that_a_threads_op_sees_are_not_locked(sim):
    builder = PipelineBuilder().add_source(range(9)).pipe(make, executor="process")
    builder.pipe(lambda batch: batch).transfer("sim")
    results = [sim.checksum(batch) for batch in builder.add_sink().build()]
    assert [result.value() for result in results] == CHECKSUMS[:9]
    assert sim.counts["lock"] == 0


def test_a_break_waits_for_the_copies_under_way(sim):
    builder = PipelineBuilder().add_source(range(40)).pipe(make, executor="process")
    pipeline = builder.transfer("sim").add_sink(1).build()
    for _ in range(3):
        for batch in pipeline:
            del batch
            break
    assert sim.locked == {}


def test_nothing_of_an_epoch_is_held_after_its_end(sim):
    made = []

    def note(number):
        tensor = torch.full((LARGE,), number, dtype=torch.uint8)
        made.append(weakref.ref(tensor))
        return tensor

    builder = PipelineBuilder().add_source(range(9)).pipe(note).transfer("sim")
    with builder.add_sink().build().auto_stop() as pipeline:
        for tensor in pipeline:
            del tensor
        assert len(made) == 9
        assert all(reference() is None for reference in made)


def test_what_a_copy_raises_has_stage_and_item(sim):
    class Bad:
        def to(self, device, non_blocking=False):
            raise ValueError("not to be moved")

        def __deepcopy__(self, memo):
            return self

    builder = PipelineBuilder().add_source([Bad()]).transfer("sim")
    with pytest.raises(ValueError, match="not to be moved") as caught:
        list(builder.add_sink().build())
    assert "Stage 'transfer to sim' failed for item" in caught.value.__notes__[0]


def test_the_cpu_is_no_stage_and_what_does_not_fit_after_a_transfer_is_told(sim):
    assert list(PipelineBuilder().add_source([1]).transfer("cpu").add_sink().build()) == [1]

    def transferred():
        return PipelineBuilder().add_source([1]).transfer("sim")

    for build in (
        lambda: transferred().transfer("sim"),
        lambda: transferred().aggregate(2),
        lambda: transferred().disaggregate(),
        lambda: transferred().pipe(make, executor="process"),
    ):
        with pytest.raises(ValueError, match="transfer"):
            build()


def test_a_device_that_is_not_there_is_told_when_it_is_named():
    if torch.cuda.is_available():
        pytest.skip("it is there")
    with pytest.raises(RuntimeError, match="CUDA"):
        PipelineBuilder().add_source([1]).transfer("cuda:0")
