"""What a state is, what it speaks of, and which loader takes it."""

import copy
import json
import pickle

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
)

import shmloader
from tests.process.support import Calls, Gate
from tests.resume.kinds import KINDS, LENGTH, Noisy, Squares, make_loader, read

IN_ORDER = "in order"  # of KINDS: Squares, in batches of 4


def stop(loader, count):
    iterator = iter(loader)
    return [read(next(iterator)) for _ in range(count)]


def saved(loader, count):
    """What a run that is stopped after so many batches has given, and its state."""
    with loader:
        return stop(loader, count), loader.state_dict()


def resumed(loader, state, epochs=None):
    with loader:
        loader.load_state_dict(state)
        return rest_of(loader) if epochs is None else [rest_of(loader) for _ in range(epochs)]


def rest_of(loader):
    return [read(batch) for batch in loader]


def whole(kind, workers=0, epochs=1, **options):
    with make_loader(kind, workers, **options) as loader:
        return [rest_of(loader) for _ in range(epochs)]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if not kind.startswith("a user's")])
def test_a_state_is_small_and_plain(kind, tmp_path):
    loader = make_loader(kind, 0)
    stop(loader, 3)
    state = loader.state_dict()
    has_generator = "generators" in state["sampler"] or "global_generators" in state["sampler"]
    assert len(json.dumps(state)) < (8192 if has_generator else 4096)
    torch.save(state, tmp_path / "state")
    assert torch.load(tmp_path / "state", weights_only=True) == state
    assert json.loads(json.dumps(state)) == state
    assert pickle.loads(pickle.dumps(state)) == state


def test_a_returned_state_never_changes_and_is_nobody_elses():
    loader = make_loader("token batches", 0)
    rest_of(loader)
    state = loader.state_dict()
    before = copy.deepcopy(state)
    state["sampler"]["epochs"].append("rubbish")
    iterator = iter(loader)
    next(iterator)
    running = loader.state_dict()
    at_first = copy.deepcopy(running)
    rest_of(loader)
    assert running == at_first
    other = make_loader("token batches", 0)
    other.load_state_dict(before)
    given = other.state_dict()
    given["sampler"]["epochs"].clear()
    assert other.state_dict() == before


def test_what_is_loaded_is_not_changed_by_what_becomes_of_the_state():
    first, state = saved(make_loader("a user's with a state", 0), 3)
    other = make_loader("a user's with a state", 0)
    other.load_state_dict(state)
    state["position"] = 0
    state["sampler"]["state"]["next"] = 0
    assert [first + rest_of(other)] == whole("a user's with a state")


def test_the_newest_iterator_is_spoken_of():
    loader = make_loader("in order", 0)
    older = iter(loader)
    next(older)
    newer = iter(loader)
    assert loader.state_dict()["position"] == 0
    next(older)
    assert loader.state_dict()["position"] == 0
    next(newer)
    assert loader.state_dict()["position"] == 1


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("seed", [None, 3])
def test_batches_that_came_before_a_late_one_do_not_come_again(seed, workers):
    gate = Gate()

    def late(index):
        if index == order[1]:  # in the epoch's second batch
            gate.pass_through()
        return index

    order = [
        batch.item() for batch in shmloader.DataLoader(range(12), seed=seed, shuffle=bool(seed))
    ]
    options = {"seed": seed, "shuffle": bool(seed)}
    loader = shmloader.DataLoader(Calls(late, 12), num_workers=2, in_order=False, **options)
    batches = iter(loader)
    seen = [next(batches).item() for _ in range(3)]
    assert order[1] not in seen
    state = json.loads(json.dumps(loader.state_dict()))
    gate.open(2)
    loader.close()
    other = shmloader.DataLoader(range(12), num_workers=workers, **options)
    other.load_state_dict(state)
    assert [batch.item() for batch in other] == [one for one in order if one not in seen]


