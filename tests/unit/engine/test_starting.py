"""Who is started when: as many get ready at a time as there are cores."""

from hypothesis import given
from hypothesis import strategies as st

from shmloader.engine.starting import Starting


def start_all(starting: Starting) -> list[int]:
    begun = []
    while (worker_id := starting.next()) is not None:
        starting.begun(worker_id)
        begun.append(worker_id)
    return begun


def test_a_worker_is_started_when_another_one_is_ready():
    starting = Starting(range(2), range(2, 5), at_once=2)
    assert start_all(starting) == []
    starting.heard(1)
    assert start_all(starting) == [2]
    starting.heard(1)  # it has long been ready
    assert start_all(starting) == []
    starting.heard(2)
    starting.heard(0)
    assert start_all(starting) == [3, 4]
    assert not starting.waiting


@given(st.data(), st.integers(1, 9), st.integers(1, 9))
def test_all_are_started_in_order_and_never_too_many_get_ready(data, count, at_once):
    first = min(count, at_once)
    starting = Starting(range(first), range(first, count), at_once)
    unready, order = set(range(first)), list(range(first))
    while unready:
        ready = data.draw(st.sampled_from(sorted(unready)))
        unready.discard(ready)
        starting.heard(ready)
        begun = start_all(starting)
        order += begun
        unready.update(begun)
        assert len(unready) <= at_once
    assert order == list(range(count))
