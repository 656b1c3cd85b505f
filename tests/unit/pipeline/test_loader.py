"""``PipelineDataLoader``: the usual chain in one call."""

import os
import threading
import weakref

import pytest
import torch

from shmloader import ClosedLoaderError, PipelineDataLoader
from tests.unit.pipeline.support import Squares


def half(number):
    return torch.tensor(number) / 2


async def half_soon(number):
    return half(number)


def load(src=None, **options):
    return PipelineDataLoader(Squares(7) if src is None else src, **options)


def test_without_options_items_come_as_they_are():
    with load() as loader:
        assert [list(loader), list(loader)] == [[number**2 for number in range(7)]] * 2


@pytest.mark.parametrize("preprocessor", [half, half_soon])
@pytest.mark.parametrize("drop_last", [False, True])
def test_the_whole_chain_epoch_after_epoch(preprocessor, drop_last):
    moved_on = set()

    def move(batch):
        moved_on.add(threading.get_ident())
        return batch + 1

    loader = load(
        preprocessor=preprocessor,
        batch_size=3,
        drop_last=drop_last,
        aggregator=torch.stack,
        transfer_fn=move,
        output_order="input",
        num_threads=3,
    )
    expected = [[1, 1.5, 3], [5.5, 9, 13.5]] + ([] if drop_last else [[19]])
    for _ in range(3):
        assert [batch.tolist() for batch in loader] == expected
    for batch in loader:  # a break carries nothing over
        assert batch.tolist() == expected[0]
        break
    assert [batch.tolist() for batch in loader] == expected
    assert threading.get_ident() not in moved_on
    loader.close()


def test_batches_without_an_aggregator_are_lists():
    with load(batch_size=4, buffer_size=1) as loader:
        assert list(loader) == [[0, 1, 4, 9], [16, 25, 36]]


def test_processes_are_kept_over_epochs_and_breaks_and_batches_lie_in_slots():
    def pid(number):
        return torch.full((30_000,), os.getpid())

    loader = load(
        preprocessor=pid, batch_size=2, aggregator=torch.stack, executor="process", num_threads=1
    )
    pids = {int(value) for batch in loader for value in batch[:, 0]}
    assert len(pids) == 1
    for batch in loader:
        assert int(batch[0, 0]) in pids
        break
    assert {int(value) for batch in loader for value in batch[:, 0]} == pids
    del batch
    reference = weakref.ref(loader)
    del loader  # which ends its workers: the check of what remains would find them
    assert reference() is None


def test_a_closed_loader_says_so():
    loader = load()
    loader.close()
    loader.close()
    with pytest.raises(ClosedLoaderError):
        iter(loader)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"src": 3}, TypeError, ["source=3"]),
        ({"preprocessor": 3}, TypeError, ["op should be callable", "=3"]),
        ({"aggregator": len}, ValueError, ["aggregator", "need batch_size"]),
        ({"drop_last": True}, ValueError, ["drop_last", "batch_size"]),
        ({"batch_size": 0}, ValueError, ["batch_size", "=0"]),
        ({"timeout": -1}, ValueError, ["timeout", "=-1"]),
        ({"preprocessor": half, "executor": "gpu"}, ValueError, ["executor", "'gpu'"]),
    ],
)
def test_arguments_are_checked_in_the_constructor(options, error, words):
    with pytest.raises(error) as caught:
        load(**options)
    assert all(word in str(caught.value) for word in words), caught.value
