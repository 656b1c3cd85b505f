"""``device="cuda"`` and ``pin_memory=True`` on a real GPU. Needs one; nothing here runs without.

The same as `tests/process/test_device.py` does on the simulated device, and what only a driver can
tell: page locks, errors it leaves behind, graph capture, forks after CUDA is initialised.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time

import pytest
import torch

from shmloader import DataLoader
from shmloader.memory.slot import Slot
from shmloader.stages.drivers import _CAPTURE_RELAXED, CudaDriver
from tests.process.support import Calls, Program, only

# Elements of int32: above 64 KiB, so a batch of one is lent, and read by the device.
LENGTH = 17_000
MIB = 1 << 20


def sample(index: int) -> torch.Tensor:
    return torch.full((LENGTH,), index, dtype=torch.int32)


def make(count: int, **options) -> DataLoader:
    options = {"num_workers": 2, "collate_fn": only, "device": "cuda", **options}
    return DataLoader(Calls(sample, count), batch_size=1, **options)


def ends_of(batches, count: int, *, slow_every: int = 0) -> list[tuple[int, int]]:
    """The least and the greatest number of each batch, found by kernels; batches are dropped."""
    found = torch.full((count, 2), -1, dtype=torch.int32, device="cuda")
    for place, batch in enumerate(batches):
        if slow_every and place % slow_every == 0:
            torch.cuda._sleep(2_000_000)  # some milliseconds in which kernels pile up
        found[place, 0].copy_(batch.amin())
        found[place, 1].copy_(batch.amax())
        del batch
    # Elsewhere, memory that was given back too early is written over.
    torch.cuda.synchronize()
    return [tuple(row) for row in found.tolist()]


def whole(count: int) -> list[tuple[int, int]]:
    return [(index, index) for index in range(count)]


# Content ---------------------------------------------------------------------------------


@pytest.mark.parametrize("slow_every", [0, 50], ids=["quick", "slow kernels"])
@pytest.mark.parametrize("on_side", [False, True], ids=["default stream", "side stream"])
def test_ten_thousand_batches_arrive_whole(on_side, slow_every) -> None:
    stream = torch.cuda.Stream() if on_side else torch.cuda.current_stream()
    with torch.cuda.stream(stream):
        assert ends_of(make(10_000), 10_000, slow_every=slow_every) == whole(10_000)


def test_batches_are_on_the_device_that_was_asked_for() -> None:
    for device in ("cuda", "cuda:0", 0, torch.device("cuda", 0)):
        (batch,) = make(1, device=device)
        assert batch.device == torch.device("cuda", 0)


def test_batches_that_are_kept_stay_as_they_are() -> None:
    kept = list(make(200))
    assert ends_of(kept, 200) == whole(200)


def test_a_transform_runs_on_the_loader_s_stream() -> None:
    streams = []

    def double(batch):
        streams.append(torch.cuda.current_stream())
        return batch * 2

    found = ends_of(make(500, transform=double), 500)
    assert found == [(2 * index, 2 * index) for index in range(500)]
    assert len(set(streams)) == 1
    assert streams[0] != torch.cuda.current_stream()


@pytest.mark.parametrize("device", [None, "cuda"], ids=["pinned", "on the device"])
def test_a_user_s_own_copy_of_a_pinned_batch_may_outlive_it(device) -> None:
    loader = make(2_000, device=device, pin_memory=True)
    copies = (batch.to("cuda", non_blocking=True) for batch in loader)
    assert ends_of(copies, 2_000, slow_every=20) == whole(2_000)


def test_small_fields_are_pinned_in_one_block() -> None:
    def fields(index):
        return {f"field {number}": torch.full((8,), index) for number in range(114)}

    loader = DataLoader(Calls(fields, 4), None, num_workers=1, pin_memory=True)
    for index, batch in enumerate(loader):
        assert all(tensor.is_pinned() for tensor in batch.values())
        assert len({tensor.untyped_storage().data_ptr() for tensor in batch.values()}) == 1
        assert all(tensor.unique().tolist() == [index] for tensor in batch.values())


# Page locks ------------------------------------------------------------------------------


@pytest.fixture
def slot():
    made = Slot.create(64 * MIB)
    yield made
    made.close()


def is_locked(slot: Slot, nbytes: int) -> bool:
    array = slot.array()
    return bool(torch.frombuffer(array, dtype=torch.uint8, count=nbytes).is_pinned())


def test_a_slot_can_be_locked_before_and_after_it_has_grown(slot) -> None:
    driver = CudaDriver()
    assert driver.register(slot.address, 2 * MIB) == ""
    assert is_locked(slot, 2 * MIB)
    driver.unregister(slot.address)
    assert not is_locked(slot, 2 * MIB)
    slot.mapping[: 32 * MIB] = b"x" * (32 * MIB)
    assert driver.register(slot.address, 32 * MIB) == ""
    assert is_locked(slot, 32 * MIB)
    driver.unregister(slot.address)


def test_a_locked_slot_is_read_as_it_is_filled(slot) -> None:
    driver = CudaDriver()
    assert driver.register(slot.address, 2 * MIB) == ""
    host = torch.frombuffer(slot.array(), dtype=torch.int32, count=LENGTH)
    for number in range(20):
        host.fill_(number)
        assert host.to("cuda", non_blocking=True).unique().tolist() == [number]
    driver.unregister(slot.address)


def test_a_refused_registration_leaves_no_error_behind(slot) -> None:
    driver = CudaDriver()
    assert driver.register(slot.address, 2 * MIB) == ""
    assert driver.register(slot.address, 2 * MIB) == "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"
    assert driver.register(0, 4096).startswith("CUDA_ERROR")
    # A launch and a synchronization would report what is pending.
    assert torch.ones(1000, device="cuda").sum().item() == 1000
    torch.cuda.synchronize()
    driver.unregister(slot.address)
    driver.unregister(slot.address)  # refused, too
    assert torch.ones(1000, device="cuda").sum().item() == 1000


def test_where_locking_is_refused_batches_come_by_pinned_memory(monkeypatch) -> None:
    monkeypatch.setattr(CudaDriver, "register", lambda *_: "CUDA_ERROR_NOT_PERMITTED")
    with pytest.warns(RuntimeWarning, match="CUDA_ERROR_NOT_PERMITTED"):
        assert ends_of(make(500), 500, slow_every=20) == whole(500)


def test_slots_are_unlocked_before_they_are_unmapped(monkeypatch) -> None:
    log: list[tuple[str, int]] = []
    unregister, close = CudaDriver.unregister, Slot.close

    def note_unregister(driver, address):
        log.append(("unlock", address))
        unregister(driver, address)

    def note_close(slot):
        log.append(("close", slot.address))
        close(slot)

    monkeypatch.setattr(CudaDriver, "unregister", note_unregister)
    monkeypatch.setattr(Slot, "close", note_close)
    assert ends_of(make(50), 50) == whole(50)
    unlocked = [address for what, address in log if what == "unlock"]
    assert unlocked
    for address in unlocked:
        assert log.index(("unlock", address)) < log.index(("close", address))


_PROGRAM = """
    import torch
    from shmloader import DataLoader
    from tests.process.support import Calls, only

    def sample(index):
        return torch.full((17_000,), index, dtype=torch.int32)

    if __name__ == "__main__":
        loader = DataLoader(
            Calls(sample, 100_000), num_workers=2, collate_fn=only, device="cuda"
        )
        batches = iter(loader)
        for _ in range(50):
            batch = next(batches)
        print(int(batch.amax()), flush=True)
        {end}
