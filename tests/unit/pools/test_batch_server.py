"""How a worker makes the batch of a task, and its answer, without a process or a socket."""

import functools
import pickle
from types import SimpleNamespace

import pytest
import torch

from shmloader.batch.dataset_state import Saved
from shmloader.batch.fetch import FetchConfig
from shmloader.batch.maker import BatchMaker
from shmloader.memory.arena import Arena
from shmloader.messages import DONE, DONE_HEAD, Answered, Task, unpack  # fmt: skip
from shmloader.pools.answers import Answer
from shmloader.pools.batch_server import BatchServer, TaskConfig
from tests.unit.memory.support import MIB, exit_code_of_a_child


class Fetcher:
    """Returns or raises the results that a test has set."""

    fingerprint = None

    def __init__(self):
        self.results = []

    def fetch(self, indices):
        result = self.results.pop(0)
        if isinstance(result, BaseException):
            raise result
        return result() if callable(result) else result


class Bench:
    """A worker with one slot."""

    def __init__(self, *, dataset=(), every=1, collates=True):
        config = FetchConfig(
            every > 1, auto_collation=collates, drop_last=False, snapshot_every=every
        )
        self.dataset = dataset
        self.arena = Arena.create(8 * MIB, 1)
        self.slot = self.arena.slots[0]
        tasks = TaskConfig(config, self.arena, None)
        self.server = BatchServer(tasks, 0, SimpleNamespace(set_sample=None))
        maker = BatchMaker(config, dataset, list, where="here", timer=self.server._timer)
        self.fetcher = maker.fetcher = Fetcher()
        self.server.dataset._maker, self.server.dataset._given = maker, every - 1

    def serve(self, result):
        """Serve a task with this result, and return the answer."""
        self.fetcher.results.append(result)
        task = Task(5, 1, 0, self.slot.touched_bytes, None, pickle.dumps(()))
        data = self.server.serve(task)
        if data[0] == DONE:
            _, seq, epoch, slot_id, used_bytes = DONE_HEAD.unpack_from(data)
            batch = Answer(None, None, data[DONE_HEAD.size :], used_bytes)
            answer = Answered(seq, epoch, slot_id, used_bytes, batch)
        else:
            answer = unpack(data)
        assert (answer.seq, answer.epoch, answer.slot_id) == (5, 1, 0)
        self.arena.reach(self.slot, max(1, self.slot.touched_bytes))  # as the main process does
        return answer


@pytest.fixture
def make_bench():
    made = []

    def make(**options) -> Bench:
        made.append(Bench(**options))
        return made[-1]

    yield make
    for bench in made:
        bench.arena.close()


def test_a_batch_that_is_not_kept_leaves_its_slot_mapped(make_bench):
    bench = make_bench()
    make = lambda: {"x": bench.server.writer.empty((10,), torch.float32), "n": "a"}  # noqa: E731
    assert bench.serve(make).layout is not None
    address = bench.slot.address
    assert bench.serve(make).layout is None
    assert bench.slot.address == address


def test_code_that_has_kept_memory_of_a_slot_is_offered_none(make_bench):
    bench, kept, offers = make_bench(collates=False), [], []
    writer = bench.server.writer

    def make(keeps):
        offers.append(writer.is_offered)
        made = writer.empty((10,), torch.float32)
        kept.extend([made] * keeps)
        return {"x": made}

    for keeps in (False, True, False, False):
        bench.serve(functools.partial(make, keeps))
    assert offers == [True, True, False, False]


@pytest.mark.parametrize(
    "write",
    [
        lambda bench: bench.serve([torch.arange(3)]),
        lambda bench: bench.server._put_state(Saved("dataset", False, {})),
    ],
)
def test_a_child_ends_before_it_writes_a_batch_or_a_state(make_bench, write):
    bench = make_bench()
    assert exit_code_of_a_child(lambda: write(bench)) == 1


class Stateful:
    """A dataset with a state of this length."""

    def __init__(self, nbytes):
        self.nbytes = nbytes

    def state_dict(self):
        return bytes(self.nbytes)

    def load_state_dict(self, state):
        pass

    def __iter__(self):
        return iter(())


@pytest.mark.parametrize(("size", "every"), [(9 * MIB, 1), (MIB, 100)])
def test_a_state_that_fits_no_slot_or_is_taken_rarely_is_in_the_answer(make_bench, size, every):
    bench = make_bench(dataset=Stateful(size), every=every)
    answer = bench.serve([torch.arange(3)])
    assert pickle.loads(answer.answer.snapshot)[2] == bytes(size)
    assert bench.slot.touched_bytes < MIB or every == 1


def test_a_state_of_many_objects_follows_the_batch_in_its_slot(make_bench):
    bench = make_bench(dataset=Stateful(0))
    numbers = list(range(200_000))
    bench.dataset.state_dict = lambda: numbers
    answer = bench.serve([torch.arange(3)])
    slot_id, offset, nbytes = answer.answer.snapshot
    assert (slot_id, offset) == (0, 64)
    assert pickle.loads(bench.slot.memory[offset : offset + nbytes])[2] == numbers
