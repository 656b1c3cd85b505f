"""The late device by itself: it is as late as its head says, and says what it was asked for."""

import ctypes
import mmap
import os
import threading

import pytest
import torch

from tests.late import LateDevice
from tests.process.support import wait_until

PAGE = mmap.PAGESIZE


def copied(source: torch.Tensor) -> torch.Tensor:
    return source.to("late", non_blocking=True)


def test_a_copy_of_pinned_memory_reads_it_when_somebody_waits(late: LateDevice) -> None:
    host = torch.arange(1000).pin_memory()
    assert host.is_pinned()
    on_device = copied(host)
    event = torch.Event("late")
    event.record()
    host.fill_(7)
    assert not event.query()
    event.synchronize()
    assert event.query()
    assert on_device.unique().tolist() == [7]
    assert late.count("late copies") == 1


def test_a_stream_that_does_not_wait_for_another_finds_what_was_there(late: LateDevice) -> None:
    host = torch.full((1000,), 7).pin_memory()
    side = torch.Stream("late:0")
    main = torch.accelerator.current_stream()
    torch.accelerator.set_stream(side)
    on_device = copied(host)
    event = torch.Event("late")
    event.record()
    torch.accelerator.set_stream(main)
    assert on_device.unique().tolist() != [7]
    main.wait_event(event)
    assert on_device.unique().tolist() == [7]


@pytest.mark.parametrize("is_recorded", [False, True])
def test_freed_memory_is_used_again_unless_a_stream_was_recorded(late, is_recorded) -> None:
    first = copied(torch.full((1000,), 1).pin_memory())
    torch.accelerator.synchronize()
    main, side = torch.accelerator.current_stream(), torch.Stream("late:0")
    torch.accelerator.set_stream(side)
    later = first.clone()
    torch.accelerator.set_stream(main)
    if is_recorded:
        first.record_stream(side)
    del first
    second = copied(torch.full((1000,), 2).pin_memory())
    torch.accelerator.synchronize()
    torch.accelerator.set_stream(side)
    found = later.unique().tolist()
    torch.accelerator.set_stream(main)
    assert second.unique().tolist() == [2]
    assert found == ([1] if is_recorded else [2])


def test_a_pinned_block_is_used_again_when_its_copy_is_done(late: LateDevice) -> None:
    host = torch.full((1000,), 1).pin_memory()
    on_device, address = copied(host), host.data_ptr()
    del host
    other = torch.full((1000,), 2).pin_memory()
    assert other.data_ptr() != address
    torch.accelerator.synchronize()
    assert torch.full((1000,), 3).pin_memory().data_ptr() == address
    assert on_device.unique().tolist() == [1]


def test_what_is_held_back_keeps_the_one_that_waits(late: LateDevice) -> None:
    on_device = copied(torch.ones(10).pin_memory())
    found: list[float] = []
    with late.held():
        thread = threading.Thread(target=lambda: found.append(on_device.sum().item()))
        thread.start()
        wait_until(lambda: late.count("waiting"))
        assert found == []
    thread.join()
    assert found == [10]


@pytest.fixture
def shared():
    """Shared memory of four pages, as a slot is; its array, file and address."""
    fd = os.memfd_create("late")
    os.ftruncate(fd, 4 * PAGE)
    memory = mmap.mmap(fd, 4 * PAGE)
    array = (ctypes.c_char * len(memory)).from_buffer(memory)
    yield memory, ctypes.addressof(array)
    del array
    memory.close()
    os.close(fd)


def numbers(memory: mmap.mmap) -> torch.Tensor:
    return torch.frombuffer(memory, dtype=torch.uint8)


def test_registered_memory_is_read_by_its_address_and_later(late, shared) -> None:
    memory, address = shared
    torch.empty(1, device="late")
    assert late.driver.register(address, 4 * PAGE) == ""
    on_device = copied(numbers(memory))
    memory[:] = b"\7" * len(memory)
    assert on_device.unique().tolist() == [7]
    assert late.driver.unregister(address) == ""


def test_pages_that_were_given_back_are_still_those_that_are_read(late, shared) -> None:
    memory, address = shared
    memory[:] = b"\1" * len(memory)
    torch.empty(1, device="late")
    assert late.driver.register(address, 4 * PAGE) == ""
    memory.madvise(mmap.MADV_REMOVE, 2 * PAGE, 2 * PAGE)
    memory[:] = b"\2" * len(memory)
    found = copied(numbers(memory)).tolist()
    assert found == 2 * PAGE * [2] + 2 * PAGE * [1]
    late.driver.unregister(address)


def test_a_copy_of_what_was_registered_and_is_no_more_is_a_fault(late, shared) -> None:
    memory, address = shared
    torch.empty(1, device="late")
    assert late.driver.register(address, PAGE) == ""
    on_device = copied(numbers(memory)[:100])
    assert late.driver.unregister(address) == ""
    assert on_device.unique().tolist() != [0]
    assert late.count("faults") == 1


def test_a_thread_registers_once_it_has_a_context(late, shared) -> None:
    _, address = shared
    found = []

    def try_to() -> None:
        torch.accelerator.set_device_index(0)
        found.append(late.driver.register(address, PAGE))
        torch.accelerator.current_stream().synchronize()
        found.append(late.driver.register(address, PAGE))

    thread = threading.Thread(target=try_to)
    thread.start()
    thread.join()
    assert found == ["late error 201", ""]
    assert late.driver.register(address, PAGE) == "late error 712"
    assert late.driver.unregister(address) == ""
    assert late.library.late_unregister(address) == 713  # it is not registered
    assert late.driver.unregister(address) == ""


def test_what_ends_a_capture_is_counted_unless_the_thread_relaxes(late, shared) -> None:
    _, address = shared
    torch.empty(1, device="late")
    with late.capturing():
        assert late.driver.register(address, PAGE) == "late error 900"
        torch.accelerator.current_stream().synchronize()
        assert late.count("capture breaks") == 2
        mode = late.driver.relax_capture()
        assert late.driver.register(address, PAGE) == ""
        assert late.driver.unregister(address) == ""
        late.driver.restore_capture(mode)
        assert late.count("capture breaks") == 2


def test_switched_off_it_is_no_accelerator(late: LateDevice) -> None:
    assert torch.accelerator.is_available()
    late.switch(is_on=False)
    assert not torch.accelerator.is_available()
    assert torch.accelerator.device_count() == 0