def raises_in_the_middle(index):
    if 8 <= index < 16:
        raise KeyError(index)
    return index


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_a_batch_that_raised_or_of_which_nothing_was_left_is_not_loaded_again(
    on_error, workers, in_order
):
    def make():
        return shmloader.DataLoader(
            Calls(raises_in_the_middle, 40),
            4,
            num_workers=workers,
            in_order=in_order,
            on_error=on_error,
        )

    given, failed = [], 0
    with make() as loader:
        batches = iter(loader)
        while failed < 2 and (on_error == "raise" or len(given) < 6):
            try:
                given.append(read(next(batches)))
            except KeyError:
                failed += 1
        state = loader.state_dict()
    given += resumed(other := make(), state)
    assert sorted(given) == [list(range(s, s + 4)) for s in range(0, 40, 4) if s not in (8, 12)]
    position = 4 if on_error == "raise" else 8
    assert not in_order or (state["position"], other.failures.total) == (position, 0)


@pytest.mark.slow
def test_a_state_is_small_while_one_batch_is_late():
    gate = Gate()

    def wait_at_4(index):
        if index == 4:
            gate.pass_through()
        return index

    options = {"num_workers": 2, "in_order": False}
    with shmloader.DataLoader(Calls(wait_at_4, 5000), 1, **options) as loader:
        given = stop(loader, 4000)
        state = loader.state_dict()
        gate.open()
    assert len(json.dumps(state)) < 500
    for options in ({}, {"num_workers": 2}, {"num_workers": 2, "in_order": False}):
        rest = resumed(shmloader.DataLoader(list(range(5000)), 1, **options), state)
        assert sorted(given + rest) == [[number] for number in range(5000)]


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize("where", [{}, {"thread_pool": True}, {"device": "late"}])
def test_what_is_in_flight_is_not_handed_over(where):
    options = {"num_workers": 2, "prefetch_factor": 4, **where}
    first, state = saved(shmloader.DataLoader(Squares(), 4, **options), 3)
    assert state["position"] == 3
    assert [first + resumed(shmloader.DataLoader(Squares(), 4, **options), state)] == whole(
        IN_ORDER
    )


@pytest.mark.parametrize("options", [{"in_order": False}, {"seed": 3}, {"thread_pool": True}])
def test_a_batch_that_a_closed_iterator_did_not_give_is_not_handed_over(options):
    with shmloader.DataLoader(Squares(), 4, num_workers=2, **options) as loader:
        iterator = iter(loader)
        for _ in range(5):
            next(iterator)
        loader.close()
        state = loader.state_dict()
        with pytest.raises(shmloader.ClosedLoaderError):
            next(iterator)
        assert loader.state_dict() == state


class CountsWhatItGave(Sampler):
    """As torchdata's StatefulDistributedSampler: between epochs it tells of the last one's end."""

    def __init__(self):
        self.given, self.to_skip, self.epoch = 0, None, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        self.given, self.to_skip = self.to_skip or 0, None
        for number in range(self.given, LENGTH):
            self.given += 1
            yield (number * 7 + self.epoch) % LENGTH

    def __len__(self):
        return LENGTH

    def state_dict(self):
        return {"given": self.given}

    def load_state_dict(self, state):
        self.to_skip = state["given"]


class Ahead(Sampler):
    """A user's batch sampler that draws more than it has given, of a sampler with a state."""

    def __init__(self):
        self.sampler = KINDS["a user's with a state"].options()["sampler"]

    def __iter__(self):
        drawn = []
        for index in self.sampler:
            drawn.append(index)
            if len(drawn) == 9:
                yield drawn[:4]
                del drawn[:4]
        while drawn:
            yield drawn[:4]
            del drawn[:4]


