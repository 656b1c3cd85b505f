"""Which device the device argument names, what its backend does, and how drivers are called."""

import ctypes
import ctypes.util
import re

import pytest
import torch

import shmloader
from shmloader.device import backend
from shmloader.device.backend import Backend, CudaDriver, parse_device
from shmloader.device.device import PageLocks
from shmloader.memory.arena import Arena

without_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


@pytest.mark.parametrize("device", [None, "cpu", torch.device("cpu"), "cpu:0"])
def test_the_cpu_is_plain_loading(device) -> None:
    assert parse_device(device) is None


@without_cuda
@pytest.mark.parametrize("device", ["cuda", "cuda:0", torch.device("cuda", 1)])
@pytest.mark.parametrize("workers", [0, 2])
def test_cuda_that_is_not_there_is_said_when_the_loader_is_made(device, workers) -> None:
    text = rf"device='{device}' does not exist: torch {re.escape(torch.__version__)} finds 0 cuda"
    with pytest.raises(RuntimeError, match=text):
        shmloader.DataLoader([1, 2], device=device, num_workers=workers)


@without_cuda
def test_an_index_asks_for_an_accelerator() -> None:
    with pytest.raises(RuntimeError, match=r"device='\w+:0' does not exist: torch .* finds 0"):
        parse_device(0)


def test_no_device_is_asked_whether_it_is_available(late, monkeypatch) -> None:
    """CUDA's answer would initialize its driver, and workers could not be forked after that."""

    def refuse():
        raise AssertionError("asked")

    monkeypatch.setattr(torch.get_device_module("late"), "is_available", refuse)
    for device in (1, "late:1", torch.device("late", 1)):
        assert parse_device(device) == torch.device("late", 1)
    with pytest.raises(RuntimeError, match=r"device='late:2' does not exist: .* finds 2 late"):
        parse_device(2)
    assert late.count("initializations") == 0


def test_a_device_of_a_kind_with_none_is_not_there(late) -> None:
    late.is_on = False
    with pytest.raises(RuntimeError, match=r"device='\w+:0' does not exist: torch .* finds 0"):
        parse_device(0)
    with pytest.raises(RuntimeError, match=r"'late' does not exist: torch .* finds 0 late devices"):
        parse_device("late")


def test_a_device_beyond_the_last_is_said_with_their_number(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert parse_device("cuda:1") == torch.device("cuda", 1)
    with pytest.raises(RuntimeError, match=r"device='cuda:2' does not exist: .* finds 2 cuda"):
        parse_device("cuda:2")


@pytest.mark.parametrize("device", [True, 1.5, ["cuda"], object()])
def test_what_is_no_device_is_a_type_error(device) -> None:
    with pytest.raises(TypeError, match="device should be a device such as"):
        parse_device(device)


def test_a_name_that_torch_does_not_know_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="device should name a device that torch knows"):
        parse_device("nonsense")


def test_a_wait_on_cuda_keeps_no_core_busy(monkeypatch) -> None:
    calls = []

    def note(name):
        return lambda *args, **kwargs: calls.append((name, args, kwargs))

    monkeypatch.setattr(torch.cuda, "Stream", note("stream"))
    monkeypatch.setattr(torch.cuda, "Event", note("event"))
    device = torch.device("cuda", 1)
    opened = Backend(device)
    assert calls == []  # nothing of CUDA is initialized
    opened._new_stream(device)
    opened._new_event(device)
    assert calls == [("stream", (device,), {}), ("event", (), {"blocking": True})]
    assert opened._current_stream is torch.cuda.current_stream


def covers(locks: PageLocks, tensor: torch.Tensor) -> bool:
    """Whether a device may read a tensor's memory directly."""
    with locks.reading(tensor) as is_locked:
        return is_locked


@pytest.fixture
def slot():
    arena = Arena.create(1 << 20, 1)
    arena.reach(arena.slots[0], 1 << 20)
    yield arena.slots[0]
    arena.close()


def test_without_the_driver_s_library_it_says_so_once_and_locks_nothing(late, slot, monkeypatch):
    def missing():
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setitem(backend.DRIVERS, "late", missing)
    locks = PageLocks(Backend(torch.device("late", 0)))
    with pytest.warns(RuntimeWarning, match=r"through pinned memory.*libcuda"):
        locks.lock(slot, 100)
    locks.lock(slot, 200)  # a second warning would be an error here
    locks.unlock(slot)


def test_a_kind_without_a_known_driver_goes_by_pinned_memory_in_silence(slot) -> None:
    locks = PageLocks(Backend(torch.device("xpu", 0)))
    locks.lock(slot, 100)
    assert not covers(locks, torch.frombuffer(slot.array(), dtype=torch.uint8, count=10))
    locks.unlock(slot)


class Library:
    """Functions that note their arguments, and return what they are told to."""

    def __init__(self, prefix: str) -> None:
        self.calls: list[tuple[object, ...]] = []
        self.error = 0
        self.prefix = prefix

    def __getattr__(self, name: str):
        if not name.startswith(self.prefix):
            raise AttributeError(name)

        def call(*arguments):
            values = []
            for value in arguments:
                held = getattr(value, "_obj", value)  # of a byref
                values.append(held.value if isinstance(held, ctypes.c_int) else held)
            self.calls.append((name, *values))
            if name == "cuGetErrorName":
                values[1].value = b"CUDA_ERROR_NOT_PERMITTED"
                return 0
            return self.error

        setattr(self, name, call)
        return call


def test_cuda_registers_for_all_devices_and_says_why_not() -> None:
    library = Library("cu")
    driver = CudaDriver(library)
    assert driver.register(4096, 100) == ""
    assert driver.unregister(4096) == ""
    mode = driver.relax_capture()
    driver.restore_capture(0)
    assert library.calls == [
        ("cuMemHostRegister_v2", 4096, 100, 1),
        ("cuMemHostUnregister", 4096),
        ("cuThreadExchangeStreamCaptureMode", 2),
        ("cuThreadExchangeStreamCaptureMode", 0),
    ]
    assert mode == 2  # what the function leaves there
    library.error = 800
    assert driver.register(4096, 100) == "CUDA_ERROR_NOT_PERMITTED"
    assert driver.unregister(4096) == "CUDA_ERROR_NOT_PERMITTED"
    assert driver.relax_capture() == 0  # the mode that a thread has at first
    library.error = 713
    assert driver.unregister(4096) == ""  # it is not registered
    assert driver.register(4096, 100) != ""


def test_cuda_is_asked_for_the_thread_s_context() -> None:
    library = Library("cu")
    driver = CudaDriver(library)
    assert not driver.has_context()
    library.cuCtxGetCurrent = lambda context: setattr(context._obj, "value", 7) or 0
    driver = CudaDriver(library)
    assert driver.has_context()
    driver._current_context = lambda context: setattr(context._obj, "value", 7) or 201
    assert not driver.has_context()


def test_a_library_that_is_not_there_is_an_os_error(monkeypatch) -> None:
    if ctypes.util.find_library("cuda"):
        pytest.skip("there is a driver")
    with pytest.raises(OSError, match="libcuda"):
        CudaDriver()
