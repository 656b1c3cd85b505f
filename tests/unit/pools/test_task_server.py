"""How a worker answers a task, without a process or a socket."""

import pickle
import zlib

import pytest
import torch

from shmloader.batch.failures import SampleReport
from shmloader.batch.fetch import FetchConfig
from shmloader.batch.maker import BatchMaker
from shmloader.batch.remote_error import RemoteError
from shmloader.batch.tolerant_fetcher import TolerantFetcher
from shmloader.errors import SharedMemoryError
from shmloader.memory.arena import Arena
from shmloader.memory.codec import PickledLayout, decode
from shmloader.messages import (
    INLINE_BYTES,
    RECEIVE_BYTES,
    BatchDone,
    BatchEmpty,
    BatchFailed,
    Spilled,
    StreamEnded,
    Task,
    pack,
    unpack,
)
from shmloader.pools.task_server import TaskConfig, TaskServer
from tests.unit.memory.support import MIB


class Fetcher:
    """Returns or raises the results that a test has set."""

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

    def note_sample(self, number, deadline_ns):
        raise AssertionError("there is no sample_timeout")


class Bench:
    """A worker with one slot."""

    def __init__(self, *, is_iterable=False, slot_bytes=8 * MIB):
        config = FetchConfig(is_iterable, auto_collation=True, drop_last=False)
        self.arena = Arena.create(slot_bytes, 1)
        self.slot = self.arena.slots[0]
        self.worker = TaskServer(None, 3, TaskConfig(config, self.arena), Page())
        maker = BatchMaker(config, [], list, where="here", timer=self.worker._server._timer)
        self.fetcher = maker.fetcher = Fetcher()
        self.worker._server.dataset.maker = maker
        self.seq = -1

    def serve(self, *results, indices=()):
        """Serve a task for each result, and return the last answer."""
        for result in results:
            self.seq += 1
            self.fetcher.results.append(result)
            sent = indices if type(indices) is Spilled else pickle.dumps(indices)
            answer = unpack(self.worker._serve(Task(self.seq, 1, 0, sent)))
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
            RemoteError.loads(data if isinstance(data, bytes) else self.spilled(data)).reraise("")
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


def small_tensors(count: int) -> list[torch.Tensor]:
    return [torch.full((1,), number) for number in range(count)]


def test_a_batch_is_answered_by_its_layout(make_bench):
    bench = make_bench()
    answer = bench.serve([torch.arange(3)], indices=[5, 6])
    assert bench.fetcher.asked == [[5, 6]]
    assert answer.used_bytes == 64
    assert decode(bench.layout_of(answer), bench.slot, None)[0].tolist() == [0, 1, 2]


def test_a_layout_like_the_last_one_is_not_sent_again(make_bench):
    bench = make_bench()
    first = bench.serve([torch.zeros(3), "a"])
    assert first.layout is not None
    assert bench.serve([torch.ones(3), "a"]).layout is None
    assert bench.serve([torch.ones(3), "b"]).layout is not None


def test_long_indices_are_read_from_the_slot(make_bench):
    bench = make_bench()
    body = pickle.dumps(list(range(10_000)))
    bench.arena.reach(bench.slot, len(body))
    bench.slot.memory[: len(body)] = body
    bench.serve(None, indices=Spilled(0, len(body)))
    assert bench.fetcher.asked == [list(range(10_000))]


def test_a_long_layout_lies_in_the_slot(make_bench):
    bench = make_bench()
    answer = bench.serve(small_tensors(3000))
    assert type(answer.layout) is Spilled
    assert answer.layout.offset + answer.layout.nbytes <= answer.used_bytes
    batch = decode(bench.layout_of(answer), bench.slot, None)
    assert [int(tensor) for tensor in batch] == list(range(3000))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("slot_bytes", range(3000 * 64, 360_000, 20_000))
def test_a_batch_whose_layout_does_not_fit_is_a_failure_and_does_not_end_the_worker(
    make_bench, slot_bytes
):
    bench = make_bench(slot_bytes=slot_bytes)
    answer = bench.serve(small_tensors(3000))
    if type(answer) is BatchFailed:
        assert type(bench.error_of(answer)) is SharedMemoryError
        again = bench.serve(small_tensors(3000))
        assert type(again) is BatchFailed, "a layout was not sent, and is taken for the last one"
    else:
        assert len(decode(bench.layout_of(answer), bench.slot, None)) == 3000


def test_a_failure_is_answered_and_the_next_batch_goes_on(make_bench):
    bench = make_bench()
    answer = bench.serve(ValueError("broken sample"))
    error = bench.error_of(answer)
    assert type(error) is ValueError
    assert "in DataLoader worker process 3" in str(error)
    assert "broken sample" in str(error)
    assert type(bench.serve([1])) is BatchDone


def test_a_long_failure_lies_in_the_slot(make_bench):
    bench = make_bench()
    answer = bench.serve(ValueError("x" * MIB))
    assert type(answer.error) is Spilled
    assert "x" * MIB in str(bench.error_of(answer))


def test_a_failure_longer_than_its_slot_is_shortened(make_bench):
    bench = make_bench(slot_bytes=64 << 10)
    answer = bench.serve(ValueError("x" * MIB))
    assert type(answer.error) is bytes
    assert len(answer.error) < INLINE_BYTES
    error = bench.error_of(answer)
    assert type(error) is ValueError
    assert "characters …]" in str(error)


