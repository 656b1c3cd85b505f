"""Where a ticket's samples stand: the same for all ways of cutting one order."""

import copy
import pickle

import pytest
from torch.utils.data import BatchSampler, SequentialSampler

from shmloader.batch.failures import describe_indices
from shmloader.sampling.arguments import Ranks
from shmloader.sampling.hooks import set_epoch_of
from shmloader.sampling.indices import PositionedIndices, without_position
from shmloader.sampling.progress import Progress
from shmloader.sampling.seeded_order import SeededOrder


def plan_of(length=50):
    return SeededOrder(12, "pad", 3, length=length, shuffle=True, ranks=Ranks(0, 1))


def test_an_epoch_that_has_begun_keeps_its_number():
    plan = plan_of(length=36)
    begun = iter(plan)
    plan.begin(8, Progress())
    assert [step.epoch for step in begun] == [0, 0, 0]
    assert [step.epoch for step in plan] == [8, 8, 8]


def test_a_plan_follows_a_dataset_that_grows():
    dataset = [1, 2, 3]
    plan = SeededOrder(2, "keep", 0, length=dataset)
    assert (len(plan), [one.indices for one in plan]) == (2, [[0, 1], [2]])
    dataset += [4, 5]
    assert (len(plan), [one.indices for one in plan]) == (3, [[0, 1], [2, 3], [4]])


@pytest.mark.parametrize("step", [[], [(1, 2), (3, 4)], [[], [1]], "key", 7])
def test_what_is_not_divided_is_handed_on_as_it_is(step):
    plan = SeededOrder(None, "keep", 0, items=[step])
    assert [one.indices for one in plan] == [step]


@pytest.mark.parametrize("make", [lambda plan: pickle.loads(pickle.dumps(plan)), copy.deepcopy])
def test_a_copy_of_a_plan_in_work_begins_an_epoch_of_its_own(make):
    plan = plan_of()
    begun = iter(plan)
    first = next(begun)
    assert next(iter(make(plan))) == first
    assert next(begun).first == 12


def test_texts_and_users_see_the_indices_alone():
    placed = PositionedIndices([4, 5, 6], 1, 12)
    assert describe_indices(placed) == describe_indices([4, 5, 6]) == "indices 4 to 6"
    assert describe_indices(PositionedIndices("key", 1, 12, is_whole=True)) == "index 'key'"
    assert without_position(placed) == without_position([4, 5, 6]) == [4, 5, 6]


class Counting(SequentialSampler):
    epochs = ()

    def set_epoch(self, epoch):
        self.epochs += (epoch,)


def test_the_sampler_in_a_batch_sampler_is_told_the_epoch_and_the_outer_one_first():
    inner = Counting(range(4))
    set_epoch_of(BatchSampler(inner, 2, drop_last=False), 3)
    set_epoch_of(inner, 4)
    assert inner.epochs == (3, 4)
    outer = Counting(range(4))
    outer.sampler = inner
    set_epoch_of(outer, 5)
    assert (outer.epochs, inner.epochs) == ((5,), (3, 4))
    set_epoch_of([1, 2], 5)
