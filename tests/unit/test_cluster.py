"""Executors on clusters: what needs no cluster."""

from types import SimpleNamespace
from typing import Any

import pytest

from shmloader.cluster import DaskExecutor


def idle_client() -> Any:
    """A client of Dask's whose tasks never begin."""
    return SimpleNamespace(
        asynchronous=False,
        status="running",
        loop=SimpleNamespace(add_callback=lambda _: None),
        submit=lambda *_, **__: SimpleNamespace(status="pending"),
    )


def test_after_shutdown_no_task_is_taken_and_futures_can_be_cancelled() -> None:
    executor = DaskExecutor(idle_client())
    future = executor.submit(max, 1, 2)
    executor.shutdown()  # does not wait
    with pytest.raises(RuntimeError, match="after shutdown"):
        executor.submit(max, 1, 2)
    executor.shutdown(cancel_futures=True)
    assert future.cancelled()
