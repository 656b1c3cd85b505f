"""Run one case through torch's DataLoader and through ours, and compare all that a user can see.

``assert_same`` compares two batches bit for bit: types of containers, dtypes, shapes, strides,
bytes, which leaves share memory and which are one object. ``run_both`` walks both loaders over
the same epochs and compares, after each step, the batch and every random state of the main
process.

torch's run is recorded whole; ours is compared step by step and each batch is dropped before the
next is asked for, as in a training loop.
"""

import array
import dataclasses
import gc
import io
import itertools
import os
import random
import struct
import threading
import traceback
import types
import warnings
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import resource_sharer
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from shmloader import DataLoader, installed

# Whether "ours" is torch's class while `shmloader.install()` is in force (`make test-frameworks`).
INSTALLED = bool(os.environ.get("SHMLOADER_TEST_INSTALLED"))

SEED = 20240229
MAX_STEPS = 2000  # of one epoch: a loader that never ends fails instead of hanging


class Rng(NamedTuple):
    """The random states of the main process."""

    torch: bytes
    generator: bytes | None
    python: object
    numpy: object


class Failure(NamedTuple):
    """An exception without its traceback, so that nothing keeps the loader alive."""

    kind: type[BaseException]
    text: str


class Step(NamedTuple):
    """What one iter() or next() did."""

    event: str  # "iter", "batch", "error" or "end"
    value: Any
    rng: Rng


TORCH_VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])


def rng_now(generator: torch.Generator | None = None) -> Rng:
    name, keys, *rest = np.random.get_state(legacy=True)
    return Rng(
        torch.get_rng_state().numpy().tobytes(),
        None if generator is None else generator.get_state().numpy().tobytes(),
        random.getstate(),
        (name, keys.tobytes(), *rest),
    )


def seed_everything(seed: int = SEED) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def walk(
    loader: Any,
    *,
    epochs: int = 2,
    take: Sequence[int | None] = (),
    before_epoch: Callable[[Any, int], None] | None = None,
    generator: torch.Generator | None = None,
) -> Iterator[Step]:
    """Iterate a loader for some epochs, breaking out of epoch e after ``take[e]`` batches."""
    for epoch in range(epochs):
        if before_epoch is not None:
            before_epoch(loader, epoch)
        limit = take[epoch] if epoch < len(take) else None
        try:
            iterator = iter(loader)
        except Exception as error:
            yield Step("error", Failure(type(error), str(error)), rng_now(generator))
            continue
        yield Step("iter", None, rng_now(generator))
        count = 0
        while limit is None or count < limit:
            assert count < MAX_STEPS, "the epoch does not end"
            step = one_step(iterator, generator)
            yield step
            if step.event == "end":
                break
            del step
            count += 1
        del iterator


def one_step(iterator: Iterator[Any], generator: torch.Generator | None = None) -> Step:
    try:
        batch = next(iterator)
    except StopIteration:
        return Step("end", None, rng_now(generator))
    except Exception as error:
        if type(iterator) is _MultiProcessingDataLoaderIter:
            # torch's iterator, once part of a reference cycle, takes 5 s a worker to end: the
            # collector closes its queues before they carry the word.
            traceback.clear_frames(error.__traceback__)
        return Step("error", Failure(type(error), str(error)), rng_now(generator))
    return Step("batch", batch, rng_now(generator))


def settle_torch() -> None:
    """End the threads that torch's iterators leave behind."""
    gc.collect()
    for thread in threading.enumerate():
        if thread.name == "QueueFeederThread":
            thread.join(10)
    resource_sharer.stop(10)


def run_torch(
    make: Callable[[], dict[str, Any]],
    drive: Callable[..., Any] = lambda loader, **options: list(walk(loader, **options)),
    *,
    seed: int = SEED,
    **options: Any,
) -> Any:
    """What ``drive(loader)`` gives with torch's loader, seeded as ``run_both`` seeds it."""
    try:
        return _run(TorchLoader, make, drive, seed, options)
    finally:
        settle_torch()


