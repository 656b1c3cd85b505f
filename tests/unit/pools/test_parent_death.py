"""A worker ends with the main process, in whatever state both are."""

import os

from shmloader.pools.parent_death import ParentDeathPipe


def test_a_worker_whose_main_process_is_gone_already_ends_at_once():
    reading, writing = os.pipe()
    gone = os.fork()
    if gone == 0:
        os._exit(0)
    os.waitpid(gone, 0)
    pid = os.fork()
    if pid == 0:
        parent_death = ParentDeathPipe()
        parent_death.main_pid = gone
        parent_death.hold()
        os.write(writing, b"x")
        os._exit(0)
    os.close(writing)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1
    assert os.read(reading, 1) == b""
    os.close(reading)


def test_closing_twice_is_no_error():
    parent_death = ParentDeathPipe()
    parent_death.close_read()
    parent_death.close()
    parent_death.close()
