"""What the start of a worker leaves as it was, and how a worker ends with the main process."""

import os
import signal

import pytest

from shmloader.pools.forking import ParentDeathPipe, sigint_blocked


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


def test_a_worker_whose_main_process_is_gone_already_ends_at_once():
    parent_death = ParentDeathPipe()
    parent_death.close_write()
    pid = os.fork()
    if pid == 0:
        parent_death.hold()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1
    parent_death.close()


def test_closing_twice_is_no_error():
    parent_death = ParentDeathPipe()
    parent_death.close_read()
    parent_death.close()
    parent_death.close()
