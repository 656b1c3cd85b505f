"""Both stages, pinning and copying to a device: order, errors, ends. Beside torch where it pins."""

import gc
import itertools
import threading
from pathlib import Path

import psutil
import pytest
import torch
import torch.utils.data

import shmloader.device.thread
from shmloader import ClosedLoaderError, DataLoader
from shmloader.device.device import DeviceStage
from shmloader.device.stage import PinStage
from tests.late import to_host
from tests.process.support import (
    Calls,
    Streams,
    in_thread,
    last_line,
    only,
    outcomes,
    stack_of,
    wait_until,
)

# Elements of int32 in a sample: above 64 KiB, so that a batch of one is lent.
LENGTH = 17_000


def sample(index):
    return torch.full((LENGTH,), index, dtype=torch.int32)


def make(kind, dataset=24, **options):
    if isinstance(dataset, int):
        dataset = Calls(sample, dataset)
    return DataLoader(dataset, **{"num_workers": 2, "collate_fn": only, **kind.options, **options})


def number(batch) -> int:
    (found,) = set(to_host(batch).flatten().tolist())
    return found


def numbers(batches) -> list[int]:
    return [number(batch) for batch in batches]


def stage_threads() -> list[str]:
    ours = {"pt_data_pin", "shmloader_device"}
    return [thread.name for thread in threading.enumerate() if thread.name in ours]


class Drawn(torch.utils.data.Sampler):
    def __len__(self) -> int:
        return 30

    def __iter__(self):
        for _ in range(30):
            assert threading.current_thread() is threading.main_thread()
            yield int(torch.randint(1000, ()))


def trace(loader_type, *, epochs, take, **options):
    """What each next() gives, and torch's random state after it."""
    torch.manual_seed(5)
    dataset = Calls(torch.tensor, 1000)
    loader = loader_type(dataset, 2, sampler=Drawn(), num_workers=2, **options)
    found = []
    for _ in range(epochs):
        batches = iter(loader)
        found.append(([], torch.get_rng_state().tolist()))
        for _ in range(take):
            batch = next(batches, None)
            read = [] if batch is None else to_host(batch).tolist()
            found.append((read, torch.get_rng_state().tolist()))
    return found


@pytest.mark.sampled(1)
@pytest.mark.parametrize("take", [4, 20], ids=["left", "to the end"])
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("threads", [False, True])
def test_each_next_gives_and_draws_what_torch_does(kind, take, persistent, threads) -> None:
    how = {"epochs": 3, "take": take, "persistent_workers": persistent}
    ours = trace(DataLoader, **how, thread_pool=threads, **kind.options)
    assert ours == trace(torch.utils.data.DataLoader, **how)


def test_out_of_order_each_next_draws_what_torch_does(kind) -> None:
    how = {"epochs": 1, "take": 20, "in_order": False}
    ours = trace(DataLoader, **how, **kind.options)
    theirs = trace(torch.utils.data.DataLoader, **how)
    (mine, states), (expected, their_states) = (
        zip(*steps, strict=True) for steps in (ours, theirs)
    )
    assert states == their_states
    assert sorted(itertools.chain(*mine)) == sorted(itertools.chain(*expected))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("prefetch_factor", [1, 3])
@pytest.mark.parametrize("persistent", [False, True])
def test_streams_of_several_lengths_come_whole(kind, prefetch_factor, persistent) -> None:
    ends = [3, 40, 0, 11]

    def stream():
        worker = torch.utils.data.get_worker_info().id
        return (torch.tensor([worker, place]) for place in range(ends[worker]))

    loader = make(
        kind, Streams(stream), num_workers=4, collate_fn=None, batch_size=None,
        prefetch_factor=prefetch_factor, persistent_workers=persistent,
    )  # fmt: skip
    for _ in range(2):
        found = [to_host(batch).tolist() for batch in loader]
        for worker, end in enumerate(ends):
            assert [place for one, place in found if one == worker] == list(range(end))


def told(batches) -> list[object]:
    """The number of each batch, or the class and the last line of its error."""
    return [
        last_line(one) if isinstance(one, BaseException) else number(one)
        for one in outcomes(batches)
    ]


def failing(index):
    if index in (3, 4, 9):
        raise ValueError(f"sample {index}")
    return sample(index)


