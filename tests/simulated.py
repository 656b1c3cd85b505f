"""A simulated device, and simulated pinned memory, for machines that have neither.

A copy to a real device reads the host's memory *later*, by its address, on a stream; whoever
fills that memory again before, or uses the copy before, or drops the copy while another stream
still uses its memory, gets wrong data, now and then. The device here is late on purpose, so that
each of these mistakes shows as a wrong checksum within a few batches.

What it is made of:

stream
    Operations in order. Each has a random number of steps to wait for; a step is one call of
    the device's, by any thread. Nothing sleeps. Waiting for an event runs what it needs, and
    no more. A stream never runs ahead of an event that it waits for.
copy
    Of memory that is locked, in two halves, each read by its address when its time has come.
    Of other memory, read at once, as CUDA stages what is pageable. Memory that has been unlocked
    meanwhile is not read: that is a fault.
memory
    Blocks of the device are used again at once, as by torch's caching allocator: for work on
    the stream that a block is of as soon as its tensor is dropped; where `use_here` noted
    further streams, once these have done what they had to do when it was dropped.
kernel
    A function of tensors, started on the thread's current stream and run late. It holds the
    addresses alone: the tensors may be dropped at once.

`SimulatedBackend` is the backend of `shmloader.stages.device` for it, by the rules. What breaks a
rule that no checksum can show is noted in `SimulatedDevice.faults`, which a test finds empty.

In a test, or in a program of its own (with the repository's root on ``PYTHONPATH``)::

    from tests.simulated import SimulatedDevice, install

    sim = install(SimulatedDevice(seed=1))       # from now on, device="sim" is this device
    loader = shmloader.DataLoader(..., num_workers=2, device="sim")
    for batch in loader:
        result = sim.checksum(batch)             # a kernel on the current stream
        del batch                                # as a user may
        print(result.value(), sim.to_host(...))  # these wait; `read` gives a tensor's content
    assert sim.faults == []

`installed(...)` is the same as a context manager, `pinning()` and `install_pinning()` let
``pin_memory=True`` run its thread on a torch without an accelerator: "pinned" tensors answer
`is_pinned()` then, and `Pinning.allocations` counts the blocks. ``num_workers=0`` has no stage,
so ``device="sim"`` needs workers. To hold all copies and kernels back: ``with sim.held():``, where
`sim.waiting` tells that a thread waits for one of them.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import functools
import itertools
import os
import random
import threading
import warnings
import weakref
import zlib
from collections.abc import Callable, Iterator
from typing import Any, ClassVar
from unittest import mock

import numpy as np
import torch

import shmloader.fronts.dataloader
import shmloader.fronts.iterator
import shmloader.fronts.pipeline.builder
from shmloader.memory.slot import Slot
from shmloader.stages.device import DeviceStage

# Steps that an operation waits for at most, once those before it on its stream have run.
LONGEST_DELAY = 12
# Blocks have lengths of these multiples, so that tensors of like length share them.
BLOCK_BYTES = 512


class Stream:
    """Operations in order."""

    def __init__(self, name: str, longest_delay: int) -> None:
        self.name = name
        self.longest_delay = longest_delay
        self.operations: collections.deque[_Operation] = collections.deque()
        # Numbers of operations; an operation's number is how many were put in before it, plus 1.
        self.put_count = 0
        self.done_count = 0

    def __repr__(self) -> str:
        return f"<stream {self.name}: {self.done_count} of {self.put_count} done>"


class _Operation:
    """One step of a stream.

    Attributes:
        action: What it does; None for a wait.
        awaits: Where another stream must have come to before.
        delay: Steps that it takes once it is first in its stream.
    """

    __slots__ = ("action", "awaits", "delay")

    def __init__(self, action: Callable[[], None] | None, awaits: Event | None, delay: int) -> None:
        self.action = action
        self.awaits = awaits
        self.delay = delay


class Event:
    """A place in a stream: done when all that was put there before is done."""

    def __init__(self, device: SimulatedDevice, stream: Stream) -> None:
        self._device = device
        self.stream = stream
        self.number = stream.put_count

    def is_over(self) -> bool:
        return self.stream.done_count >= self.number

    def query(self) -> bool:
        """Whether it is done. A step for the device."""
        with self._device.call():
            return self.is_over()

    def synchronize(self) -> None:
        """Wait until it is done."""
        with self._device.call():
            self._device.run_up_to(self)


class Result:
    """What a kernel will have found."""

    def __init__(self, event: Callable[[], Event]) -> None:
        self._event = event
        self.found: Any = None

    def value(self) -> Any:
        """It; waits for the kernel."""
        self._event().synchronize()
        return self.found


class _Block:
    """Memory of the device.

    Attributes:
        stream: Whose work it was made for, and is used again for.
        used_by: Further streams that use the tensor in it.
    """

    def __init__(self, nbytes: int, stream: Stream) -> None:
        self.nbytes = nbytes
        self.stream = stream
        self.used_by: set[Stream] = set()
        self._memory = bytearray(nbytes)
        self._type = ctypes.c_char * nbytes
        self.address = ctypes.addressof(self._type.from_buffer(self._memory))

    def array(self) -> ctypes.Array[ctypes.c_char]:
        return self._type.from_buffer(self._memory)


class _Devices:
    """Those of this process, for the fork to be watched."""

    live: ClassVar[weakref.WeakSet[SimulatedDevice]] = weakref.WeakSet()

    @classmethod
    def look_before_fork(cls) -> None:
        """A thread of the user's may be in there; a stage's may not."""
        ours = {
            thread.ident for thread in threading.enumerate() if thread.name == DeviceStage.name
        } - {threading.get_ident()}
        for device in list(cls.live):
            if device.inside & ours:
                device.faults.append("forked while a stage's thread was inside the device")


os.register_at_fork(before=_Devices.look_before_fork)


class SimulatedDevice:
    """A device whose copies read late. Its methods may be called from any thread.

    Attributes:
        faults: Rules that were broken, in words.
        locked: Locked bytes by their address.
        counts: How often: "lock", "unlock", "refused", "late copy", "early copy" (of memory that
            is not locked), "wait" (`await_here`), "use" (`use_here`), "new block".
        most_locked: The most memory that was locked at a time, in bytes.
        waiting: Set while a thread waits for something that is held back.

    Args:
        seed: Of the delays.
        longest_delay: Steps that an operation waits for at most.
        refuses: Why locking is refused, if it is.
    """

    def __init__(
        self, seed: int = 0, longest_delay: int = LONGEST_DELAY, refuses: str = ""
    ) -> None:
        self._random = random.Random(seed)
        self._longest_delay = longest_delay
        self.refuses = refuses
        self._changed = threading.Condition(threading.RLock())
        self._is_held = False
        self.waiting = threading.Event()
        self.inside: set[int] = set()
        self._here = threading.local()
        self._names = itertools.count()
        self.default_stream = self.new_stream("default")
        self._streams: weakref.WeakSet[Stream] = weakref.WeakSet([self.default_stream])
        self._free: dict[tuple[int, Stream], list[_Block]] = {}
        # Blocks that came back, with how far other streams must have come. Anybody's thread
        # appends, even inside the garbage collector.
        self._returned: collections.deque[tuple[_Block, dict[Stream, int]]] = collections.deque()
        self._leases: dict[int, weakref.ref[Any]] = {}
        self._blocks: dict[int, _Block] = {}
        self.locked: dict[int, int] = {}
        self.most_locked = 0
        self.faults: list[str] = []
        self.counts: collections.Counter[str] = collections.Counter()
        _Devices.live.add(self)

    # Steps -------------------------------------------------------------------------------

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """A call of the device's: one step. Not to be left by a fork."""
        thread = threading.get_ident()
        is_outermost = thread not in self.inside
        self.inside.add(thread)
        try:
            with self._changed:
                if is_outermost and not self._is_held:
                    self._step()
                yield
        finally:
            if is_outermost:
                self.inside.discard(thread)

    def _step(self) -> None:
        streams = [stream for stream in self._streams if stream.operations]
        streams.sort(key=lambda stream: stream.name)
        self._random.shuffle(streams)
        for stream in streams:
            while stream.operations and self._may_run(stream.operations[0]):
                self._run_first(stream)

    def _may_run(self, operation: _Operation) -> bool:
        if operation.awaits is not None and not operation.awaits.is_over():
            return False
        operation.delay -= 1
        return operation.delay < 0

    def _run_first(self, stream: Stream) -> None:
        operation = stream.operations.popleft()
        if operation.action is not None:
            operation.action()
        stream.done_count += 1

    def run_up_to(self, event: Event) -> None:
        """Run what an event needs; inside :meth:`call`."""
        while self._is_held and not event.is_over():
            self.waiting.set()
            self._changed.wait()
        self.waiting.clear()
        stream = event.stream
        while not event.is_over():
            awaits = stream.operations[0].awaits
            if awaits is not None:
                self.run_up_to(awaits)
            self._run_first(stream)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Nothing is run inside, and who waits for it, waits."""
        with self._changed:
            self._is_held = True
        try:
            yield
        finally:
            with self._changed:
                self._is_held = False
                self._changed.notify_all()

    def finish(self) -> None:
        """Run everything."""
        with self.call():
            for stream in list(self._streams):
                self.run_up_to(Event(self, stream))

    @property
    def unfinished_count(self) -> int:
        """Operations that have not been run."""
        with self._changed:
            return sum(len(stream.operations) for stream in self._streams)

    # Streams -----------------------------------------------------------------------------

    def new_stream(self, name: str = "", longest_delay: int | None = None) -> Stream:
        """A further stream."""
        delay = self._longest_delay if longest_delay is None else longest_delay
        stream = Stream(f"{name or 'stream'} {next(self._names)}", delay)
        if hasattr(self, "_streams"):
            with self._changed:
                self._streams.add(stream)
        return stream

    def current_stream(self) -> Stream:
        """That of the calling thread."""
        return getattr(self._here, "stream", self.default_stream)

    @contextlib.contextmanager
    def on(self, stream: Stream) -> Iterator[Stream]:
        """Inside, it is the calling thread's current one."""
        before = self.current_stream()
        self._here.stream = stream
        try:
            yield stream
        finally:
            self._here.stream = before

    def _put(self, action: Callable[[], None] | None, awaits: Event | None = None) -> None:
        stream = self.current_stream()
        delay = self._random.randint(0, stream.longest_delay)
        stream.operations.append(_Operation(action, awaits, delay))
        stream.put_count += 1

    def record(self) -> Event:
        """An event on the current stream."""
        with self.call():
            return Event(self, self.current_stream())

    def wait(self, event: Event) -> None:
        """Have the current stream wait for an event."""
        with self.call():
            self.counts["wait"] += 1
            if event.stream is not self.current_stream():
                self._put(None, event)

    # Memory ------------------------------------------------------------------------------

    def empty(self, like: torch.Tensor) -> torch.Tensor:
        """A tensor on the device, of the current stream, with whatever its block held."""
        if like.nbytes == 0:
            return torch.empty_like(like, device="cpu", requires_grad=False)
        with self.call():
            self._take_returned()
            nbytes = -(-like.nbytes // BLOCK_BYTES) * BLOCK_BYTES
            stream = self.current_stream()
            free = self._free.setdefault((nbytes, stream), [])
            if free:
                block = free.pop()
            else:
                self.counts["new block"] += 1
                block = _Block(nbytes, stream)
                self._blocks[block.address] = block
            array = block.array()
            self._leases[block.address] = weakref.ref(
                array, functools.partial(_give_back, self._returned, block)
            )
            flat = torch.frombuffer(array, dtype=torch.uint8, count=like.nbytes)
            return flat.view(like.dtype).view(like.shape)

    def _take_returned(self) -> None:
        waiting = []
        while self._returned:
            block, places = self._returned.popleft()
            if all(stream.done_count >= place for stream, place in places.items()):
                self._free[block.nbytes, block.stream].append(block)
            else:
                waiting.append((block, places))
        self._returned.extend(waiting)

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is on the device."""
        return tensor.nbytes == 0 or tensor.untyped_storage().data_ptr() in self._blocks

    def use(self, tensor: torch.Tensor) -> None:
        """Note that the current stream uses a tensor."""
        with self.call():
            self.counts["use"] += 1
            if tensor.nbytes == 0:
                return
            block = self._blocks.get(tensor.untyped_storage().data_ptr())
            if block is None:
                self.faults.append("a tensor that is not on the device was noted as used")
            elif block.stream is not self.current_stream():
                block.used_by.add(self.current_stream())

    # Copies and kernels ------------------------------------------------------------------

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a tensor to the device, on the current stream."""
        if tensor.layout is not torch.strided:
            raise RuntimeError("the simulated device takes strided tensors")
        tensor = tensor.detach()
        if not tensor.is_contiguous():
            tensor = tensor.contiguous()  # which the host does, at once
        copied = self.empty(tensor)
        nbytes = tensor.nbytes
        if nbytes == 0:
            return copied
        with self.call():
            source, target = tensor.data_ptr(), copied.data_ptr()
            if self._is_locked(source, nbytes):
                self.counts["late copy"] += 1
                half = nbytes // 2
                self._put(functools.partial(self._move, target, source, half))
                self._put(
                    functools.partial(self._move, target + half, source + half, nbytes - half)
                )
            else:
                self.counts["early copy"] += 1
                data = ctypes.string_at(source, nbytes)
                self._put(functools.partial(ctypes.memmove, target, data, nbytes))
        return copied

    def _is_locked(self, address: int, nbytes: int) -> bool:
        return any(
            start <= address and address + nbytes <= start + length
            for start, length in self.locked.items()
        )

    def _move(self, target: int, source: int, nbytes: int) -> None:
        if not self._is_locked(source, nbytes):
            self.faults.append(f"{nbytes} bytes were unlocked before they were copied")
            return
        ctypes.memmove(target, source, nbytes)

    def launch(self, function: Callable[..., Any], *tensors: torch.Tensor) -> Result:
        """Start a kernel on the current stream.

        Args:
            function: Gets the tensors' memory as NumPy arrays, when it is run; what it returns is
                the result.
            tensors: On the device.
        """
        views = [(_bytes_at, tensor.data_ptr(), tensor.nbytes) for tensor in tensors]
        views = [functools.partial(*view) for view in views]
        with self.call():
            for tensor in tensors:
                if not self.has(tensor):
                    self.faults.append("a kernel was started on a tensor of the host's")
            stream = self.current_stream()
            number = stream.put_count + 1
            event = Event(self, stream)
            event.number = number
            result = Result(lambda: event)

            def run() -> None:
                result.found = function(*(view() for view in views))

            self._put(run)
        return result

    def checksum(self, batch: Any) -> Result:
        """A kernel that finds the checksum of all tensors in a batch."""
        return self.launch(checksum_of, *_tensors_in(batch))

    def compute(
        self, function: Callable[[np.ndarray], np.ndarray], tensor: torch.Tensor
    ) -> torch.Tensor:
        """A new tensor on the device, of a tensor there: what a transform does.

        Args:
            function: Of the input's elements, flat; gives as many of the same type.
            tensor: On the device.
        """
        out = self.empty(tensor)
        dtype = torch.empty(0, dtype=tensor.dtype).numpy().dtype

        def kernel(source: np.ndarray, target: np.ndarray) -> None:
            target.view(dtype)[:] = function(source.view(dtype))

        self.launch(kernel, tensor, out)
        return out

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor's content, read after all that the current stream has to do."""
        copied = torch.empty(tensor.nbytes, dtype=torch.uint8)
        target = copied.numpy()

        def kernel(source: np.ndarray) -> None:
            target[:] = source

        self.launch(kernel, tensor).value()
        return copied.view(tensor.dtype).view(tensor.shape)

    def to_host(self, batch: Any) -> Any:
        """A batch of lists, tuples and dicts whose tensors are on the host."""
        if isinstance(batch, torch.Tensor):
            return self.read(batch)
        if isinstance(batch, dict):
            return {key: self.to_host(part) for key, part in batch.items()}
        if isinstance(batch, list | tuple):
            return type(batch)(map(self.to_host, batch))
        return batch

    # Page locks --------------------------------------------------------------------------

    def lock(self, address: int, nbytes: int) -> str:
        """Lock memory; returns why not, or nothing."""
        with self.call():
            if self.refuses:
                self.counts["refused"] += 1
                return self.refuses
            self.counts["lock"] += 1
            if address in self.locked:
                self.faults.append("memory was locked twice")
            self.locked[address] = nbytes
            self.most_locked = max(self.most_locked, sum(self.locked.values()))
            return ""

    def unlock(self, address: int) -> None:
        """Undo it. Who has not waited for the copies finds a fault."""
        with self.call():
            self.counts["unlock"] += 1
            if self.locked.pop(address, None) is None:
                self.faults.append("memory was unlocked that was not locked")


def _give_back(
    returned: collections.deque[tuple[_Block, dict[Stream, int]]], block: _Block, _: object
) -> None:
    """A block's tensor is dropped. Runs on any thread, even inside the garbage collector."""
    users, block.used_by = block.used_by, set()
    returned.append((block, {stream: stream.put_count for stream in users}))


def _bytes_at(address: int, nbytes: int) -> np.ndarray:
    if nbytes == 0:
        return np.empty(0, np.uint8)
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))


