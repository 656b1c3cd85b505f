"""Devices that batches are copied to, through torch's interface for all accelerators.

There is one backend for each loader and device. Its stream is made once, because torch's allocator
keeps device memory for the stream that first used it. Nothing here initializes a device before the
loader's thread starts, so that the workers of the first epoch can be forked.
"""

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import torch

from shmloader.device.drivers import CudaDriver, open_driver, relaxed_capture
from shmloader.interruptions import Caught, Suppressed, attempt

#: A point in a stream, such as a ``torch.Event``, complete when all earlier work of the stream is.
Event = Any


def parse_device(value: object, argument: str = "device") -> torch.device | None:
    """Check a device that the user gave.

    Args:
        value: None, a str such as ``"cuda:0"``, an index, or a ``torch.device``.
        argument: The name of the argument, for the texts of errors.

    Returns:
        The device, with its index if its kind can have several; None for the CPU.

    Raises:
        TypeError: If the value is of another type.
        ValueError: If torch knows no such device.
        RuntimeError: If this machine, or this build of torch, does not have the device.
    """
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, str | int | torch.device):
        raise TypeError(
            f"{argument} should be a device such as 'cuda:0', an index or a torch.device, "
            f"but got {argument}={value!r}"
        )
    try:
        if isinstance(value, int):
            value = f"{_accelerator_kind() or 'cuda'}:{value}"
        device = torch.device(value)
    except RuntimeError as error:
        raise ValueError(
            f"{argument} should name a device that torch knows, but got {argument}={value!r}: "
            f"{error}"
        ) from None
    if device.type == "cpu":
        return None
    count = _count(device.type)
    index: int | None = device.index
    if (index or 0) >= count:
        raise RuntimeError(
            f"{argument}='{device}' does not exist: torch {torch.__version__} finds {count} "
            f"{device.type} devices here"
        )
    if index is None and device.type != "mps":
        return torch.device(device.type, current_index(device.type))
    return device


def current_index(kind: str) -> int:
    """Return the index of the calling thread's current device of a kind."""
    is_initialized = getattr(torch.get_device_module(kind), "is_initialized", lambda: True)
    if not is_initialized():
        return 0  # the default: torch initializes the kind when another device is selected
    return torch.accelerator.current_device_index()


def _accelerator_kind() -> str | None:
    # Not is_available(), which calls CUDA's driver.
    try:
        accelerator = torch.accelerator.current_accelerator()
    except RuntimeError:  # torch 2.6 raises it if there is none
        return None
    return None if accelerator is None else accelerator.type


def _count(kind: str) -> int:
    """Return how many devices of a kind there are. Not by is_available(), for the same reason."""
    if kind == "cuda":
        return torch.cuda.device_count()
    return torch.accelerator.device_count() if kind == _accelerator_kind() else 0


def move_to(batch: Any, device: Any) -> Any:
    """Call an object's own ``to``, which may not accept ``non_blocking``."""
    try:
        return batch.to(device, non_blocking=True)
    except TypeError:
        return batch.to(device)


