"""When a fault happens. The fault campaign tests what it does to a process."""

import pytest

from shmloader.faults import _Fault


def fail():
    raise MemoryError("injected")


def test_a_fault_happens_at_the_nth_time_only():
    fault = _Fault(f"worker.task:2:{__name__}.fail")
    for point in ("worker.task", "worker.idle", "worker.idle"):
        fault.reach(point)
    with pytest.raises(MemoryError):
        fault.reach("worker.task")
    fault.reach("worker.task")


def test_a_point_may_name_one_worker():
    fault = _Fault(f"worker.task/1:1:{__name__}.fail")
    fault.worker_id = 0
    fault.reach("worker.task")
    fault.worker_id = 1
    with pytest.raises(MemoryError):
        fault.reach("worker.task")
