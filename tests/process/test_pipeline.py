"""Pipelines' stages beyond threads and coroutines.

On worker processes they have the loader's own pool and slots; ``transfer`` has the stages of
``device=``, tried on the late device.
"""

import errno
import multiprocessing
import os
import signal
import threading
import time
import weakref

import numpy as np
import pytest
import torch

import shmloader
from shmloader import PipelineBuilder, WorkerDiedError
from tests.process.support import (
    Bad,
    Gate,
    Slots,
    few_descriptors,
    mapping_at,
    wait_for_end,
    wait_until,
)

SOON_S = 20.0
# Said: within 1 s. What must not be waited for here takes a minute.
END_S = 5.0
LARGE = 300_000


def on_processes(op, source, *, concurrency=2, sink=2, **options):
    builder = PipelineBuilder().add_source(source)
    builder.pipe(op, executor="process", concurrency=concurrency, **options)
    return builder.add_sink(sink).build()


def pids():
    return [process.pid for process in multiprocessing.active_children()]


def filled(number):
    return torch.full((LARGE,), number, dtype=torch.uint8)


def test_large_results_are_views_of_slots(slots: Slots):
    with on_processes(filled, range(40)).auto_stop() as pipeline:
        for number, tensor in enumerate(pipeline):
            assert "memfd:shmloader " in mapping_at(tensor.data_ptr()), number
        # Tickets in flight: 2 processes with 2 jobs each. Lent: as many, 2 in the sink, 2 in hand.
        assert 1 <= len(slots.maps()) <= 4 + 8
    assert len(slots.maps()) == 1  # under the last tensor
    del tensor
    assert slots.maps() == {}


@pytest.mark.parametrize("order", ["completion", "input"])
def test_each_item_is_worked_on_once_in_another_process(order):
    def op(number):
        return number, os.getpid(), filled(number)

    pipeline = on_processes(op, range(60), output_order=order)
    taken = []
    pids = set()
    for number, pid, tensor in pipeline:
        assert bool((tensor == number).all())
        taken.append(number)
        pids.add(pid)
    assert taken == list(range(60)) if order == "input" else sorted(taken) == list(range(60))
    assert os.getpid() not in pids
    assert 1 <= len(pids) <= 2


def test_items_of_any_size_reach_the_worker_and_none_is_left_out():
    def total(item):
        array, number = item
        return None if number % 2 else int(array.sum())

    source = [(np.full(number * 100_000, 1, np.uint8), number) for number in range(6)]
    assert list(on_processes(total, source, output_order="input")) == [0, 200_000, 400_000]


def test_an_op_on_a_list_collates_straight_into_the_slot():
    def collate(numbers):
        return torch.utils.data.default_collate([filled(number) for number in numbers])

    def own(batch):
        out = shmloader.empty(batch.shape, dtype=torch.uint8)
        out.copy_(batch + 1)
        return out

    builder = PipelineBuilder().add_source(range(10)).aggregate(4)
    builder.pipe(collate, executor="process").pipe(own, executor="process")
    batches = list(builder.add_sink().build())
    assert [tuple(batch.shape) for batch in batches] == [(4, LARGE), (4, LARGE), (2, LARGE)]
    assert [batch[:, 0].tolist() for batch in batches] == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10]]


def test_a_generator_functions_results_come_together():
    def many(number):
        yield None
        for part in range(number):
            yield number, part, filled(number)

    taken = [
        (number, part, int(tensor[0]))
        for number, part, tensor in on_processes(many, range(5), output_order="input", sink=1)
    ]
    assert taken == [(number, part, number) for number in range(5) for part in range(number)]


def test_workers_are_kept_from_epoch_to_epoch_and_after_a_break():
    pipeline = on_processes(lambda number: os.getpid(), range(20))
    with pipeline.auto_stop():
        taken = set(pipeline)
        before = set(pids())
        assert taken <= before
        for pid in pipeline:
            assert pid in before
            break
        taken = list(pipeline)
        assert len(taken) == 20
        assert set(taken) <= before
        assert set(pids()) == before


