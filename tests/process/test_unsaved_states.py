"""States that nobody asks for cost nothing, and one that cannot be saved breaks no epoch."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, IterableDataset, SequentialSampler

from shmloader import DataLoader
from tests.process.support import Deaths, Numbers

WHOLE = [[0, 1], [2, 3], [4, 5], [6, 7]]


class Stub:
    """Has the methods that its base class declares."""

    def state_dict(self) -> Any:
        raise NotImplementedError("has no state")

    def load_state_dict(self, state: Any) -> None:
        raise NotImplementedError


class Unpicklable(Stub):
    def state_dict(self) -> Any:
        return {"lock": threading.Lock()}


class Stops(Stub):
    def state_dict(self) -> Any:
        raise StopIteration


class Everything:
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: None


class ClosedOver(Stub):
    """Its state can be copied, but not pickled by pickle or cloudpickle."""

    def state_dict(self) -> Any:
        return {"stream": iter(NeverPickled())}


class NeverPickled:
    def __iter__(self) -> Any:
        return self

    def __deepcopy__(self, memo: Any) -> NeverPickled:
        return self

    def __reduce__(self) -> Any:
        raise TypeError("never")


KINDS = [Stub, Unpicklable, Stops, Everything, ClosedOver]


def samples_of(kind: type) -> Any:
    class Samples(kind, Numbers):
        pass

    return {"dataset": Samples(8), "batch_size": 2}


def stream_of(kind: type) -> Any:
    class Stream(kind, IterableDataset):
        def __iter__(self) -> Any:
            return iter(range(8))

    return {"dataset": Stream(), "batch_size": 2}


def stream_iterator_of(kind: type) -> Any:
    class Numbers(kind):
        def __init__(self) -> None:
            self.numbers = iter(range(8))

        def __iter__(self) -> Any:
            return self

        def __next__(self) -> int:
            return next(self.numbers)

    class Stream(IterableDataset):
        def __iter__(self) -> Any:
            return Numbers()

    return {"dataset": Stream(), "batch_size": 2}


def sampler_of(kind: type) -> Any:
    class Sampler(kind):
        def __len__(self) -> int:
            return 8

        def __iter__(self) -> Any:
            return iter(range(8))

    return {"dataset": range(8), "batch_size": 2, "sampler": Sampler()}


def batch_sampler_of(kind: type) -> Any:
    class Batches(kind, BatchSampler):
        pass

    batches = Batches(SequentialSampler(range(8)), 2, drop_last=False)
    return {"dataset": range(8), "batch_sampler": batches}


PLACES = [samples_of, stream_of, stream_iterator_of, sampler_of, batch_sampler_of]


# The object, the cause and the remedy.
UNSAVED = (
    r"^the state of \w+ cannot be (saved|pickled): .*"
    r"(set snapshot_every_n_steps=0|set state_dict = None in its class)"
)


PERSISTENT: dict[str, Any] = {"num_workers": 1, "persistent_workers": True}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *itertools.product(KINDS, [{}, PERSISTENT]),
        (Stub, {"seed": 1, **PERSISTENT}),
    ],
)
def test_a_state_that_cannot_be_saved_breaks_no_epoch(place, kind, options) -> None:
    with DataLoader(**place(kind), **options) as loader:
        for _ in range(2):
            batches = iter(loader)
            first = sorted(next(batches).tolist())
            with pytest.raises(RuntimeError, match=UNSAVED):
                loader.state_dict()
            rest = [batch.tolist() for batch in batches]
            assert sorted(sum(rest, first)) == list(range(8))


@pytest.mark.parametrize("workers", [0, 1])
def test_the_remedy_for_a_sampler_helps(workers) -> None:
    arguments = sampler_of(Stub)
    type(arguments["sampler"]).state_dict = None
    with DataLoader(**arguments, num_workers=workers) as loader:
        next(iter(loader))
        state = loader.state_dict()
    with DataLoader(**arguments, num_workers=workers) as other:
        other.load_state_dict(state)
        assert [batch.tolist() for batch in other] == WHOLE[1:]


class Weights(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(8))

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return self.table[index]

    def state_dict(self, *args: Any, **options: Any) -> Any:
        raise AssertionError("asked")


class WeightsStream(Weights, IterableDataset):
    def __iter__(self) -> Any:
        return iter(range(8))


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", [Weights, WeightsStream])
def test_a_module_is_no_dataset_with_a_state(kind, workers) -> None:
    options: Any = {"num_workers": workers, "persistent_workers": workers > 0}
    with DataLoader(kind(), 2, **options) as loader:
        for _ in range(2):
            batches = iter(loader)
            assert next(batches).tolist() == WHOLE[0]
            state = loader.state_dict()
            assert [batch.tolist() for batch in batches] == WHOLE[1:]
    with DataLoader(kind(), 2, **options) as other:
        other.load_state_dict(state)
        assert [batch.tolist() for batch in other] == WHOLE[1:]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_module_has_a_state_if_the_user_wants_that(workers) -> None:
    class Counts(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros((), dtype=torch.int64))

        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> Any:
            self.count += 1
            return self.count.clone()

    options: Any = {"num_workers": workers, "snapshot_every_n_steps": 1}
    with DataLoader(Counts(), 2, **options) as loader:
        next(iter(loader))
        state = loader.state_dict()
    with DataLoader(Counts(), 2, **options) as other:
        other.load_state_dict(state)
        assert [batch.tolist() for batch in other] == [[3, 4], [5, 6], [7, 8]]


def test_a_replaced_worker_reads_a_stream_again_whose_state_cannot_be_saved() -> None:
    class Dies(Stub, IterableDataset):
        deaths: Any = None

        def __iter__(self) -> Any:
            for number in range(8):
                if number == 5:
                    self.deaths.come()
                yield number

    dataset = Dies()
    dataset.deaths = Deaths(1)
    with DataLoader(dataset, 2, num_workers=1, worker_restarts=1) as loader:
        assert [batch.tolist() for batch in loader] == WHOLE