def checksum_of(*arrays: np.ndarray) -> int:
    """The checksum of some arrays' bytes, as the kernel finds it."""
    return functools.reduce(lambda seen, array: zlib.crc32(array, seen), arrays, 0)


def host_checksum(batch: Any) -> int:
    """What :meth:`SimulatedDevice.checksum` should find, of a batch on the host."""
    arrays = [tensor.contiguous().view(torch.uint8).numpy() for tensor in _tensors_in(batch)]
    return checksum_of(*arrays)


def _tensors_in(batch: Any) -> list[torch.Tensor]:
    if isinstance(batch, torch.Tensor):
        return [batch]
    if isinstance(batch, dict):
        batch = list(batch.values())
    if isinstance(batch, list | tuple):
        return [tensor for part in batch for tensor in _tensors_in(part)]
    return []


class SimulatedBackend:
    """The simulated device as `shmloader.stages.device` wants it, with CUDA's rules."""

    def __init__(self, device: SimulatedDevice) -> None:
        self.device = device
        self.own_stream = device.new_stream("loader")
        self.started_on: list[str] = []
        self._locked: dict[int, int] = {}
        self._refusal = ""
        self._pid = os.getpid()

    def start(self) -> None:
        self.started_on.append(threading.current_thread().name)

    def lock(self, slot: Slot, nbytes: int) -> None:
        if self._refusal or self._locked.get(slot.address, 0) >= nbytes:
            return
        self.unlock(slot)
        self._refusal = self.device.lock(slot.address, nbytes)
        if self._refusal:
            warnings.warn(f"simulated: not locked ({self._refusal})", RuntimeWarning, stacklevel=2)
        else:
            self._locked[slot.address] = nbytes

    def unlock(self, slot: Slot) -> None:
        if os.getpid() == self._pid and self._locked.pop(slot.address, 0):
            self.synchronize()
            self.device.unlock(slot.address)

    def stream(self) -> contextlib.AbstractContextManager[Any]:
        return self.device.on(self.own_stream)

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.device.copy(tensor)

    def move(self, batch: Any) -> Any:
        return batch.to(self.device)

    def record(self) -> Event:
        return self.device.record()

    def await_here(self, event: Event) -> None:
        self.device.wait(event)

    def use_here(self, tensor: torch.Tensor) -> None:
        if self.device.has(tensor):
            self.device.use(tensor)

    def synchronize(self) -> None:
        with self.stream():
            self.device.record().synchronize()