@pytest.mark.parametrize("in_order", [False, True])
def test_errors_of_dataset_and_collate_come_in_their_places(kind, in_order) -> None:
    def collate(samples):
        if samples[0][0] == 5:
            raise KeyError("collate")
        return samples[0]

    loader = make(kind, Calls(failing, 12), collate_fn=collate, in_order=in_order)
    found = told(iter(loader))
    want: list[object] = list(range(12))
    for place in (3, 4, 9):
        want[place] = f"ValueError ValueError: sample {place}"
    want[5] = "KeyError KeyError: 'collate'"
    if not in_order:
        found.sort(key=str)
        want.sort(key=str)
    assert found == want


class Stubborn:
    def __init__(self, index) -> None:
        self.index = index

    def pin_memory(self):
        if self.index == 2:
            raise ValueError("it does not pin")
        return self


@pytest.mark.usefixtures("late")
def test_an_error_of_pinning_comes_in_its_place_and_in_torch_s_words() -> None:
    texts = []
    for loader_type in (DataLoader, torch.utils.data.DataLoader):
        loader = loader_type(Calls(Stubborn, 6), num_workers=2, collate_fn=only, pin_memory=True)
        batches = iter(loader)
        assert [next(batches).index, next(batches).index] == [0, 1]
        with pytest.raises(ValueError, match="it does not pin") as caught:
            next(batches)
        texts.append(str(caught.value).splitlines()[0])
        assert [batch.index for batch in batches] == [3, 4, 5]
        del batches
    assert texts == ["Caught ValueError in pin memory thread for device 0."] * 2


@pytest.mark.parametrize(
    ("device", "workers", "error"),
    [
        ("late", 2, ValueError),
        ("late", 2, StopIteration),
        ("late", 2, SystemExit),
        ("late", 2, KeyboardInterrupt),
        ("cpu", 0, StopIteration),
        ("cpu", 1, StopIteration),
    ],
)
@pytest.mark.usefixtures("late")
def test_an_error_of_the_transform_comes_in_its_place(device, workers, error) -> None:
    def check(batch):
        if batch[0] in (1, 2):
            raise error("not this one")
        return batch

    batches = iter(
        DataLoader(
            Calls(sample, 6), collate_fn=only, num_workers=workers, device=device,
            device_transform=check,
        )
    )  # fmt: skip
    text = f"{error.__name__} not this one"
    if error is StopIteration:
        text = "RuntimeError a batch's device_transform or pin_memory raised StopIteration"
    assert told(batches) == [0, text, text, 3, 4, 5]


class FailingSampler(torch.utils.data.Sampler):
    def __init__(self, at, length) -> None:
        self.at = at
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __iter__(self):
        yield from range(min(self.at, self.length))
        if self.at < self.length:
            raise ValueError("sampler")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("prefetch_factor", [1, 2])
@pytest.mark.parametrize("at", [4, 7])
def test_a_sampler_that_raises_ends_the_epoch_as_with_torch(kind, at, prefetch_factor) -> None:
    found = []
    for loader_type, options in ((DataLoader, kind.options), (torch.utils.data.DataLoader, {})):
        loader = loader_type(
            Calls(sample, 12), sampler=FailingSampler(at, 12), num_workers=1, collate_fn=only,
            prefetch_factor=prefetch_factor, **options,
        )  # fmt: skip
        found.append(told(iter(loader)))
    assert found[0] == found[1]


def test_a_sampler_that_raises_at_an_epoch_s_start_leaves_nothing_waiting(kind) -> None:
    sampler = FailingSampler(99, 8)
    loader = make(kind, 8, sampler=sampler, persistent_workers=True)
    batches = iter(loader)
    assert numbers(batches) == list(range(8))
    sampler.at = 2
    with pytest.raises(ValueError, match="sampler"):
        iter(loader)
    # Two were drawn. Whoever has kept the iterator gets these, and the end.
    assert numbers(batches) == [0, 1]
    sampler.at = 99
    assert numbers(loader) == list(range(8))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("where", ["start", "deliver"])
def test_a_stage_that_fails_for_good_says_so_and_closes(kind, monkeypatch, where) -> None:
    def fail(*_):
        raise OSError("the device is gone")

    for stage in (PinStage, DeviceStage):
        monkeypatch.setattr(stage, where, fail)
    batches = iter(make(kind))
    with pytest.raises(OSError, match="the device is gone"):
        next(batches)
    for _ in range(2):
        with pytest.raises(ClosedLoaderError):
            next(batches)
    assert stage_threads() == []


