"""Iterable datasets of random order, resumed anywhere: nothing lost, nothing twice, same order.

Each cell is compared with the unbroken run, and with the set of all samples. `make test` and
`make test-full` run a part that a checksum of a cell's name chooses, `make test-all` all of them.
"""

from __future__ import annotations

import itertools
import json
import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch

import shmloader
from tests.parity.compare import seed_everything
from tests.process.support import Deaths
from tests.resume.kinds import IS_WHOLE
from tests.resume.random_streams import KINDS, LENGTH, SOURCES, Shuffled, drawing_collate

BATCH = 2
EPOCHS = 3
INTERVALS = (1, 3, 100, 0)


class Cell(NamedTuple):
    """A loader whose run is stopped and resumed.

    Attributes:
        kind: Of the dataset.
        source: Where it draws its order from.
        workers: How many; 0 for in-process.
        persistent: Whether they stay.
        every: `snapshot_every_n_steps`.
        collates: Whether the collate function draws, too.
    """

    kind: str
    source: str
    workers: int
    persistent: bool
    every: int
    collates: bool

    def make(self, method: str = "fork", **options: Any) -> shmloader.DataLoader[Any]:
        if self.workers:
            options.setdefault("multiprocessing_context", method)
        options.setdefault("generator", torch.Generator().manual_seed(5))
        return shmloader.DataLoader(
            KINDS[self.kind](self.source),
            BATCH,
            num_workers=self.workers,
            persistent_workers=self.persistent,
            snapshot_every_n_steps=self.every,
            collate_fn=drawing_collate if self.collates else None,
            **options,
        )

    def is_chosen(self, one_of: int) -> bool:
        return zlib.crc32(str(tuple(self)).encode()) % one_of == 0


CELLS = [
    Cell(*values)
    for values in itertools.product(
        KINDS, SOURCES, (0, 1, 2), (False, True), INTERVALS, (False, True)
    )
    if (values[2] or not values[3])  # workers stay only if there are some
    and not (values[0] == "ShuffleBuffer" and values[1] == "worker seed")
    # What a collate function draws moves the stream's own numbers, where both are of one process;
    # a dataset that goes on from a state of its own does not draw them again.
    and not (values[5] and "State" in values[0])
    and not (values[5] and values[0] == "Eager")
]


def read(batch: Any) -> Any:
    return [part.tolist() for part in batch] if isinstance(batch, list) else batch.tolist()


def numbers(batches: list[Any]) -> list[float]:
    """The samples themselves, without what was drawn for each."""
    found: list[float] = []
    for batch in batches:
        for one in batch:
            found += one if isinstance(one, list) else [one]
    return sorted(number for number in found if number == int(number))


def all_samples(workers: int) -> list[float]:
    return [1000 * worker + number for worker in range(max(1, workers)) for number in range(LENGTH)]


def saved_everywhere(cell: Cell, **options: Any) -> tuple[list[Any], dict[tuple[int, Any], str]]:
    seed_everything(11)
    epochs: list[Any] = []
    states = {}
    with cell.make(**options) as loader:
        for epoch in range(EPOCHS):
            epochs.append([])
            iterator = iter(loader)
            states[epoch, 0] = json.dumps(loader.state_dict())
            for batch in iterator:
                epochs[epoch].append(read(batch))
                states[epoch, len(epochs[epoch])] = json.dumps(loader.state_dict())
            states[epoch, "end"] = json.dumps(loader.state_dict())
    return epochs, states


def stops(cell: Cell, last: int) -> Iterator[tuple[int, Any]]:
    for epoch, at in itertools.product(range(EPOCHS - 1), (0, 1, 5, last, "end")):
        # What has no workers, or new ones, draws its next epoch from this process's generators.
        if at != "end" or (cell.persistent and cell.workers):
            yield epoch, at


def check(cell: Cell, method: str = "fork") -> None:
    epochs, states = saved_everywhere(cell, method=method)
    for epoch in epochs:
        assert numbers(epoch) == all_samples(cell.workers), f"the unbroken run of {cell}"
    # The seed is the same in each epoch of this process, and of workers that stay.
    stays = cell.source == "worker seed" and (cell.persistent or not cell.workers)
    assert stays or epochs[0] != epochs[1], "an order that is not random"
    # In this process, what is drawn after the epoch's first sample comes of its own generators.
    is_exact = cell.workers or cell.kind not in ("ShuffleBuffer", "Augmented")
    for epoch, at in stops(cell, len(epochs[0])):
        where = f"{cell}, {method}, epoch {epoch}, after {at}"
        state = json.loads(states[epoch, at])
        seed_everything(99)  # another process's are elsewhere
        with cell.make(method=method, generator=torch.Generator().manual_seed(6)) as loader:
            loader.load_state_dict(state)
            assert loader.state_dict() == state, where
            number, given = (epoch + 1, 0) if at == "end" else (epoch, at)
            rest = [read(batch) for batch in loader]
            before = epochs[number][:given]
            assert numbers(before + rest) == all_samples(cell.workers), where
            if is_exact:
                assert rest == epochs[number][given:], where
            # New workers are seeded from the generator, and those that stay go on.
            if cell.workers and number + 1 < EPOCHS:
                assert [read(batch) for batch in loader] == epochs[number + 1], f"then: {where}"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", KINDS)
