"""Executors on clusters: what needs no cluster."""

import threading
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


@pytest.mark.parametrize("cancel_futures", [False, True])
def test_shutdown_does_not_wait_for_tasks_that_were_cancelled(cancel_futures: bool) -> None:
    executor = DaskExecutor(idle_client())
    future = executor.submit(max, 1, 2)
    if not cancel_futures:
        assert future.cancel()
    shutdown = threading.Thread(
        target=executor.shutdown, kwargs={"cancel_futures": cancel_futures}, daemon=True
    )
    shutdown.start()
    shutdown.join(20)
    assert not shutdown.is_alive()
    assert future.cancelled()
