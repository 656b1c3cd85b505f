"""An executor that is a ``concurrent.futures.Executor`` of the user's, who also shuts it down."""

import collections
import concurrent.futures
import threading
from typing import Any

from shmloader.interruptions import is_interruption
from shmloader.pipeline.epoch import Task
from shmloader.pipeline.ops import OpKind, call_all, refuse_coroutine


class ExecutorStage:
    """Submits tasks. All that a generator function gives for an item comes together.

    Args:
        executor: The user's.
    """

    def __init__(self, executor: concurrent.futures.Executor) -> None:
        self._executor = executor
        self._waiting: collections.deque[Task] = collections.deque()
        self._submitting = threading.Lock()
        # Who takes a task out of here goes on with what its future gave.
        self._tasks: dict[concurrent.futures.Future[object], Task] = {}

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
        call, item = task.call, task.job.item
        if task.epoch.is_over:
            return
        try:
            if call.kind is OpKind.GENERATOR:
                future: concurrent.futures.Future[object] = self._executor.submit(
                    call_all, call.op, item
                )
            else:
                future = self._executor.submit(call.op, item)
        except BaseException as error:
            if task.epoch.is_taken_here and is_interruption(error):
                raise
            # The executor is shut down, or broken.
            self._go_on(task.epoch.broke(task, error))
            return
        self._tasks[future] = task
        # Not in a callback on this thread: concurrent.futures keeps to itself what one raises, and
        # so what a signal handler raises in it.
        adding_on: int | None = threading.get_ident()

        def done(future: "concurrent.futures.Future[object]") -> None:
            if adding_on != threading.get_ident():
                self._finish(future)

        if not future.done():
            future.add_done_callback(done)
            adding_on = None
        if future.done():
            self._finish(future)

    def _finish(self, future: "concurrent.futures.Future[object]") -> None:
        """Go on with what a future gave, unless another thread does; on any thread."""
        task = self._tasks.pop(future, None)
        if task is None:
            return
        if future.cancelled():
            if not task.epoch.is_over:
                task.epoch.broke(task, RuntimeError("somebody has cancelled the item's future"))
            return
        error = future.exception()
        if error is not None:
            self._go_on(task.epoch.failed(task, error))
            return
        result: Any = future.result()
        try:
            refuse_coroutine(result, task.call.name)
        except TypeError as refused:
            if is_interruption(refused):
                raise
            self._go_on(task.epoch.failed(task, refused))
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
        for future in list(self._tasks):
            future.cancel()

    def join(self, deadline: float) -> None:
        """The user's threads or processes are waited for by nobody."""