def test_closing_in_the_middle_of_a_copy_waits_for_it(late, slots) -> None:
    loader = DataLoader(Calls(sample, 24), num_workers=2, collate_fn=only, device="late")
    batches = iter(loader)
    with late.held():
        held = next(batches)
        with in_thread(loader.close):
            wait_until(lambda: late.count("waiting"))
            assert slots.maps()  # not unmapped while a copy reads it
            assert late.count("registered bytes")
            late.library.late_hold(0)
    assert slots.maps() == {}
    assert int(held[0]) == 0


class Collects:
    """Waits, and then collects garbage, where the stage runs."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.go = threading.Event()
        self.is_over = threading.Event()

    def __call__(self, batch):
        self.entered.set()
        assert self.go.wait(30)
        gc.collect()
        self.is_over.set()
        return batch


@pytest.mark.sampled(1)
@pytest.mark.usefixtures("no_collector")
def test_an_iterator_that_is_collected_on_its_own_thread_ends(kind, monkeypatch, slots) -> None:
    collects = Collects()
    for stage in (PinStage, DeviceStage):
        run = stage.run
        monkeypatch.setattr(stage, "run", lambda self, batch, run=run: run(self, collects(batch)))
    batches = iter(make(kind))
    cycle = [batches]
    cycle.append(cycle)
    assert collects.entered.wait(30)
    del batches, cycle
    collects.go.set()
    assert collects.is_over.wait(30)
    wait_until(lambda: not stage_threads())
    assert slots.maps() == {}


def test_a_transform_that_hangs_delays_closing_by_a_bounded_time(late, monkeypatch) -> None:
    monkeypatch.setattr(shmloader.device.thread, "_JOIN_S", 0.2)
    collects = Collects()
    loader = DataLoader(
        Calls(sample, 8), num_workers=2, collate_fn=only, device="late", device_transform=collects
    )
    batches = iter(loader)
    pids = [worker.pid for worker in batches._workers]
    assert collects.entered.wait(30)
    loader.close()
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert stage_threads() == ["shmloader_device"]
    assert late.count("registered bytes")  # the thread may look at it
    collects.go.set()
    wait_until(lambda: not stage_threads())
    assert late.count("registered bytes") == 0


@pytest.mark.slow
def test_a_further_epoch_waits_for_a_transform_that_takes_long(late, monkeypatch) -> None:
    monkeypatch.setattr(shmloader.device.thread, "_JOIN_S", 0.0)
    collects = Collects()
    loader = DataLoader(
        Calls(sample, 8), num_workers=2, collate_fn=only, device="late", persistent_workers=True,
        device_transform=collects,
    )  # fmt: skip
    iter(loader)
    assert collects.entered.wait(30)
    main = threading.main_thread().ident

    def release():
        wait_until(lambda: "end_epoch" in stack_of(main) or has_begun)
        collects.go.set()

    has_begun: list[bool] = []
    with in_thread(release):
        batches = iter(loader)
        has_begun.append(collects.is_over.is_set())
    assert has_begun == [True]
    assert [int(batch[0]) for batch in batches] == list(range(8))


@pytest.mark.sampled(1)
def test_threads_stand_still_while_another_loader_forks(kind, late) -> None:
    """The late device counts forks while the loader's thread is inside of it."""
    loader = make(kind, 400, prefetch_factor=4)
    if "device" in kind.options:

        def take_long(batch):
            late.stay_inside(0.005)
            return batch

        loader.device_transform = take_long
    stop = threading.Event()

    def consume():
        while not stop.is_set():
            for place, batch in enumerate(loader):
                assert number(batch) == place
                if stop.is_set():
                    break

    with in_thread(consume):
        try:
            for _ in range(6):
                assert numbers(make(kind, 3, num_workers=3)) == [0, 1, 2]
        finally:
            stop.set()


def test_the_thread_has_a_name_for_the_system_and_ends_with_the_loader(kind) -> None:
    loader = make(kind)
    batches = iter(loader)
    assert number(next(batches)) == 0
    assert stage_threads() == [kind.thread]
    (ident,) = [thread.native_id for thread in threading.enumerate() if thread.name == kind.thread]
    assert Path(f"/proc/self/task/{ident}/comm").read_text().strip() == kind.thread[:15]
    loader.close()
    assert stage_threads() == []
    with pytest.raises(ClosedLoaderError):
        next(batches)
