"""The constructor: signature, checks in torch's order and words, attributes, warnings."""

import inspect
import multiprocessing
import os
from multiprocessing import get_context
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, SequentialSampler, default_collate, default_convert
from torch.utils.data import DataLoader as TorchLoader

from shmloader import DataLoader
from tests.parity.compare import TORCH_VERSION, both_outcomes, outcome
from tests.parity.data import Counting, Measured, Squares, as_is, draw_some
from tests.parity.ways import with_both_classes

MAP = Squares(10)
STREAM = Counting()
SAMPLER = SequentialSampler(MAP)
BATCHES = BatchSampler(SAMPLER, 3, False)
GENERATOR = torch.Generator()


def each(name: str, *values: object, **others: object) -> list[dict[str, Any]]:
    """One argument with several values, beside others."""
    return [{name: value, **others} for value in values]


REFUSED: list[dict[str, Any]] = [
    {"num_workers": -1},
    {"timeout": -1},
    {"timeout": -0.5, "num_workers": 1},
    *each("prefetch_factor", 2, 0, -1),
    {"prefetch_factor": -1, "num_workers": 1},
    {"persistent_workers": True},
    {"multiprocessing_context": "fork"},
    {"multiprocessing_context": get_context("spawn")},
    *each("multiprocessing_context", "bad", "", 5, multiprocessing, num_workers=1),
    *each("shuffle", True, "yes", [], dataset=STREAM),
    *each("sampler", SAMPLER, [], dataset=STREAM),
    {"dataset": STREAM, "batch_sampler": BATCHES},
    {"dataset": STREAM, "sampler": SAMPLER, "batch_sampler": BATCHES, "shuffle": True},
    *each("sampler", SAMPLER, [], shuffle=True),
    *each("batch_size", 2, None, batch_sampler=BATCHES),
    {"batch_sampler": BATCHES, "shuffle": True},
    {"batch_sampler": BATCHES, "sampler": SAMPLER},
    {"batch_sampler": BATCHES, "drop_last": True},
    {"batch_sampler": BATCHES, "sampler": SAMPLER, "shuffle": True},
    *each("drop_last", True, "yes", batch_size=None),
    *each("batch_size", 0, -3, True, 2.0, "4"),
    *each("drop_last", 1, None),
    {"dataset": [], "shuffle": True},
    {"dataset": STREAM, "batch_size": 0},
    *each("num_workers", "2", None),
    {"timeout": None},
    {"no_such_option": 1},
    # Where several are wrong, the first check wins.
    {"num_workers": -1, "timeout": -1},
    {"timeout": -1, "prefetch_factor": 2},
    {"prefetch_factor": 2, "persistent_workers": True},
    {"persistent_workers": True, "multiprocessing_context": "fork"},
    {"multiprocessing_context": "bad"},
    {"multiprocessing_context": "bad", "num_workers": 1, "dataset": STREAM, "shuffle": True},
    {"shuffle": True, "sampler": SAMPLER, "batch_sampler": BATCHES},
    {"batch_size": 0, "sampler": SAMPLER, "shuffle": True},
    # torch's checks come before those of types that it does not check.
    {"dataset": STREAM, "sampler": 3},
    {"dataset": STREAM, "batch_sampler": 3},
    {"sampler": 3, "shuffle": True},
    {"batch_sampler": 3, "batch_size": 2},
    {"batch_size": 0, "collate_fn": 3},
    {"batch_size": 0, "generator": 3},
    {"num_workers": -1, "worker_init_fn": 3},
    {"num_workers": 1, "timeout": -1, "prefetch_factor": "2"},
    {"dataset": 5, "num_workers": -1},
]

