"""A device that batches are copied to, through torch's interface for all accelerators.

There is one backend for each loader and device. Its stream is made once, because torch's allocator
keeps device memory for the stream that first used it. The device is not initialized before the
loader's thread starts, so that the workers of the first epoch can be forked.
"""

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

import torch

from shmloader.device.drivers import Driver, open_driver, relaxed_capture
from shmloader.interruptions import Suppressed, is_interruption


class Event(Protocol):
    """A point in a stream. It is complete when all earlier work of the stream is done."""

    def query(self) -> bool:
        """Return whether it is complete."""

    def synchronize(self) -> None:
        """Wait until it is complete."""


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
        can_pin: Whether torch has pinned memory for its kind.
        is_lost: Whether the device has reported an error that lasts.

    Args:
        device: See above.
    """

    can_pin = True

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.is_lost = False
        self._driver: Driver | None = None
        # The first is our stream; a list, since two threads may make it at the same time.
        self._streams: list[Any] = []
        self._numbers = itertools.count()
        # Events of the user's streams, for each batch that was handed over, oldest first. The
        # user's threads put them there. They outlive an epoch, which may be short.
        self._handed_over: dict[int, list[Event]] = {}
        self._new_stream: Callable[[torch.device], Any] = torch.Stream
        self._new_event: Callable[[torch.device], Any] = functools.partial(
            torch.Event, enable_timing=False
        )
        self._current_stream: Callable[[torch.device], Any] = torch.accelerator.current_stream
        if device.type == "cuda":
            # Waiting for a torch.Event keeps a core busy, which the workers need.
            self._new_stream = torch.cuda.Stream
            self._new_event = lambda _: torch.cuda.Event(blocking=True)
            self._current_stream = torch.cuda.current_stream

    def driver(self) -> Driver | None:
        """Return the driver for this kind of device, or None if there is no known one.

        Raises:
            OSError: If its library is not there.
            AttributeError: If the library lacks a function.
        """
        if self._driver is None:
            self._driver = open_driver(self.device.type)
        return self._driver

    @property
    def stream(self) -> Any:
        """The loader's stream. The first call makes it, and initializes the device."""
        if not self._streams:
            self._streams.append(self._new_stream(self.device))
        return self._streams[0]

    @contextlib.contextmanager
    def ready(self) -> Iterator[None]:
        """Inside, the calling thread may call the driver, also while a graph is captured."""
        try:
            driver = self.driver()
        except (OSError, AttributeError) as error:
            if is_interruption(error):
                raise
            driver = None
        if driver is None:
            yield
            return
        with relaxed_capture(driver):
            if not driver.has_context():
                # In torch 2.6 and 2.7, selecting device 0 on a new thread binds no context.
                # Waiting for a stream binds one in every runtime.
                with Suppressed(Exception):
                    self.stream.synchronize()
            yield

    def enter(self) -> None:
        """Make the loader's stream the current one of the calling thread, a thread of its own."""
        torch.accelerator.set_stream(self.stream)

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a tensor to the device, on the calling thread's current stream.

        The copy reads the tensor's memory after this has returned, where that is page-locked.
        """
        return tensor.to(self.device, non_blocking=True)

    def move(self, batch: Any) -> Any:
        """Copy an object to the device, by its own ``to``."""
        return move_to(batch, self.device)

    def number(self) -> int:
        """Return the number of a new batch."""
        return next(self._numbers)

    def record(self) -> Event:
        """Record an event on the loader's stream."""
        return self._record(self.device, self.stream)

    def record_all(self, tensors: Iterable[torch.Tensor]) -> dict[torch.device, Event]:
        """Record what the calling thread has enqueued for a batch.

        Returns:
            An event of the thread's current stream, for each device that the batch has tensors on,
            and for the loader's device.
        """
        devices = dict.fromkeys([self.device, *(tensor.device for tensor in tensors)])
        return {device: self._record(device, self._current_stream(device)) for device in devices}

    def _record(self, device: torch.device, stream: Any) -> Event:
        event = self._new_event(device)
        event.record(stream)
        return event  # type: ignore[no-any-return]

    def hand_over(
        self, events: Mapping[torch.device, Event], tensors: Iterable[torch.Tensor], number: int
    ) -> None:
        """Let the calling thread's current streams use a batch.

        Args:
            events: When the batch is ready, for each device that it has tensors on.
            tensors: One tensor of each of its storages.
            number: The batch's. It may be handed over several times, to one thread after the other.
        """
        streams = {device: self._current_stream(device) for device in events}
        for device, event in events.items():
            streams[device].wait_event(event)
        for tensor in tensors:
            tensor.record_stream(streams[tensor.device])
        self._handed_over[number] = [
            self._record(device, stream) for device, stream in streams.items()
        ]

    def wait_for_user(self, most: int) -> None:
        """Wait until the user's work on earlier batches is done.

        Args:
            most: The number of batches, of those handed over last, that are not waited for.
        """
        while len(self._handed_over) > most:
            oldest = next(iter(self._handed_over.copy()))
            for event in self._handed_over.pop(oldest, ()):
                event.synchronize()

    def check(self) -> bool:
        """Wait for all copies. Returns whether the device still works."""
        if self._streams:
            with self.ready():
                try:
                    self.stream.synchronize()
                except Exception as error:
                    if is_interruption(error):
                        raise
                    self.is_lost = True  # whatever a kind of device raises
        return not self.is_lost


class BlockingBackend(Backend):
    """A device whose kind offers no streams (MPS). Each copy waits until it is done."""

    can_pin = False

    def enter(self) -> None:
        """Do nothing: there is one stream."""

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a tensor to the device."""
        return tensor.to(self.device)

    def record(self) -> Event:
        """Return an event that is complete."""
        return _Done()

    def record_all(self, tensors: Iterable[torch.Tensor]) -> dict[torch.device, Event]:  # noqa: ARG002 - as a backend's
        """Return nothing: there is nothing to wait for."""
        return {}

    def hand_over(
        self, events: Mapping[torch.device, Event], tensors: Iterable[torch.Tensor], number: int
    ) -> None:
        """Do nothing: the batch is ready, and was made on the current stream."""


class _Done:
    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


def open_backend(device: torch.device) -> Backend:
    """Return the backend for a device."""
    return BlockingBackend(device) if device.type == "mps" else Backend(device)