def test_a_random_stream_goes_on_exactly_where_it_stopped(kind):
    chosen = [cell for cell in CELLS if cell.kind == kind and (IS_WHOLE or cell.is_chosen(20))]
    assert chosen
    for cell in chosen:
        check(cell)


@pytest.mark.slow
@pytest.mark.parametrize(("method", "kind"), [("forkserver", "Shuffled"), ("spawn", "WithState")])
def test_a_random_stream_goes_on_in_workers_that_are_not_forked(method, kind):
    cell = Cell(kind, "numpy", 1, persistent=True, every=1, collates=False)
    epochs, states = saved_everywhere(cell, method=method)
    for epoch, at in ((0, 2), (1, 2)):
        with cell.make(method=method) as loader:
            loader.load_state_dict(json.loads(states[epoch, at]))
            assert [read(batch) for batch in loader] == epochs[epoch][at:]


class Dies(Shuffled):
    """Worker 1 ends at one sample of its second epoch, once."""

    def __init__(self, source, deaths):
        super().__init__(source)
        self.deaths = deaths
        self.epoch = 0

    def __iter__(self):
        self.epoch += 1
        for at, sample in enumerate(super().__iter__()):
            if self.epoch == 2 and at == 5 and torch.utils.data.get_worker_info().id == 1:
                self.deaths.come()
            yield sample


@pytest.mark.parametrize("source", ["torch", "numpy", "python"])
def test_a_worker_that_is_replaced_draws_the_order_of_its_predecessor(source):
    """In an epoch that workers did not begin with fresh generators, too."""

    def run(deaths):
        options = {"generator": torch.Generator().manual_seed(5), "num_workers": 2}
        with shmloader.DataLoader(
            Dies(source, deaths), BATCH, persistent_workers=True, worker_restarts=1, **options
        ) as loader:
            return [[read(batch) for batch in loader] for _ in range(2)]

    deaths = Deaths(1)
    assert run(deaths) == run(Deaths(0))
    assert not deaths.left


def test_in_process_what_training_draws_is_found_out_where_it_would_lose_samples():
    """The samples of a shuffle buffer depend on it; an order that is drawn at once does not."""

    def run(kind, state=None):
        loader = shmloader.DataLoader(KINDS[kind]("torch"), BATCH)
        if state is not None:
            loader.load_state_dict(state)
        seen = []
        for batch in loader:
            seen += batch.tolist()
            if len(seen) == 6 and state is None:
                return seen, loader.state_dict()
            torch.rand(3)
        return seen, None

    torch.manual_seed(1)
    before, state = run("Shuffled")
    assert sorted(before + run("Shuffled", state)[0]) == list(range(LENGTH))
    torch.manual_seed(1)
    _, state = run("ShuffleBuffer")
    with pytest.raises(ValueError, match="yields other samples"):
        run("ShuffleBuffer", state)


@pytest.mark.parametrize("workers", [0, 1])
def test_an_epoch_that_goes_on_leaves_torchs_generator_where_the_user_had_it(workers):
    cell = Cell("Shuffled", "torch", workers, persistent=False, every=1, collates=False)
    with cell.make(generator=None) as loader:
        next(iter(loader))
        state = loader.state_dict()
    with cell.make(generator=None) as loader:
        loader.load_state_dict(state)
        before = torch.get_rng_state()
        next(iter(loader))
        assert torch.equal(torch.get_rng_state(), before)


def test_a_stream_that_ends_sooner_than_before_is_found_out():
    class Shrinks(torch.utils.data.IterableDataset):
        length = 8

        def __iter__(self):
            return iter(range(self.length))

    loader = shmloader.DataLoader(dataset := Shrinks(), BATCH)
    iterator = iter(loader)
    for _ in range(3):
        next(iterator)
    state = loader.state_dict()
    dataset.length = 3
    other = shmloader.DataLoader(dataset, BATCH)
    other.load_state_dict(state)
    with pytest.raises(ValueError, match=r"saved after 3 batches .* dataset ends after 2"):
        next(iter(other))


class Stops(torch.utils.data.IterableDataset):
    """Raises once at a sample, as a signal's handler may."""

    def __init__(self, error, at):
        self.error, self.at = error, at

    def __iter__(self):
        for number in range(20):
            if number == self.at and self.error is not None:
                error, self.error = self.error, None
                raise error
            yield number


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (
            KeyboardInterrupt,
            "since KeyboardInterrupt, raised from outside, interrupted it while a batch",
        ),
        (TimeoutError("an alarm"), "since: its dataset could not be resumed"),
    ],
    ids=repr,
)
def test_in_process_what_interrupts_the_reading_of_old_batches_arrives_and_loses_nothing(
    error, told
):
    iterator = iter(loader := shmloader.DataLoader(Stops(None, 0), BATCH))
    before = [next(iterator).tolist() for _ in range(4)]
    state = loader.state_dict()
    loader = shmloader.DataLoader(Stops(error, 3), BATCH)
    loader.load_state_dict(state)
    iterator = iter(loader)
    with pytest.raises(error if isinstance(error, type) else type(error)):
        next(iterator)
    with pytest.raises(shmloader.ClosedLoaderError, match=told):
        next(iterator)
    again = loader.state_dict()
    assert again["datasets"]["checkpoints"][0]["given"] == 4
    loader.load_state_dict(again)
    assert before + [batch.tolist() for batch in loader] == [
        [number, number + 1] for number in range(0, 20, 2)
    ]
