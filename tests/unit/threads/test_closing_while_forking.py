"""A process that is forked while another thread closes a descriptor closes none twice."""

import os

import pytest

from shmloader.pools.forking import ParentDeathPipe
from shmloader.pools.status_page import StatusPage


@pytest.mark.parametrize(
    "make", [lambda: StatusPage(1), ParentDeathPipe], ids=["status_page", "parent_death"]
)
def test_a_child_forked_within_close_closes_nothing_twice(make, monkeypatch):
    owner, close, codes = make(), os.close, []

    def close_and_fork(fd):
        # os.close lets other threads run, and one of them forks a worker.
        close(fd)
        monkeypatch.setattr(os, "close", close)
        pid = os.fork()
        if pid == 0:
            try:
                owner.close()
            except BaseException:
                os._exit(1)
            os._exit(0)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))

    monkeypatch.setattr(os, "close", close_and_fork)
    owner.close()
    assert codes == [0]