def install(
    device: SimulatedDevice | None = None,
    backend: Callable[[SimulatedDevice], Any] = SimulatedBackend,
) -> SimulatedDevice:
    """From now on, ``device="sim"`` is a simulated device. For programs; it is not undone.

    Args:
        device: Which; None: a new one.
        backend: Makes the backend of each iterator.
    """
    manager = installed(device, backend)
    found = manager.__enter__()
    _Installed.managers.append(manager)
    return found


class _Installed:
    """What :func:`install` and :func:`install_pinning` have entered: else it would be undone."""

    managers: ClassVar[list[Any]] = []


@contextlib.contextmanager
def installed(
    device: SimulatedDevice | None = None,
    backend: Callable[[SimulatedDevice], Any] = SimulatedBackend,
) -> Iterator[SimulatedDevice]:
    """Inside, ``device="sim"`` is a simulated device. See :func:`install`."""
    device = SimulatedDevice() if device is None else device
    parse, open_real = (
        shmloader.fronts.iterator.parse_device,
        shmloader.fronts.iterator.open_backend,
    )

    def parse_device(value: Any) -> Any:
        return device if value == "sim" else parse(value)

    def open_backend(target: Any) -> Any:
        return backend(device) if target is device else open_real(target)

    with (
        mock.patch.object(shmloader.fronts.iterator, "parse_device", parse_device),
        mock.patch.object(shmloader.fronts.dataloader, "parse_device", parse_device),
        mock.patch.object(shmloader.fronts.iterator, "open_backend", open_backend),
        mock.patch.object(shmloader.fronts.pipeline.builder, "parse_device", parse_device),
        mock.patch.object(shmloader.fronts.pipeline.builder, "open_backend", open_backend),
    ):
        yield device


