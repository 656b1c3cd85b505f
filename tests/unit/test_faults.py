"""When a fault happens. The fault campaign tests what it does to a process."""

import pytest

from shmloader.faults import _Faults, _read

taken: list[str] = []


def note() -> None:
    taken.append("note")


def other() -> None:
    raise MemoryError("placed")


@pytest.fixture(autouse=True)
def _nothing_taken():
    taken.clear()


HERE = f"{__name__}.note"


def test_a_fault_happens_at_the_nth_time_only():
    faults = _Faults(f"worker.task:3:{HERE}")
    for count in range(1, 6):
        faults.reach("worker.task")
        faults.reach("worker.idle")
        assert len(taken) == (count >= 3)


def test_a_point_may_name_one_worker():
    faults = _Faults(f"worker.task/1:1:{HERE}")
    faults.worker_id = 0
    faults.reach("worker.task")
    assert not taken
    faults = _Faults(f"worker.task/1:1:{HERE}")
    faults.worker_id = 1
    faults.reach("worker.task")
    assert taken


def test_an_action_may_raise():
    with pytest.raises(MemoryError, match="placed"):
        _Faults(f"main.next:1:{__name__}.other").reach("main.next")


def test_several_faults_can_be_given_at_once():
    faults = _Faults(f"a:1:{HERE}, b:2:{HERE}")
    for point in ("a", "b", "b"):
        faults.reach(point)
    assert len(taken) == 2


@pytest.mark.parametrize("text", ["worker.task", "worker.task:1", "a:b:SIGKILL", "a:1:", ":1:b"])
def test_a_text_of_another_form_is_refused(text):
    with pytest.raises(ValueError, match="SHMLOADER_FAULT should be point:nth:action"):
        _Faults(text)


def test_without_the_variable_there_are_no_faults(monkeypatch):
    monkeypatch.delenv("SHMLOADER_FAULT", raising=False)
    assert _read() is None
    monkeypatch.setenv("SHMLOADER_FAULT", "a:1:SIGKILL")
    assert _read() is not None