"""


def test_an_interpreter_ends_quietly_with_a_live_iterator() -> None:
    program = Program(_PROGRAM.format(end="pass"))
    assert program.read_line() == "49"
    program.finish().assert_quiet()


def test_after_a_kill_nothing_is_left_and_the_next_one_works() -> None:
    for _ in range(2):
        program = Program(_PROGRAM.format(end="[0 for _ in batches]"))
        assert program.read_line() == "49"
        os.kill(program.pid, signal.SIGKILL)
        done = program.finish()
        assert done.code == -signal.SIGKILL
        assert done.left == []
    assert ends_of(make(20), 20) == whole(20)


# Beside the user's own work --------------------------------------------------------------


def test_a_graph_is_captured_while_the_loader_s_thread_works() -> None:
    # Rooms for as many that the thread copies during the whole capture.
    loader = make(300, device_prefetch=200, prefetch_factor=4)
    batches = iter(loader)
    first = next(batches)
    static = torch.zeros(1000, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # warm up, as torch's notes on graphs ask for
        static.add_(1)
    torch.cuda.current_stream().wait_stream(side)
    static.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(20):
            static.add_(1)
            time.sleep(0.01)
    graph.replay()
    assert static.unique().tolist() == [20]
    assert int(first.amax()) == 0
    assert ends_of(batches, 299) == [(index, index) for index in range(1, 300)]


@pytest.mark.parametrize("options", [{"device": "cuda"}, {"device": None, "pin_memory": True}])
def test_workers_may_be_forked_after_cuda_is_initialised(options) -> None:
    assert torch.cuda.is_initialized()
    for _ in range(3):
        loader = make(20, multiprocessing_context="fork", **options)
        assert [int(batch.amax()) for batch in loader] == list(range(20))


def test_loaders_fork_while_another_one_s_thread_works() -> None:
    stop = threading.Event()
    wrong = []

    def consume():
        while not stop.is_set():
            for place, batch in enumerate(make(200)):
                if int(batch.amax()) != place:
                    wrong.append(place)

    thread = threading.Thread(target=consume)
    thread.start()
    try:
        for _ in range(10):
            assert ends_of(make(5, num_workers=3), 5) == whole(5)
    finally:
        stop.set()
        thread.join(60)
    assert wrong == []


class DiesOnce:
    def __init__(self) -> None:
        self.is_armed = torch.ones(1, dtype=torch.uint8).share_memory_()

    def __call__(self, index):
        if index == 30 and self.is_armed[0]:
            self.is_armed[0] = 0
            os.kill(os.getpid(), signal.SIGKILL)
        return sample(index)


def test_a_dead_worker_is_replaced_while_copies_go_on() -> None:
    loader = DataLoader(
        Calls(DiesOnce(), 60), num_workers=2, collate_fn=only, device="cuda", worker_restarts=1
    )
    assert ends_of(loader, 60) == whole(60)


def test_a_child_of_the_user_s_leaves_the_locks_alone() -> None:
    batches = iter(make(60))
    first = [int(next(batches).amax()) for _ in range(3)]
    pid = os.fork()
    if pid == 0:
        del batches
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert first == [0, 1, 2]
    assert [int(batch.amax()) for batch in batches] == list(range(3, 60))


def test_the_driver_s_functions_have_the_signatures_that_are_called() -> None:
    driver = CudaDriver()
    for function in (driver._register, driver._unregister, driver._exchange_mode):
        assert function.restype is ctypes.c_int
    driver.relax_capture()
    mode = ctypes.c_int(0)  # back to the global mode; the former one is given
    assert driver._exchange_mode(ctypes.byref(mode)) == 0
    assert mode.value == _CAPTURE_RELAXED
