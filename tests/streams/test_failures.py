"""Records that fail or hang, and shards that are broken: the same on any workers, and counted."""

import threading
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import pytest
import torch.distributed

import shmloader
from shmloader import DataLoader, ShardedDataLoader
from shmloader.streams import Shards, Stream, mix
from tests.streams.made_streams import MadeFormat, fail_at_times, paths

WORKERS: list[dict[str, Any]] = [
    {},
    {"num_workers": 1},
    {"num_workers": 3},
    {"num_workers": 2, "thread_pool": True},
]


def ids(records: list[list[int]]) -> list[int]:
    return [record[0] for record in records]


def shards(counts: int = 6, **options: Any) -> Shards:
    """Return shards of 9 records, of which each has a bad one, and one is broken."""
    names = paths("a", [9] * counts, [4])
    names[2] = "a2/9/all"
    return Shards(names, MadeFormat(), seed=1, readers=3, **options)


def failing(collate: Any = ids) -> Stream:
    return shards().shuffle(5).map(fail_at_times).batch(4, collate=collate)


def deliveries(loader: DataLoader[Any], count: int | None = None) -> list[Any]:
    """Return batches, and the last lines of the errors that came in place of others."""
    found: list[Any] = []
    iterator = iter(loader)
    while count is None or len(found) < count:
        try:
            found.append(next(iterator))
        except StopIteration:
            break
        except (ValueError, shmloader.ShardError, shmloader.SampleTimeoutError) as error:
            notes = [note for note in getattr(error, "__notes__", ()) if note.startswith("Record")]
            text = str(error).splitlines()[-1].rpartition("Error: ")[2]
            found.append((type(error).__name__, text.partition(" took")[0], *notes))
    return found


def loader_of(stream: Stream, **options: Any) -> DataLoader[Any]:
    return DataLoader(stream, batch_size=None, **options)


@pytest.fixture(scope="module")
def expected() -> list[Any]:
    return deliveries(loader_of(failing()))