def run_ours(
    make: Callable[[], dict[str, Any]],
    drive: Callable[..., Any] = lambda loader, **options: list(walk(loader, **options)),
    *,
    seed: int = SEED,
    **options: Any,
) -> Any:
    """The same with our loader, or with torch's on our engine if ``INSTALLED``."""
    if not INSTALLED:
        return _run(DataLoader, make, drive, seed, options)
    with installed() as report:
        result = _run(TorchLoader, make, drive, seed, options)
    on_torch = [one for one in report.loaders if one.engine != "shmloader"]
    assert not on_torch, str(report)
    return result


def _run(loader_class: Any, make: Any, drive: Any, seed: int, options: dict[str, Any]) -> Any:
    kwargs = make()
    seed_everything(seed)
    return drive(loader_class(**kwargs), **options)


def run_both(
    make: Callable[[], dict[str, Any]],
    *,
    epochs: int = 2,
    take: Sequence[int | None] = (),
    before_epoch: Callable[[Any, int], None] | None = None,
    same: Callable[[Any, Any], None] | None = None,
    seed: int = SEED,
) -> list[Any]:
    """Walk both loaders and compare every batch and random state, step by step.

    Args:
        make: Gives fresh keyword arguments; called once for each loader.
        epochs: How often to iterate each loader.
        take: Number of batches after which to break, one for each epoch; None is all.
        before_epoch: Called with the loader and the epoch before each iter().
        same: Compares a batch of ours with torch's; ``assert_same`` by default.
        seed: Of all random streams of the main process, before each loader is made.

    Returns:
        torch's batches of all epochs, for further checks on what the case does.
    """
    same = same or assert_same
    options = {"epochs": epochs, "take": take, "before_epoch": before_epoch}
    kwargs = make()
    untouched = kwargs.get("num_workers", 0) > 0
    generator = kwargs.get("generator")
    del kwargs

    def with_generator(loader: Any, **options: Any) -> Iterator[Step]:
        return walk(loader, generator=loader.generator, **options)

    theirs = run_torch(
        make, lambda loader, **o: list(with_generator(loader, **o)), seed=seed, **options
    )

    def compare(loader: Any, **options: Any) -> None:
        start = rng_now()
        expected_steps = iter(theirs)
        for number, step in enumerate(with_generator(loader, **options)):
            expected = next(expected_steps, None)
            where = f"step {number}"
            assert expected is not None, f"{where}: ours goes on with {step.event}, torch is done"
            if step.event == "error" and expected.event != "error":
                raise AssertionError(f"{where}: ours fails: {step.value.text}")
            assert step.event == expected.event, where
            if step.event == "batch":
                same(step.value, expected.value)
            elif step.event == "error":
                assert_same_failure(step.value, expected.value)
            assert step.rng.torch == expected.rng.torch, f"{where}: torch's random state"
            assert step.rng.generator == expected.rng.generator, f"{where}: generator's state"
            assert step.rng.python == expected.rng.python, f"{where}: random's state"
            assert step.rng.numpy == expected.rng.numpy, f"{where}: numpy.random's state"
            if untouched:
                assert step.rng.python == start.python, f"{where}: random was drawn from"
                assert step.rng.numpy == start.numpy, f"{where}: numpy.random was drawn from"
            del step  # its slot may be filled again from here on
        left = next(expected_steps, None)
        assert left is None, f"ours is done, torch goes on with {left}"

    assert generator is None or isinstance(generator, torch.Generator)
    run_ours(make, compare, seed=seed, **options)
    return [step.value for step in theirs if step.event == "batch"]


def both_outcomes(call: Callable[[Any], Any]) -> tuple[Any, Any]:
    """What ``call(loader_class)`` gives or raises, with warnings: (ours, torch's)."""
    theirs = outcome(call, TorchLoader)
    settle_torch()
    return outcome(call, DataLoader), theirs


class Outcome(NamedTuple):
    value: Any
    failure: Failure | None
    warned: list[tuple[type[Warning], str]]


