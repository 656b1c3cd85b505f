"""Copies batches to a device, and passes them to the threads that use them.

Work on a device is asynchronous: a copy, or what an op computes, may still be under way when its
thread continues, and each thread has current streams of its own. So a batch on a device travels as
a :class:`DeviceFuture`, with events of the streams that it was made on. The thread that takes it
(the next op's, or the consumer's) first makes its own current streams wait for these events.
"""

import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

from shmloader.device.device import Destination, DeviceStage, OnDevice
from shmloader.pipeline.config import OpKind
from shmloader.pipeline.executors import ThreadExecutor

# How many batches may be on their way to a device, or be there and not yet taken.
_TRANSFERS_AHEAD = 2


def _itself(value: object) -> object:
    return value


class DeviceFuture:
    """A batch on a device. The work that makes it was enqueued, but may still be under way.

    Args:
        stage: The stage that copied the batch to the device.
        result: The batch, as the stage's ``run`` or ``record`` returned it.
    """

    __slots__ = ("_stage", "result")

    def __init__(self, stage: DeviceStage, result: OnDevice) -> None:
        self._stage = stage
        self.result = result

    def open(self) -> object:
        """Make the calling thread's current streams wait for the batch, and return it."""
        return self._stage.hand_over(self.result)

    def __reduce__(self) -> tuple[Any, ...]:
        """Send the batch itself to another process."""
        return _itself, (self.open(),)


def opened(item: object) -> object:
    """Open a :class:`DeviceFuture` and return its batch. Any other item is returned unchanged."""
    return item.open() if type(item) is DeviceFuture else item


class DeviceExecutor(ThreadExecutor):
    """One thread that copies batches to a device."""

    def __init__(self, destination: Destination) -> None:
        backend = destination.backends[0]
        assert backend is not None
        self.stage = DeviceStage(backend, destination.locks, _TRANSFERS_AHEAD)
        super().__init__(DeviceStage.name, 1, self.stage.start)

    def copy(self, batch: object) -> DeviceFuture:
        """Start a batch's copy. Called on the thread."""
        try:
            return DeviceFuture(self.stage, self.stage.run(batch))
        finally:
            del batch  # a traceback pins this frame, which must not pin the slot

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread, and if it has ended, for the copies under way."""
        has_ended = super().join(timeout_s)
        if has_ended:
            self.stage.close()
        return has_ended


class AfterTransfer:
    """The op of a stage after a transfer. Opens the futures that it gets, and returns futures.

    Args:
        op: The user's op. In another process it is called without this wrapper.
        kind: The op's kind.
        stage: The stage of the transfer.
    """

    def __init__(self, op: Callable[..., Any], kind: OpKind, stage: DeviceStage) -> None:
        self._op = op
        self._kind = kind
        self._stage = stage

    def __reduce__(self) -> tuple[Any, ...]:
        return _itself, (self._op,)

    def __call__(self, item: object, *context: object) -> object:
        """Call the op as its kind requires. ``context`` is what ``setup`` returned, if any."""
        match self._kind:
            case OpKind.FUNCTION:
                return self._wrapped(self._op(opened(item), *context), item)
            case OpKind.GENERATOR:
                return self._generator(item, *context)
            case OpKind.COROUTINE:
                return self._coroutine(item, *context)
            case OpKind.ASYNC_GENERATOR:
                return self._async_generator(item, *context)

    def _generator(self, item: object, *context: object) -> Iterator[object]:
        with contextlib.closing(self._op(opened(item), *context)) as results:
            for result in results:
                yield self._wrapped(result, item)

    async def _coroutine(self, item: object, *context: object) -> object:
        return self._wrapped(await self._op(opened(item), *context), item)

    async def _async_generator(self, item: object, *context: object) -> AsyncIterator[object]:
        async with contextlib.aclosing(self._op(opened(item), *context)) as results:
            async for result in results:
                yield self._wrapped(result, item)

    def _wrapped(self, result: object, item: object) -> object:
        """Return a result that the calling thread made, in a future if it is on the device."""
        source = item.result if type(item) is DeviceFuture else None
        made = self._stage.record(result, source)
        return result if made is None else DeviceFuture(self._stage, made)
