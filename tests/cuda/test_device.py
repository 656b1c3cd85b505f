"""``device=`` and ``pin_memory=True`` on a real GPU; ``--accelerator=late`` is for trials.

The same as `tests/process/test_device.py` does on the late device, and what only a driver can
tell: page locks, errors it leaves behind, graph capture, forks after CUDA is initialised.

A copy of 68 KB is over before a worker could write to the slot again, so careless code would pass.
Where it matters, the loader's stream and the consumer's are kept busy before each copy and each
read (`copies_are_late`, ``sleep_ms``), and the same test fails for a loader that leaves a rule out.
"""

import ctypes
import os
import signal
import threading

import pytest
import torch

from shmloader import DataLoader
from shmloader.device.backend import _CAPTURE_RELAXED, Backend, CudaDriver, open_driver
from shmloader.device.device import DeviceStage
from shmloader.memory.arena import Arena, Slot
from tests.cuda.accelerators import COPY_MS, LENGTH, kind, make, on, sample, whole
from tests.process.support import Calls, Program, only, run_program

MIB = 1 << 20


@pytest.mark.parametrize("slow_every", [0, 50], ids=["quick", "slow kernels"])
@pytest.mark.parametrize("on_side", [False, True], ids=["default stream", "side stream"])
def test_thousands_of_batches_arrive_whole(accelerator, ends_of, on_side, slow_every) -> None:
    stream = torch.Stream(kind()) if on_side else torch.accelerator.current_stream()
    count = accelerator.batches
    with on(stream):
        found = ends_of(make(count), count, sleep_ms=1, slow_every=slow_every)
    assert found == whole(count)


@pytest.mark.usefixtures("accelerator")
def test_batches_are_on_the_device_that_was_asked_for() -> None:
    for device in (kind(), f"{kind()}:0", 0, torch.device(kind(), 0)):
        (batch,) = make(1, device=device)
        assert batch.device == torch.device(kind(), 0)


def test_batches_that_are_kept_stay_as_they_are(ends_of) -> None:
    kept = list(make(200))
    assert ends_of(kept, 200) == whole(200)


def test_a_transform_runs_on_the_loader_s_stream(ends_of) -> None:
    streams = []

    def double(batch):
        streams.append(torch.accelerator.current_stream())
        return batch * 2

    found = ends_of(make(500, device_transform=double), 500)
    assert found == [(2 * index, 2 * index) for index in range(500)]
    assert len(set(streams)) == 1
    assert streams[0] != torch.accelerator.current_stream()


@pytest.mark.parametrize("is_pinned_alone", [True, False], ids=["pinned", "on the device"])
def test_a_user_s_own_copy_of_a_pinned_batch_may_outlive_it(
    accelerator, ends_of, is_pinned_alone
) -> None:
    device = None if is_pinned_alone else kind()
    loader = make(300, device=device, pin_memory=True)

    def copied_late():
        for batch in loader:
            accelerator.sleep(1)
            yield batch.to(kind(), non_blocking=True)

    assert ends_of(copied_late(), 300) == whole(300)


@pytest.mark.usefixtures("accelerator")
def test_small_fields_are_pinned_in_one_block() -> None:
    def fields(index):
        return {f"field {number}": torch.full((8,), index) for number in range(114)}

    loader = DataLoader(Calls(fields, 4), None, num_workers=1, pin_memory=True)
    for index, batch in enumerate(loader):
        assert all(tensor.is_pinned() for tensor in batch.values())
        assert len({tensor.untyped_storage().data_ptr() for tensor in batch.values()}) == 1
        assert all(tensor.unique().tolist() == [index] for tensor in batch.values())


def frees_at_once(monkeypatch) -> None:
    """Slots are free when their copy has been started."""
    run = DeviceStage.run

    def run_and_free(self, batch):
        copied = run(self, batch)
        self._reading.clear()
        return copied

    monkeypatch.setattr(DeviceStage, "run", run_and_free)


def waits_for_no_event(monkeypatch) -> None:
    """The consumer's stream does not wait for the copy."""
    deliver = Backend.deliver

    def deliver_at_once(self, _, tensors):
        # Never recorded: there is nothing to wait for.
        deliver(self, self._new_event(self.device), tensors)

    monkeypatch.setattr(Backend, "deliver", deliver_at_once)


