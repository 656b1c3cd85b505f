"""What a process of an executor keeps between tasks."""

import collections
from typing import Any

from shmloader.pools import executor_task
from shmloader.process_state import PROCESS


def test_the_datasets_of_the_loaders_that_were_used_last_are_kept(monkeypatch) -> None:
    made, closed = [], []

    class Maker:
        def __init__(self, payload: Any, loader: int, *_: Any) -> None:
            self.loader, self.digest = loader, payload.digest
            made.append(self.loader)

        def close(self) -> None:
            closed.append(self.loader)

    monkeypatch.setattr(executor_task, "_Maker", Maker)
    monkeypatch.setattr(executor_task, "_keep_freed_memory", lambda: None)
    monkeypatch.setattr(PROCESS.tasks, "makers", collections.OrderedDict())

    def make(loader: int) -> None:
        payload = (b"-", b"", (0, 0, 0), False)
        common = executor_task.Common(loader, payload, b"", loader)
        executor_task._find_maker(common, 0, "", None)

    most = executor_task.KEPT
    for loader in [*range(most), 0, 1, most, most + 1, 0, 1]:
        make(loader)
    assert made == list(range(most + 2))
    assert closed == [2, 3]
