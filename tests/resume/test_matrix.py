"""Stopped anywhere, with any number of workers, and gone on with any other: the same batches.

Every cell is a run of its own. ``make test`` and ``make test-full`` run a part of them, which a
checksum of a cell's name chooses; ``make test-all`` runs all of those in-process and with forked
workers, and a larger part of the others: two workers that are started afresh take seconds. So the
whole of these is run with workers that stay, which load the state of one cell after the other. An
epoch that was resumed is resumed again, from any position in it.
"""

import collections
import itertools
import json
import random
import zlib
from typing import Any, NamedTuple

import pytest
import torch

from shmloader import DataLoader
from tests.resume.kinds import (
    EPOCHS,
    IS_WHOLE,
    KINDS,
    disturb,
    make_loader,
    name_epoch,
    read,
    unbroken,
)

WORKERS = (0, 1, 2, 5)

#: One cell of so many is run, by start method: in ``make test-all``, and else.
WHOLE = {"none": 1, "fork": 1, "forkserver": 200, "spawn": 800}
PART = {"none": 12, "fork": 100, "forkserver": 6000, "spawn": 12000}
STAYING_PART = {"fork": 16}


class Cell(NamedTuple):
    kind: str
    workers_before: int
    workers_after: int
    method: str
    in_order: bool

    def is_chosen(self, epoch: int, stop: int | str, one_of: dict[str, int]) -> bool:
        name = f"{tuple(self)} {epoch} {stop}"
        return zlib.crc32(name.encode()) % one_of[self.method] == 0


CELLS = [
    Cell(kind, before, after, method if after else "none", in_order)
    for kind, before, after, method, in_order in itertools.product(
        KINDS, WORKERS, WORKERS, ("fork", "forkserver", "spawn"), (True, False)
    )
    if after or method == "fork"
]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.timeout(3600)
def test_a_run_goes_on_exactly_where_it_stopped(kind):
    """All start methods in one test: they share the unbroken runs, which take most of its time."""
    counts: collections.Counter[str] = collections.Counter()
    for cell in CELLS:
        if cell.kind != kind:
            continue
        run = unbroken(kind, cell.workers_before, in_order=cell.in_order)
        for epoch, stop in run.states:
            if cell.is_chosen(epoch, stop, WHOLE if IS_WHOLE else PART):
                _check(cell, epoch, stop)
                counts[cell.method] += 1
    assert counts["none"]
    assert counts["fork"]


def _check(cell: Cell, epoch: int, stop: int | str) -> None:
    with _loader_of(cell) as loader:
        _go_on(loader, cell, epoch, stop)


def _loader_of(cell: Cell, *, persistent: bool = False) -> DataLoader[Any]:
    return make_loader(
        cell.kind,
        cell.workers_after,
        in_order=cell.in_order,
        multiprocessing_context=None if cell.method == "none" else cell.method,
        persistent_workers=persistent,
    )


def _go_on(loader: DataLoader[Any], cell: Cell, epoch: int, stop: int | str) -> None:
    run = unbroken(cell.kind, cell.workers_before, in_order=cell.in_order)
    kind = KINDS[cell.kind]
    state = json.loads(run.states[epoch, stop])
    torch.manual_seed(99)  # another process's streams are elsewhere
    random.seed(99)
    where = f"{cell}, stopped in epoch {epoch} at {stop}"
    loader.load_state_dict(state)
    assert loader.state_dict() == state, where
    at, given = (epoch + 1, 0) if stop == "end" else (epoch, stop)
    if at == EPOCHS:
        return
    name_epoch(cell.kind, loader, at)
    rest = []
    for batch in loader:
        rest.append(read(batch))
        disturb()
    before = run.epochs[at][:given]
    if cell.in_order:
        assert rest == run.epochs[at][given:], where
    else:
        assert sorted(before + rest) == sorted(run.epochs[at]), where
    if kind.goes_on and at + 1 < EPOCHS:
        name_epoch(cell.kind, loader, at + 1)
        following = [read(batch) for batch in loader]
        if not cell.in_order:
            following, expected = sorted(following), sorted(run.epochs[at + 1])
        else:
            expected = run.epochs[at + 1]
        assert following == expected, f"the epoch after: {where}"


@pytest.mark.sampled(16)
@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.timeout(3600)
def test_workers_that_stay_go_on_from_one_state_after_the_other(kind, method):
    if method != "fork" and not IS_WHOLE:
        pytest.skip("workers are started afresh by make test-all")
    groups = collections.defaultdict(list)
    for cell in CELLS:
        # To run all of the unbroken ones takes longer than to go on from some.
        few = (cell.workers_before, cell.workers_after, cell.in_order) == (2, 2, True)
        is_wanted = IS_WHOLE or few
        if is_wanted and (cell.kind, cell.method) == (kind, method):
            run = unbroken(kind, cell.workers_before, in_order=cell.in_order)
            groups[cell.workers_after, cell.in_order] += [
                (cell, epoch, stop)
                for epoch, stop in run.states
                if IS_WHOLE or cell.is_chosen(epoch, stop, STAYING_PART)
            ]
    assert any(groups.values())
    for chosen in filter(None, groups.values()):
        with _loader_of(chosen[0][0], persistent=True) as loader:
            for cell, epoch, stop in chosen:
                _go_on(loader, cell, epoch, stop)


def stop(loader, count):
    """Take so many batches, with other random numbers drawn in between, and the state then."""
    batches = iter(loader)
    given = []
    for _ in range(count):
        given.append(read(next(batches)))
        disturb()
    return given, json.loads(json.dumps(loader.state_dict()))


def resumed(kind, workers, state):
    torch.manual_seed(random.randrange(1000))  # another process's generators are elsewhere
    random.seed(torch.randint(1000, ()).item())
    loader = make_loader(kind, workers)
    loader.load_state_dict(state)
    return loader


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_resumed_epoch_is_resumed_again_at_each_position(kind, workers):
    with make_loader(kind, workers) as loader:
        name_epoch(kind, loader, 0)
        epochs, states = [[], []], []
        batches = iter(loader)
        while len(states) == len(epochs[0]):
            states.append(json.loads(json.dumps(loader.state_dict())))
            epochs[0] += [read(batch) for batch in itertools.islice(batches, 1)]
            disturb()
        name_epoch(kind, loader, 1)
        epochs[1] += map(read, loader)
    last = len(epochs[0])
    for first in range(last + 1) if not workers else (0, 2, last):
        left = last - first
        for second in range(left + 1) if not workers else sorted({0, min(1, left), left}):
            with resumed(kind, workers, states[first]) as loader:
                given, again = stop(loader, second)
            with resumed(kind, workers, again) as loader:
                where = f"at {first}, and {second} later"
                assert given + list(map(read, loader)) == epochs[0][first:], where
                if KINDS[kind].goes_on:
                    name_epoch(kind, loader, 1)
                    assert list(map(read, loader)) == epochs[1], where
