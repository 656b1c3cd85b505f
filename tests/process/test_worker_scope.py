"""``worker_scope="host"``: all ranks of a host share one pool of workers."""

import contextlib
import functools
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from shmloader import LoaderTimeoutError, SampleTimeoutError, WorkerDiedError
from tests.process.host_loaders import (
    BATCH,
    COUNT,
    WORKERS,
    Samples,
    contents,
    expected,
    has_ended,
    loader,
    owner_of,
    pids,
)
from tests.process.ranks import LONG_S, meet
from tests.process.support import TOLD_S, Calls, Numbers, wait_until

pytestmark = pytest.mark.usefixtures("quick_spawn")


class KillOnce:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __call__(self) -> None:
        if not self.path.exists():
            self.path.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def hang() -> None:
    time.sleep(LONG_S)


def refuse() -> None:
    raise ValueError("a bad sample")


def large(_: int) -> torch.Tensor:
    return torch.rand(25_000)


class Waiting:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __call__(self, _: int = 0) -> None:
        wait_until(self.path.exists, LONG_S)


@pytest.mark.parametrize("ranks", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 3))])
@pytest.mark.parametrize("is_persistent", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_ranks_get_their_batches_from_the_same_workers(run, ranks, is_persistent, tmp_path):
    def epochs() -> Any:
        with loader(persistent_workers=is_persistent) as one:
            found = [list(one) for _ in range(2)]
            meet(tmp_path, ranks=ranks)  # the last one to leave ends the workers
        return [contents(batches) for batches in found], set.union(*map(pids, found))

    found = run.results(epochs, ranks)
    for rank, (batches, _) in enumerate(found):
        assert batches == expected(rank, ranks, epochs=2)
    assert len(set.union(*(makers for _, makers in found))) <= WORKERS


class Epochs:
    epoch = 0

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> int:
        return self.epoch

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


def test_each_rank_gets_samples_of_its_own_epoch(run, tmp_path):
    def epochs() -> Any:
        rank = int(os.environ["RANK"])
        with loader(Epochs()) as one:
            found = []
            for number, epoch in enumerate((0, 5 + rank, 10 * (1 + rank))):
                one.set_epoch(epoch)
                batches = iter(one)
                found.append({*next(batches).tolist()})
                meet(tmp_path, str(number))  # both are in the midst of their epochs
                found[-1].update(*(batch.tolist() for batch in batches))
        return found

    assert run.results(epochs, 2) == [[{0}, {5}, {10}], [{0}, {6}, {20}]]


def test_nothing_is_left_when_the_last_rank_has_closed_its_loader(run):
    def one_epoch() -> Any:
        one = loader()
        makers = pids(one)
        owner = owner_of(one)
        one.close()
        children = [child.pid for child in psutil.Process().children()]
        return owner, makers, children

    for owner, makers, children in run.results(one_epoch, 2):
        for pid in {owner, *makers}:
            wait_until(functools.partial(has_ended, pid), LONG_S)
        assert set(children) <= {owner}


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("how", ["closes", signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_leaves_early_costs_the_others_nothing(run, tmp_path, victim, how):
    """Also the one that has started the workers' owner."""
    begun, gone = tmp_path / "begun", tmp_path / "gone"

    def ends() -> Any:
        one = loader()
        next(iter(one))
        begun.touch()
        if how == "closes":
            wait_until(gone.exists, LONG_S)
            one.close()
        else:
            os.kill(os.getpid(), how)

    def stays() -> Any:
        wait_until(begun.exists, LONG_S)
        with loader() as one:
            iterator = iter(one)
            first = next(iterator)
            if how == "closes":
                gone.touch()
            wait_until(gone.exists, LONG_S)
            return contents([first, *iterator])

    one, other = run.start(ends, victim), run.start(stays, 1 - victim)
    if how == "closes":
        one.result()
        one.end()
    else:
        state = psutil.Process(one.process.pid)
        wait_until(lambda: state.status() in {"zombie", "stopped"}, LONG_S)
        gone.touch()
    assert other.result() == expected(1 - victim)[0]
    if how != "closes":
        one.process.kill()


@pytest.mark.slow
@pytest.mark.parametrize("restarts", [0, 1])
def test_if_the_owner_dies_each_rank_gets_one_error_and_the_next_epoch_new_workers(
    run, tmp_path, restarts
):
    told = tmp_path / "told"

    def epochs() -> Any:
        waits = {index: Waiting(told) for index in range(COUNT)}
        with loader(Samples(at=waits), worker_restarts=restarts) as one:
            iterator = iter(one)
            meet(tmp_path)  # else a slow rank would find, and kill, the owner that comes next
            with contextlib.suppress(ProcessLookupError):  # the other rank was faster
                os.kill(owner_of(one), signal.SIGKILL)
            killed_s = time.monotonic()
            with pytest.raises(RuntimeError if restarts else WorkerDiedError) as caught:
                next(iterator)
            told_s = time.monotonic() - killed_s
            told.touch()
            one.set_epoch(0)
            return str(caught.value), told_s, contents(one)

    for rank, (text, told_s, batches) in enumerate(run.results(epochs, 2)):
        assert "owns the workers of this host" in text
        assert told_s < TOLD_S
        assert batches == expected(rank)[0]


@pytest.mark.slow
def test_batches_in_slots_are_those_of_own_workers_and_outlive_the_owner(run, tmp_path):
    """Large ones, which are lent, and kept so long that further ones are copied out."""

    def epochs() -> Any:
        with loader(Calls(large, COUNT)) as one:
            kept = list(one)
            slots = one.stats().slots
            iterator = iter(one)
            kept += [next(iterator) for _ in range(3)]
            meet(tmp_path)
            with contextlib.suppress(ProcessLookupError):  # the other rank was faster
                os.kill(owner_of(one), signal.SIGKILL)
        with loader(Calls(large, COUNT), worker_scope="rank") as own:
            expected = [*own, *(batch for batch, _ in zip(own, range(3), strict=False))]
        # By numpy: threads of torch's may be missing in a forked process.
        pairs = zip(kept, expected, strict=True)
        same = [np.array_equal(ours.numpy(), theirs.numpy()) for ours, theirs in pairs]
        return same, slots.lent, slots.copied

    for same, lent, copied in run.results(epochs, 2):
        assert all(same)
        assert lent
        assert copied


@pytest.mark.slow
def test_a_stopped_rank_keeps_no_worker_busy_though_it_has_much_in_flight(run, tmp_path):
    """All answers of its only worker fit into the socket."""
    batches = 100
    stopped, gone = tmp_path / "stopped", tmp_path / "gone"

    def stops() -> Any:
        one = loader(Numbers(2 * BATCH * batches), num_workers=1, prefetch_factor=64)
        iterator = iter(one)
        next(iterator)
        stopped.touch()
        os.kill(os.getpid(), signal.SIGSTOP)
        return len(list(iterator))

    def goes_on() -> Any:
        with loader(Numbers(2 * BATCH * batches), num_workers=1, prefetch_factor=64) as one:
            iterator = iter(one)
            next(iterator)
            wait_until(stopped.exists, LONG_S)
            count = len(list(iterator))
            gone.touch()
            return count

    ranks = [run.start(stops, 0), run.start(goes_on, 1)]
    try:
        assert ranks[1].result() == batches - 1
    finally:
        os.kill(ranks[0].process.pid, signal.SIGCONT)
    assert ranks[0].result() == batches - 1


def rank_of_index(index: int, ranks: int = 2) -> int:
    return next(
        rank
        for rank in range(ranks)
        if any(index in indices for indices, _ in expected(rank, ranks)[0])
    )


class Note:
    """Writes which sample is made, once that is allowed."""

    def __init__(self, folder: Path) -> None:
        self.making, self.opened, self.log = (folder / each for each in ("making", "opened", "log"))

    def __call__(self, index: int) -> None:
        self.making.touch()
        wait_until(self.opened.exists, LONG_S)
        with self.log.open("a") as file:
            file.write(f"{index}\n")

    def made(self) -> list[int]:
        return [int(line) for line in self.log.read_text().splitlines()]


@pytest.mark.parametrize(("is_late", "more"), [(False, 0), (True, 2)])
def test_ranks_whose_batches_wait_are_served_in_turns(run, tmp_path, is_late, more):
    """The other rank comes before the worker makes a batch, or while it makes the first one."""
    note, each = Note(tmp_path), 4
    note.log.touch()

    def begin() -> Any:
        if is_late and os.environ["RANK"] == "1":
            wait_until(note.making.exists, LONG_S)
        at = {index: functools.partial(note, index) for index in range(COUNT)}
        get_ready = None if is_late else Waiting(note.opened)
        with loader(
            Samples(at=at), num_workers=1, prefetch_factor=2 * each, worker_init_fn=get_ready
        ) as one:
            iterator = iter(one)
            meet(tmp_path)
            note.opened.touch()
            # Nothing is taken meanwhile, so no rank's queue has more tasks than the other's.
            wait_until(lambda: len(note.made()) >= 2 * each * BATCH, LONG_S)
            return note.made()[: 2 * each * BATCH : BATCH], contents(iterator)

    found = run.results(begin, 2)
    assert [batches for _, batches in found] == [expected(rank)[0] for rank in range(2)]
    ranks = [rank_of_index(index) for index in found[0][0]]
    # The late one is heard once the batch is made and the next task is received.
    assert ranks == [ranks[0]] * more + [ranks[0], 1 - ranks[0]] * (each - more // 2)


BAD_SAMPLES: dict[str, tuple[Any, dict[str, Any], Any, str]] = {
    "kills its worker": (kill, {}, WorkerDiedError, "Killed"),
    "raises": (refuse, {}, ValueError, "a bad sample"),
    "hangs": (hang, {"sample_timeout": 1.0}, SampleTimeoutError, "sample 7 took longer than"),
    "hangs, and is skipped": (hang, {"sample_timeout": 1.0, "on_error": "skip"}, None, ""),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", BAD_SAMPLES)
def test_a_bad_sample_is_treated_in_its_rank_alone(run, what):
    function, options, kind, text = BAD_SAMPLES[what]

    def epoch() -> Any:
        with loader(Samples(at={7: function}), **options) as one:
            return contents(one), [failure.index for failure in one.failures]

    hit = rank_of_index(7)
    found = run.results(epoch, 2)
    assert found[1 - hit] == (expected(1 - hit)[0], [])
    if kind is not None:
        assert isinstance(found[hit], kind)
        assert text in str(found[hit])
    else:
        batches, failed = found[hit]
        assert failed == [7]
        counts = [sum(len(part[0]) for part in each) for each in (batches, expected(hit)[0])]
        assert counts[0] == counts[1]


def test_a_worker_that_dies_is_replaced_for_all(run, tmp_path):
    def epoch() -> Any:
        with loader(Samples(at={7: KillOnce(tmp_path / "died")}), worker_restarts=1) as one:
            return contents(one)

    assert run.results(epoch, 2) == [expected(rank)[0] for rank in range(2)]


@pytest.mark.slow
def test_after_a_timeout_nothing_is_lost(run, tmp_path):
    """Of either rank: both may wait for the worker that is stuck."""
    told = tmp_path / "told"

    def epoch() -> Any:
        with loader(Samples(at={7: Waiting(told)}), timeout=1.0, num_workers=2) as one:
            iterator = iter(one)
            found, is_late = [], False
            while True:
                try:
                    found.append(next(iterator))
                except LoaderTimeoutError:
                    is_late = True
                    told.touch()
                except StopIteration:
                    return contents(found), is_late

    found = run.results(epoch, 2)
    assert [batches for batches, _ in found] == [expected(rank)[0] for rank in range(2)]
    assert any(is_late for _, is_late in found)


def test_programs_with_one_rank_share_no_workers_though_they_have_the_same_store(run):
    def program(value: int) -> set[int]:
        one = loader(Calls(lambda _: value, COUNT), persistent_workers=True)
        kept.append(one)  # its workers live until the program ends
        return {number for batch in one for number in batch.tolist()}

    kept: list[Any] = []
    found = [run.start(functools.partial(program, value), 0, 1) for value in (3, 4)]
    assert [one.result() for one in found] == [{3}, {4}]


@pytest.mark.slow
def test_loaders_with_the_same_dataset_share_workers(run):
    def epochs() -> Any:
        dataset = Samples()
        with loader(dataset) as training, loader(dataset, seed=5) as validation:
            one = list(training)
            two = list(validation)
            with loader(Samples()) as other:
                three = list(other)
        return pids(one) | pids(two), pids(three), contents(two)

    found = run.results(epochs, 2)
    for rank, (shared, others, batches) in enumerate(found):
        assert len(shared) <= WORKERS
        assert not shared & others
        assert batches == expected(rank, seed=5)[0]


@pytest.mark.slow
def test_a_state_moves_between_workers_of_a_rank_and_of_a_host(run):
    def interrupted() -> Any:
        with loader() as one:
            iterator = iter(one)
            before = contents([next(iterator) for _ in range(2)])
            state = one.state_dict()
        with loader(worker_scope="rank") as other:
            other.load_state_dict(state)
            iterator = iter(other)
            middle = contents([next(iterator)])
            state = other.state_dict()
        with loader() as one:
            one.load_state_dict(state)
            return before + middle + contents(one)

    assert run.results(interrupted, 2) == [expected(rank)[0] for rank in range(2)]


@pytest.mark.slow
def test_a_child_that_a_rank_forks_does_not_keep_the_workers_alive(run):
    def epoch() -> Any:
        one = loader()
        iterator = iter(one)
        next(iterator)
        child = os.fork()
        if not child:
            signal.pause()
        owner = owner_of(one)
        one.close()
        return owner, child

    owner, child = run.start(epoch, 0, 1).result()
    try:
        wait_until(functools.partial(has_ended, owner), LONG_S)
    finally:
        os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"worker_scope": "node"}, "worker_scope should be 'rank' or 'host'"),
        ({"num_workers": 0}, "needs num_workers > 0"),
        ({"num_workers": "auto"}, "worker_scope='host': give a number"),
        ({"thread_pool": True}, "cannot be combined with thread_pool"),
        ({"multiprocessing_context": "fork"}, "cannot be combined with multiprocessing_context"),
    ],
)
def test_what_cannot_be_combined_is_refused_at_construction(options, text):
    with pytest.raises(ValueError, match=text):
        loader(rank=0, world_size=1, **options)
