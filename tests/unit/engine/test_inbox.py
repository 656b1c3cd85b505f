from __future__ import annotations

from shmloader.engine.inbox import Inbox


def nothing() -> None: ...


def test_it_gives_what_was_put_in_in_order_and_then_ends_until_more_is_there() -> None:
    inbox = Inbox(nothing)
    assert not inbox
    assert list(inbox) == []
    for indices in ([0], [1], [2]):
        inbox.put(indices, nothing)
    assert inbox
    assert list(inbox) == [[0], [1], [2]]
    inbox.put([3], nothing)
    assert list(inbox) == [[3]]
    assert not inbox.is_ended


def test_whatever_is_put_in_wakes_the_engine_after_it_is_there() -> None:
    seen = []

    def wake() -> None:
        seen.append((bool(inbox), inbox.is_ended))

    inbox = Inbox(nothing)
    inbox.put([0], wake)
    list(inbox)
    inbox.end(wake)
    assert seen == [(True, False), (False, True)]


def test_nobody_is_woken_while_nothing_is_awaited_but_for_the_end() -> None:
    woken = []
    inbox = Inbox(nothing)
    inbox.is_awaited = False
    inbox.put([0], lambda: woken.append("put"))
    assert inbox
    assert not woken
    inbox.end(lambda: woken.append("end"))
    assert woken == ["end"]


def test_it_asks_by_what_it_was_given() -> None:
    asked = []
    Inbox(asked.append).ask(True)
    assert asked == [1]
