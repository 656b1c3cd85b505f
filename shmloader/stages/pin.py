"""Page-locked copies for a faster way to the GPU.

A copy, not a view of the slot: torch's allocator knows when the GPU has read memory of its own,
and no other. What a batch's parts become, and which objects pin themselves, is torch's to say,
but for batches that are a tensor, or a list or dict of tensors: there all small fields share one
page-locked block, since each allocation has its price.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch._utils import ExceptionWrapper
from torch.utils.data._utils.pin_memory import pin_memory

from shmloader.memory.flat import COPY_OUT_BYTES
from shmloader.memory.slot import align


def pin_batch(batch: object, device: str | None) -> object:
    """Copy a batch into page-locked memory.

    Args:
        batch: As the engine gave it.
        device: The accelerator's type, as torch names it.

    Returns:
        A batch of the same structure.
    """
    fields: Sequence[Any]
    if type(batch) is list:
        fields = batch
    elif type(batch) is dict:
        fields = list(batch.values())
    else:
        return pin_memory(batch, device)
    if not all(type(field) is torch.Tensor and _is_plain(field) for field in fields):
        return pin_memory(batch, device)
    pinned = _pin_fields(fields)
    if type(batch) is list:
        return pinned
    return dict(zip(batch, pinned, strict=True))


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        tensor.layout is torch.strided
        and tensor.is_cpu
        and tensor.is_contiguous()
        and not tensor.requires_grad
        and not tensor.is_quantized
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def _pin_fields(fields: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Large fields by themselves, small ones as views of one block."""
    sizes = [align(field.nbytes) if field.nbytes <= COPY_OUT_BYTES else 0 for field in fields]
    block = _pinned_block(sum(sizes))
    pinned = []
    start = 0
    for field, size in zip(fields, sizes, strict=True):
        if field.nbytes > COPY_OUT_BYTES or field.nbytes == 0:
            pinned.append(field.pin_memory())
            continue
        place = block[start : start + field.nbytes].view(field.dtype).view(field.shape)
        place.copy_(field)
        pinned.append(place)
        start += size
    return pinned


def _pinned_block(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=nbytes > 0)


class PinStage:
    """Pins each batch, on a thread.

    Attributes:
        ahead: As many as there are tickets, as with torch.
        name: torch's name for such a thread.

    Args:
        device: The accelerator's type, as torch names it.
        index: Which of them; the thread makes it its own, as torch's does.
    """

    ahead: int | None = None
    name = "pt_data_pin"

    def __init__(self, device: str | None, index: int) -> None:
        self._device = device
        self._index = index

    def start(self) -> None:
        """Begin, on the thread."""
        # The copy is not to take all cores.
        torch.set_num_threads(1)
        torch.multiprocessing._set_thread_name(self.name)
        torch.accelerator.set_device_index(self._index)

    def run(self, batch: object) -> object:
        """The batch in page-locked memory; its slot is free when we drop what we were given.

        Raises:
            Exception: As torch's pin thread has it: of the same type, with the traceback in it.
        """
        try:
            return pin_batch(batch, self._device)
        except Exception:  # noqa: BLE001 - whatever an object's own pin_memory raises
            error = ExceptionWrapper(where=f"in pin memory thread for device {self._index}")
        del batch  # who keeps the exception keeps this frame, and must not keep the slot
        try:
            error.reraise()
        except Exception as raised:
            raised.with_traceback(None)  # the frame that it comes from holds it
            raise
        raise AssertionError("it returned")

    def hand_over(self, result: object) -> object:
        """The batch."""
        return result

    def close(self) -> None:
        """Nothing is under way."""