ACCEPTED: list[dict[str, Any]] = [
    {},
    {"batch_size": 4},
    *each("shuffle", True, False, 1, "yes"),
    {"sampler": SAMPLER},
    {"sampler": SAMPLER, "batch_size": None},
    {"sampler": [3, 1], "shuffle": False},
    {"sampler": SAMPLER, "shuffle": 0},
    {"batch_sampler": BATCHES},
    {"batch_sampler": [[1], [2, 3]], "collate_fn": as_is},
    {"batch_size": None},
    {"batch_size": None, "shuffle": True},
    {"drop_last": True, "batch_size": 3},
    *each("num_workers", 1, 1000, True),
    *each("prefetch_factor", 5, 0, num_workers=1),
    {"num_workers": 1, "persistent_workers": True},
    {"num_workers": 1, "timeout": 2.5},
    {"timeout": 3},
    {"num_workers": 1, "worker_init_fn": draw_some},
    *each("multiprocessing_context", "fork", "spawn", num_workers=1),
    *each("multiprocessing_context", *map(get_context, ("forkserver", None)), num_workers=1),
    {"generator": GENERATOR, "shuffle": True},
    {"generator": GENERATOR},
    {"pin_memory": True},
    {"pin_memory": True, "pin_memory_device": "cuda"},
    {"pin_memory_device": "cuda:1"},
    {"collate_fn": as_is},
    *each("num_workers", 0, 1, in_order=False),
    {"dataset": STREAM},
    {"dataset": STREAM, "shuffle": False},
    {"dataset": STREAM, "batch_size": None},
    {"dataset": STREAM, "batch_size": 4, "drop_last": True},
    {"dataset": Measured(3, 3), "num_workers": 1, "persistent_workers": True},
    {"dataset": [], "batch_size": 3},
]

ATTRIBUTES = [
    *("num_workers", "prefetch_factor", "pin_memory", "pin_memory_device", "timeout"),
    *("worker_init_fn", "in_order", "batch_size", "drop_last", "generator", "collate_fn"),
    *("persistent_workers", "_auto_collation", "_dataset_kind", "_iterator", "dataset"),
    *("_IterableDataset_len_called", "_DataLoader__initialized", "multiprocessing_context"),
    "_DataLoader__multiprocessing_context",
]


def words(options: dict[str, Any]) -> str:
    """A short name of a case."""
    return ", ".join(f"{k}={v!r}" if len(repr(v)) < 20 else k for k, v in options.items()) or "none"


@pytest.mark.sampled(31)
@pytest.mark.parametrize("options", REFUSED, ids=words)
def test_wrong_arguments_are_refused_in_torchs_words(options: dict[str, Any]) -> None:
    ours, theirs = both_outcomes(lambda cls: cls(**{"dataset": MAP, **options}))
    assert theirs.failure is not None
    if "no_such_option" in options:
        assert ours.failure is not None
        assert ours.failure.kind is TypeError
        assert "unexpected keyword argument 'no_such_option'" in ours.failure.text
        return
    if options == {"num_workers": "2"}:  # torch's words are of a comparison that fails
        assert ours.failure is not None
        assert ours.failure.kind is theirs.failure.kind is TypeError
        return
    assert ours == theirs


@pytest.mark.parametrize("options", ACCEPTED, ids=words)
def test_attributes_after_init_are_torchs(options: dict[str, Any]) -> None:
    ours, theirs = both_outcomes(lambda cls: cls(**{"dataset": MAP, **options}))
    assert ours.failure is None
    assert theirs.failure is None
    assert ours.warned == theirs.warned
    mine, torchs = ours.value, theirs.value
    for name in ATTRIBUTES:
        assert getattr(mine, name) == getattr(torchs, name), name
    for name in ("sampler", "batch_sampler", "_index_sampler"):
        left, right = getattr(mine, name), getattr(torchs, name)
        is_given = right is not None and right in (BATCHES, SAMPLER)
        assert left is right if is_given else type(left) is type(right), name
    for name in vars(torchs):
        assert hasattr(mine, name), name


def test_the_collate_fn_by_default_is_torchs_own() -> None:
    assert DataLoader(MAP).collate_fn is default_collate
    assert DataLoader(MAP, batch_size=None).collate_fn is default_convert
    assert DataLoader(MAP, batch_sampler=BATCHES).collate_fn is default_collate
    assert DataLoader(MAP, collate_fn=as_is).collate_fn is as_is


