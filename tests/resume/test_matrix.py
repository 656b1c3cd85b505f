"""Stopped anywhere, with any number of workers, and gone on with any other: the same batches.

Every cell is a run of its own. ``make test`` and ``make test-full`` run a part of them, which a
checksum of a cell's name chooses; ``make test-all`` runs all of those in-process and with forked
workers, and a larger part of the others: two workers that are started afresh take seconds. So the
whole of these is run with workers that stay, which load the state of one cell after the other.
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
from tests.resume.kinds import EPOCHS, KINDS, disturb, make_loader, name_epoch, read, unbroken

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
def test_a_run_goes_on_exactly_where_it_stopped(kind, whole):
    """All start methods in one test: they share the unbroken runs, which take most of its time."""
    counts: collections.Counter[str] = collections.Counter()
    for cell in CELLS:
        if cell.kind != kind:
            continue
        run = unbroken(kind, cell.workers_before, in_order=cell.in_order)
        for epoch, stop in run.states:
            if cell.is_chosen(epoch, stop, WHOLE if whole else PART):
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
def test_workers_that_stay_go_on_from_one_state_after_the_other(kind, method, whole):
    if method != "fork" and not whole:
        pytest.skip("workers are started afresh by make test-all")
    groups = collections.defaultdict(list)
    for cell in CELLS:
        # To run all of the unbroken ones takes longer than to go on from some.
        is_wanted = whole or (cell.workers_before, cell.workers_after, cell.in_order) == (
            2,
            2,
            True,
        )
        if is_wanted and (cell.kind, cell.method) == (kind, method):
            run = unbroken(kind, cell.workers_before, in_order=cell.in_order)
            groups[cell.workers_after, cell.in_order] += [
                (cell, epoch, stop)
                for epoch, stop in run.states
                if whole or cell.is_chosen(epoch, stop, STAYING_PART)
            ]
    assert any(groups.values())
    for chosen in filter(None, groups.values()):
        with _loader_of(chosen[0][0], persistent=True) as loader:
            for cell, epoch, stop in chosen:
                _go_on(loader, cell, epoch, stop)
