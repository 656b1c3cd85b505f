"""Long and odd things on their way: keys, bodies, exceptions, objects that do not pickle."""

import dataclasses
import re
import sys
import threading
import types
from typing import Any

import pytest
import torch

from shmloader import DataLoader, WorkerDiedError
from shmloader.memory import compiled
from shmloader.pools import handle, process, task_queue, worker
from tests.parity.compare import assert_same
from tests.process.support import Calls, only, outcomes

KEYS = [1, True, 1.0]

ODD: dict[str, tuple[Calls, dict[str, Any]]] = {
    "very many indices": (Calls(int, 300_000), {"batch_size": 100_000}),
    # Which wait for their socket.
    "very many small keys in flight": (
        Calls(lambda key: int(key.split()[0]), 500),
        {"sampler": [f"{n} " + "x" * 2000 for n in range(500)], "prefetch_factor": 100},
    ),
    "large bodies of objects": (
        Calls(lambda n: {"text": "0123456789" * 500_000 + str(n), "list": [*range(n * 1000)]}, 8),
        {"collate_fn": only},
    ),
    "bodies of one length and other content": (
        Calls(lambda n: [str(n % 10) * 100_000, str(n % 10) * 3], 40), {"collate_fn": only},
    ),
    "keys that are equal and not the same": (
        Calls(lambda n: {KEYS[n % 3]: torch.tensor(n)}, 9), {"batch_size": 1, "num_workers": 1},
    ),
    "thousands of fields": (
        Calls(lambda n: {f"field {k}": torch.tensor(n + k) for k in range(3000)}, 6),
        {"batch_size": 2},
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", ODD)
def test_odd_things_arrive_as_they_are(what) -> None:
    dataset, options = ODD[what]
    here = {
        name: options[name] for name in options if name not in ("prefetch_factor", "num_workers")
    }
    expected = list(DataLoader(dataset, **here))
    with DataLoader(dataset, persistent_workers=True, **{"num_workers": 2, **options}) as loader:
        for _ in range(2):
            batches = list(loader)
            assert_same(batches, expected)
    if "not the same" in what:
        assert [type(next(iter(batch))) for batch in batches] == [int, bool, float] * 3


def test_messages_are_received_without_compiled_code_as_well(monkeypatch) -> None:
    monkeypatch.setattr(compiled, "receive_each", None)
    for module in (handle, process, worker):
        monkeypatch.setattr(module, "receive", task_queue._receive)
    for in_order in (True, False):  # without an order, workers share a queue
        loader = DataLoader(range(200), num_workers=2, in_order=in_order)
        assert sorted(batch.item() for batch in loader) == [*range(200)]


class TwoArguments(Exception):  # noqa: N818 - as users name theirs
    def __init__(self, a: int, b: int) -> None:
        super().__init__(a, b)


class FailsToSpeak(Exception):  # noqa: N818 - as users name theirs
    def __str__(self) -> str:
        raise ZeroDivisionError


class HoldsALock(Exception):  # noqa: N818 - as users name theirs
    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock = threading.Lock()


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):  # noqa: N818 - what matters is that it is frozen
    text: str


class Slotted(Exception):  # noqa: N818 - as users name theirs
    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(name)


def _local() -> Exception:
    class Local(Exception):  # noqa: N818 - as users name theirs
        pass

    return Local("a local one")


def _known_here_only() -> Exception:
    module = types.ModuleType("known_in_the_worker_only")
    sys.modules[module.__name__] = module
    exec("class Strange(Exception): pass", module.__dict__)
    return module.Strange("unheard of")


MAKERS: dict[str, tuple[Any, str, str]] = {
    "ten megabytes": (lambda: ValueError("m" * 10_000_000), "ValueError", "mmmm"),
    "two arguments": (lambda: TwoArguments(1, 2), "RuntimeError", "TwoArguments"),
    "a failing str": (lambda: FailsToSpeak("x"), "FailsToSpeak", ""),
    "a lock in it": (lambda: HoldsALock("locked"), "HoldsALock", "locked"),
    "a class that only the worker knows": (_known_here_only, "", "unheard of"),
    "a local class": (_local, "Local", "a local one"),
    "a frozen dataclass": (lambda: Frozen("frozen"), "Frozen", "frozen"),
    "attributes that cannot be set": (lambda: Slotted("set"), "Slotted", "set"),
    "a group": (lambda: ExceptionGroup("several", [ValueError("one")]), "", "several"),
}  # fmt: skip


@pytest.mark.sampled(2)
@pytest.mark.parametrize("what", MAKERS)
def test_an_exception_with(what) -> None:
    make, kind, text = MAKERS[what]

    def sample(n: int) -> int:
        if n == 1:
            raise make()
        return n

    seen = outcomes(DataLoader(Calls(sample, 4), num_workers=2, collate_fn=only))
    assert [seen[0], *seen[2:]] == [0, 2, 3]
    error = seen[1]
    assert kind in ("", type(error).__name__)
    if what != "a failing str":
        assert text in str(error)
        assert re.search(r"Original\s.*Traceback \(most recent call last\)", str(error))
    if what not in ("a frozen dataclass", "attributes that cannot be set"):
        assert any("batch 1 (index 1)" in note for note in error.__notes__)


class FailsToReduce:
    def __reduce__(self) -> Any:
        raise ZeroDivisionError("cannot be reduced")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("collate", [None, only])
@pytest.mark.parametrize("kind", ["a lock", "failing"])
def test_a_dict_key_that_cannot_be_pickled_is_an_error_at_its_place(kind, collate) -> None:
    def sample(n: int) -> Any:
        if n != 1:
            return torch.tensor([n])
        key = threading.Lock() if kind == "a lock" else FailsToReduce()
        return {key: torch.tensor([n])}

    seen = outcomes(DataLoader(Calls(sample, 4), num_workers=2, collate_fn=collate))
    assert [int(seen[0]), *map(int, seen[2:])] == [0, 2, 3]
    assert isinstance(seen[1], Exception)
    assert not isinstance(seen[1], WorkerDiedError)


class Unreadable:
    def __reduce__(self) -> Any:
        return (int, ("not a number",))


def test_a_key_that_the_worker_cannot_read_fails_its_batch_and_no_other() -> None:
    keys = [0, Unreadable(), 2]
    loader = DataLoader(Calls(lambda key: key, 3), sampler=keys, batch_size=None, num_workers=1)
    batches = iter(loader)
    assert next(batches) == 0
    with pytest.raises(ValueError, match="invalid literal"):
        next(batches)
    assert next(batches) == 2
