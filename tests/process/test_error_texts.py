"""What the errors of samples say, wherever the samples are loaded, and what their tracebacks show.

Each test runs without workers, with worker processes, and with threads.
"""

import re
import traceback
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Subset

from shmloader import DataLoader
from tests.process.support import Bad, Calls, ListsAlone, Numbers, Streams

PLACES: dict[str, dict[str, Any]] = {
    "in-process": {},
    "processes": {"num_workers": 2},
    "threads": {"num_workers": 2, "thread_pool": True},
}
EVERYWHERE = pytest.mark.parametrize("place", PLACES)


def raised_by(loader: DataLoader) -> Exception:
    try:
        for _ in loader:
            pass
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def whole_text(error: Exception) -> str:
    return "".join(traceback.format_exception(error))


def own_notes(error: Exception) -> list[str]:
    """The notes of an exception, whose text is torch's."""
    notes = getattr(error, "__notes__", [])
    assert not [note for note in notes if note in str(error)]
    return notes


@EVERYWHERE
@pytest.mark.parametrize(
    "options", [{}, {"fetch_concurrency": 2}, {"seed": 1}, {"batch_size": None}]
)
def test_the_index_of_a_bad_sample_is_named(place, options):
    options = {"batch_size": 4, **options}
    error = raised_by(DataLoader(Numbers(12, 6), **options, **PLACES[place]))
    assert type(error) is Bad
    assert "The sample of index 6 failed." in own_notes(error)
    assert "in __getitem__" in whole_text(error)
    if options == {"batch_size": 4} and place != "in-process":
        who = "Worker 1 (pid N)" if place == "processes" else "Worker thread N"
        said = re.sub(
            "pid [0-9]+|thread [0-9]+", lambda one: one[0].split()[0] + " N", error.__notes__[0]
        )
        assert said == f"{who} was loading batch 1 (indices 4 to 7)."


@EVERYWHERE
def test_the_index_in_a_subset_is_named(place):
    """torch's Subset loads a whole batch by one call, but from a dataset without such a call."""
    subset = Subset(Numbers(12, 6), [3, 4, 5, 6, 7])
    error = raised_by(DataLoader(subset, batch_size=5, **PLACES[place]))
    assert "The sample of index 3 failed." in own_notes(error)


@pytest.mark.parametrize("place", ["processes", "threads"])
@pytest.mark.parametrize("on_error", ["raise", "skip"])  # which skips only what is an Exception
@pytest.mark.parametrize(
    "kind", [SystemExit, KeyboardInterrupt, GeneratorExit, StopIteration, StopAsyncIteration]
)
def test_what_would_end_something_here_is_a_runtime_error_and_the_epoch_goes_on(
    kind, on_error, place
):
    def sample(index: int) -> int:
        if index == 2:
            raise kind
        return index

    batches = iter(DataLoader(Calls(sample, 8), 4, on_error=on_error, **PLACES[place]))
    if on_error == "skip" and issubclass(kind, Exception):
        assert next(batches).tolist() == [0, 1, 3]
    else:
        with pytest.raises(RuntimeError) as raised:
            next(batches)
        assert f"Caught {kind.__name__} in DataLoader worker " in str(raised.value)
        if place == "processes" or issubclass(kind, Exception):
            assert "The sample of index 2 failed." in own_notes(raised.value)
    assert next(batches).tolist() == [4, 5, 6, 7]


@EVERYWHERE
@pytest.mark.parametrize("options", [{}, {"fetch_concurrency": 2}, {"batch_size": None}])
def test_an_exception_of_on_error_is_named_with_the_index(place, options):
    def fails(index: int) -> int:
        """Takes no exception."""
        return index

    options = {"batch_size": 4, "on_error": fails, **options}
    error = raised_by(DataLoader(Numbers(12, 6), **options, **PLACES[place]))
    assert type(error) is TypeError
    assert own_notes(error)[-1] == "It was raised by on_error for the sample of index 6."


def test_an_exception_of_worker_init_fn_is_named():
    def begin() -> None:
        """Takes no worker's number."""

    error = raised_by(DataLoader(range(4), num_workers=1, worker_init_fn=begin))
    assert type(error) is TypeError
    assert own_notes(error)[-1] == "It was raised by worker_init_fn(0)."


