"""Batches on a device, on their way from the thread that enqueued their work to one that uses them.

Work on a device is asynchronous: a copy, or what an op computes, may be under way still when its
thread goes on. Each thread has current streams of its own. So what leaves a stage on a device
travels as a :class:`DeviceFuture`, with events of the streams that it was made on, and the thread
that takes it, of the next op or the consumer, has its own current streams wait for them first.
"""

import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

from shmloader.device.device import DeviceStage, OnDevice
from shmloader.pipeline.ops import OpKind


def _itself(value: object) -> object:
    return value


class DeviceFuture:
    """A batch whose work was enqueued.

    Args:
        stage: The stage that copied it to the device.
        result: The batch, as the stage's ``run`` or ``depart`` returned it.
    """

    __slots__ = ("_stage", "result")

    def __init__(self, stage: DeviceStage, result: OnDevice) -> None:
        self._stage = stage
        self.result = result

    def open(self) -> object:
        """The batch; the calling thread's current streams wait for it."""
        return self._stage.hand_over(self.result)

    def __reduce__(self) -> tuple[Any, ...]:
        """Another process gets the batch itself."""
        return _itself, (self.open(),)


def opened(item: object) -> object:
    """An item for its user: a batch that has arrived, or the item as it is."""
    return item.open() if type(item) is DeviceFuture else item


class AfterTransfer:
    """An op of a stage after a transfer: takes futures, and gives them.

    Args:
        op: The op itself, which runs alone where this is sent to another process.
        kind: The op's kind.
        stage: The stage of the transfer.
    """

    def __init__(self, op: Callable[[Any], Any], kind: OpKind, stage: DeviceStage) -> None:
        self._op = op
        self._kind = kind
        self._stage = stage

    def __reduce__(self) -> tuple[Any, ...]:
        return _itself, (self._op,)

    def __call__(self, item: object) -> object:
        """Call the op, as one of its kind is called."""
        match self._kind:
            case OpKind.FUNCTION:
                return self._function(item)
            case OpKind.GENERATOR:
                return self._generator(item)
            case OpKind.COROUTINE:
                return self._coroutine(item)
            case OpKind.ASYNC_GENERATOR:
                return self._async_generator(item)

    def _function(self, item: object) -> object:
        return self._departed(self._op(opened(item)), item)

    def _generator(self, item: object) -> Iterator[object]:
        with contextlib.closing(self._op(opened(item))) as results:
            for result in results:
                yield self._departed(result, item)

    async def _coroutine(self, item: object) -> object:
        return self._departed(await self._op(opened(item)), item)

    async def _async_generator(self, item: object) -> AsyncIterator[object]:
        async with contextlib.aclosing(self._op(opened(item))) as results:
            async for result in results:
                yield self._departed(result, item)

    def _departed(self, result: object, item: object) -> object:
        """A result of the calling thread, as it travels on."""
        came = item.result if type(item) is DeviceFuture else None
        made = self._stage.depart(result, came)
        return result if made is None else DeviceFuture(self._stage, made)
