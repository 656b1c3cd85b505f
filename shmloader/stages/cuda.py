"""CUDA, and ROCm by the same names, as a device that batches are copied to.

Slots are page-locked by :mod:`shmloader.stages.drivers`. What cannot be page-locked goes by way of
torch's pinned memory, which costs one more copy.
"""

import os
import warnings
from contextlib import AbstractContextManager
from typing import Any

import torch

from shmloader.memory.slot import Slot
from shmloader.stages.drivers import Driver, open_driver

# A slot is locked in such steps, so that it need not be locked anew for each larger batch.
_STEP_BYTES = 2 << 20


def move_to(batch: Any, device: Any) -> Any:
    """Call an object's own ``to``, which may know nothing of ``non_blocking``."""
    try:
        return batch.to(device, non_blocking=True)
    except TypeError:
        return batch.to(device)


class CudaBackend:
    """One CUDA device, seen by one loader's thread. See :class:`shmloader.stages.device.Backend`.

    Args:
        device: The device, with its index.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._driver: Driver | None = None
        self._refusal = ""
        try:
            self._driver = open_driver()
        except (OSError, AttributeError) as error:
            self._refuse(str(error))
        self._pid = os.getpid()
        # Bytes that are locked, by the slot's address.
        self._locked: dict[int, int] = {}

    def start(self) -> None:
        """Make the device this thread's own."""
        torch.cuda.set_device(self._device)
        if self._driver is not None:
            self._driver.relax_capture()

    def lock(self, slot: Slot, nbytes: int) -> None:
        """Page-lock a slot's first ``nbytes``, if that is not done or refused."""
        driver = self._driver
        if self._refusal or driver is None or self._locked.get(slot.address, 0) >= nbytes:
            return
        self.unlock(slot)
        wanted = min(-(-nbytes // _STEP_BYTES) * _STEP_BYTES, slot.nbytes)
        refusal = driver.register(slot.address, wanted)
        if refusal:
            self._refuse(f"page-locking {wanted} bytes was refused: {refusal}")
        else:
            self._locked[slot.address] = wanted

    def unlock(self, slot: Slot) -> None:
        """Undo it, once no copy reads the slot."""
        if os.getpid() != self._pid:
            return  # a forked child has no part in what its parent locked
        if self._driver is not None and self._locked.pop(slot.address, 0):
            self._stream.synchronize()
            self._driver.unregister(slot.address)

    def _refuse(self, why: str) -> None:
        self._refusal = why
        warnings.warn(
            f"shmloader copies batches to {self._device} by way of pinned memory, since its own "
            f"cannot be page-locked ({why})",
            RuntimeWarning,
            stacklevel=2,
        )

    def stream(self) -> AbstractContextManager[Any]:
        """What is done inside is done on our stream."""
        return torch.cuda.stream(self._stream)

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a tensor to the device."""
        if self._refusal and tensor.is_cpu and tensor.layout is torch.strided:
            tensor = tensor.pin_memory()
        return tensor.to(self._device, non_blocking=True)

    def move(self, batch: Any) -> Any:
        """Copy an object to the device."""
        return move_to(batch, self._device)

    def record(self) -> torch.cuda.Event:
        """An event on our stream, waited for without turning a core."""
        event = torch.cuda.Event(blocking=True)
        event.record(self._stream)
        return event

    def await_here(self, event: Any) -> None:
        """Let the calling thread's current stream wait for an event."""
        torch.cuda.current_stream(self._device).wait_event(event)

    def use_here(self, tensor: torch.Tensor) -> None:
        """Note that the calling thread's current stream uses a tensor of our stream."""
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))

    def synchronize(self) -> None:
        """Wait for all copies."""
        self._stream.synchronize()


class OtherBackend:
    """An accelerator of another kind (MPS, XPU): torch copies, and the call waits."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def start(self) -> None:
        """Nothing to do."""

    def lock(self, slot: Slot, nbytes: int) -> None:
        """Nothing is locked."""

    def unlock(self, slot: Slot) -> None:
        """Nothing was."""

    def stream(self) -> AbstractContextManager[Any]:
        """torch's current one."""
        return _NoStream()

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a tensor to the device."""
        return tensor.to(self._device)

    def move(self, batch: Any) -> Any:
        """Copy an object to the device."""
        return move_to(batch, self._device)

    def record(self) -> "_Done":
        """All is done."""
        return _Done()

    def await_here(self, event: object) -> None:
        """It is."""

    def use_here(self, tensor: torch.Tensor) -> None:
        """It was made on the current stream."""

    def synchronize(self) -> None:
        """Wait for all copies."""
        torch.accelerator.synchronize(self._device)


class _NoStream(AbstractContextManager[None]):
    def __exit__(self, *_: object) -> None:
        pass


class _Done:
    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass
