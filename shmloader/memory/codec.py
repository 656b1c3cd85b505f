"""Defines the layout of any picklable batch, and builds the batch from it in the main process.

Pickle protocol 5 walks through the batch. Tensors and arrays leave the pickle as out-of-band
buffers and lie in the slot; the body keeps the structure and refers to the buffers in order. The
worker's half is :mod:`shmloader.memory.encoder`.
"""

import pickle
from typing import Any, NamedTuple

import numpy as np
import torch

from shmloader.memory.arena import Slot, align
from shmloader.memory.flat import COPY_OUT_BYTES, private_memory
from shmloader.memory.lease import hold


class Span(NamedTuple):
    """One buffer in the slot.

    Attributes:
        offset: Bytes from the slot's start; a multiple of 64, except for pieces of an array that
            a collate function put into the slot.
        nbytes: Length of the span.
        first_byte: For a tensor's storage, which of its bytes is the span's first; -1 for a
            plain buffer.
    """

    offset: int
    nbytes: int
    first_byte: int


class PickledLayout(NamedTuple):
    """Where a pickled batch lies.

    Attributes:
        body: The pickle, or its (offset, nbytes) if it lies in the slot as well.
        spans: The buffers.
        order: For each out-of-band buffer of the body, in turn, the index of its span.
    """

    body: "bytes | tuple[int, int]"
    spans: tuple[Span, ...]
    order: tuple[int, ...]


class PartialStorage(NamedTuple):
    """The part of a storage that the pickled tensors need.

    Attributes:
        storage: The bytes that are needed.
        first_byte: Offset of the first of these bytes in the original storage.
    """

    storage: torch.UntypedStorage
    first_byte: int


def rebuild_tensor(
    partial: PartialStorage,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    storage_offset: int,
    requires_grad: bool,
    is_parameter: bool,
) -> torch.Tensor:
    """Make a tensor over a partial storage. Called by pickle in the receiving process."""
    is_empty = 0 in shape or partial.storage.nbytes() == 0
    offset = 0 if is_empty else storage_offset - partial.first_byte // dtype.itemsize
    tensor = torch.empty(0, dtype=dtype, device="cpu").set_(partial.storage, offset, shape, stride)
    if is_parameter:
        return torch.nn.Parameter(tensor, requires_grad)
    if requires_grad:
        tensor.requires_grad_()
    return tensor


def rebuild_sparse(
    parts: Any,
    shape: tuple[int, ...],
    layout: torch.layout,
    is_coalesced: bool | None,
    requires_grad: bool,
) -> torch.Tensor:
    """Make a sparse tensor. Called by pickle in the receiving process, as are the following."""
    make: Any = torch.sparse_compressed_tensor
    options: dict[str, object] = {"layout": layout}
    if layout is torch.sparse_coo:
        make, options = torch.sparse_coo_tensor, {"is_coalesced": is_coalesced}
    tensor: torch.Tensor = make(
        *parts, shape, check_invariants=False, requires_grad=requires_grad, **options
    )
    return tensor


def rebuild_array(array: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
    """Return the array, which pickle has built already."""
    return array


def rebuild_storage(partial: PartialStorage) -> torch.UntypedStorage:
    """Return the storage. All its bytes were needed."""
    return partial.storage


def rebuild_typed_storage(storage: torch.UntypedStorage, dtype: torch.dtype) -> torch.TypedStorage:
    """Make a typed storage."""
    return torch.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)


def lends(layout: PickledLayout) -> bool:
    """Whether a batch has a buffer that is large enough to be lent."""
    return any(span.nbytes > COPY_OUT_BYTES for span in layout.spans)


def decode(layout: PickledLayout, slot: Slot, lease: object | None) -> object:
    """Build the batch.

    Args:
        layout: The layout, from the worker.
        slot: The slot that it lies in.
        lease: Large buffers become views of it; None copies them out as well.

    Raises:
        Exception: Whatever the user's objects raise when they are unpickled.
    """
    buffers = _open_spans(layout.spans, slot, lease)
    body: Any = layout.body
    if not isinstance(body, bytes):
        body = slot.memory[body[0] : body[0] + body[1]]
    return pickle.loads(body, buffers=[buffers[index] for index in layout.order])


def _open_spans(spans: tuple[Span, ...], slot: Slot, lease: object | None) -> list[object]:
    """Return each span as pickle needs it: a :class:`PartialStorage` or a writable memoryview."""
    # All small spans share one block. A large span that is not lent has a block of its own.
    total = sum(align(span.nbytes) for span in spans if span.nbytes <= COPY_OUT_BYTES)
    block = private_memory(total).data
    buffers: list[object] = []
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
            home[offset : offset + nbytes] = slot.memory[span.offset : span.offset + nbytes]
        if nbytes == 0:
            is_plain = span.first_byte < 0
            buffers.append(bytearray() if is_plain else PartialStorage(torch.UntypedStorage(0), 0))
        elif span.first_byte < 0:
            buffers.append(memoryview(home).cast("B")[offset : offset + nbytes])
        else:
            flat = torch.frombuffer(home, dtype=torch.uint8, count=nbytes, offset=offset)
            storage = flat.untyped_storage()
            hold(storage, home)
            buffers.append(PartialStorage(storage, span.first_byte))
    return buffers
