"""Copies the batches of a step to several devices, one to each, on one thread."""

import contextlib
import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch

from shmloader.device.backend import Backend
from shmloader.device.device import DeviceStage
from shmloader.device.page_locks import PageLocks
from shmloader.device.structure import map_tensors


class HostStage:
    """Copies batches out of their slots, which a device reads as well, into memory of their own."""

    def __init__(self, transform: Callable[[Any], Any] | None = None) -> None:
        self._transform = transform

    def run(self, batch: Any) -> Any:
        """Copy a batch."""
        copied = map_tensors(torch.clone, batch, copy.deepcopy)
        return copied if self._transform is None else self._transform(copied)

    def hand_over(self, result: Any) -> Any:
        """It is there."""
        return result

    def start(self) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Nothing is under way."""


class DevicesStage:
    """Copies batch i of each step to device i. A stream for each.

    Attributes:
        ahead: Steps that may be ready and not taken.
        name: Of the thread.

    Args:
        backends: The devices; None for the CPU.
        locks: The page locks of the slots.
        ahead: See above; at least 1.
        transform: Called with each batch on its device, on the thread and the device's stream.
    """

    name = DeviceStage.name
    kind = DeviceStage.kind

    def __init__(
        self,
        backends: Sequence[Backend | None],
        locks: PageLocks,
        ahead: int,
        transform: Callable[[Any], Any] | None = None,
    ) -> None:
        self.ahead: int | None = ahead
        self._stages = [
            HostStage(transform)
            if backend is None
            else DeviceStage(backend, locks, ahead, transform)
            for backend in backends
        ]

    def start(self) -> None:
        """Begin, on the thread."""
        for stage in self._stages:
            stage.start()

    def run(self, batch: Any) -> list[Any]:
        """Start the copies of a step: a list of at most as many batches as there are devices."""
        results, part = [], None
        try:
            for stage, part in zip(self._stages, batch, strict=False):
                results.append(stage.run(part))
        finally:
            del batch, part  # a traceback keeps this frame, which must not keep the slot
        return results

    def hand_over(self, result: list[Any]) -> object:
        """Give the batches to the user, whose current stream on each device waits for its own."""
        return [stage.hand_over(batch) for stage, batch in zip(self._stages, result, strict=False)]

    def close(self) -> None:
        """Wait for the copies under way, and let go of their slots."""
        with contextlib.ExitStack() as stack:  # one that fails keeps none of the others
            for stage in self._stages:
                stack.callback(stage.close)
