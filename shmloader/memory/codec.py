"""Any picklable batch: its layout, and how it is built again in the main process.

Pickle protocol 5 does the walking. Tensors and arrays leave the stream by its out-of-band
buffers and lie in the slot; the body keeps the structure, with the n-th buffer's place in it.
The worker's half is :mod:`shmloader.memory.encoder`.
"""

import pickle
from typing import Any, NamedTuple

import numpy as np
import torch

from shmloader.memory.flat import COPY_OUT_BYTES, private_memory
from shmloader.memory.lease import hold
from shmloader.memory.slot import Slot, align


class Span(NamedTuple):
    """One buffer in the slot.

    Attributes:
        offset: From the slot's start, in bytes, a multiple of 64 (but for parts of an array
            that a collate function put into the slot).
        nbytes: Its length.
        first_byte: For a tensor's storage, which of its bytes is the span's first; -1 for a
            plain buffer.
    """

    offset: int
    nbytes: int
    first_byte: int


class PickledLayout(NamedTuple):
    """Where the parts of a batch lie.

    Attributes:
        body: The pickle; or (offset, nbytes), where it lies in the slot itself.
        spans: The buffers.
        order: For each out-of-band buffer of the body, in turn, its span.
    """

    body: "bytes | tuple[int, int]"
    spans: tuple[Span, ...]
    order: tuple[int, ...]


class Part(NamedTuple):
    """A storage as the body's tensors need it."""

    storage: torch.UntypedStorage
    first_byte: int


def rebuild_tensor(
    part: Part,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    storage_offset: int,
    requires_grad: bool,
    is_parameter: bool,
) -> torch.Tensor:
    """Make a tensor from its storage's span. Called by pickle, in the main process."""
    is_empty = 0 in shape or part.storage.nbytes() == 0
    offset = 0 if is_empty else storage_offset - part.first_byte // dtype.itemsize
    tensor = torch.empty(0, dtype=dtype, device="cpu").set_(part.storage, offset, shape, stride)
    if is_parameter:
        return torch.nn.Parameter(tensor, requires_grad)
    if requires_grad:
        tensor.requires_grad_()
    return tensor


def rebuild_coo(
    indices: torch.Tensor,
    values: torch.Tensor,
    shape: tuple[int, ...],
    is_coalesced: bool,
    requires_grad: bool,
) -> torch.Tensor:
    """Called by pickle, in the main process."""
    return torch.sparse_coo_tensor(
        indices,
        values,
        shape,
        is_coalesced=is_coalesced,
        check_invariants=False,
        requires_grad=requires_grad,
    )


def rebuild_compressed(
    outer: torch.Tensor,
    inner: torch.Tensor,
    values: torch.Tensor,
    shape: tuple[int, ...],
    layout: torch.layout,
    requires_grad: bool,
) -> torch.Tensor:
    """Called by pickle, in the main process."""
    return torch.sparse_compressed_tensor(
        outer,
        inner,
        values,
        shape,
        layout=layout,
        check_invariants=False,
        requires_grad=requires_grad,
    )


def rebuild_array(array: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
    """Called by pickle, in the main process."""
    return array


def rebuild_storage(part: Part) -> torch.UntypedStorage:
    """Called by pickle, in the main process."""
    return part.storage


def rebuild_typed_storage(storage: torch.UntypedStorage, dtype: torch.dtype) -> torch.TypedStorage:
    """Called by pickle, in the main process."""
    return torch.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)


def lends(layout: PickledLayout) -> bool:
    """Whether a batch has a part that is large enough to be lent."""
    return any(span.nbytes > COPY_OUT_BYTES for span in layout.spans)


def decode(layout: PickledLayout, slot: Slot, lease: object | None) -> object:
    """Build the batch.

    Args:
        layout: From the worker.
        slot: The slot that it lies in.
        lease: Large parts are made views of it; None copies them out as well.

    Raises:
        Exception: Whatever the user's objects raise when they are unpickled.
    """
    parts = _open_parts(layout.spans, slot, lease)
    body = layout.body
    if not isinstance(body, bytes):
        body = slot.mapping[body[0] : body[0] + body[1]]
    return pickle.loads(body, buffers=[parts[index] for index in layout.order])


def _open_parts(spans: tuple[Span, ...], slot: Slot, lease: object | None) -> list[object]:
    """Each span as the body wants it: a :class:`Part`, or a writable memoryview."""
    # One block for all small ones; a large one that is not lent has a block of its own.
    total = sum(align(span.nbytes) for span in spans if span.nbytes <= COPY_OUT_BYTES)
    block = private_memory(total).data
    parts: list[object] = []
    position = 0
    for span in spans:
        nbytes = span.nbytes
        home: Any = lease
        offset = span.offset
        if nbytes <= COPY_OUT_BYTES:
            home, offset = block, position
            position += align(nbytes)
        elif lease is None:
            home, offset = private_memory(nbytes).data, 0
        if home is not lease and nbytes:
            # By way of memoryviews: the slot's lives for this statement only.
            home[offset : offset + nbytes] = memoryview(slot.mapping)[
                span.offset : span.offset + nbytes
            ]
        if nbytes == 0:
            parts.append(bytearray() if span.first_byte < 0 else Part(torch.UntypedStorage(0), 0))
        elif span.first_byte < 0:
            parts.append(memoryview(home).cast("B")[offset : offset + nbytes])
        else:
            flat = torch.frombuffer(home, dtype=torch.uint8, count=nbytes, offset=offset)
            storage = flat.untyped_storage()
            hold(storage, home)
            parts.append(Part(storage, span.first_byte))
    return parts