class Pinning:
    """What was "pinned" meanwhile.

    Attributes:
        allocations: Lengths in bytes, one for each block of pinned memory.
        threads: Names of the threads that asked for one.
        device_indices: What `torch.accelerator.set_device_index` was given.
    """

    def __init__(self) -> None:
        self.allocations: list[int] = []
        self.threads: set[str] = set()
        self.device_indices: list[int] = []
        # By the address of the storage: a view is pinned as its base is.
        self._memory: dict[int, weakref.ref[Any]] = {}

    def block(self, nbytes: int) -> torch.Tensor:
        """A new block of "pinned" bytes, which is known as such for as long as it lives."""
        self.allocations.append(nbytes)
        self.threads.add(threading.current_thread().name)
        if nbytes == 0:
            return torch.zeros(0, dtype=torch.uint8)
        array = (ctypes.c_char * nbytes)()
        address = ctypes.addressof(array)
        self._memory[address] = weakref.ref(array, lambda _: self._memory.pop(address, None))
        return torch.frombuffer(array, dtype=torch.uint8)

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._memory


def install_pinning() -> Pinning:
    """From now on, ``pin_memory=True`` has an accelerator. For programs; it is not undone."""
    manager = pinning()
    found = manager.__enter__()
    _Installed.managers.append(manager)
    return found


