"""How a worker gets ready, without a process."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from shmloader.batch.remote_error import RemoteError
from shmloader.pools import child


@pytest.mark.parametrize("is_fresh", [False, True])
def test_a_worker_that_cannot_load_its_dataset_lets_the_next_one_start_up(
    is_fresh: bool, monkeypatch
) -> None:
    ended, errors = [], []
    monkeypatch.setattr(child, "end_startup", ended.append)
    monkeypatch.setattr(child, "seed_worker", lambda base_seed, worker_id: 0)
    start: Any = SimpleNamespace(worker_id=0, base_seed=1, startup="its turn", is_fresh=is_fresh)
    tasks: Any = SimpleNamespace(install=lambda: None, fail=errors.append, where="here")
    worker = object.__new__(child._Worker)
    worker._start, worker._tasks = start, tasks

    def fail() -> None:
        raise LookupError("the dataset")

    worker._prepare(SimpleNamespace(load=fail))
    assert [type(error) for error in errors] == [RemoteError]
    assert ended == (["its turn"] if is_fresh else [])
