"""The two driver functions that torch does not offer: page locks, and the mode of graph capture.

No other module names a driver. `DRIVERS` lists the kinds of device that have one. Batches for other
kinds go through torch's pinned memory.

On CUDA the functions are the driver's own: a refusal by the runtime would leave an error behind
that the user's next call reports. HIP has one library for both, whose last error is reset after a
refusal.
"""

import contextlib
import ctypes
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch

from shmloader.interruptions import Suppressed

# The same numbers in <cuda.h> and <hip/hip_runtime_api.h>.
_PORTABLE = 1  # CU_MEMHOSTREGISTER_PORTABLE, hipHostRegisterPortable: for all devices
_CAPTURE_GLOBAL = 0  # CU_STREAM_CAPTURE_MODE_GLOBAL, hipStreamCaptureModeGlobal: a thread's first
_NOT_REGISTERED = 713  # CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED, hipErrorHostMemoryNotRegistered
_CAPTURE_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED, hipStreamCaptureModeRelaxed


class Driver(Protocol):
    """The functions of a kind of device. They may be called from any thread."""

    def register(self, address: int, nbytes: int) -> str:
        """Page-lock memory for all devices. Returns why not, or an empty string."""

    def unregister(self, address: int) -> str:
        """Undo it. Returns why not, or an empty string, also if the memory is not registered."""

    def has_context(self) -> bool:
        """Whether the calling thread has a context, which registering needs."""

    def relax_capture(self) -> int:
        """Let the calling thread work while another one captures a graph. Returns its mode."""

    def restore_capture(self, mode: int) -> None:
        """Give the calling thread back the mode that :meth:`relax_capture` returned."""


def _prepare(register: Any, unregister: Any, exchange_mode: Any) -> None:
    register.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint]
    unregister.argtypes = [ctypes.c_void_p]
    exchange_mode.argtypes = [ctypes.POINTER(ctypes.c_int)]


class CudaDriver:
    """CUDA's.

    Args:
        library: ``libcuda``, if it is loaded.
    """

    def __init__(self, library: Any = None) -> None:
        library = library or ctypes.CDLL("libcuda.so.1")
        self._register = library.cuMemHostRegister_v2
        self._unregister = library.cuMemHostUnregister
        self._exchange_mode = library.cuThreadExchangeStreamCaptureMode
        _prepare(self._register, self._unregister, self._exchange_mode)
        self._current_context = library.cuCtxGetCurrent
        self._current_context.argtypes = [ctypes.POINTER(ctypes.c_void_p)]
        self._error_name = library.cuGetErrorName
        self._error_name.argtypes = [ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)]

    def register(self, address: int, nbytes: int) -> str:
        """Page-lock memory for all devices. Returns why not, or an empty string."""
        return self._describe(self._register(address, nbytes, _PORTABLE))

    def unregister(self, address: int) -> str:
        """Undo it. Returns why not, or an empty string, also if the memory is not registered."""
        return self._describe(self._unregister(address), besides=_NOT_REGISTERED)

    def has_context(self) -> bool:
        """Whether the calling thread has a context, which registering needs."""
        context = ctypes.c_void_p()
        return self._current_context(ctypes.byref(context)) == 0 and bool(context.value)

    def relax_capture(self) -> int:
        """Let the calling thread work while another one captures a graph. Returns its mode."""
        mode = ctypes.c_int(_CAPTURE_RELAXED)
        if self._exchange_mode(ctypes.byref(mode)) != 0:
            return _CAPTURE_GLOBAL  # nothing was exchanged: CUDA is not initialized yet
        return mode.value

    def restore_capture(self, mode: int) -> None:
        """Give the calling thread back the mode that :meth:`relax_capture` returned."""
        self._exchange_mode(ctypes.byref(ctypes.c_int(mode)))

    def _describe(self, error: int, besides: int = 0) -> str:
        if error in {0, besides}:
            return ""
        name = ctypes.c_char_p()
        self._error_name(error, ctypes.byref(name))
        return (name.value or b"").decode() or f"CUDA error {error}"


class HipDriver:
    """ROCm's.

    Args:
        library: ``libamdhip64``; None: the one that torch has loaded.
    """

    def __init__(self, library: Any = None) -> None:
        library = library or ctypes.CDLL(_loaded_library("libamdhip64.so"))
        self._register = library.hipHostRegister
        self._unregister = library.hipHostUnregister
        self._exchange_mode = library.hipThreadExchangeStreamCaptureMode
        _prepare(self._register, self._unregister, self._exchange_mode)
        self._error_name = library.hipGetErrorName
        self._error_name.argtypes = [ctypes.c_int]
        self._error_name.restype = ctypes.c_char_p
        self._take_last_error = library.hipGetLastError

    def register(self, address: int, nbytes: int) -> str:
        """Page-lock memory for all devices. Returns why not, or an empty string."""
        return self._describe(self._register(address, nbytes, _PORTABLE))

    def unregister(self, address: int) -> str:
        """Undo it. Returns why not, or an empty string, also if the memory is not registered."""
        return self._describe(self._unregister(address), besides=_NOT_REGISTERED)

    def has_context(self) -> bool:
        """HIP's functions make one where they need it."""
        return True

    def relax_capture(self) -> int:
        """Let the calling thread work while another one captures a graph. Returns its mode."""
        mode = ctypes.c_int(_CAPTURE_RELAXED)
        if self._describe(self._exchange_mode(ctypes.byref(mode))):
            return _CAPTURE_GLOBAL  # nothing was exchanged
        return mode.value

    def restore_capture(self, mode: int) -> None:
        """Give the calling thread back the mode that :meth:`relax_capture` returned."""
        self._describe(self._exchange_mode(ctypes.byref(ctypes.c_int(mode))))

    def _describe(self, error: int, besides: int = 0) -> str:
        if error == 0:
            return ""
        self._take_last_error()
        if error == besides:
            return ""
        return (self._error_name(error) or b"").decode() or f"HIP error {error}"


def _loaded_library(name: str, maps: Path = Path("/proc/self/maps")) -> str:
    """The file of a library that this process has loaded, which may be torch's own copy.

    Raises:
        OSError: If it has not.
    """
    found = re.search(rf"\S*/{re.escape(name)}\S*", maps.read_text())
    if found is None:
        raise OSError(f"{name} is not loaded")
    return found[0]


def _open_cuda() -> Driver:
    return CudaDriver() if torch.version.hip is None else HipDriver()


#: What opens the driver of a kind of device, by the type of its ``torch.device``.
DRIVERS: dict[str, Callable[[], Driver]] = {"cuda": _open_cuda}


def open_driver(kind: str) -> Driver | None:
    """The driver of a kind of device, or None if none is known.

    Raises:
        OSError: If its library is not there.
        AttributeError: If the library lacks a function.
    """
    return DRIVERS[kind]() if kind in DRIVERS else None


@contextlib.contextmanager
def relaxed_capture(driver: Driver) -> Iterator[None]:
    """Inside, no call by this thread ends the capture of a graph, by whichever thread."""
    mode = driver.relax_capture()
    try:
        yield
    finally:
        driver.restore_capture(mode)


def relax_this_thread(kind: str) -> None:
    """Relax the mode of a thread of the loader for good. Does nothing if there is no driver."""
    with Suppressed(OSError, AttributeError):
        driver = open_driver(kind)
        if driver is not None:
            driver.relax_capture()
