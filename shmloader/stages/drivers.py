"""Functions of the GPU's driver that torch does not offer: page-locking, and the capture mode.

On CUDA they are the driver's own: a refusal by the runtime would leave an error behind that the
user's next call reports. HIP has one library for both, whose last error is reset after a refusal.
"""

import ctypes
import re
from pathlib import Path
from typing import Any, Protocol

import torch

# The same numbers in <cuda.h> and <hip/hip_runtime_api.h>.
_PORTABLE = 1  # CU_MEMHOSTREGISTER_PORTABLE, hipHostRegisterPortable: for all devices
_CAPTURE_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED, hipStreamCaptureModeRelaxed


class Driver(Protocol):
    """What the backend asks of it."""

    def register(self, address: int, nbytes: int) -> str:
        """Page-lock memory; returns why not, or nothing."""

    def unregister(self, address: int) -> None:
        """Undo it."""

    def relax_capture(self) -> None:
        """Let this thread work while another one captures a graph."""


def open_driver() -> Driver:
    """The driver of the kind of GPU that this torch was built for.

    Raises:
        OSError: If its library is not there.
        AttributeError: If that lacks a function.
    """
    return CudaDriver() if torch.version.hip is None else HipDriver()


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
        self._error_name = library.cuGetErrorName
        self._error_name.argtypes = [ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)]

    def register(self, address: int, nbytes: int) -> str:
        """Page-lock memory; returns why not, or nothing."""
        error = self._register(address, nbytes, _PORTABLE)
        if error == 0:
            return ""
        name = ctypes.c_char_p()
        self._error_name(error, ctypes.byref(name))
        return (name.value or b"").decode() or f"CUDA error {error}"

    def unregister(self, address: int) -> None:
        """Undo it."""
        self._unregister(address)

    def relax_capture(self) -> None:
        """Let this thread work while another one captures a graph."""
        self._exchange_mode(ctypes.byref(ctypes.c_int(_CAPTURE_RELAXED)))


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
        """Page-lock memory; returns why not, or nothing."""
        error = self._register(address, nbytes, _PORTABLE)
        if error == 0:
            return ""
        self._take_last_error()
        return (self._error_name(error) or b"").decode() or f"HIP error {error}"

    def unregister(self, address: int) -> None:
        """Undo it."""
        if self._unregister(address) != 0:
            self._take_last_error()

    def relax_capture(self) -> None:
        """Let this thread work while another one captures a graph."""
        if self._exchange_mode(ctypes.byref(ctypes.c_int(_CAPTURE_RELAXED))) != 0:
            self._take_last_error()


def _loaded_library(name: str, maps: Path = Path("/proc/self/maps")) -> str:
    """The file of a library that this process has loaded, which may be torch's own copy.

    Raises:
        OSError: If it has not.
    """
    found = re.search(rf"\S*/{re.escape(name)}\S*", maps.read_text())
    if found is None:
        raise OSError(f"{name} is not loaded")
    return found[0]
