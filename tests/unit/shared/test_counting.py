"""How many Python objects a dataset holds is estimated at a glance."""

import numpy as np
import pytest
import torch

import shmloader
from shmloader.shared import sharing
from shmloader.shared.sharing import MANY, describe_many, estimate_objects
from tests.process.support import Calls


class Holder:
    def __init__(self, **fields) -> None:
        self.__dict__.update(fields)
        self.itself = self


class Slots:
    __slots__ = ("left", "right")

    def __init__(self, number: int) -> None:
        self.left, self.right = str(number), -1_000_000 - number


TEXTS = [f"line {number}" for number in range(5_000)]


@pytest.mark.parametrize(
    ("make", "count"),
    [
        (lambda: TEXTS, 5_000),
        (lambda: tuple(TEXTS), 5_000),
        (lambda: {text: 1_000_000 + number for number, text in enumerate(TEXTS)}, 10_000),
        (lambda: [{"text": text, "at": (text,)} for text in TEXTS], 20_000),
        (lambda: Holder(texts=TEXTS, other=list(TEXTS)), 10_000),
        (lambda: Holder(inner=Holder(texts=TEXTS)), 5_000),
        (lambda: [Slots(number) for number in range(5_000)], 15_000),
        # A step through these that meets none but the empty ones.
        (
            lambda: [[[text] for _ in range(10)] if n % 78 else [] for n, text in enumerate(TEXTS)],
            100_000,
        ),
        (lambda: [None] * 5_000, 1),
        (lambda: [True, False] * 5_000, 2),
        (lambda: np.zeros(10**6), 0),
        (lambda: torch.zeros(10**6), 0),
        (list, 1),
        (lambda: Holder(module=np, kind=dict), 1),
    ],
    ids=["list", "tuple", "dict", "dicts", "attributes", "nested", "slots", "periodic",
         "one object", "two", "array", "tensor", "empty", "module"],
)  # fmt: skip
def test_the_estimate_is_about_right(make, count, monkeypatch):
    # On a busy machine, the time is over before the items have been looked at.
    monkeypatch.setattr(sharing, "_LIMIT_S", 30)
    assert estimate_objects(make())[0] == pytest.approx(count, rel=0.6, abs=5)


def test_what_is_shared_holds_hardly_any():
    assert estimate_objects(Holder(texts=shmloader.share(TEXTS)))[0] < 100


def test_many_objects_are_told_with_their_number(monkeypatch):
    monkeypatch.setattr(sharing, "estimate_objects", lambda dataset: dataset)
    assert describe_many((MANY, 10**9), 4) is None
    text = describe_many((2_340_000, 140_000_000), 4)
    assert text is not None
    assert "about 2.3 million Python objects (140.0 MB)" in text
    assert "up to 560.0 MB" in text
    assert "shmloader.share(dataset)" in text


def test_a_loader_says_it_once(monkeypatch):
    monkeypatch.setattr("shmloader.shared.sharing.MANY", 1_000)
    dataset = Calls(TEXTS.__getitem__, 20)
    dataset.texts = TEXTS
    loader = shmloader.DataLoader(
        dataset, batch_size=10, num_workers=1, multiprocessing_context="fork"
    )
    with pytest.warns(UserWarning, match=r"0\.0 million Python objects .*share\(dataset\)"):
        assert len(list(loader)) == 2
    assert len(list(loader)) == 2  # where a further warning would be an error


class Unmeasured:
    def __sizeof__(self) -> int:
        raise RuntimeError("no size")


def test_an_object_that_cannot_be_looked_at_breaks_no_loader():
    dataset = Calls(TEXTS.__getitem__, 20)
    dataset.odd = Unmeasured()
    with shmloader.DataLoader(
        dataset, batch_size=10, num_workers=1, multiprocessing_context="fork"
    ) as loader:
        assert len(list(loader)) == 2
