"""A stage processes each batch between the engine and the user; and the stage that pins batches.

The user gets a page-locked copy, which a GPU reads faster, and not a view of a page-locked slot:
torch's allocator knows when the GPU has read the allocator's own memory, but not when it has read
other memory. torch decides what each value in a batch becomes, and which objects pin themselves,
with one exception: all small tensors in lists, tuples and dicts share one page-locked block,
because each allocation is expensive.
"""

import traceback
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch._utils import ExceptionWrapper
from torch.utils.data._utils.pin_memory import pin_memory

from shmloader.device.backend import relax_this_thread
from shmloader.memory.arena import align
from shmloader.memory.flat import COPY_OUT_BYTES
from shmloader.memory.pickled import is_plain


class Stage:
    """Processes each batch, on a thread of its own.

    Attributes:
        ahead: Batches that may be ready and not yet taken; None for as many as there are tickets.
        name: The thread's name.
        kind: The stage's name in the statistics; one of
            :data:`~shmloader.insight.stats.PARTS`.
    """

    ahead: int | None
    name: str
    kind: str

    def start(self) -> None:
        """Prepare the stage's thread. Called on it."""

    def run(self, batch: Any) -> Any:
        """Process a batch. Called on the stage's thread."""
        raise NotImplementedError

    def deliver(self, result: Any) -> Any:
        """Make the user's batch of what :meth:`run` returned. Called on the user's thread."""
        return result

    def close(self) -> None:
        """Wait for work under way, and drop all batches. Called when no :meth:`run` is running."""


def clear_frames(error: BaseException | None) -> None:
    """Drop what the frames of an exception's traceback hold, such as views of a slot."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def pin_batch(batch: object, device: str | None) -> object:
    """Copy a batch into page-locked memory.

    Args:
        batch: The batch, as the engine returned it.
        device: The type of the accelerator, such as "cuda"; None leaves it to torch.

    Returns:
        A batch of the same structure.
    """
    small = list(_small_tensors(batch))
    if not small:
        return pin_memory(batch, device)
    pinned = split_block(pin_block(small), small)

    def rebuild(value: Any) -> Any:
        if type(value) is torch.Tensor:
            return next(pinned) if is_small(value) else value.pin_memory()
        if type(value) is dict:
            return {key: rebuild(item) for key, item in value.items()}
        if type(value) is list:
            return [rebuild(item) for item in value]
        if type(value) is tuple:
            return tuple([rebuild(item) for item in value])
        return pin_memory(value, device)

    return rebuild(batch)


def _small_tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors that share a block, in order: those in Python's own containers."""
    if type(value) is torch.Tensor:
        if is_small(value):
            yield value
    elif type(value) in {dict, list, tuple}:
        for item in value.values() if type(value) is dict else value:
            yield from _small_tensors(item)


def is_small(tensor: torch.Tensor) -> bool:
    """Whether a tensor shares a block with others of its batch."""
    return (
        type(tensor) is torch.Tensor
        and is_plain(tensor)
        and tensor.is_contiguous()
        and 0 < tensor.nbytes <= COPY_OUT_BYTES
        and not tensor.requires_grad
    )


def pin_block(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Copy small tensors into one block of page-locked memory. Returns the block."""
    nbytes = sum(align(tensor.nbytes) for tensor in tensors)
    block = torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
    for piece, tensor in zip(split_block(block, tensors), tensors, strict=True):
        piece.copy_(tensor)
    return block


def split_block(block: torch.Tensor, tensors: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield the tensors that :func:`pin_block` put into a block, as pieces of the block.

    Args:
        block: The block, or a copy of it on a device.
        tensors: The tensors that were put there.
    """
    views: dict[torch.dtype, torch.Tensor] = {}
    start = 0
    for tensor in tensors:
        view = views.get(tensor.dtype)
        if view is None:
            view = views[tensor.dtype] = block.view(tensor.dtype)
        # Only one call for each tensor: with a hundred tensors, a second call costs 0.1 ms in all.
        piece = view.as_strided(tensor.shape, tensor.stride(), start // tensor.itemsize)
        # `.data`, so that autograd does not see a view of the block: one piece may be changed in
        # place while another one is kept for the backward pass.
        yield piece.data
        start += align(tensor.nbytes)


class PinStage(Stage):
    """Pins each batch.

    Args:
        device: The type of the accelerator, such as "cuda"; None leaves it to torch.
        index: The accelerator's index. As with torch, it becomes the thread's current device.
    """

    ahead = None  # no limit, as with torch
    name = "pt_data_pin"  # torch's name for such a thread
    kind = "pin"

    def __init__(self, device: str | None, index: int) -> None:
        self._device = device
        self._index = index

    def start(self) -> None:
        """Prepare the stage's thread. Called on it."""
        torch.set_num_threads(1)  # else a copy would take all cores
        torch.multiprocessing._set_thread_name(self.name)
        torch.accelerator.set_device_index(self._index)
        # Pinned memory is allocated here even while the user's thread captures a graph.
        relax_this_thread(self._device or "cuda")

    def run(self, batch: object) -> object:
        """Return a copy of the batch in page-locked memory, which does not hold the slot.

        Raises:
            Exception: As from torch's pin thread: an exception of the same type, with the traceback
                in its text.
        """
        try:
            return pin_batch(batch, self._device)
        except Exception:  # noqa: BLE001 - whatever an object's own pin_memory raises
            error = ExceptionWrapper(where=f"in pin memory thread for device {self._index}")
        error.reraise()
        raise AssertionError("reraise() returned")
