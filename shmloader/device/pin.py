"""Page-locked copies for a faster way to the GPU.

A copy, not a view of the slot: torch's allocator knows when the GPU has read memory of its own,
and no other. What a batch's parts become, and which objects pin themselves, is torch's to say, but
for tensors in lists, tuples and dicts: there all small fields of a batch share one page-locked
block, since each allocation has its price.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch._utils import ExceptionWrapper
from torch.utils.data._utils.pin_memory import pin_memory

from shmloader.device.drivers import relax_this_thread
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
    small = list(_small_tensors(batch))
    if not small:
        return pin_memory(batch, device)
    pinned = parts_of(pin_together(small), small)

    def rebuild(part: Any) -> Any:
        if type(part) is torch.Tensor:
            return next(pinned) if is_small(part) else part.pin_memory()
        if type(part) is dict:
            return {key: rebuild(value) for key, value in part.items()}
        if type(part) is list:
            return [rebuild(item) for item in part]
        if type(part) is tuple:
            return tuple([rebuild(item) for item in part])
        return pin_memory(part, device)

    return rebuild(batch)


def _small_tensors(part: Any) -> Iterator[torch.Tensor]:
    """Those that are to share a block: in Python's own containers, however deep, in order."""
    if type(part) is torch.Tensor:
        if is_small(part):
            yield part
    elif type(part) is dict:
        for value in part.values():
            yield from _small_tensors(value)
    elif type(part) in {list, tuple}:
        for item in part:
            yield from _small_tensors(item)


def is_small(tensor: torch.Tensor) -> bool:
    """Whether a tensor is to share a block with others of its batch."""
    return (
        type(tensor) is torch.Tensor and _is_plain(tensor) and 0 < tensor.nbytes <= COPY_OUT_BYTES
    )


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        tensor.layout is torch.strided
        and tensor.is_cpu
        and tensor.is_contiguous()
        and not tensor.requires_grad
        and not tensor.is_nested
        and not tensor.is_quantized
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def pin_together(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Copy small tensors into one block of page-locked memory, which is returned."""
    nbytes = sum(align(tensor.nbytes) for tensor in tensors)
    block = torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
    for part, tensor in zip(parts_of(block, tensors), tensors, strict=True):
        part.copy_(tensor)
    return block


def parts_of(block: torch.Tensor, tensors: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The tensors that :func:`pin_together` put into a block, or into what is a copy of it."""
    start = 0
    for tensor in tensors:
        part = block[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        # To autograd no view of the block: one part may be changed in place where another one is
        # kept for the backward pass.
        yield part.data
        start += align(tensor.nbytes)


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
    kind = "pin"

    def __init__(self, device: str | None, index: int) -> None:
        self._device = device
        self._index = index

    def start(self) -> None:
        """Begin, on the thread."""
        # The copy is not to take all cores.
        torch.set_num_threads(1)
        torch.multiprocessing._set_thread_name(self.name)
        torch.accelerator.set_device_index(self._index)
        # Pinned memory is made here, also while the user's thread captures a graph.
        relax_this_thread(self._device or "cuda")

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