@EVERYWHERE
def test_of_samples_that_one_call_loads_the_range_is_named(place):
    for dataset in (ListsAlone(12, 6), Subset(ListsAlone(12, 6), range(12))):
        error = raised_by(DataLoader(dataset, batch_size=4, **PLACES[place]))
        assert "One call of __getitems__ for indices 4 to 7 failed." in own_notes(error)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("batch_size", [2, None])
def test_the_number_of_a_bad_sample_of_an_iterable_dataset_is_named(workers, batch_size):
    stream = Streams(lambda: map(Numbers(9, 5).__getitem__, range(9)))
    error = raised_by(DataLoader(stream, batch_size=batch_size, num_workers=workers))
    where = " in this worker" if workers else ""
    assert (
        f"The dataset's iterator failed at sample 5, counted from 0{where} since the epoch began."
    ) in own_notes(error)


@EVERYWHERE
def test_an_error_of_a_samplers_own_has_its_frames(place):
    def sampler() -> Any:
        yield 0
        raise Bad("no further index")

    error = raised_by(DataLoader(range(4), sampler=sampler(), **PLACES[place]))
    assert "in sampler" in whole_text(error)


def ragged(index: int) -> dict[str, Any]:
    return {"id": index, "image": torch.zeros(3 if index % 4 else 4, 2)}


@EVERYWHERE
@pytest.mark.parametrize(
    "options", [{}, {"on_error": "skip"}, {"seed": 1}, {"fetch_concurrency": 2}]
)
def test_samples_of_several_shapes_are_named(place, options):
    error = raised_by(DataLoader(Calls(ragged, 8), batch_size=4, **options, **PLACES[place]))
    assert type(error) is RuntimeError
    said = (
        "stack expects each tensor to be equal size, but got [4, 2] at entry 0 and [3, 2] at "
        "entry 1"
    )
    assert (
        "In this batch, sample['image'] is a float32 Tensor of shape [4, 2] for index 0; "
        "a float32 Tensor of shape [3, 2] for index 1. Give them one type, dtype and shape "
    ) in "".join(own_notes(error))
    text = str(error)
    if place == "in-process":
        assert text == said
    else:
        where = "process" if place == "processes" else "thread"
        first, second, *_ = text.splitlines()
        assert re.fullmatch(f"Caught RuntimeError in DataLoader worker {where} [01].", first)
        assert second == "Original Traceback (most recent call last):"
        assert text.endswith(f"\nRuntimeError: {said}\n")


#: torch's errors in a worker.
CAST = "TypeError: torch.cat(): input types can't be cast to the desired output type "
GRAD = "RuntimeError: stack(): functions with out=... arguments don't support automatic "
FOR_WORKERS: dict[str, tuple[list[Any], str, str]] = {
    "dtypes": (
        [(1, {"x": torch.zeros(2, dtype=dtype)}) for dtype in (torch.int64, torch.float32) * 2],
        CAST,
        "sample[1]['x'] is an int64 Tensor of shape [2] for index 0; a float32 Tensor of",
    ),
    "dtypes of arrays": (
        [np.zeros(2, np.uint8), *[np.zeros(2, np.float32)] * 3],
        CAST,
        "sample is an uint8 ndarray of shape [2] for index 0; a float32 ndarray of shape [2] for",
    ),
    "grad": (
        [torch.ones(2), *[torch.ones(2, requires_grad=True) * 2] * 3],
        GRAD,
        "sample is a float32 Tensor of shape [2] for index 0; a float32 Tensor of shape [2] that",
    ),
}


@pytest.mark.parametrize("name", FOR_WORKERS)
def test_what_only_workers_cannot_collate_is_named_after_torch_s_text(name):
    samples, torchs, note = FOR_WORKERS[name]
    forked = {"num_workers": 2, "multiprocessing_context": "fork"}
    error = raised_by(DataLoader(samples, batch_size=4, **forked))
    kind, _, _ = torchs.partition(":")
    assert type(error).__name__ == kind
    assert str(error).splitlines()[-1].startswith(torchs)
    assert f"In this batch, {note} " in "".join(own_notes(error))