def outcome(call: Callable[..., Any], *args: Any) -> Outcome:
    """A call's result or exception, and the warnings that it gave."""
    value, failure = None, None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            value = call(*args)
        except Exception as error:
            failure = Failure(type(error), str(error))
    warned = [
        (w.category, str(w.message))
        for w in caught
        if not issubclass(w.category, (DeprecationWarning, ResourceWarning))
    ]
    return Outcome(value, failure, warned)


def assert_same_failure(ours: Failure, theirs: Failure) -> None:
    """Same type; torch's first two lines begin ours; what the user's code said is in it."""
    assert ours.kind is theirs.kind, f"{ours.kind} for torch's {theirs.kind}: {ours.text}"
    head = theirs.text.splitlines()[:2]
    assert ours.text.splitlines()[: len(head)] == head, ours.text
    last = [line for line in theirs.text.splitlines() if line.strip()][-1:]
    for line in last:
        assert line in ours.text, f"{line!r} is missing in {ours.text}"


def assert_same(ours: Any, theirs: Any) -> None:
    """Assert that two batches are the same in all that a user can see."""
    _compare(ours, theirs, "batch", set())
    assert identities(ours) == identities(theirs), "other leaves are one object than torch's"
    assert memory_groups(ours) == memory_groups(theirs), "other leaves share memory than torch's"


def _compare(ours: Any, theirs: Any, at: str, seen: set[tuple[int, int]]) -> None:
    assert type(ours) is type(theirs), f"{at}: {type(ours)} for torch's {type(theirs)}"
    if (id(ours), id(theirs)) in seen:
        return
    seen.add((id(ours), id(theirs)))
    match theirs:
        case torch.Tensor():
            _compare_tensors(ours, theirs, at, seen)
        case torch.UntypedStorage():
            left, right = (torch.tensor([], dtype=torch.uint8).set_(s) for s in (ours, theirs))
            assert torch.equal(left, right), at
        case torch.TypedStorage():
            assert ours.dtype == theirs.dtype, at
            assert ours.tolist() == theirs.tolist(), at
        case torch.Generator():
            assert torch.equal(ours.get_state(), theirs.get_state()), at
        case np.ndarray():
            _compare_arrays(ours, theirs, at, seen)
        case np.generic():
            assert ours.dtype == theirs.dtype, at
            assert ours.tobytes() == theirs.tobytes(), f"{at}: {ours!r} for torch's {theirs!r}"
        case float():
            assert struct.pack("d", ours) == struct.pack("d", theirs), f"{at}: {ours}, {theirs}"
        case complex():
            _compare((ours.real, ours.imag), (theirs.real, theirs.imag), at, seen)
        case Mapping():
            assert list(ours) == list(theirs), f"{at}: keys"
            if isinstance(theirs, defaultdict):
                assert ours.default_factory is theirs.default_factory, at
            for key in theirs:
                _compare(ours[key], theirs[key], f"{at}[{key!r}]", seen)
            _compare_state(ours, theirs, at, seen)
        case tuple() | list() | deque():
            assert len(ours) == len(theirs), f"{at}: length"
            if isinstance(theirs, deque):
                assert ours.maxlen == theirs.maxlen, at
            for index, (left, right) in enumerate(zip(ours, theirs, strict=True)):
                _compare(left, right, f"{at}[{index}]", seen)
            _compare_state(ours, theirs, at, seen)
        case array.array():
            assert ours.typecode == theirs.typecode, at
            assert ours.tobytes() == theirs.tobytes(), at
        case io.BytesIO():
            assert ours.getvalue() == theirs.getvalue(), at
        case _ if dataclasses.is_dataclass(theirs):
            for field in dataclasses.fields(theirs):
                left, right = getattr(ours, field.name), getattr(theirs, field.name)
                _compare(left, right, f"{at}.{field.name}", seen)
            _compare_state(ours, theirs, at, seen)
        case types.SimpleNamespace():
            _compare_state(ours, theirs, at, seen)
        case _ if type(theirs).__eq__ is object.__eq__ and _state(theirs):
            _compare_state(ours, theirs, at, seen)
        case _:
            assert ours == theirs, f"{at}: {ours!r} for torch's {theirs!r}"