def test_back_pressure_holds_the_workers():
    calls = multiprocessing.get_context("fork").Value("i", 0)
    asked, lead = multiprocessing.RawValue("i", 0), multiprocessing.RawValue("i", 0)

    def op(number):
        with calls.get_lock():
            calls.value += 1
            lead.value = max(lead.value, calls.value - asked.value)
        return number

    bound = 2 + 4  # in the sink, in the stage
    items = iter(on_processes(op, range(1000), sink=2))
    for asked.value in range(1, 51):
        next(items)
        wait_until(lambda: calls.value >= asked.value + bound, SOON_S)
    assert lead.value == bound
    assert len(list(items)) == 950


def test_an_ops_exception_has_stage_item_and_worker():
    def op(number):
        if number == 3:
            raise Bad("no 3")
        return number

    pipeline = on_processes(op, range(9), name="decode", concurrency=1)
    taken = []
    with pytest.raises(Bad, match="no 3") as caught:
        taken.extend(pipeline)
    assert taken == [0, 1, 2]
    notes = " ".join(caught.value.__notes__)
    assert "Stage 'decode' failed for item 3." in notes
    assert "Worker 0 (pid" in notes


def test_what_cannot_be_sent_is_an_error_of_its_item():
    lock = threading.Lock()
    with pytest.raises(TypeError, match="pickle") as caught:
        list(on_processes(str, [1, lock], concurrency=1))
    assert any("Stage 'str' failed for item <unlocked" in note for note in caught.value.__notes__)
    with pytest.raises(TypeError, match="pickle"):
        list(on_processes(lambda _: threading.Lock(), [1]))


@pytest.mark.parametrize("left", range(4))
def test_processes_that_cannot_be_started_are_an_error_that_names_the_limit(left):
    pipeline = on_processes(filled, range(4))
    with few_descriptors(left), pytest.raises(OSError, match="ulimit -n") as raised:
        iter(pipeline)
    assert raised.value.errno == errno.EMFILE
    with pipeline.auto_stop():
        assert len(list(pipeline)) == 4


@pytest.mark.sampled(1)
@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_killed_worker_is_worker_died_error_and_the_next_start_has_new_ones(is_stopped):
    gate, reached = Gate(), Gate()

    def op(number):
        if number == 2:
            reached.open()
            gate.pass_through()
        return number

    pipeline = on_processes(op, range(9), concurrency=1, name="decode")
    with pipeline.auto_stop():
        items = iter(pipeline)
        assert [next(items), next(items)] == [0, 1]
        reached.wait_until_open()
        (pid,) = pids()
        if is_stopped:
            os.kill(pid, signal.SIGSTOP)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(WorkerDiedError) as caught:
            next(items)
        assert f"pid {pid}" in str(caught.value)
        assert any("Stage 'decode' failed for item 2" in note for note in caught.value.__notes__)
        gate.open(2)
        assert list(pipeline) == list(range(9))
        assert pids() != [pid]


def test_a_worker_that_is_killed_while_it_waits_is_told_at_its_next_item():
    pipeline = on_processes(filled, range(3), concurrency=1)
    with pipeline.auto_stop():
        list(pipeline)
        (pid,) = pids()
        os.kill(pid, signal.SIGKILL)
        wait_for_end(pid)
        with pytest.raises(WorkerDiedError):
            list(pipeline)
        assert len(list(pipeline)) == 3


@pytest.mark.sampled(2)
@pytest.mark.parametrize("is_stopped", [False, True])
@pytest.mark.parametrize("how", ["stop", "break", "garbage"])
def test_workers_that_are_in_an_op_end_at_once(how, is_stopped):
    reached = Gate()

    def op(number):
        if number:
            reached.open()
            time.sleep(60)
        return number

    pipeline = on_processes(op, range(9))
    items = iter(pipeline)
    assert next(items) == 0
    reached.wait_until_open()
    workers = pids()
    if is_stopped:
        os.kill(workers[0], signal.SIGSTOP)
    start = time.monotonic()
    if how == "stop":
        pipeline.stop()
    elif how == "break":
        del items
    else:
        del items, pipeline
    assert time.monotonic() - start < END_S
    for pid in workers:
        wait_for_end(pid, 0.1)


