"""Traces are what Perfetto reads: the format, and the nesting of slices."""

import collections
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from shmloader import DataLoader
from tests.process.support import Bad, Calls, Numbers

pytestmark = pytest.mark.timeout(120)

# What the trace event format asks of each phase that is used here.
FIELDS: dict[str, dict[str, type | tuple[type, ...]]] = {
    "M": {"name": str, "pid": int, "args": dict},
    "X": {"name": str, "cat": str, "pid": int, "tid": int, "ts": (int, float), "dur": (int, float)},
}


def ns(event: dict[str, Any], field: str) -> int:
    """A time in nanoseconds; the format has microseconds."""
    return round(event[field] * 1000)


def check_format(path: Path) -> list[dict[str, Any]]:
    trace = json.loads(path.read_text(encoding="utf-8"))
    events = trace["traceEvents"]
    for event in events:
        for field, kind in FIELDS[event["ph"]].items():
            assert isinstance(event[field], kind), event
        assert event.get("ts", 0) >= 0, event
        assert event.get("dur", 0) >= 0, event
    check_nesting(events)
    return events


def slices(events: list[dict[str, Any]]) -> dict[tuple[int, int], list[dict[str, Any]]]:
    tracks = collections.defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            tracks[event["pid"], event["tid"]].append(event)
    return tracks


def check_nesting(events: list[dict[str, Any]]) -> None:
    """On a track, two slices lie apart, or one in the other."""
    for track in slices(events).values():
        open_until: list[int] = []
        for event in sorted(track, key=lambda one: (one["ts"], -one["dur"])):
            end = ns(event, "ts") + ns(event, "dur")
            while open_until and open_until[-1] <= ns(event, "ts"):
                open_until.pop()
            assert not open_until or end <= open_until[-1], event
            open_until.append(end)


def names_of(events: list[dict[str, Any]]) -> set[str]:
    return {event["args"]["name"] for event in events if event["name"] == "thread_name"}


def loader_of(length: int = 40, **options: Any) -> DataLoader:
    return DataLoader(Calls(lambda index: torch.full((64,), index), length), 4, **options)


@pytest.mark.parametrize(
    ("options", "tracks"),
    [
        ({"num_workers": 2}, {"worker 0", "worker 1", "consumer"}),
        ({"num_workers": 2, "seed": 0}, {"worker 0", "worker 1", "consumer"}),
        ({"num_workers": 1, "thread_pool": True}, {"worker 0", "consumer"}),
        ({}, {"consumer"}),
    ],
)
def test_a_trace_is_in_the_format_and_has_a_track_for_each(tmp_path, options, tracks) -> None:
    path = tmp_path / "run.json"
    with loader_of(**options) as loader, loader.trace(path):
        for _ in loader:
            pass
    events = check_format(path)
    assert names_of(events) - {"worker 0", "worker 1"} == tracks - {"worker 0", "worker 1"}
    assert names_of(events) <= tracks
    takes = [event for event in events if event["name"].startswith("next() → batch")]
    assert len(takes) == 10
    (begun,) = (event for event in events if event["name"] == "iter()")
    assert begun["ts"] + begun["dur"] <= takes[0]["ts"]
    loads = [event for event in events if event["name"].startswith("batch ")]
    assert len(loads) == (10 if options else 0)


@pytest.mark.parametrize("kind", ["pin", "device"])
@pytest.mark.usefixtures("late")
def test_the_thread_of_a_stage_has_a_track(tmp_path, kind) -> None:
    path = tmp_path / "run.json"
    options = {"pin_memory": True} if kind == "pin" else {"device": "late"}
    with loader_of(num_workers=2, **options) as loader, loader.trace(path):
        for _ in loader:
            pass
    assert f"{kind} thread" in names_of(check_format(path))


def test_epochs_that_begin_in_the_block_are_traced_until_its_end(tmp_path) -> None:
    path = tmp_path / "run.json"
    with loader_of(num_workers=1, persistent_workers=True) as loader:
        batches = iter(loader)
        next(batches)
        with loader.trace(path):
            next(batches)
            with pytest.raises(RuntimeError, match="recorded already"), loader.trace(path):
                pass
            batches = iter(loader)
            next(batches)
        list(batches)
        events = check_format(path)
        assert sum(event["name"].startswith("next()") for event in events) == 1


def test_each_epoch_is_a_process_of_the_trace(tmp_path) -> None:
    """Also those of iterators at the same time, whose slices would cross on one track."""
    path = tmp_path / "run.json"
    with DataLoader(Calls(slow, 6), num_workers=1) as loader, loader.trace(path):
        for _, _ in zip(loader, loader, strict=True):
            pass
    events = check_format(path)
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert names == ["epoch 0", "epoch 1"]
    assert {event["pid"] for event in events} == {1, 2}


def slow(index: int) -> int:
    time.sleep(0.01)
    return index


def test_a_block_that_raises_leaves_a_trace(tmp_path) -> None:
    path = tmp_path / "run.json"
    with pytest.raises(Bad), DataLoader(Numbers(8, 5), num_workers=1) as loader, loader.trace(path):
        for _ in loader:
            pass
    events = check_format(path)
    assert sum(event["name"].startswith("batch ") for event in events) == 5


def test_a_place_that_cannot_be_written_is_told_at_once(tmp_path) -> None:
    with (
        loader_of() as loader,
        pytest.raises(FileNotFoundError),
        loader.trace(tmp_path / "no" / "run.json"),
    ):
        raise AssertionError("the block was entered")
    with loader.trace(tmp_path / "run.json"):
        pass
    assert check_format(tmp_path / "run.json") == []