def _state(value: Any) -> dict[str, Any]:
    """Instance attributes, those in __slots__ too."""
    state = dict(getattr(value, "__dict__", {}))
    for base in type(value).__mro__:
        slots = base.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                state[name] = getattr(value, name)
    return state


def _compare_state(ours: Any, theirs: Any, at: str, seen: set[tuple[int, int]]) -> None:
    left, right = _state(ours), _state(theirs)
    assert list(left) == list(right), f"{at}: attributes"
    for name in right:
        _compare(left[name], right[name], f"{at}.{name}", seen)


def tensor_bytes(tensor: torch.Tensor) -> bytes:
    """The bits of a strided tensor's elements, in order."""
    plain = tensor.detach().as_subclass(torch.Tensor).resolve_conj().resolve_neg()
    dense = plain.clone(memory_format=torch.contiguous_format)  # with strides of its own
    return dense.reshape(-1).view(torch.uint8).numpy().tobytes()


def _compare_tensors(
    ours: torch.Tensor, theirs: torch.Tensor, at: str, seen: set[tuple[int, int]]
) -> None:
    for name in ("dtype", "layout", "device", "requires_grad", "is_leaf", "is_nested"):
        left, right = getattr(ours, name), getattr(theirs, name)
        assert left == right, f"{at}: {name} is {left}, torch's {right}"
    assert (ours.grad is None) == (theirs.grad is None), f"{at}: grad"
    if theirs.is_nested:
        _compare(list(ours.unbind()), list(theirs.unbind()), f"{at}.unbind()", seen)
        return
    assert ours.shape == theirs.shape, f"{at}: shape {ours.shape}, torch's {theirs.shape}"
    assert ours.is_conj() == theirs.is_conj(), f"{at}: conj bit"
    assert ours.is_neg() == theirs.is_neg(), f"{at}: neg bit"
    assert ours.is_quantized == theirs.is_quantized, f"{at}: quantized"
    parts: tuple[str, ...] = ()
    match theirs.layout:
        case torch.sparse_coo:
            assert ours.is_coalesced() == theirs.is_coalesced(), f"{at}: coalesced"
            parts = ("_indices", "_values")
        case torch.sparse_csr | torch.sparse_bsr:
            parts = ("crow_indices", "col_indices", "values")
        case torch.sparse_csc | torch.sparse_bsc:
            parts = ("ccol_indices", "row_indices", "values")
        case _:
            assert ours.stride() == theirs.stride(), (
                f"{at}: strides {ours.stride()}, torch's {theirs.stride()}"
            )
            if theirs.is_quantized:
                assert ours.qscheme() == theirs.qscheme(), f"{at}: qscheme"
                parts = ("int_repr",)
            elif theirs.device.type != "meta":
                assert tensor_bytes(ours) == tensor_bytes(theirs), (
                    f"{at}: values {ours}, torch's {theirs}"
                )
    for part in parts:
        left, right = getattr(ours, part)(), getattr(theirs, part)()
        _compare(left, right, f"{at}.{part}()", seen)
    if type(theirs) is not torch.Tensor:
        _compare_state(ours, theirs, at, seen)


