"""What ranks post of a stream's readers is never lost."""

import itertools

import pytest
import torch.distributed

from shmloader.streams.board import Board
from shmloader.streams.reader import Found
from shmloader.streams.rounds import Facts


@pytest.fixture(params=["hash", "file"])
def store(request, tmp_path):
    if request.param == "hash":
        return torch.distributed.HashStore()
    return torch.distributed.FileStore(str(tmp_path / "store"), 1)


def make_rank(store, own, readers=1):
    facts = [Facts() for _ in range(readers)]
    return facts, Board(store, "epoch", facts, own)


def found(number, known, *, is_all=False):
    return Found(0, number, known, is_all, ((0, number),), 1)


NEWS = [found(3, 6), found(4, 7), found(5, 7, is_all=True)]


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_a_late_post_does_not_replace_a_newer_one(order, store):
    """Where readers have ended, several ranks make batches of one reader."""
    ranks = [make_rank(store, [0] if rank == 0 else []) for rank in range(3)]
    listener, board = make_rank(store, [])
    for number in order:
        (facts,), own = ranks[number]
        facts.add(NEWS[number])
        own.post(0)
    board.read()
    assert (listener[0].known, listener[0].is_all) == (7, True)
    assert listener[0].before(6) == (6, ((0, 5),))


def test_nothing_is_read_before_all_ranks_have_begun(store):
    (first, second), board = make_rank(store, [0], readers=2)
    other, others = make_rank(store, [], readers=2)
    first.add(NEWS[2])
    board.post(0)
    others.read()
    assert other[0].known == 0
    make_rank(store, [1], readers=2)
    others.read()
    assert other[0].is_all
    assert not second.is_all
