"""Workers that are forked while another thread draws random numbers."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from shmloader import DataLoader


def draw_by_torch() -> None:
    torch.empty(1_000_000).normal_()


def draw_by_numpy() -> None:
    np.random.standard_normal(1_000_000)


@pytest.mark.parametrize("draw", [draw_by_torch, draw_by_numpy])
def test_a_worker_that_is_forked_while_another_thread_draws_makes_batches(draw) -> None:
    has_begun, stop = threading.Event(), threading.Event()

    def go() -> None:
        while not stop.is_set():
            draw()
            has_begun.set()

    thread = threading.Thread(target=go)
    thread.start()
    has_begun.wait()
    try:
        for _ in range(2):
            with DataLoader(range(4), num_workers=2, timeout=20) as loader:
                assert [batch.item() for batch in loader] == [0, 1, 2, 3]
    finally:
        stop.set()
        thread.join()
    draw()
