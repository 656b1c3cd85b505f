"""What the start of a worker leaves as it was."""

from __future__ import annotations

import signal

import pytest

from shmloader.pools.forking import sigint_blocked


@pytest.mark.parametrize("was_blocked", [False, True])
def test_ctrl_c_is_blocked_after_a_start_only_if_it_was_before(was_blocked: bool) -> None:
    how = signal.SIG_BLOCK if was_blocked else signal.SIG_UNBLOCK
    before = signal.pthread_sigmask(how, [signal.SIGINT])
    try:
        with sigint_blocked(is_fresh=False):
            assert signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, [])
        is_blocked = signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, [])
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert is_blocked == was_blocked