class Backend:
    """One device, with a stream for copies.

    Attributes:
        device: The device, with its index.
        driver: The driver for this kind of device; None if there is no known one.
        no_driver: Why that driver could not be opened; "" if it was, or if none is known.
        can_pin: Whether torch has pinned memory for this kind of device.
        is_lost: Whether the device has reported a permanent error.
        numbers: The numbers of the batches.
    """

    can_pin = True

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.is_lost = False
        self.no_driver = ""
        # The first item is the loader's stream. A list, because two threads may each make one.
        self._streams: list[Any] = []
        self.numbers = itertools.count()
        # The events of the user's streams, for each batch that was handed over, oldest first. The
        # user's threads add them. The next epoch still waits for them: an epoch may be short.
        self._handed_over: dict[int, list[Event]] = {}
        self._new_stream: Callable[[torch.device], Any] = torch.Stream
        self._new_event: Callable[[torch.device], Any] = functools.partial(
            torch.Event, enable_timing=False
        )
        self._current_stream: Callable[[torch.device], Any] = torch.accelerator.current_stream
        if device.type == "cuda":
            # Waiting for a torch.Event would keep a core busy that the workers need.
            self._new_stream = torch.cuda.Stream
            self._new_event = lambda _: torch.cuda.Event(blocking=True)
            self._current_stream = torch.cuda.current_stream

    @functools.cached_property
    def driver(self) -> CudaDriver | None:
        """Open the driver for this kind of device."""
        driver = attempt(open_driver, self.device.type)
        if isinstance(driver, Caught):  # its library, or a function of it, is missing
            self.no_driver = str(driver.error)
            return None
        return driver

    @property
    def stream(self) -> Any:
        """The loader's stream. The first access makes it, and initializes the device."""
        if not self._streams:
            self._streams.append(self._new_stream(self.device))
        return self._streams[0]

    @contextlib.contextmanager
    def ready(self) -> Iterator[None]:
        """Prepare the calling thread for driver calls in the block, even during a graph capture."""
        driver = self.driver
        if driver is None:
            yield
            return
        with relaxed_capture(driver):
            if not driver.has_context():
                # In torch 2.6 and 2.7, selecting device 0 on a new thread binds no context.
                # Waiting for a stream binds one in every runtime.
                with Suppressed(RuntimeError):
                    self.stream.synchronize()
            yield

    def enter(self) -> None:
        """Make the loader's stream the current one of the calling thread."""
        torch.accelerator.set_stream(self.stream)

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a tensor to the device, on the calling thread's current stream.

        If the tensor's memory is page-locked, the copy may read it after this method has returned.
        """
        return tensor.to(self.device, non_blocking=True)

    def record(self) -> Event:
        """Record an event on the loader's stream."""
        return self._record(self.device, self.stream)

    def record_all(self, tensors: Iterable[torch.Tensor]) -> dict[torch.device, Event]:
        """Record what the calling thread has enqueued for a batch.

        Returns:
            An event of the thread's current stream, for the loader's device and for each device
            that the batch has tensors on.
        """
        devices = dict.fromkeys([self.device, *(tensor.device for tensor in tensors)])
        return {device: self._record(device, self._current_stream(device)) for device in devices}

    def _record(self, device: torch.device, stream: Any) -> Event:
        event = self._new_event(device)
        event.record(stream)
        return event

    def hand_over(
        self, events: Mapping[torch.device, Event], tensors: Iterable[torch.Tensor], number: int
    ) -> None:
        """Make the calling thread's current streams wait for a batch, and note that they use it.

        Args:
            events: For each device that the batch has tensors on, the event that is complete when
                the batch is ready.
            tensors: One tensor of each of the batch's storages.
            number: The batch's number. A batch may be handed over several times, from one thread
                to the next.
        """
        streams = {device: self._current_stream(device) for device in events}
        for device, event in events.items():
            streams[device].wait_event(event)
        for tensor in tensors:
            tensor.record_stream(streams[tensor.device])
        self._handed_over[number] = [
            self._record(device, stream) for device, stream in streams.items()
        ]

    def wait_for_user(self, newest: int) -> None:
        """Wait until the user's work on earlier batches is done.

        Args:
            newest: How many of the most recent batches are not waited for.
        """
        while len(self._handed_over) > newest:
            oldest = next(iter(self._handed_over.copy()))
            for event in self._handed_over.pop(oldest, ()):
                event.synchronize()

    def check(self) -> bool:
        """Wait for all copies. Returns False if the device has reported a permanent error."""
        if self._streams:
            with self.ready():
                self.is_lost |= isinstance(attempt(self.stream.synchronize), Caught)
        return not self.is_lost


class BlockingBackend(Backend):
    """A device of a kind without streams (MPS). Each copy waits until it is done."""

    can_pin = False

    def enter(self) -> None:
        """Do nothing: there are no streams."""

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a tensor to the device."""
        return tensor.to(self.device)

    def record(self) -> Event:
        """Return a complete event."""
        return SimpleNamespace(query=lambda: True, synchronize=lambda: None)

    def record_all(self, tensors: Iterable[torch.Tensor]) -> dict[torch.device, Event]:  # noqa: ARG002 - the base's signature
        """Return no events: there is nothing to wait for."""
        return {}

    def hand_over(
        self, events: Mapping[torch.device, Event], tensors: Iterable[torch.Tensor], number: int
    ) -> None:
        """Do nothing: the batch is ready."""


def open_backend(device: torch.device) -> Backend:
    """Return the backend for a device."""
    return BlockingBackend(device) if device.type == "mps" else Backend(device)