def _compare_arrays(
    ours: np.ndarray, theirs: np.ndarray, at: str, seen: set[tuple[int, int]]
) -> None:
    assert ours.dtype == theirs.dtype, f"{at}: dtype {ours.dtype}, torch's {theirs.dtype}"
    assert ours.shape == theirs.shape, f"{at}: shape {ours.shape}, torch's {theirs.shape}"
    assert ours.strides == theirs.strides, f"{at}: strides {ours.strides}, torch's {theirs.strides}"
    for flag in ("C_CONTIGUOUS", "F_CONTIGUOUS", "WRITEABLE", "ALIGNED"):
        assert ours.flags[flag] == theirs.flags[flag], f"{at}: flag {flag}"
    if isinstance(theirs, np.ma.MaskedArray):
        left, right = np.ma.getmaskarray(ours), np.ma.getmaskarray(theirs)
        assert left.tobytes() == right.tobytes(), f"{at}: mask"
        _compare(ours.data, theirs.data, f"{at}.data", seen)
    elif theirs.dtype.names:
        for name in theirs.dtype.names:
            left, right = np.asarray(ours[name]), np.asarray(theirs[name])
            _compare(left.copy(), right.copy(), f"{at}[{name!r}]", set())
    elif theirs.dtype.hasobject:
        for index, (left, right) in enumerate(zip(ours.flat, theirs.flat, strict=True)):
            _compare(left, right, f"{at}.flat[{index}]", seen)
    elif theirs.dtype.char in "gG":
        np.testing.assert_array_equal(ours, theirs, at)  # long doubles have bytes of no meaning
    else:
        assert ours.tobytes() == theirs.tobytes(), f"{at}: values {ours}, torch's {theirs}"


def nodes(batch: Any) -> Iterator[Any]:
    """All tensors, arrays, storages and mutable objects of a batch, each visit, in order."""
    stack, entered = [batch], set()
    while stack:
        value = stack.pop()
        # A storage's only attribute is what keeps its memory, which is no part of the batch.
        if isinstance(value, (torch.Tensor, np.ndarray, torch.UntypedStorage)):
            yield value
            continue
        if isinstance(value, Mapping):
            inner = list(value.values())
        elif isinstance(value, (list, tuple, deque)):
            inner = list(value)
        elif isinstance(value, (str, bytes, int, float, complex, type, type(None))):
            continue
        else:
            inner = list(_state(value).values())
            if not inner:
                continue
        if not isinstance(value, tuple):
            yield value
        if id(value) not in entered:
            entered.add(id(value))
            stack.extend(reversed(inner))


def identities(batch: Any) -> list[int]:
    """For each node, the number of the first node that is the same object."""
    found = list(nodes(batch))  # keeps all alive, so that an id stands for one object
    first: dict[int, int] = {}
    return [first.setdefault(id(value), number) for number, value in enumerate(found)]


def span(leaf: Any) -> tuple[int, int] | None:
    """Addresses of the memory of a tensor's storage or an array's elements, None if empty."""
    if isinstance(leaf, np.ndarray):
        if leaf.size == 0 or leaf.dtype.hasobject:
            return None
        start, stop = np.lib.array_utils.byte_bounds(np.asarray(leaf))
        return start, stop
    if not isinstance(leaf, torch.Tensor) or leaf.layout is not torch.strided:
        return None
    if leaf.is_nested or leaf.device.type == "meta" or leaf.untyped_storage().nbytes() == 0:
        return None
    storage = leaf.untyped_storage()
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()


def memory_groups(batch: Any) -> list[int | None]:
    """For each tensor and array, the number of the first one that lies in the same memory."""
    spans = [span(leaf) for leaf in nodes(batch)]
    order = sorted((s, n) for n, s in enumerate(spans) if s is not None)
    groups: list[int | None] = [None] * len(spans)
    end, members = -1, []
    clusters: list[list[int]] = []
    for (start, stop), number in order:
        if start >= end:
            members = []
            clusters.append(members)
        members.append(number)
        end = max(end, stop)
    for cluster in clusters:
        for number in cluster:
            groups[number] = min(cluster)
    return groups


def assert_private_tensors(batch: Any) -> None:
    """Each tensor has a storage of its own of exactly its size, contiguous and writable."""
    tensors = [leaf for leaf in nodes(batch) if isinstance(leaf, torch.Tensor)]
    for tensor in tensors:
        assert tensor.is_contiguous()
        assert tensor.storage_offset() == 0
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
        before = tensor_bytes(tensor)
        with torch.no_grad():
            tensor.copy_(tensor.clone())
        assert tensor_bytes(tensor) == before
    used = [s for s in map(span, tensors) if s is not None]
    starts = sorted(used)
    for (_, stop), (start, _) in itertools.pairwise(starts):
        assert stop <= start, "two tensors of a batch lie in the same memory"
