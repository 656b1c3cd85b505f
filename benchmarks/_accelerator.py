"""The accelerator that a benchmark runs on: torch's own, or the test device of this repository.

The test device (``--device late``, `tests.late`) is for trying a benchmark out where there is no
accelerator. Its figures say nothing about real devices.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from shmloader.device.backend import parse_device

LATE = "late"


class Accelerator:
    """One device, and what benchmarks ask of it.

    Attributes:
        device: The device, with its index.
        can_time: Whether its events measure time. Those of the test device do not.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        torch.accelerator.set_device_index(device.index or 0)
        torch.empty(1, device=device)  # initializes the device
        # Waiting for a torch.Event keeps a core busy, which would count as the consumer's time. On
        # CUDA, streams and events of torch's two interfaces cannot be used with each other.
        if device.type == "cuda":
            self._new_event: Any = functools.partial(torch.cuda.Event, blocking=True)
            self._new_stream: Any = torch.cuda.Stream
            self._current_stream: Any = torch.cuda.current_stream
        else:
            self._new_event = functools.partial(torch.Event, device)
            self._new_stream = torch.Stream
            self._current_stream = torch.accelerator.current_stream
        self.can_time = self._try_timing()

    def describe(self) -> dict[str, str]:
        """Name the device, and the versions of what drives it."""
        if self.device.type == LATE:
            return {"device": f"{self.device}, a test device: its figures mean nothing"}
        name = torch.get_device_module(self.device).get_device_name(self.device)
        found = {"device": f"{self.device}, {name}"}
        if self.device.type == "cuda":
            runtime = torch.version.hip or torch.version.cuda
            found["runtime"] = f"{'ROCm' if torch.version.hip else 'CUDA'} {runtime}"
        return found

    def _try_timing(self) -> bool:
        events = [self._new_event(enable_timing=True) for _ in range(2)]
        for event in events:
            event.record()
        self.synchronize()
        try:
            events[0].elapsed_time(events[1])
        except RuntimeError:
            return False
        return True

    def event(self) -> Any:
        """Record an event on the current stream. It measures time if the device can."""
        event = self._new_event(enable_timing=self.can_time)
        event.record()
        return event

    def current_stream(self) -> Any:
        """Return the calling thread's current stream."""
        return self._current_stream(self.device)

    def new_stream(self) -> Any:
        """Make a stream."""
        return self._new_stream(self.device)

    def synchronize(self) -> None:
        """Wait until the device has done all its work."""
        torch.accelerator.synchronize(self.device)

    @contextlib.contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        """Make a stream the calling thread's current one inside the ``with`` block."""
        before = self.current_stream()
        torch.accelerator.set_stream(stream)
        try:
            yield
        finally:
            torch.accelerator.set_stream(before)

    def most_reserved_bytes(self) -> int | None:
        """Return the most device memory that torch's allocator has held; None if unknown."""
        module = torch.get_device_module(self.device)
        counted = getattr(module, "max_memory_reserved", None)
        return None if counted is None else int(counted(self.device))


def find_device(name: str | None) -> torch.device | str:
    """Find a device by its name, or torch's accelerator. Initializes no device but "late".

    Args:
        name: The device's name, such as "cuda:0" or "late". None: the one that torch finds.

    Returns:
        The device, or one line that says why there is none.
    """
    if name == LATE:
        return _find_late()
    if name is None:
        if not torch.accelerator.is_available():
            return f"There is no accelerator: torch {torch.__version__} finds none on this machine."
        kind = torch.accelerator.current_accelerator()
        assert kind is not None
        name = kind.type
    try:
        device = parse_device(name)
    except (RuntimeError, ValueError) as error:
        return f"There is no such accelerator: {error}."
    return "The CPU is no accelerator." if device is None else device


def _find_late() -> torch.device | str:
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from tests.late import reason_to_skip, switch_on  # noqa: PLC0415 - it needs pytest

    if reason := reason_to_skip():
        return f"The test device cannot be used: {reason}."
    switch_on()
    return torch.device(LATE, 0)


def open_accelerator(name: str | None) -> Accelerator | str:
    """Open the device that :func:`find_device` finds, or return the line that says why not."""
    device = find_device(name)
    return device if isinstance(device, str) else Accelerator(device)
