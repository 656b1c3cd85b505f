"""How a worker answers a task, without a process or a socket."""

import pickle
import zlib

import pytest
import torch

from shmloader.batch.fetch import FetchConfig
from shmloader.batch.maker import BatchMaker
from shmloader.memory.arena import Arena
from shmloader.memory.pickled import PickledLayout
from shmloader.messages import (
    BatchDone,
    BatchFailed,
    Spilled,
    Task,
    pack,
    unpack,
)
from shmloader.pools.task_server import TaskConfig, TaskServer
from tests.unit.memory.support import MIB


class Fetcher:
    """Returns or raises the results that a test has set."""

    fingerprint = None

    def __init__(self):
        self.results = []
        self.asked = []

    def fetch(self, indices):
        self.asked.append(indices)
        result = self.results.pop(0)
        if isinstance(result, BaseException):
            raise result
        return result() if callable(result) else result


class Page:
    """The worker's line of a status page that is read by nothing."""

    def __init__(self):
        self.held = [0]

    def note_sample(self, number, deadline_ns):
        raise AssertionError("there is no sample_timeout")

    def note(self, phase, epoch=0, seq=0):
        """Write nothing."""


class Channel:
    """The worker's end of a socket that keeps what is sent."""

    def __init__(self):
        self.sent = []

    def send(self, data):
        self.sent.append(data)


class Bench:
    """A worker with one slot."""

    def __init__(self, *, is_iterable=False, slot_bytes=8 * MIB):
        config = FetchConfig(is_iterable, auto_collation=True, drop_last=False)
        self.arena = Arena.create(slot_bytes, 1)
        self.slot = self.arena.slots[0]
        self.channel = Channel()
        self.worker = TaskServer(self.channel, 3, TaskConfig(config, self.arena), Page())
        maker = BatchMaker(config, [], list, where="here", timer=self.worker._server._timer)
        self.fetcher = maker.fetcher = Fetcher()
        self.worker._server.dataset.maker = maker
        self.worker._server.dataset.is_ready = True
        self.seq = -1

    def serve(self, *results, indices=()):
        """Serve a task for each result, and return the last answer."""
        for result in results:
            self.seq += 1
            self.fetcher.results.append(result)
            sent = indices if type(indices) is Spilled else pickle.dumps(indices)
            self.worker.take(pack(Task(self.seq, 1, 0, sent)))
            answer = unpack(self.channel.sent.pop())
            assert (answer.seq, answer.epoch) == (self.seq, 1)
        self.arena.reach(self.slot, max(1, self.slot.touched_bytes))  # as the main process does
        return answer

    def spilled(self, where: Spilled) -> bytes:
        end = where.offset + where.nbytes
        self.arena.reach(self.slot, end)
        return bytes(self.slot.memory[where.offset : end])

    def layout_of(self, answer: BatchDone) -> PickledLayout:
        layout = answer.layout
        return pickle.loads(self.spilled(layout) if type(layout) is Spilled else layout)

    def error_of(self, answer: BatchFailed) -> BaseException:
        data = answer.error
        try:
            pickle.loads(data if isinstance(data, bytes) else self.spilled(data)).reraise("")
        except BaseException as error:
            return error


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
    make = lambda: {"x": bench.worker._server.writer.empty((10,), torch.float32), "n": "a"}  # noqa: E731
    bench.serve(make)
    address = bench.slot.address
    bench.serve(make)
    assert bench.slot.address == address


def test_a_failure_reports_how_much_of_the_slot_was_touched(make_bench):
    bench = make_bench()

    def fill_and_fail():
        bench.worker._server.writer.allocate(100_000)
        raise ValueError("x" * 50_000)

    assert bench.serve(fill_and_fail).touched_bytes == 100_032
    assert bench.serve(ValueError("short")).touched_bytes == 0


def test_a_batch_carries_a_checksum_only_when_debugging(make_bench):
    bench = make_bench()
    assert bench.serve([torch.arange(3)]).checksum is None
    bench.worker._server._is_debugging = True
    answer = bench.serve([torch.arange(3)])
    assert answer.checksum == zlib.crc32(bench.slot.memory[: answer.used_bytes])
    assert answer.used_bytes == 64