STATEFUL = {
    "counts": lambda: {"batch_size": 4, "sampler": CountsWhatItGave()},
    "draws ahead": lambda: {"batch_sampler": Ahead()},
    "one batch": lambda: {**KINDS["a user's with a state"].options(), "batch_size": LENGTH + 1},
    "short last batch": KINDS["a user's with a state"].options,
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("kind", STATEFUL)
def test_a_samplers_own_state_is_of_what_was_handed_over(kind, seed):
    def make():
        return shmloader.DataLoader(Squares(), seed=seed, **STATEFUL[kind]())

    def name_epoch(loader, epoch):
        if kind == "counts":
            loader.sampler.set_epoch(epoch)

    loader = make()
    epochs = []
    for epoch in range(4):
        name_epoch(loader, epoch)
        epochs.append(rest_of(loader))
    loader = make()
    states = {}
    for epoch in range(3):
        name_epoch(loader, epoch)
        given = 0
        iterator = iter(loader)
        states[epoch, 0] = loader.state_dict()
        for given, batch in enumerate(iterator, start=1):
            assert read(batch) == epochs[epoch][given - 1]
            states[epoch, given] = loader.state_dict()
        assert given == len(epochs[epoch])
        states[epoch + 1, 0, "not begun"] = loader.state_dict()
    for (epoch, given, *_), state in states.items():
        other = make()
        other.load_state_dict(json.loads(json.dumps(state)))
        name_epoch(other, epoch)
        assert rest_of(other) == epochs[epoch][given:], (epoch, given)
        if epoch < 3:
            name_epoch(other, epoch + 1)
            assert rest_of(other) == epochs[epoch + 1], (epoch, given)


def test_a_sampler_that_gives_another_order_or_too_little_is_found_out():
    def another(order):
        return shmloader.DataLoader(Squares(), 4, sampler=order)

    _, state = saved(another([*range(40)]), 3)
    with pytest.raises(ValueError, match=r"yields another batch 2 .*Seed it"):
        resumed(another([*range(1, 41)]), state)
    _, state = saved(another([*range(40)]), 8)
    with pytest.raises(ValueError, match="this loader yields only 5"):
        resumed(another([*range(20)]), state)


def test_the_state_of_one_rank_goes_on_with_another_of_torchs_distributed_sampler():
    def make(rank):
        sampler = DistributedSampler(Squares(), 2, rank, seed=4)
        return shmloader.DataLoader(Squares(), 4, sampler=sampler)

    def run(loader):
        given = []
        for epoch in range(loader.epoch, 3):
            loader.sampler.set_epoch(epoch)
            given.extend(rest_of(loader))
        return given

    first = make(0)
    first.set_epoch(1)
    stop(first, 3)
    for rank in (0, 1):
        loader = make(rank)
        loader.load_state_dict(first.state_dict())
        assert run(loader) == run(make(rank))[-9:]


def test_a_state_is_taken_up_by_workers_that_stay():
    kind = "shuffled by a generator"
    epochs = whole(kind, 2, 3, persistent_workers=True)
    with make_loader(kind, 2, persistent_workers=True) as loader:
        stop(loader, 4)
        state = loader.state_dict()
        pids = {worker.pid for worker in loader._iterator._workers}
        for _ in range(2):
            rest_of(loader)
        loader.load_state_dict(state)
        assert [rest_of(loader), rest_of(loader)] == [epochs[0][4:], epochs[1]]
        assert {worker.pid for worker in loader._iterator._workers} == pids


LIST = {"sampler": [3, 2]}


def batched(size, drop_last=False):
    """A batch sampler of torch's, for the constructor; a loader with one has no batch size."""
    batches = BatchSampler(SequentialSampler(Squares()), size, drop_last)
    return {"batch_size": 1, "batch_sampler": batches}


@pytest.mark.parametrize(
    ("saved", "own", "told"),
    [
        ({}, {"dataset": list(range(7))}, f"len(dataset): {LENGTH} in the state, 7 in"),
        ({}, {"batch_size": 5}, "all ranks: 4 in the state, 5 in"),
        ({"seed": 3}, {"seed": 4}, "- seed: 3 in the state, 4 in"),
        ({"seed": 3, "shuffle": True}, {"seed": 3}, "batch_sampler: 'shuffled' in the state, 'in"),
        ({"seed": 3, **LIST}, {"seed": 3}, "batch_sampler: 'list' in the state, 'in order' in"),
        ({}, {"drop_last": True}, "drop_last: 'keep' in the state, 'discard' in"),
        (
            {},
            {"shuffle": True},
            "'BatchSampler(SequentialSampler)' in the state, 'BatchSampler(RandomSampler)' in",
        ),
        ({}, {"batch_size": 1, "batch_sampler": [[0], [2]]}, "all ranks: 4 in the state, None in"),
        ({"generator": torch.Generator()}, {}, "generators of the loader and its samplers: 1 in"),
        ({}, {"generator": torch.Generator()}, "samplers: 0 in the state, 1 in"),
        (batched(4), batched(8), "all ranks: 4 in the state, 8 in"),
        (batched(8, drop_last=True), batched(8), "'discard' in the state, 'keep' in"),
        (
            {"seed": 3, **batched(4)},
            {"seed": 3, **batched(8)},
            "all ranks: '4 samples' in the state, '8 samples' in",
        ),
    ],
)
def test_another_loader_says_what_was_found_and_what_it_expected(saved, own, told):
    def make(dataset=None, batch_size=4, **options):
        return shmloader.DataLoader(dataset or Squares(), batch_size, **options)

    state = make(**saved).state_dict()
    loader = make(**own)
    before = loader.state_dict()
    with pytest.raises(ValueError) as raised:  # noqa: PT011 - the text follows
        loader.load_state_dict(state)
    text = str(raised.value)
    assert text.startswith("the state does not fit this loader:\n- ")
    assert text.endswith(" this loader.\nGive the arguments with which the state was saved.")
    assert told in text
    assert loader.state_dict() == before


def test_another_number_of_ranks_fits_and_another_global_batch_does_not():
    def make(size, world_size):
        return shmloader.ShardedDataLoader(
            Squares(), **batched(size), rank=0, world_size=world_size
        )

    state = make(4, 2).state_dict()
    make(4, 1).load_state_dict(state)
    with pytest.raises(ValueError, match="'4 samples' in the state, '5 samples' in this"):
        make(5, 1).load_state_dict(state)
    state = shmloader.ShardedDataLoader(Squares(), 4, rank=0, world_size=2).state_dict()
    with pytest.raises(ValueError, match="over all ranks: 8 in the state, 12 in this"):
        shmloader.ShardedDataLoader(Squares(), 12).load_state_dict(state)


def test_what_is_no_state_is_refused():
    loader = shmloader.DataLoader(Squares(), 4)
    with pytest.raises(TypeError, match="should be a dict that state_dict"):
        loader.load_state_dict([1])
    with pytest.raises(ValueError, match="keys of this one: '_snapshot'"):
        loader.load_state_dict({"_snapshot": {}})
    with pytest.raises(ValueError, match="this one: none"):
        loader.load_state_dict({})
    with pytest.raises(ValueError, match="not saved by a loader of shmloader"):  # torchdata's
        loader.load_state_dict({"_sampler_iter_state": None, "_num_yielded": 3})
    for version in (1, 99, "3"):
        with pytest.raises(ValueError, match=f"has version {version!r}, .* reads version 8"):
            loader.load_state_dict({**loader.state_dict(), "version": version})


def test_a_generators_state_that_cannot_be_read_is_refused():
    loader = make_loader("shuffled by a generator", 0)
    state = loader.state_dict()
    state["sampler"]["generators"] = ["no base64"]
    with pytest.raises(ValueError, match=r"^the state is damaged: a generator's state cannot"):
        loader.load_state_dict(state)


def test_a_closed_loader_takes_no_state_but_has_one():
    loader = shmloader.DataLoader(Squares(), 4, num_workers=2)
    saved(loader, 3)
    state = loader.state_dict()
    assert state["position"] == 3
    with pytest.raises(shmloader.ClosedLoaderError):
        loader.load_state_dict(state)


def test_a_copy_of_a_loader_in_mid_epoch_has_no_part_in_it():
    loader = make_loader("shuffled by a generator", 0)
    iterator = iter(loader)
    next(iterator)
    twin = copy.deepcopy(loader)
    assert twin.state_dict()["position"] == 0
    next(iterator)
    assert twin.state_dict()["position"] == 0


def test_a_batch_sampler_of_a_random_sampler_of_the_users_own_is_known():
    def make():
        torch.manual_seed(4)
        batches = BatchSampler(RandomSampler(Squares()), 3, drop_last=False)
        return shmloader.DataLoader(Squares(), batch_sampler=batches)

    epoch = rest_of(make())
    _, state = saved(make(), 2)
    other = make()
    torch.manual_seed(8)
    assert resumed(other, state) == epoch[2:]


def test_a_sampler_may_change_the_states_that_it_gave_and_was_given():
    class Careless(CountsWhatItGave):
        def state_dict(self):
            return self.__dict__

        def load_state_dict(self, state):
            self.to_skip = state.pop("given")

    loader = shmloader.DataLoader(Squares(), 2, sampler=Careless())
    first = stop(loader, 2)
    state = loader.state_dict()
    before = copy.deepcopy(state)
    other = shmloader.DataLoader(Squares(), 2, sampler=Careless())
    other.load_state_dict(state)
    iterator = iter(other)
    assert other.state_dict()["sampler"] == state["sampler"]
    assert first + [read(batch) for batch in iterator] == rest_of(loader)
    assert state == before


def test_a_sampler_that_went_on_draws_its_later_epochs_anew():
    torch.manual_seed(3)
    _, state = saved(make_loader("shuffled by the global stream", 0), 2)
    other = make_loader("shuffled by the global stream", 0)
    _, second, third = resumed(other, state, epochs=3)
    assert second != third
    assert other.sampler.generator is None


def test_the_epoch_that_is_named_goes_on_and_another_gives_the_state_up(caplog):
    def make():
        return shmloader.DataLoader(Squares(), 4, shuffle=True, seed=2)

    epochs = [rest_of(loader) for loader in [make()] for _ in range(3)]
    loader = make()
    rest_of(loader)
    stop(loader, 3)
    state = loader.state_dict()
    assert (state["epoch"], state["position"]) == (1, 3)
    other = make()
    other.load_state_dict(state)
    assert other.epoch == 1
    other.set_epoch(1)
    assert rest_of(other) == epochs[1][3:]
    assert other.epoch == 2
    other.load_state_dict(state)
    assert not caplog.text
    other.set_epoch(2)
    assert "of epoch 1 at batch 3, is discarded, since set_epoch(2) was called" in caplog.text
    assert rest_of(other) == epochs[2]


def test_what_a_sampler_was_told_of_the_epoch_does_not_change_the_one_that_goes_on():
    epochs = whole("token batches", epochs=3)
    loader = make_loader("token batches", 0)
    rest_of(loader)
    _, state = saved(loader, 3)
    other = make_loader("token batches", 0)
    other.load_state_dict(state)
    other.batch_sampler.set_epoch(0)
    assert [rest_of(other), rest_of(other)] == [epochs[1][3:], epochs[2]]


@pytest.mark.parametrize("sampler", [None, [3, 1, 2, 0, 4, 5, 6, 7]])
def test_the_loaders_generator_is_saved_though_no_sampler_draws_from_it(sampler):
    """The workers of the next epoch are seeded from it."""

    def make(seed):
        generator = torch.Generator().manual_seed(seed)
        return shmloader.DataLoader(
            Noisy(), 4, sampler=sampler, num_workers=1, generator=generator
        )  # fmt: skip

    with make(5) as loader:
        iterator = iter(loader)
        next(iterator)
        mid = json.loads(json.dumps(loader.state_dict()))
        list(iterator)
        end = json.loads(json.dumps(loader.state_dict()))
        expected = [read(batch) for batch in loader]
    for state in (mid, end):
        with make(6) as loader:
            loader.load_state_dict(state)
            if state is mid:
                list(loader)
            assert [read(batch) for batch in loader] == expected
    other = shmloader.DataLoader(Noisy(), 4, sampler=sampler, num_workers=1)
    with pytest.raises(ValueError, match="samplers: 1 in the state, 0 in this loader"):
        other.load_state_dict(mid)


@pytest.mark.parametrize("options", [{}, {"seed": 1}])
def test_a_position_past_the_end_is_found_out_and_loads_nothing(options):
    loader = shmloader.DataLoader(Squares(), 4, **options)
    state = loader.state_dict()
    begun = {**state["sampler"], "has_started": True}
    state |= {"sampler": begun, "position": 12}

    def go_on():
        loader.load_state_dict(state)
        next(iter(loader))

    with pytest.raises(ValueError, match=r"was saved after 12 batches.*(yields only|has) 11"):
        go_on()


class Breaks(Sampler):
    """Yields ten numbers, and raises in the middle as long as it is broken."""

    is_broken = True

    def __len__(self):
        return 10

    def __iter__(self):
        for index in range(10):
            if index == 5 and self.is_broken:
                raise LookupError(f"no index {index}")
            yield index


@pytest.mark.parametrize("workers", [0, 2])
def test_a_batch_in_whose_place_the_sampler_raises_is_still_to_come(workers):
    loader = shmloader.DataLoader(range(10), 1, sampler=Breaks(), num_workers=workers)
    with loader:
        iterator, found = iter(loader), []
        with pytest.raises(LookupError, match="no index 5"):
            found.extend(map(read, iterator))
        state = loader.state_dict()
    mended = Breaks()
    mended.is_broken = False
    other = shmloader.DataLoader(range(10), 1, sampler=mended)
    assert found + resumed(other, state) == [[index] for index in range(10)]