def records_no_stream(monkeypatch) -> None:
    """The allocator is not told that the consumer's stream uses the batch."""
    deliver = Backend.deliver
    monkeypatch.setattr(Backend, "deliver", lambda self, event, _: deliver(self, event, ()))


def keeps_the_rules(monkeypatch) -> None:
    """The control."""


@pytest.mark.usefixtures("copies_are_late")
@pytest.mark.parametrize(
    "policy", [frees_at_once, waits_for_no_event, records_no_stream, keeps_the_rules]
)
def test_a_loader_that_leaves_one_thing_out_corrupts_batches(monkeypatch, ends_of, policy) -> None:
    policy(monkeypatch)
    with on(torch.Stream(kind())):
        read_late = ends_of(make(100), 100, slow_every=1)
        read_at_once = ends_of(make(100), 100)
    is_right = read_late == read_at_once == whole(100)
    assert is_right == (policy is keeps_the_rules)


@pytest.mark.parametrize("is_view", [True, False], ids=["views", "copies"])
def test_views_of_registered_memory_that_the_user_copies_corrupt_batches(
    accelerator, monkeypatch, ends_of, is_view
) -> None:
    if is_view:
        monkeypatch.setattr(Backend, "copy", lambda self, tensor: tensor)

    def copied_late():
        for batch in make(100):
            accelerator.sleep(COPY_MS)
            yield batch.to(kind(), non_blocking=True)

    assert (ends_of(copied_late(), 100) == whole(100)) == (not is_view)


@pytest.fixture
def driver(accelerator) -> CudaDriver:
    found = open_driver(kind())
    assert not isinstance(found, str)
    return found


@pytest.fixture
def slot():
    arena = Arena.create(64 * MIB, 1)
    arena.reach(arena.slots[0], 64 * MIB)
    yield arena.slots[0]
    arena.close()


def is_locked(slot: Slot, nbytes: int) -> bool:
    array = slot.array()
    return bool(torch.frombuffer(array, dtype=torch.uint8, count=nbytes).is_pinned())


def test_a_slot_can_be_locked_before_and_after_it_has_grown(driver, slot) -> None:
    assert driver.register(slot.address, 2 * MIB) == ""
    assert is_locked(slot, 2 * MIB)
    driver.unregister(slot.address)
    assert not is_locked(slot, 2 * MIB)
    slot.memory[: 32 * MIB] = b"x" * (32 * MIB)
    assert driver.register(slot.address, 32 * MIB) == ""
    assert is_locked(slot, 32 * MIB)
    driver.unregister(slot.address)


def test_a_locked_slot_is_read_as_it_is_filled(driver, slot) -> None:
    assert driver.register(slot.address, 2 * MIB) == ""
    host = torch.frombuffer(slot.array(), dtype=torch.int32, count=LENGTH)
    for number in range(20):
        host.fill_(number)
        assert host.to(kind(), non_blocking=True).unique().tolist() == [number]
    driver.unregister(slot.address)


def test_a_refused_registration_leaves_no_error_behind(accelerator, driver, slot) -> None:
    assert driver.register(slot.address, 2 * MIB) == ""
    assert accelerator.already_registered in driver.register(slot.address, 2 * MIB)
    # A launch and a synchronization would report what is pending.
    assert torch.ones(1000, device=kind()).sum().item() == 1000
    torch.accelerator.synchronize()
    assert driver.unregister(slot.address) == ""
    assert driver.unregister(slot.address) == ""  # the driver refuses: nothing is left to undo
    assert driver.register(slot.address, 2 * MIB) == ""  # so the first call had undone it
    assert driver.unregister(slot.address) == ""
    assert torch.ones(1000, device=kind()).sum().item() == 1000


@pytest.mark.usefixtures("for_cuda_alone")
def test_memory_that_is_not_there_is_refused_and_leaves_no_error_behind() -> None:
    assert CudaDriver().register(0, 4096).startswith("CUDA_ERROR")
    assert torch.ones(1000, device="cuda").sum().item() == 1000
    torch.cuda.synchronize()


def test_where_locking_is_refused_batches_come_by_pinned_memory(
    driver, monkeypatch, ends_of
) -> None:
    monkeypatch.setattr(type(driver), "register", lambda *_: "NOT_PERMITTED")
    with pytest.warns(RuntimeWarning, match="NOT_PERMITTED"):
        assert ends_of(make(200), 200, sleep_ms=1, slow_every=2) == whole(200)


