"""A worker ends with the main process, in whatever state both are."""

import os

from shmloader.pools.parent_death import ParentDeathPipe


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
