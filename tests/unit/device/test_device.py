"""Whose the devices of a loader are."""

from __future__ import annotations

import os

import torch

from shmloader.device.device import Destination


def test_the_devices_of_a_process_are_not_those_of_a_child_that_it_forks(monkeypatch) -> None:
    destination = Destination([None])
    assert destination.is_of([None])
    assert not destination.is_of([None, None])
    assert not destination.is_of([torch.device("cuda", 0)])
    with monkeypatch.context() as patched:
        patched.setattr(os, "getpid", lambda: 0)
        is_of_child = destination.is_of([None])
    assert not is_of_child