def test_slots_are_unlocked_before_they_are_unmapped(driver, monkeypatch, ends_of) -> None:
    log: list[tuple[str, int]] = []
    unregister, unmap = type(driver).unregister, Slot.unmap

    def note_unregister(driver, address):
        log.append(("unlock", address))
        return unregister(driver, address)

    def note_unmap(slot):
        log.append(("unmap", getattr(slot, "address", 0)))
        return unmap(slot)

    monkeypatch.setattr(type(driver), "unregister", note_unregister)
    monkeypatch.setattr(Slot, "unmap", note_unmap)
    assert ends_of(make(50), 50) == whole(50)
    unlocked = [address for what, address in log if what == "unlock"]
    assert unlocked
    for address in unlocked:
        assert log.index(("unlock", address)) < log.index(("unmap", address))


_PROGRAM = """
    import torch
    from shmloader import DataLoader
    from tests.cuda.accelerators import open_accelerator
    from tests.process.support import Calls, only

    def sample(index):
        return torch.full((17_000,), index, dtype=torch.int32)

    if __name__ == "__main__":
        open_accelerator("{device}")
        loader = DataLoader(
            Calls(sample, 100_000), num_workers=2, collate_fn=only, device="{device}"
        )
        batches = iter(loader)
        for _ in range(50):
            batch = next(batches)
        print(int(batch.amax()), flush=True)
        {end}
"""


@pytest.mark.usefixtures("accelerator")
def test_an_interpreter_ends_quietly_with_a_live_iterator() -> None:
    program = Program(_PROGRAM.format(device=kind(), end="pass"))
    assert program.read_line() == "49"
    program.finish().assert_quiet()


def test_after_a_kill_nothing_is_left_and_the_next_one_works(ends_of) -> None:
    for _ in range(2):
        program = Program(_PROGRAM.format(device=kind(), end="[0 for _ in batches]"))
        assert program.read_line() == "49"
        os.kill(program.pid, signal.SIGKILL)
        done = program.finish()
        assert done.code == -signal.SIGKILL
        assert done.left == []
    assert ends_of(make(20), 20) == whole(20)


_CAPTURE = """
    from tests.cuda.capture import main

    main("{device}", is_careless={is_careless})
"""


@pytest.mark.usefixtures("accelerator")
def test_a_graph_is_captured_while_the_loader_registers_and_copies() -> None:
    done = run_program(_CAPTURE.format(device=kind(), is_careless=False))
    assert (done.out, done.err) == ("captured\nwhole\n", "")
    assert done.code == 0


@pytest.mark.usefixtures("accelerator")
def test_a_loader_that_does_not_relax_the_capture_mode_breaks_a_capture() -> None:
    done = run_program(_CAPTURE.format(device=kind(), is_careless=True))
    assert done.out.strip() not in {"", "captured"}, done.err
    assert done.code == 0


@pytest.mark.usefixtures("accelerator")
@pytest.mark.parametrize("options", [{}, {"device": None, "pin_memory": True}])
def test_workers_may_be_forked_after_the_device_is_initialised(options) -> None:
    torch.empty(1, device=kind())
    assert torch.get_device_module(kind()).is_initialized()
    for _ in range(3):
        loader = make(20, multiprocessing_context="fork", **options)
        assert [int(batch.amax()) for batch in loader] == list(range(20))


def test_loaders_fork_while_another_one_s_thread_works(ends_of) -> None:
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


@pytest.mark.usefixtures("copies_are_late")
def test_a_dead_worker_is_replaced_while_copies_go_on(ends_of) -> None:
    loader = DataLoader(
        Calls(DiesOnce(), 60), num_workers=2, collate_fn=only, device=kind(), worker_restarts=1
    )
    assert ends_of(loader, 60) == whole(60)


@pytest.mark.usefixtures("accelerator")
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


@pytest.mark.usefixtures("for_cuda_alone")
def test_the_driver_s_functions_have_the_signatures_that_are_called() -> None:
    driver = CudaDriver()
    for function in (driver._register, driver._unregister, driver._exchange_mode):
        assert function.restype is ctypes.c_int
    driver.relax_capture()
    mode = ctypes.c_int(0)  # back to the global mode; the former one is given
    assert driver._exchange_mode(ctypes.byref(mode)) == 0
    assert mode.value == _CAPTURE_RELAXED
