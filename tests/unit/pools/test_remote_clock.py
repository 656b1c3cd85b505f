"""What calls tell of another machine's clock."""

from __future__ import annotations

import pytest

from shmloader.pools.remote_clock import RemoteClock

MS = 1_000_000
AHEAD_NS = -7_000_000_000_000  # the other machine has been up for longer


def call(clock: RemoteClock, at_ms: float, *, there_ms: float, work_ms: float, back_ms: float):
    """Note a call, and return how long it seems to have taken there, and back, in ms."""
    sent_ns = int(at_ms * MS)
    began_ns = sent_ns + int(there_ms * MS)
    ended_ns = began_ns + int(work_ms * MS)
    received_ns = ended_ns + int(back_ms * MS)
    clock.note(sent_ns, began_ns - AHEAD_NS, ended_ns - AHEAD_NS, received_ns)
    began_here_ns = began_ns - AHEAD_NS + clock.ahead_ns
    ended_here_ns = ended_ns - AHEAD_NS + clock.ahead_ns
    return (began_here_ns - sent_ns) / MS, (received_ns - ended_here_ns) / MS


def test_a_network_that_always_takes_the_same_time_is_told_from_the_work() -> None:
    clock = RemoteClock()
    assert call(clock, 0, there_ms=5, work_ms=1, back_ms=5) == (5, 5)
    assert call(clock, 10, there_ms=5, work_ms=100, back_ms=5) == (5, 5)


def test_a_call_that_waited_behind_others_is_seen_to_have_waited() -> None:
    clock = RemoteClock()
    call(clock, 0, there_ms=5, work_ms=1, back_ms=5)
    assert call(clock, 1, there_ms=45, work_ms=1, back_ms=5) == pytest.approx((45, 5), abs=0.1)
    assert call(clock, 2, there_ms=5, work_ms=1, back_ms=95) == pytest.approx((5, 95), abs=0.1)


def test_the_fastest_ways_count_though_they_come_later_and_of_different_calls() -> None:
    clock = RemoteClock()
    assert call(clock, 0, there_ms=40, work_ms=1, back_ms=10) == (25, 25), "half of each"
    call(clock, 100, there_ms=4, work_ms=1, back_ms=50)
    call(clock, 200, there_ms=60, work_ms=1, back_ms=4)
    assert call(clock, 300, there_ms=40, work_ms=1, back_ms=10) == pytest.approx((40, 10), abs=0.2)


def test_clocks_that_drift_apart_are_followed() -> None:
    clock = RemoteClock()
    for second in range(3600):
        at_ns = second * 1_000 * MS
        drift_ns = second * 50_000  # 50 millionths
        began_ns = at_ns + 2 * MS - AHEAD_NS + drift_ns
        clock.note(at_ns, began_ns, began_ns + MS, at_ns + 5 * MS)
        assert abs(clock.ahead_ns - AHEAD_NS + drift_ns) < MS


def test_after_a_jump_of_a_clock_the_newest_call_counts() -> None:
    clock = RemoteClock()
    call(clock, 0, there_ms=5, work_ms=1, back_ms=5)
    # The other machine was suspended for an hour, in which its clock stood still.
    began_ns = 3_600_000 * MS + 5 * MS - AHEAD_NS
    clock.note(7_200_000 * MS, began_ns, began_ns + MS, 7_200_011 * MS)
    assert clock.ahead_ns == AHEAD_NS + 3_600_000 * MS


def test_nothing_is_added_before_the_first_call() -> None:
    assert RemoteClock().ahead_ns == 0
