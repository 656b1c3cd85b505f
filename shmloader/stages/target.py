"""Which device batches are to arrive on, and how they get there."""

import torch

from shmloader.stages.cuda import CudaBackend, OtherBackend
from shmloader.stages.device import Backend


def parse_device(value: object) -> torch.device | None:
    """Read the ``device`` option.

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
            "device option should be a device such as 'cuda:0', an index or a torch.device, "
            f"but got device={value!r}"
        )
    if isinstance(value, int):
        kind = _accelerator_kind()
        if kind is None:
            raise RuntimeError(
                f"device={value} asks for an accelerator, and torch finds none on this machine"
            )
        value = f"{kind}:{value}"
    try:
        device = torch.device(value)
    except RuntimeError as error:
        raise ValueError(
            f"device option should name a device that torch knows, but got device={value!r}: "
            f"{error}"
        ) from None
    if device.type == "cpu":
        return None
    _check_present(device)
    if device.type == "cuda":
        return torch.device("cuda", torch._utils._get_device_index(device, optional=True))
    return device


def _accelerator_kind() -> str | None:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return None if accelerator is None else accelerator.type


def _check_present(device: torch.device) -> None:
    if device.type == "cuda":
        if not torch.backends.cuda.is_built():
            raise RuntimeError(
                f"device='{device}' needs CUDA, and this torch ({torch.__version__}) was built "
                "without it"
            )
        if not torch.cuda.is_available():
            raise RuntimeError(
                f"device='{device}' needs CUDA, and torch finds no usable GPU or driver here"
            )
        count = torch.cuda.device_count()
        if (device.index or 0) >= count:
            raise RuntimeError(f"device='{device}' is not there: this machine has {count} GPUs")
    elif device.type != _accelerator_kind():
        raise RuntimeError(f"device='{device}' is not there: torch finds no {device.type} device")


def open_backend(device: torch.device) -> Backend:
    """What copies batches to a device."""
    return CudaBackend(device) if device.type == "cuda" else OtherBackend(device)
