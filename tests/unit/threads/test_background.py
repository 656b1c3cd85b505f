"""When a background thread has ended."""

import threading

from shmloader.threads.background import BackgroundThread


class Departing(BackgroundThread):
    """A thread whose end takes as long as a test wants."""

    def __init__(self) -> None:
        super().__init__("departing")
        self.departs, self.may_go = threading.Event(), threading.Event()

    def work(self) -> None: ...

    def depart(self) -> None:
        self.departs.set()
        assert self.may_go.wait(20)


def test_a_thread_has_not_ended_before_what_it_uses_has() -> None:
    thread = Departing()
    assert thread.join(0), "it was never started"
    thread.start()
    assert thread.departs.wait(20)
    assert thread.system_id is not None
    assert not thread.join(0)
    thread.may_go.set()
    assert thread.join(20)
    assert thread.system_id is None
