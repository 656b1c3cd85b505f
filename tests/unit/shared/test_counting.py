"""A dataset with a very long list is warned of once."""

import pytest

import shmloader
from shmloader.shared import sharing
from shmloader.shared.sharing import describe_long
from tests.process.support import Calls

TEXTS = [f"line {number}" for number in range(5_000)]


class Slots:
    __slots__ = ("many",)

    def __init__(self, many: object) -> None:
        self.many = many


def test_a_long_list_is_told_with_its_length(monkeypatch):
    monkeypatch.setattr(sharing, "MANY", 5_000)
    for value in (TEXTS, tuple(TEXTS), dict.fromkeys(TEXTS)):
        for dataset in (value, Slots(value)):
            text = describe_long(dataset)
            assert text is not None
            assert f"a {type(value).__name__} of 5,000 items" in text
    for few in (TEXTS[1:], shmloader.share(TEXTS), [TEXTS], "x" * 5_000, Slots(None), 7):
        assert describe_long(few) is None


def test_a_loader_says_it_once(monkeypatch):
    monkeypatch.setattr(sharing, "MANY", 5_000)
    dataset = Calls(TEXTS.__getitem__, 20)
    dataset.texts = TEXTS
    loader = shmloader.DataLoader(
        dataset, batch_size=10, num_workers=1, multiprocessing_context="fork"
    )
    with pytest.warns(UserWarning, match=r"5,000 items.*share\(dataset\)"):
        assert len(list(loader)) == 2
    assert len(list(loader)) == 2  # where a further warning would be an error
