"""How the drivers' functions are called, over libraries that only write down."""

import ctypes
import ctypes.util

import pytest

from shmloader.device.backend import CudaDriver, open_driver


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


def test_a_kind_without_a_known_driver_has_none() -> None:
    assert open_driver("xpu") == ""


def test_a_library_that_is_not_there_is_an_os_error(monkeypatch) -> None:
    if ctypes.util.find_library("cuda"):
        pytest.skip("there is a driver")
    with pytest.raises(OSError, match="libcuda"):
        CudaDriver()
