"""A device that batches are copied to: torch's interface for all accelerators, and CUDA's driver.

There is one backend for each loader and device. Its stream is made once, because torch's allocator
keeps device memory for the stream that first used it. Nothing here initializes a device before the
loader's thread starts, so that the workers of the first epoch can be forked.

CUDA's driver does what torch does not offer: page locks, and the mode of graph capture. (The
runtime would keep the error of a refused call, and the user's next call would report it.) Batches
for kinds of device without a driver in `DRIVERS`, and for ROCm, go through torch's pinned memory.
"""

import collections
import contextlib
import ctypes
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from shmloader.grammar import counted
from shmloader.interruptions import Caught, attempt

#: A point in a stream, such as a ``torch.Event``, complete when all earlier work of the stream is.
Event = Any

# Numbers of <cuda.h>.
_PORTABLE = 1  # CU_MEMHOSTREGISTER_PORTABLE: for all devices
_CAPTURE_GLOBAL = 0  # CU_STREAM_CAPTURE_MODE_GLOBAL: the default
_NOT_REGISTERED = 713  # CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED
_CAPTURE_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


def parse_device(value: object) -> torch.device | None:
    """Return the device that the user gave, with its index; None for the CPU.

    Args:
        value: None, a str such as ``"cuda:0"``, an index, or a ``torch.device``.

    Raises:
        TypeError: If the value is of another type.
        ValueError: If torch knows no such device.
        RuntimeError: If this machine, or this build of torch, does not have the device.
    """
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, str | int | torch.device):
        raise TypeError(
            f"device should be a device such as 'cuda:0', an index or a torch.device, "
            f"but got device={value!r}"
        )
    try:
        if isinstance(value, int):
            value = f"{_accelerator_kind() or 'cuda'}:{value}"
        device = torch.device(value)
    except RuntimeError as error:
        raise ValueError(
            f"device should name a device that torch knows, but got device={value!r}: {error}"
        ) from None
    if device.type == "cpu":
        return None
    # Not is_available(), which calls CUDA's driver.
    count = torch.cuda.device_count() if device.type == "cuda" else 0
    if device.type == _accelerator_kind() != "cuda":
        count = torch.accelerator.device_count()
    index: int | None = device.index
    if (index or 0) >= count:
        raise RuntimeError(
            f"device='{device}' does not exist: torch {torch.__version__} finds "
            f"{counted(count, f'{device.type} device')} here"
        )
    return torch.device(device.type, current_index(device.type)) if index is None else device


def current_index(kind: str) -> int:
    """Return the index of the calling thread's current device of a kind."""
    is_initialized = getattr(torch.get_device_module(kind), "is_initialized", lambda: True)
    if not is_initialized():
        return 0  # the default: torch initializes the kind when another device is selected
    return torch.accelerator.current_device_index()


def _accelerator_kind() -> str | None:
    try:
        accelerator = torch.accelerator.current_accelerator()
    except RuntimeError:  # torch 2.6 raises it if there is none
        return None
    return None if accelerator is None else accelerator.type


class CudaDriver:
    """The driver of CUDA. Called from any thread.

    Raises:
        OSError: If its library is missing.
        AttributeError: If the library lacks a function.
    """

    def __init__(self, library: Any = None) -> None:
        library = library or ctypes.CDLL("libcuda.so.1")
        self._register = library.cuMemHostRegister_v2
        self._register.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint]
        self._unregister = library.cuMemHostUnregister
        self._unregister.argtypes = [ctypes.c_void_p]
        self._exchange_mode = library.cuThreadExchangeStreamCaptureMode
        self._current_context = library.cuCtxGetCurrent
        self._error_name = library.cuGetErrorName

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
        if self._exchange_mode(ctypes.byref(mode)):
            return _CAPTURE_GLOBAL  # nothing was exchanged: CUDA is not initialized yet
        return mode.value

    def restore_capture(self, mode: int) -> None:
        """Restore the calling thread's mode, which :meth:`relax_capture` returned."""
        self._exchange_mode(ctypes.byref(ctypes.c_int(mode)))

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


def open_driver(kind: str) -> CudaDriver | str:
    """Return the driver of a kind of device; or why it has none, "" if none is known."""
    driver = attempt(DRIVERS[kind]) if kind in DRIVERS else ""
    return str(driver.error) if isinstance(driver, Caught) else driver


def relax_this_thread(kind: str) -> None:
    """Relax the calling thread's capture mode for good. Does nothing if there is no driver."""
    driver = open_driver(kind)
    if not isinstance(driver, str):
        driver.relax_capture()


class Backend:
    """One device, with a stream for copies.

    Attributes:
        device: The device, with its index.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # The event of the user's stream, for each batch that was delivered, oldest first. The
        # user's threads add it. The next epoch still waits for it: an epoch may be short.
        self._delivered: collections.deque[Event] = collections.deque()
        self._new_stream: Any = torch.Stream
        self._new_event: Any = torch.Event
        self._current_stream: Any = torch.accelerator.current_stream
        if device.type == "cuda":
            # Waiting for a torch.Event would keep a core busy that the workers need.
            self._new_stream = torch.cuda.Stream
            self._new_event = lambda _: torch.cuda.Event(blocking=True)
            self._current_stream = torch.cuda.current_stream

    @functools.cached_property
    def driver(self) -> CudaDriver | str:
        """The driver for this kind of device; or why there is none, "" if none is known."""
        return open_driver(self.device.type)

    @functools.cached_property
    def stream(self) -> Any:
        """The loader's stream. The first access makes it, and initializes the device."""
        return self._new_stream(self.device)

    @contextlib.contextmanager
    def ready(self) -> Iterator[None]:
        """Prepare the calling thread for driver calls in the block, even during a graph capture."""
        driver = self.driver
        if isinstance(driver, str):
            yield
            return
        mode = driver.relax_capture()
        try:
            if not driver.has_context():
                # In torch 2.6 and 2.7, selecting device 0 on a new thread binds no context.
                # Waiting for a stream binds one in every runtime. A lost device refuses it.
                attempt(self.stream.synchronize)
            yield
        finally:
            driver.restore_capture(mode)

    def enter(self) -> None:
        """Make the loader's stream the current one of the calling thread."""
        torch.accelerator.set_stream(self.stream)

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a tensor to the device, on the calling thread's current stream.

        If the tensor's memory is page-locked, the copy may read it after this method has returned.
        """
        return tensor.to(self.device, non_blocking=True)

    def current_stream(self) -> Any:
        """Return the calling thread's current stream."""
        return self._current_stream(self.device)

    def record(self, stream: Any = None) -> Event:
        """Record an event on a stream; None for the loader's."""
        event = self._new_event(self.device)
        event.record(self.stream if stream is None else stream)
        return event

    def deliver(self, event: Event, tensors: Iterable[torch.Tensor]) -> None:
        """Make the calling thread's current stream wait for a batch, and record that it uses it.

        Args:
            event: Complete when the batch is ready.
            tensors: One tensor of each of the batch's storages.
        """
        stream = self.current_stream()
        stream.wait_event(event)
        for tensor in tensors:
            tensor.record_stream(stream)
        self._delivered.append(self.record(stream))

    def wait_for_user(self, newest: int) -> None:
        """Wait until the user's work on all batches but the ``newest`` is done."""
        while len(self._delivered) > newest:
            with contextlib.suppress(IndexError):  # another epoch's thread has taken it
                self._delivered.popleft().synchronize()

    def finish(self) -> None:
        """Wait for all copies. A device with a permanent error refuses that, and reads no more."""
        if "stream" in self.__dict__:
            with self.ready():
                attempt(self.stream.synchronize)