@contextlib.contextmanager
def pinning() -> Iterator[Pinning]:
    """Inside, torch says that there is an accelerator, and "pins" into memory that is noted."""
    noted = Pinning()
    empty = torch.empty

    def make_empty(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        made = empty(*args, **kwargs)
        if not pin_memory:
            return made
        return noted.block(made.nbytes).view(made.dtype).view(made.shape)

    def pin_memory(tensor: torch.Tensor, device: object = None) -> torch.Tensor:
        if tensor.layout is not torch.strided:
            raise RuntimeError("simulated: only strided tensors can be pinned")
        if noted.is_pinned(tensor) and tensor.nbytes:
            return tensor
        source = tensor.detach()
        # As torch does: the strides are kept, and a view brings what it spans.
        span = sum((n - 1) * s for n, s in zip(source.shape, source.stride(), strict=True)) + 1
        block = noted.block(span * source.itemsize if source.numel() else 0)
        pinned = block.view(source.dtype).as_strided(source.shape, source.stride())
        return pinned.copy_(source)

    def is_pinned(tensor: torch.Tensor, device: object = None) -> bool:
        return noted.is_pinned(tensor)

    def set_device_index(index: int) -> None:
        noted.device_indices.append(index)

    with (
        mock.patch.object(torch, "empty", make_empty),
        mock.patch.object(torch.Tensor, "pin_memory", pin_memory),
        mock.patch.object(torch.Tensor, "is_pinned", is_pinned),
        mock.patch.object(torch.accelerator, "is_available", return_value=True),
        mock.patch.object(
            torch.accelerator,
            "current_accelerator",
            return_value=torch.device("cuda"),
        ),
        mock.patch.object(torch.accelerator, "current_device_index", return_value=0),
        mock.patch.object(torch.accelerator, "set_device_index", set_device_index),
    ):
        yield noted