def test_a_failure_takes_the_place_of_what_the_batch_had_written(make_bench):
    bench = make_bench(slot_bytes=2 * MIB)

    def fill_and_fail():
        bench.worker._server.writer.allocate(2 * MIB - 64)
        raise ValueError("x" * MIB)

    assert "x" * MIB in str(bench.error_of(bench.serve(fill_and_fail)))


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), SystemExit(1), GeneratorExit(), StopIteration()]
)
def test_control_flow_out_of_a_map_style_dataset_is_a_failure(make_bench, error):
    answer = make_bench().serve(error)
    assert type(answer) is BatchFailed
    assert type(make_bench().error_of(answer)) is RuntimeError


def test_the_end_of_an_iterable_dataset_answers_every_further_task(make_bench):
    bench = make_bench(is_iterable=True)
    assert type(bench.serve([1])) is BatchDone
    assert type(bench.serve(StopIteration())) is StreamEnded
    assert type(bench.serve([2])) is StreamEnded
    assert len(bench.fetcher.asked) == 2, "an ended stream is not asked again"


@pytest.mark.parametrize("fails", [False, True])
def test_what_the_user_keeps_of_a_slot_is_not_changed_by_later_batches(make_bench, fails):
    bench = make_bench()
    kept = []

    def collate():
        kept.append(bench.worker._server.writer.empty((10,), torch.float32).fill_(len(kept)))
        if fails:
            raise ValueError("after the fact")
        return [kept[-1]]

    for count in range(3):
        answer = bench.serve(collate)
        assert type(answer) is (BatchFailed if fails else BatchDone)
        if count == 0 and not fails:
            assert decode(bench.layout_of(answer), bench.slot, None)[0].tolist() == [0] * 10
    bench.slot.memory[:4096] = bytes([9]) * 4096
    assert [tensor.unique().tolist() for tensor in kept] == [[0], [1], [2]]


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


class Fails:
    """A dataset that raises a long text for all keys except the good ones."""

    def __init__(self, length, good=()):
        self.length = length
        self.good = good

    def __getitem__(self, key):
        if key in self.good:
            return torch.zeros(self.length, dtype=torch.uint8)
        raise LookupError("€" * self.length)


def report_of(bench: Bench, answer: BatchDone | BatchFailed | BatchEmpty) -> SampleReport:
    data = answer.report
    return SampleReport.loads(data if isinstance(data, bytes) else bench.spilled(data))


def tolerate(bench: Bench, dataset: object, collate_fn=list) -> None:
    fetcher = TolerantFetcher(bench.worker._server._config, dataset, collate_fn, "skip", "here")
    bench.worker._server.dataset.maker.fetcher = fetcher


def test_an_answer_reports_on_its_own_samples_only(make_bench):
    bench = make_bench()
    tolerate(bench, Fails(10, good=(2, 3)))
    for indices, kind, bad in [
        ([1, 2], BatchDone, [1]),
        ([2, 3], BatchDone, []),
        ([4, 5], BatchEmpty, [4, 5]),
        ([3], BatchDone, []),
    ]:
        answer = bench.serve(None, indices=indices)
        assert type(answer) is kind
        assert [one.index for one in report_of(bench, answer).newest] == bad
        assert report_of(bench, answer).sample_count == len(indices)


def test_an_answer_without_a_fetcher_of_ours_has_no_report(make_bench):
    bench = make_bench()
    assert bench.serve(None).report is None
    assert bench.serve(ValueError()).report is None


def test_a_batch_whose_indices_cannot_be_read_reports_nothing(make_bench):
    bench = make_bench()
    tolerate(bench, Fails(10))
    bench.serve(None, indices=[1])
    data = b"no pickle"
    bench.slot.memory[: len(data)] = data
    answer = bench.serve(None, indices=Spilled(0, len(data)))
    assert type(answer) is BatchFailed
    assert report_of(bench, answer) == SampleReport()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("fails_in_collate", [False, True])
@pytest.mark.parametrize("good", [(), ("good",)])
@pytest.mark.parametrize("slot_bytes", [64 * 1024, 8 * MIB])
def test_a_report_goes_into_the_slot_or_is_shortened_to_a_message(
    make_bench, slot_bytes, good, fails_in_collate
):
    def collate(samples):
        if fails_in_collate:
            raise ValueError("€" * 10_000_000)
        return samples

    bench = make_bench(slot_bytes=slot_bytes)
    tolerate(bench, Fails(63_000, good), collate)
    answer = bench.serve(None, indices=["€" * 1300 + str(n) for n in range(120)] + list(good))
    assert len(pack(answer)) <= RECEIVE_BYTES
    report = report_of(bench, answer)
    assert (report.sample_count, report.failed_count) == (120 + len(good), 120)
    is_whole = type(answer.report) is Spilled
    assert is_whole is (slot_bytes == 8 * MIB)
    assert len(report.newest) == (100 if is_whole else 1)
    assert report.newest[-1].index.endswith("119" if is_whole else "119'")
    if good and not fails_in_collate:
        assert decode(bench.layout_of(answer), bench.slot, None)[0].tolist() == [0] * 63_000
