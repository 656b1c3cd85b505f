"""CUDA's driver functions that torch does not offer: page locks, and the mode of graph capture.

No other module names the driver. `DRIVERS` lists the kinds of device that have one. Batches for
other kinds, and for ROCm, go through torch's pinned memory.

The functions are the driver's, not the runtime's: the runtime would keep the error of a refused
call, and the user's next call would report it.
"""

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import torch

# Numbers of <cuda.h>.
_PORTABLE = 1  # CU_MEMHOSTREGISTER_PORTABLE: for all devices
_CAPTURE_GLOBAL = 0  # CU_STREAM_CAPTURE_MODE_GLOBAL: the default
_NOT_REGISTERED = 713  # CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED
_CAPTURE_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


class CudaDriver:
    """The driver of CUDA. Called from any thread.

    Args:
        library: ``libcuda``; None loads it.
    """

    def __init__(self, library: Any = None) -> None:
        library = library or ctypes.CDLL("libcuda.so.1")
        self._register = library.cuMemHostRegister_v2
        self._register.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint]
        self._unregister = library.cuMemHostUnregister
        self._unregister.argtypes = [ctypes.c_void_p]
        self._exchange_mode = library.cuThreadExchangeStreamCaptureMode
        self._exchange_mode.argtypes = [ctypes.POINTER(ctypes.c_int)]
        self._current_context = library.cuCtxGetCurrent
        self._current_context.argtypes = [ctypes.POINTER(ctypes.c_void_p)]
        self._error_name = library.cuGetErrorName
        self._error_name.argtypes = [ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)]

    def register(self, address: int, nbytes: int) -> str:
        """Page-lock memory for all devices. Returns why that failed, or an empty string."""
        return self._describe(self._register(address, nbytes, _PORTABLE))

    def unregister(self, address: int) -> str:
        """Undo :meth:`register`, if it was done. Returns why that failed, or an empty string."""
        error = self._unregister(address)
        return "" if error == _NOT_REGISTERED else self._describe(error)

    def has_context(self) -> bool:
        """Whether the calling thread has a context, which registering needs."""
        context = ctypes.c_void_p()
        return self._current_context(ctypes.byref(context)) == 0 and bool(context.value)

    def relax_capture(self) -> int:
        """Let the calling thread work while another captures a graph. Returns the old mode."""
        mode = ctypes.c_int(_CAPTURE_RELAXED)
        if self._describe(self._exchange_mode(ctypes.byref(mode))):
            return _CAPTURE_GLOBAL  # nothing was exchanged: CUDA is not initialized yet
        return mode.value

    def restore_capture(self, mode: int) -> None:
        """Restore the calling thread's mode, which :meth:`relax_capture` returned."""
        self._describe(self._exchange_mode(ctypes.byref(ctypes.c_int(mode))))

    def _describe(self, error: int) -> str:
        """Return the name of an error, or an empty string for success."""
        if error == 0:
            return ""
        name = ctypes.c_char_p()
        self._error_name(error, ctypes.byref(name))
        return (name.value or b"").decode() or f"CUDA error {error}"


#: Opens the driver of a kind of device, by the type of its ``torch.device``.
DRIVERS: dict[str, Callable[[], CudaDriver]] = (
    {"cuda": CudaDriver} if torch.version.hip is None else {}
)


def open_driver(kind: str) -> CudaDriver | None:
    """Return the driver of a kind of device, or None if there is no known one.

    Raises:
        OSError: If its library is missing.
        AttributeError: If the library lacks a function.
    """
    return DRIVERS[kind]() if kind in DRIVERS else None


@contextlib.contextmanager
def relaxed_capture(driver: CudaDriver) -> Iterator[None]:
    """Keep the calling thread's calls in the block from invalidating a capture on any thread."""
    mode = driver.relax_capture()
    try:
        yield
    finally:
        driver.restore_capture(mode)


def relax_this_thread(kind: str) -> None:
    """Relax the calling thread's capture mode for good. Does nothing if there is no driver."""
    with contextlib.suppress(OSError, AttributeError):
        driver = open_driver(kind)
        if driver is not None:
            driver.relax_capture()