def test_an_error_names_shard_and_record_and_takes_the_place_of_one_batch(
    expected: list[Any],
) -> None:
    errors = [one for one in expected if isinstance(one, tuple)]
    record = "record 4 of shard a1/9/4"
    assert ("ShardError", f"{record} is bad", f"R{record[1:]} failed.") in errors
    assert any(error[0] == "ValueError" and "of shard" in error[2] for error in errors)
    good = [one for batch in expected if isinstance(batch, list) for one in batch]
    assert len(good) == len(set(good)) > 9
    assert len(expected) == sum(-(-each // 4) for each in (18, 18, 10))


@pytest.mark.parametrize("options", WORKERS[1:])
def test_errors_are_the_same_on_any_workers(expected: list[Any], options: dict[str, Any]) -> None:
    assert deliveries(loader_of(failing(), **options)) == expected


@pytest.mark.parametrize("options", WORKERS)
def test_errors_are_the_same_after_a_resume(expected: list[Any], options: dict[str, Any]) -> None:
    first = loader_of(failing(), num_workers=2)
    for at in (3, 5, 8):
        assert deliveries(first, at) == expected[:at]
        second = loader_of(failing(), **options)
        second.load_state_dict(first.state_dict())
        assert deliveries(second) == expected[at:]
        first.load_state_dict(loader_of(failing()).state_dict())


@pytest.mark.parametrize("options", WORKERS)
def test_skipped_records_are_left_out_counted_and_listed(options: dict[str, Any]) -> None:
    loader = loader_of(failing(), on_error="skip", **options)
    records = [one for batch in loader for one in batch]
    whole = [
        sum(b"a%d" % shard) * 1000 + number for shard in (0, 1, 3, 4, 5) for number in range(9)
    ]
    good = {one for one in whole if one % 1000 != 4 and one % 13}
    assert set(records) == good
    assert len(records) == len(good)
    failed = {failure.index for failure in loader.failures}
    assert len(failed) == len(loader.failures) == len(whole) - len(good) + 1
    assert {"record 4 of shard a0/9/4", "record 0 of shard a2/9/all"} <= failed


def test_failures_of_batches_that_are_passed_over_are_not_counted_again() -> None:
    loader = loader_of(failing(), on_error="skip", num_workers=2)
    iterator = iter(loader)
    for _ in range(5):
        next(iterator)
    counted = len(loader.failures)
    resumed = loader_of(failing(), on_error="skip", num_workers=3)
    resumed.load_state_dict(loader.state_dict())
    list(resumed)
    assert counted > 0
    assert counted + len(resumed.failures) == len(whole_failures())


@pytest.mark.parametrize("options", WORKERS)
def test_a_batch_whose_records_all_failed_is_left_out_and_the_epoch_resumes(
    options: dict[str, Any],
) -> None:
    def loader() -> DataLoader[Any]:
        stream = shards().map(fail_at_times).batch(1, collate=ids)
        return loader_of(stream, on_error="skip", **options)

    whole = deliveries(loader())
    first = loader()
    iterator = iter(first)
    for at in range(0, len(whole), 4):
        resumed = loader()
        resumed.load_state_dict(first.state_dict())
        assert deliveries(resumed) == whole[at:]
        assert list(islice(iterator, 4)) == whole[at : at + 4]


def test_a_rank_does_not_leave_out_a_batch_that_the_others_have() -> None:
    def steps(stream: Stream) -> list[Any]:
        ranks = [
            ShardedDataLoader(stream, batch_size=None, rank=rank, world_size=2, on_error="skip")
            for rank in range(2)
        ]
        return list(zip(*ranks, strict=True))

    store = torch.distributed.HashStore()
    stream = shards(store=store).map(fail_at_times).batch(1, collate=ids)
    with pytest.raises(shmloader.TooManyFailures, match="all samples of batch"):
        steps(stream)
    # Otherwise, batches have a record fewer: no copy of another one takes its place.
    stream = shards(store=store).filter(is_no_error).batch(4, collate=ids)
    records = [one for step in steps(stream) for batch in step for one in batch]
    alone = [one for batch in loader_of(stream, on_error="skip") for one in batch]
    assert records[: len(alone)] == alone


def is_no_error(record: list[int]) -> bool:
    return bool(fail_at_times(record))


def test_max_failures_ends_the_epoch() -> None:
    loader = loader_of(failing(), on_error="skip", max_failures=3, num_workers=2)
    with pytest.raises(shmloader.TooManyFailures, match="failed"):
        list(loader)
    list(loader_of(failing(), on_error="skip", max_failures=len(whole_failures())))


def whole_failures() -> list[Any]:
    loader = loader_of(failing(), on_error="skip")
    list(loader)
    return list(loader.failures)


def test_a_stop_iteration_of_a_function_does_not_end_the_epoch() -> None:
    stream = Shards(paths("a", [4]), MadeFormat(), seed=0, readers=1).map(_stop)
    for options in WORKERS[:2]:
        iterator = iter(loader_of(stream.batch(2, collate=ids), **options))
        with pytest.raises(RuntimeError, match="StopIteration"):
            next(iterator)
        assert len(next(iterator)) == 2


def _stop(record: list[int]) -> list[int]:
    if record[0] % 1000 == 1:
        raise StopIteration
    return record


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Where hanging records are written down."""
    return tmp_path / "hung"


def hang(log: Path, record: list[int]) -> None:
    with log.open("a") as file:
        file.write(f"{record[0]}\n")
    threading.Event().wait()


@dataclass
class Hang:
    """Hangs for the records of some numbers."""

    log: Path
    numbers: tuple[int, ...]

    def __call__(self, record: list[int]) -> list[int]:
        if record[0] % 1000 in self.numbers:
            hang(self.log, record)
        return record


class HangingFormat(MadeFormat):
    """Hangs where it reads record 5 of a shard."""

    def __init__(self, log: Path, *, seeks: bool) -> None:
        super().__init__(seeks=seeks)
        self.log = log

    def _read(self, path: str, number: int) -> list[int]:
        record = super()._read(path, number)
        if number == 5:
            hang(self.log, record)
        return record


@pytest.mark.parametrize("on_error", ["skip", "raise"])
@pytest.mark.parametrize("way", ["late", "early"])
def test_a_record_that_hangs_is_left_out_and_the_stream_goes_on(
    log: Path, on_error: Literal["skip", "raise"], way: str
) -> None:
    def stream(*hung: int) -> Stream:
        form = MadeFormat(seeks=False)  # only reading that hangs would leave out the whole shard
        made = Shards(paths("a", [12, 12]), form, seed=1, readers=2).map(Hang(log, hung))
        # A function under a filter is applied to all records of a window before its first batch.
        return (made.filter(bool) if way == "early" else made).shuffle(6).batch(3, collate=ids)

    whole = deliveries(loader_of(stream()))
    options = {"num_workers": 2, "sample_timeout": 1.0}
    loader = loader_of(stream(5), on_error=on_error, **options)
    found = deliveries(loader)
    assert len(found) == len(whole)
    for got, batch in zip(found, whole, strict=True):
        hung = [one for one in batch if one % 1000 == 5]
        if not hung:
            assert got == batch
        elif on_error == "skip":
            assert got == [one for one in batch if one not in hung]
        else:
            assert got[0] == "SampleTimeoutError"
            assert "record 5 of shard" in str(got).lower()
    assert len(log.read_text().split()) == 2
    assert len(loader.failures) == 2 * (on_error == "skip")


@pytest.mark.parametrize("seeks", [True, False])
def test_reading_that_hangs_leaves_out_a_record_or_else_the_rest_of_its_shard(
    log: Path, *, seeks: bool
) -> None:
    stream = Shards(paths("a", [12, 12]), HangingFormat(log, seeks=seeks), seed=1, readers=2)
    loader = loader_of(
        stream.batch(4, collate=ids), num_workers=2, sample_timeout=1.0, on_error="skip"
    )
    numbers = [one % 1000 for batch in loader for one in batch]
    left = [0, 1, 2, 3, 4] + [6, 7, 8, 9, 10, 11] * seeks
    assert sorted(numbers) == sorted(left * 2)
    assert [str(one.index)[:8] for one in loader.failures] == ["record 5"] * 2


def test_a_mix_names_the_record_that_failed() -> None:
    a = shards(shuffle_shards=False)
    loader = loader_of(mix({a: 1, a.map(fail_at_times): 1}).batch(4, collate=ids))
    errors = [one for one in deliveries(loader) if isinstance(one, tuple)]
    assert any("of shard a" in error[-1] for error in errors)