class FiveAnEpoch:
    epoch = -1

    def __iter__(self):
        self.epoch += 1
        return iter([(self.epoch, number) for number in range(5)])


def test_what_was_in_work_when_an_epoch_was_left_reaches_nobody():
    gate, reached = Gate(), Gate()

    def op(item):
        epoch, number = item
        if epoch == 0 and number == 1:
            reached.open()
            gate.pass_through()
        return item

    with on_processes(op, FiveAnEpoch(), concurrency=1).auto_stop() as pipeline:
        for item in pipeline:
            assert item == (0, 0)
            reached.wait_until_open()
            break
        items = iter(pipeline)
        gate.open()
        assert list(items) == [(1, number) for number in range(5)]


@pytest.mark.slow
def test_ops_cross_to_workers_of_another_start_method(monkeypatch):
    default = multiprocessing.context._default_context
    monkeypatch.setattr(default, "_actual_context", multiprocessing.get_context("spawn"))
    factor = 3
    taken = list(on_processes(lambda number: factor * number, range(3), concurrency=1))
    assert taken == [0, 3, 6]


def test_workers_draw_other_numbers_in_each_stage_and_after_each_start():
    def draw(numbers):
        return [*numbers, torch.rand(()).item()]

    builder = PipelineBuilder().add_source([[]])
    for _ in range(2):
        builder.pipe(draw, executor="process")
    pipeline = builder.add_sink().build()
    torch.manual_seed(1)
    drawn = [number for _ in range(2) for numbers in pipeline for number in numbers]
    assert len(set(drawn)) == 4
    torch.manual_seed(1)
    assert list(pipeline) == [drawn[:2]]


def test_a_pipeline_on_processes_can_be_resumed_and_measures_there():
    def many(number):
        time.sleep(0.002)
        for part in range(number % 3):
            yield number * 10 + part

    def make():
        return on_processes(many, range(20), output_order="input")

    whole = list(make())
    for place in (0, 1, 2, 7, len(whole)):
        first = make()
        items = iter(first)
        taken = [next(items) for _ in range(place)]
        state = first.state_dict()
        del items
        second = make()
        second.load_state_dict(state)
        assert taken + list(second) == whole
    measured = make()
    list(measured)
    [_, stage] = measured.stats().stages
    assert stage.kind == "process"
    assert stage.op_mean_s >= 0.002
    assert (stage.items_in, stage.items_out) == (20, len(whole))


def sample(number):
    return {"image": filled(number), "label": torch.tensor([number])}


def ends(count: int) -> list[list[int]]:
    return [[number] * 4 for number in range(count)]


def test_batches_are_copied_from_their_slots_which_are_page_locked(late):
    builder = PipelineBuilder().add_source(range(40))
    builder.pipe(sample, executor="process", concurrency=2, output_order="input")
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
    builder = PipelineBuilder().add_source(range(40)).pipe(sample)
    assert late.contents(builder.transfer("late").add_sink().build()) == ends(40)
    assert late.count("registered") == late.count("pageable copies") == 0


def test_a_break_waits_for_the_copies_under_way(late):
    builder = PipelineBuilder().add_source(range(40)).pipe(sample, executor="process")
    pipeline = builder.transfer("late").add_sink(1).build()
    for _ in range(3):
        for batch in pipeline:
            del batch
            break
    assert late.count("registered bytes") == late.count("faults") == 0


def test_nothing_of_an_epoch_is_held_after_its_end(late):
    made = []

    def note(number):
        tensor = filled(number)
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
        lambda: builder.pipe(sample),
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
