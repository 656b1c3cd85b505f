"""Records that fail or hang, and shards that are broken: the same on any workers, and counted."""

import json
import random
import threading
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import pytest
import torch.distributed

import shmloader
from shmloader import DataLoader, ShardedDataLoader, ShardError, TooManyFailures
from shmloader.streams import ShardCache, Shards, Stream, open_jsonl, open_tar
from tests.streams.made_streams import MadeFormat, fail_at_times, paths
from tests.streams.support import tar_bytes, write

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


# Shards and records that cannot be read --------------------------------------------------------


def broken_off(path):
    """Yield five records, or two and an error."""
    for number in range(5):
        if path == "1" and number == 2:
            raise KeyError("two")
        yield path, number


def load(paths, open_, **options):
    stream = Shards(paths, open_, seed=0, readers=1, shuffle_shards=False).batch(2, collate=list)
    loader = DataLoader(stream, batch_size=None, **options)
    return [record for batch in loader for record in batch], loader.failures


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_users_iterator_that_raises_ends_its_shard(num_workers):
    found, failures = load(["0", "1", "2"], broken_off, num_workers=num_workers, on_error="skip")
    expected = [("0", number) for number in range(5)] + [("1", 0), ("1", 1)]
    assert found == expected + [("2", number) for number in range(5)]
    assert failures.total == 1
    assert failures[0].index == "record 2 of shard 1"


def test_bad_lines_are_left_out_and_the_next_shard_is_asked_for_once(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(ShardCache, "prefetch", lambda _, url: asked.append(url))
    paths = [str(tmp_path / name) for name in ("a.jsonl", "b.jsonl")]
    write(paths[0], b"1\n2\n{\n4\nx\n6\n")
    write(paths[1], b"7\n")
    found, failures = load(paths, open_jsonl, on_error="skip")
    assert found == [1, 2, 4, 6, 7]
    assert [each.index for each in failures] == [f"record {n} of shard {paths[0]}" for n in (2, 4)]
    assert asked == paths[1:]


class Stuck:
    """Names record 0 in every error, so that it cannot be gone past."""

    seeks = False

    def count(self, path):
        raise NotImplementedError

    def read(self, path, numbers):
        if path == "1":
            yield from [(path, 0), (path, 1)][numbers[0] :]
            raise ShardError("broken", path, 0)
        yield path, 0


def test_an_error_about_an_earlier_record_ends_its_shard():
    found, failures = load(["0", "1", "2"], Stuck(), on_error="skip")
    assert found == [("0", 0), ("1", 0), ("1", 1), ("2", 0)]
    assert [each.index for each in failures] == ["record 2 of shard 1"]


@pytest.mark.parametrize("ending", ["gz", "zst"])
@pytest.mark.parametrize("size", [0, 5, 1_000, -3])
def test_a_cut_compressed_shard_is_no_end_of_the_shard(tmp_path, ending, size):
    paths = [str(tmp_path / f"a.jsonl.{ending}"), str(tmp_path / "b.jsonl")]
    lines = [random.Random(number).randbytes(40).hex() for number in range(500)]
    write(paths[0], "\n".join(map(json.dumps, lines)).encode())
    data = Path(paths[0]).read_bytes()
    Path(paths[0]).write_bytes(data[:size])
    write(paths[1], b"7\n")
    found, failures = load(paths, open_jsonl, on_error="skip")
    assert found == [7]
    assert [each.index for each in failures] == [f"record 0 of shard {paths[0]}"]
    assert "it is no JSON" not in str(failures[0].error)


def test_messages_name_a_record_by_its_shard(tmp_path, caplog):
    path = str(tmp_path / ("a long name " * 9 + ".jsonl"))
    write(path, b"1\nx\ny\n")
    with pytest.raises(TooManyFailures, match=f"The last was record 2 of shard {path} "):
        load([path], open_jsonl, on_error="skip", max_failures=1)
    (line,) = caplog.messages
    assert line.startswith(f"record 1 of shard {path} failed and is left out (this process")


@pytest.mark.parametrize("name", ["a b", "ä", "a%20b", "a#b", "a?b", "a:b"])
def test_a_shard_may_be_a_file_url_of_any_name(tmp_path, name):
    path = tmp_path / f"{name}.jsonl"
    write(str(path), b"1\n2\n")
    assert load([path.as_uri()], open_jsonl)[0] == [1, 2]
    if "%" not in name:  # as people write it
        assert load([f"file://{path}"], open_jsonl)[0] == [1, 2]


def test_shards_that_are_missing_or_cut_in_or_after_a_file_are_left_out(tmp_path):
    paths = [str(tmp_path / f"{name}.tar") for name in "abcde"]
    for path, size in zip(paths[:4], (None, 1500, 1024, None), strict=True):
        files = [("x.cls", path[-5:].encode()), ("y.cls", b"2" * 2000)]
        write(path, tar_bytes(files)[:size])
    found, failures = load(paths, open_tar, on_error="skip")
    assert [(record["__key__"], record["cls"][:5]) for record in found] == [
        ("x", b"a.tar"), ("y", b"22222"), ("x", b"d.tar"), ("y", b"22222"),
    ]  # fmt: skip
    assert [each.index for each in failures] == [
        f"record 0 of shard {paths[number]}" for number in (1, 2, 4)
    ]
    with pytest.raises(ShardError, match=f"shard {paths[1]} cannot be read: at the file"):
        load(paths, open_tar)
    with pytest.raises(ShardError, match="neither a file nor a block of zeros"):
        load(paths[2:], open_tar)
