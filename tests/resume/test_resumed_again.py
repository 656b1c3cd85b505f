"""An epoch that was resumed is resumed again, from any position in it."""

import itertools
import json
import random

import pytest
import torch

from tests.resume.kinds import KINDS, disturb, make_loader, name_epoch, read


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
