"""Batches that were copied to a device, on their way to whoever uses them.

A copy may be under way still. Who uses the batch first has its current stream wait for it, on its
own thread: the next op, or the consumer.
"""

from typing import Any

from shmloader.stages.device import DeviceStage


class Arrival:
    """A batch whose copy was started.

    Args:
        stage: Which has started it.
        result: What its ``run`` has returned.
    """

    __slots__ = ("_result", "_stage")

    def __init__(self, stage: DeviceStage, result: Any) -> None:
        self._stage = stage
        self._result = result

    def open(self) -> object:
        """The batch; the calling thread's current stream waits for it."""
        return self._stage.hand_over(self._result)


def opened(item: object) -> object:
    """An item for its user: a batch that has arrived, or the item as it is."""
    return item.open() if type(item) is Arrival else item
