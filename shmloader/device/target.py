"""Which devices batches are to arrive on, and how they get there.

Nothing here initializes a device: workers forked after that could not use it.
"""

import os
from collections.abc import Sequence

import torch

from shmloader.device.backend import open_backend
from shmloader.device.page_locks import PageLocks


def parse_device(value: object) -> torch.device | None:
    """Read the ``device`` argument.

    Args:
        value: None, a text such as ``"cuda:0"``, an index, or a ``torch.device``.

    Returns:
        The device, with its index where its kind has several; None for the CPU.

    Raises:
        TypeError: If it is none of these.
        ValueError: If torch knows no such device.
        RuntimeError: If this machine, or this build of torch, has none.
    """
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, str | int | torch.device):
        raise TypeError(
            "device should be a device such as 'cuda:0', an index or a torch.device, "
            f"but got device={value!r}"
        )
    if isinstance(value, int):
        kind = _accelerator_kind()
        if kind is None or torch.accelerator.device_count() == 0:
            raise RuntimeError(
                f"device={value} asks for an accelerator, and torch finds none on this machine"
            )
        value = f"{kind}:{value}"
    try:
        device = torch.device(value)
    except RuntimeError as error:
        raise ValueError(
            f"device should name a device that torch knows, but got device={value!r}: {error}"
        ) from None
    if device.type == "cpu":
        return None
    _check_present(device)
    index: int | None = device.index
    if index is None and device.type != "mps":
        return torch.device(device.type, current_index(device.type))
    return device


def current_index(kind: str) -> int:
    """The index of the current device of a kind, for the calling thread."""
    is_initialized = getattr(torch.get_device_module(kind), "is_initialized", lambda: True)
    if not is_initialized():
        return 0  # selecting another device initializes it
    return torch.accelerator.current_device_index()


def _accelerator_kind() -> str | None:
    # Not is_available(), which calls CUDA's driver.
    accelerator = torch.accelerator.current_accelerator()
    return None if accelerator is None else accelerator.type


def _check_present(device: torch.device) -> None:
    if device.type == "cuda":
        if not torch.backends.cuda.is_built():
            raise RuntimeError(
                f"device='{device}' needs CUDA, and this torch ({torch.__version__}) was built "
                "without it"
            )
        # Not is_available(), which calls the driver.
        count = torch.cuda.device_count()
        if count == 0:
            raise RuntimeError(
                f"device='{device}' needs CUDA, and torch finds no usable GPU or driver here"
            )
        if (device.index or 0) >= count:
            raise RuntimeError(f"device='{device}' is not there: this machine has {count} GPUs")
        return
    count = torch.accelerator.device_count() if device.type == _accelerator_kind() else 0
    if count == 0:
        raise RuntimeError(f"device='{device}' is not there: torch finds no {device.type} device")
    if (device.index or 0) >= count:
        raise RuntimeError(
            f"device='{device}' is not there: this machine has {count} {device.type} devices"
        )


class Destination:
    """Where a loader's batches go. All iterators of a loader share it.

    Attributes:
        backends: One for each device; None for the CPU.
        locks: The page locks of slots, for all of them.

    Args:
        devices: As :func:`parse_device` gives them; at least one is not the CPU.
    """

    def __init__(self, devices: Sequence[torch.device | None]) -> None:
        backends = {device: open_backend(device) for device in devices if device is not None}
        self.backends = [None if device is None else backends[device] for device in devices]
        self.locks = PageLocks(list(backends.values()))
        self._devices = tuple(devices)
        self._pid = os.getpid()

    def is_of(self, devices: Sequence[torch.device | None]) -> bool:
        """Whether it is for these devices, and this process made it."""
        return self._devices == tuple(devices) and self._pid == os.getpid()
