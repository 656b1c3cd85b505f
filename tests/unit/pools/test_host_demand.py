"""What a rank reports of its waits."""

from __future__ import annotations

import time

from shmloader.pools.host_demand import REPORT_NS, DemandReporter
from shmloader.pools.host_messages import Demand, EpochBegun


def test_what_the_owner_did_not_take_is_reported_with_the_next(monkeypatch) -> None:
    reported: list[tuple[object, ...]] = []
    takes = [True]

    def report(message: tuple[object, ...]) -> bool:
        reported.append(message)
        return takes[0]

    monkeypatch.setattr(time, "monotonic_ns", lambda: 5 * REPORT_NS)
    reporter = DemandReporter(report)
    reporter.note(REPORT_NS - 1, 100, 100)  # of the time before the epoch
    reporter.begin()
    now_ns = 5 * REPORT_NS
    reporter.note(now_ns, 1, 20)
    assert reported == [EpochBegun()]
    takes[0] = False
    reporter.note(now_ns + REPORT_NS, 2, 30)
    takes[0] = True
    reporter.note(now_ns + REPORT_NS + 1, 4, 50)
    reporter.note(now_ns + 2 * REPORT_NS, 8, 60)
    reporter.note(now_ns + 2 * REPORT_NS + 1, 16, 70)
    assert reported == [EpochBegun(), Demand(2, 3, 50), Demand(3, 7, 100), Demand(2, 24, 130)]
