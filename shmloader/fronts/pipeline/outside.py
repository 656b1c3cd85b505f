"""A crew that is a ``concurrent.futures.Executor`` of the user's, who also shuts it down."""

import collections
import concurrent.futures
import functools
import threading
from typing import Any

from shmloader.fronts.pipeline.arrival import opened
from shmloader.fronts.pipeline.epoch import Task
from shmloader.fronts.pipeline.ops import OpKind, call_all, refuse_coroutine


class ExecutorCrew:
    """Submits tasks. All that a generator function gives for an item comes together.

    Args:
        executor: The user's.
    """

    def __init__(self, executor: concurrent.futures.Executor) -> None:
        self._executor = executor
        self._waiting: collections.deque[Task] = collections.deque()
        self._submitting = threading.Lock()
        self._futures: set[concurrent.futures.Future[object]] = set()

    def put(self, task: Task) -> None:
        """Submit a task.

        One after the other, also where an executor runs it inside of ``submit``, and its end brings
        the next one: these must not pile up on the stack.
        """
        self._waiting.append(task)
        while self._waiting and self._submitting.acquire(blocking=False):
            try:
                while self._waiting:
                    self._submit(self._waiting.popleft())
            finally:
                self._submitting.release()

    def _submit(self, task: Task) -> None:
        call, item = task.call, opened(task.job.item)
        if task.epoch.is_over:
            return
        try:
            if call.kind is OpKind.GENERATOR:
                future: concurrent.futures.Future[object] = self._executor.submit(
                    call_all, call.op, item
                )
            else:
                future = self._executor.submit(call.op, item)
        except BaseException as error:  # noqa: BLE001 - it is shut down, or broken
            self._go_on(task.epoch.broke(task, error))
            return
        self._futures.add(future)
        future.add_done_callback(functools.partial(self._done, task))

    def _done(self, task: Task, future: "concurrent.futures.Future[object]") -> None:
        """On whichever thread the executor calls this."""
        self._futures.discard(future)
        if future.cancelled():
            if not task.epoch.is_over:
                task.epoch.broke(task, RuntimeError("somebody has cancelled the item's future"))
            return
        try:
            result: Any = future.result()
            refuse_coroutine(result, task.call.name)
        except BaseException as error:  # noqa: BLE001 - the consumer is told
            self._go_on(task.epoch.failed(task, error))
            return
        if task.call.kind is OpKind.GENERATOR:  # what call_all gave
            self._go_on(task.epoch.finished(task, *result))
        else:
            self._go_on(task.epoch.finished(task, *(() if result is None else (result,))))

    def _go_on(self, task: Task | None) -> None:
        if task is not None:
            self.put(task)

    def end(self) -> None:
        """Cancel what has not begun; from anywhere."""
        self._waiting.clear()
        for future in list(self._futures):
            future.cancel()

    def join(self, deadline: float) -> None:
        """The user's threads or processes are waited for by nobody."""