def test_the_signature_begins_as_torchs_and_adds_keywords_only() -> None:
    ours = list(inspect.signature(DataLoader.__init__).parameters.values())
    theirs = list(inspect.signature(TorchLoader.__init__).parameters.values())
    positional = [p for p in theirs if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert [(p.name, p.default, p.kind) for p in ours[: len(positional)]] == [
        (p.name, p.default, p.kind) for p in positional
    ]
    mine = {p.name: p for p in ours}
    for parameter in theirs:
        assert mine[parameter.name].default == parameter.default
        assert mine[parameter.name].kind == parameter.kind
    for parameter in ours[len(positional) :]:
        assert parameter.kind is parameter.KEYWORD_ONLY
        assert parameter.default is not parameter.empty


def test_all_thirteen_arguments_may_be_positional() -> None:
    loader = DataLoader(
        MAP, 2, False, None, None, 1, as_is, False, True, 3, draw_some, "spawn", GENERATOR
    )
    assert loader.batch_size == 2
    assert loader.collate_fn is as_is
    assert loader.timeout == 3
    assert loader.worker_init_fn is draw_some
    assert loader.multiprocessing_context.get_start_method() == "spawn"
    assert loader.generator is GENERATOR
    with pytest.raises(TypeError):
        DataLoader(MAP, 2, False, None, None, 1, as_is, False, True, 3, None, None, None, 2)


@pytest.mark.parametrize(
    "name", ["batch_size", "batch_sampler", "sampler", "drop_last", "dataset", "persistent_workers"]
)
def test_some_attributes_are_frozen_after_init(name: str) -> None:
    ours, theirs = both_outcomes(lambda cls: setattr(cls(MAP, num_workers=1), name, 1))
    assert theirs.failure is not None
    assert ours == theirs


def test_a_subclass_is_named_when_a_frozen_attribute_is_set() -> None:
    class MyLoader(DataLoader):
        pass

    with pytest.raises(ValueError, match="after MyLoader is initialized"):
        MyLoader(MAP).batch_size = 3


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_workers", 1),
        ("collate_fn", as_is),
        ("worker_init_fn", draw_some),
        ("generator", GENERATOR),
        ("timeout", 9),
        ("pin_memory", True),
        ("in_order", False),
        ("prefetch_factor", 7),
        ("something_else", object()),
    ],
)
def test_other_attributes_may_be_set_after_init(name: str, value: Any) -> None:
    loader = DataLoader(MAP)
    setattr(loader, name, value)
    assert getattr(loader, name) is value


@with_both_classes(lambda found: found.value == [[0, 1], [2, 3], [4, 5]])
def test_attributes_set_after_init_are_read_at_iter(cls: Any) -> list[Any]:
    loader = cls(range(6), batch_size=2)
    loader.num_workers = 1
    loader.prefetch_factor = 1
    loader.collate_fn = as_is
    return list(loader)


@pytest.mark.parametrize("context", ["bad", 5, "spawn", None, get_context("fork")])
@pytest.mark.parametrize("workers", [0, 1])
def test_the_context_is_checked_when_it_is_set_later(workers: int, context: Any) -> None:
    def change(cls: Any) -> Any:
        loader = cls(MAP, num_workers=workers)
        loader.multiprocessing_context = context
        return loader.multiprocessing_context

    ours, theirs = both_outcomes(change)
    assert ours == theirs


@with_both_classes(lambda found: "will create 1000 worker processes" in found.warned[0][1])
def test_too_many_workers_warn_when_asked(cls: Any) -> None:
    loader = cls(MAP)
    loader.num_workers = 1000
    loader.check_worker_number_rationality()


def test_too_many_workers_warn_again_at_iter_unless_persistent() -> None:
    cores = len(os.sched_getaffinity(0))
    if cores > 3:
        pytest.skip("needs more workers than cores")

    def go(cls: Any, persistent: bool) -> None:
        loader = cls(MAP, num_workers=cores + 1, persistent_workers=persistent)
        for _ in range(2):
            for _batch in loader:
                pass

    for persistent in (False, True):
        ours, theirs = both_outcomes(lambda cls, persistent=persistent: go(cls, persistent))
        assert ours == theirs
        assert len(theirs.warned) == 3 - persistent


# Before, torch said nothing, and pinned for CUDA where it was named, whether or not it was there.
WARNS_OF_PINNING = TORCH_VERSION >= (2, 8)
PIN_DEVICES = ["", "cuda"] if WARNS_OF_PINNING else [""]


@pytest.mark.skipif(torch.accelerator.is_available(), reason="warns without an accelerator")
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("device", PIN_DEVICES)
def test_pinning_without_an_accelerator_warns_and_does_nothing(workers: int, device: str) -> None:
    def go(cls: Any) -> list[bool]:
        loader = cls(
            MAP, batch_size=5, pin_memory=True, pin_memory_device=device, num_workers=workers
        )
        return [batch["square"].is_pinned() for batch in loader]

    ours, theirs = both_outcomes(go)
    assert ours == theirs
    assert theirs.value == [False, False]
    assert len(theirs.warned) == (1 + bool(device) if WARNS_OF_PINNING else 0)


def test_a_plain_loader_warns_of_nothing() -> None:
    ours = outcome(lambda: len(list(DataLoader(MAP, batch_size=4, num_workers=1))))
    assert ours == (3, None, [])
