from __future__ import annotations

from shmloader.engine.inbox import Inbox


def test_it_gives_what_was_put_in_in_order_and_then_ends_until_more_is_there() -> None:
    inbox = Inbox(lambda: None, lambda: None)
    assert not inbox
    assert list(inbox) == []
    for indices in ([0], [1], [2]):
        inbox.put(indices)
    assert inbox
    assert list(inbox) == [[0], [1], [2]]
    inbox.put([3])
    assert list(inbox) == [[3]]
    assert not inbox.is_ended


def test_whatever_is_put_in_wakes_the_engine_after_it_is_there() -> None:
    seen = []
    inbox = Inbox(lambda: seen.append((bool(inbox), inbox.is_ended)), lambda: None)
    inbox.put([0])
    list(inbox)
    inbox.end()
    assert seen == [(True, False), (False, True)]


def test_nobody_is_woken_while_nothing_is_awaited_but_for_the_end() -> None:
    woken = []
    inbox = Inbox(lambda: woken.append(len(woken)), lambda: None)
    inbox.is_awaited = False
    inbox.put([0])
    assert inbox
    assert not woken
    inbox.end()
    assert woken == [0]


def test_it_asks_by_what_it_was_given() -> None:
    asked = []
    Inbox(lambda: None, lambda: asked.append(1)).ask()
    assert asked == [1]
