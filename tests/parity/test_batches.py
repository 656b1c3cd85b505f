"""The same batch whatever it is made of: values, dtypes, shapes, strides, types, sharing."""

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

from tests.parity.compare import (
    TORCH_VERSION,
    Failure,
    assert_private_tensors,
    assert_same,
    run_both,
    run_ours,
    run_torch,
    walk,
)
from tests.parity.data import Made, only
from tests.parity.objects import (
    CONVERTED,
    IN_PROCESS_ONLY,
    REFUSED,
    REFUSED_IN_OTHER_WORDS,
    SAMPLES,
    TORCH_FAILS,
    WHOLE,
    Record,
    floats,
    with_grad,
)
from tests.parity.ways import THREE, Case, tried

pytestmark = [
    # Young features of torch say so, and workers inherit that warnings are errors.
    pytest.mark.filterwarnings("ignore:Sparse:UserWarning"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning"),
    pytest.mark.filterwarnings("ignore:The given NumPy array is not writable:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*quantize:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*quantize:UserWarning"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning"),
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning"),
]


def dozens(cases: Iterable[str]) -> list[Any]:
    """Parameters: a dozen cases each, since workers take longer to start than to load them."""
    names = list(cases)
    parts = [names[at : at + 12] for at in range(0, len(names), 12)]
    return [pytest.param(part, id=f"{part[0]} to {part[-1]}") for part in parts]


def samples_of(makes: dict[str, Callable[[int], Any]], cases: list[str], each: int) -> Made:
    """So many samples of each case, one case after the other."""
    return Made(lambda n: makes[cases[n // each]](n % each), each * len(cases))


def naming(
    cases: list[str], each: int, same: Callable[[Any, Any], None] = assert_same
) -> Callable[[Any, Any], None]:
    """``same`` for one batch after the other, which says whose batch is not."""
    names = itertools.chain.from_iterable([case] * each for case in cases)

    def compare(ours: Any, theirs: Any) -> None:
        case = next(names)
        try:
            same(ours, theirs)
        except BaseException as error:
            error.add_note(f"the case: {case}")
            raise

    return compare


@pytest.mark.sampled(1)
@pytest.mark.parametrize("cases", dozens(WHOLE))
def test_a_batch_can_be(cases: list[str]) -> None:
    """One sample makes a batch, which the collate_fn returns as it is."""
    batches = run_both(
        lambda: {"dataset": samples_of(WHOLE, cases, 5), "collate_fn": only, "num_workers": 2},
        epochs=1,
        same=naming(cases, 5),
    )
    assert len(batches) == 5 * len(cases)


def whole(case: str) -> Case:
    """Alone, in-process and in a persistent worker."""
    make = lambda: {"dataset": Made(WHOLE[case], 5), "collate_fn": only}  # noqa: E731
    return Case(make, ["in-process", "two persistent workers"], 15, walk={"epochs": 3})


test_in_process_and_in_a_persistent_worker_a_batch_can_be = tried(
    4,
    {
        case: whole(case)
        for case in (
            "nested containers", "a tensor that requires grad", "overlapping arrays",
            "a dataclass", "an object", "a nested tensor",
        )
    },
)  # fmt: skip


# torch's own unpickling of quantized tensors warns of torch's own storages.
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")
@pytest.mark.parametrize("case", TORCH_FAILS)
def test_a_batch_that_torch_spoils_comes_right_or_fails_clearly(case: str) -> None:
    """Torch drops the conj and neg bits, frees the array's memory, cannot rebuild quantized."""
    steps = run_ours(
        lambda: {"dataset": Made(TORCH_FAILS[case], 3), "collate_fn": only, "num_workers": 1},
        epochs=1,
    )
    assert len(steps) == 1 + 3 + 1
    for number, step in enumerate(steps[1:-1]):
        if step.event == "error":
            assert step.value.kind in (RuntimeError, TypeError, ValueError)
            assert len(step.value.text) > 20
        else:
            assert_equal(step.value, TORCH_FAILS[case](number))


def assert_equal(ours: Any, expected: Any) -> None:
    """Equal values; conj and neg bits may have been worked out."""
    if isinstance(expected, list):
        for left, right in zip(ours, expected, strict=True):
            assert type(left) is type(right)
            assert_equal(left, right)
    elif isinstance(expected, np.ndarray) or expected.is_quantized:
        assert_same(ours, expected)
    else:
        assert ours.dtype == expected.dtype
        assert torch.equal(ours, expected)


def test_writing_to_one_view_of_a_storage_shows_in_the_other() -> None:
    def drive(loader: Any) -> list[Any]:
        seen = []
        for whole, part, same, transposed in loader:
            part[0] = -7.0
            assert same is whole
            assert whole[1, 0] == -7.0
            assert transposed[0, 1] == -7.0
            seen.append((whole.clone(), part.clone(), transposed.clone()))
        return seen

    for size in (4, 100_000):  # small enough to be copied out, and not
        for run in (run_ours, run_torch):
            batches = run(
                lambda size=size: {
                    "dataset": Made(lambda n: views(n, size), 3),
                    "collate_fn": only,
                    "num_workers": 1,
                },
                drive,
            )
            assert len(batches) == 3


def views(n: int, size: int) -> tuple[torch.Tensor, ...]:
    whole = floats(size, 6, start=n)
    return whole, whole[1], whole, whole.t()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("way", [{"num_workers": 0}, {"num_workers": 2}], ids=["in-process", "two"])
@pytest.mark.parametrize("cases", dozens(SAMPLES))
def test_default_collate_makes_the_same_of(cases: list[str], way: dict[str, Any]) -> None:
    def same(ours: Any, theirs: Any) -> None:
        assert_same(ours, theirs)
        assert_private_tensors(ours)

    parts = ((0, 1), (2, 3), (4,))
    order = [[5 * n + k for k in part] for n in range(len(cases)) for part in parts]
    batches = run_both(
        lambda: {"dataset": samples_of(SAMPLES, cases, 5), "batch_sampler": order, **way},
        epochs=1,
        same=naming(cases, 3, same),
    )
    assert len(batches) == 3 * sum(map(torch_collates, cases))


def torch_collates(case: str) -> bool:
    try:
        default_collate([SAMPLES[case](0)])
    except TypeError:
        # Torch 2.6 and a numpy.bool of NumPy 2.4.
        assert (case, TORCH_VERSION) == ("numpy scalars", (2, 6))
        return False
    return True


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", IN_PROCESS_ONLY)
def test_samples_that_torch_collates_in_process_only(case: str) -> None:
    """In a worker ours gives what torch gives in-process, or torch's type of error."""

    def make(workers: int) -> dict[str, Any]:
        dataset = Made(IN_PROCESS_ONLY[case], 5)
        return {"dataset": dataset, "batch_size": 2, "num_workers": workers}

    batches = run_both(lambda: make(0), epochs=1)
    assert len(batches) == 3
    steps = run_ours(lambda: make(2), epochs=1)[1:-1]
    for step, expected in zip(steps, batches, strict=True):
        if step.event == "error":
            assert step.value.kind in (RuntimeError, TypeError)
            assert step.value.text.startswith(f"Caught {step.value.kind.__name__} in DataLoader")
        else:
            assert_same(step.value, expected)


def failures(loader: Any) -> list[Failure]:
    return [step.value for step in walk(loader, epochs=1) if step.event == "error"]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("way", [{"num_workers": 0}, {"num_workers": 1}], ids=["in-process", "one"])
@pytest.mark.parametrize("case", REFUSED)
def test_default_collate_refuses_in_torchs_words(case: str, way: dict[str, Any]) -> None:
    def make() -> dict[str, Any]:
        return {"dataset": Made(REFUSED[case], 4), "batch_size": 2, **way}

    theirs, ours = run_torch(make, failures), run_ours(make, failures)
    assert len(theirs) == 2 or case == "missing keys"
    for mine, torchs in zip(ours, theirs, strict=True):
        assert mine.kind is torchs.kind
        assert torchs.text.splitlines()[0] in mine.text
        assert torchs.text.splitlines()[-1] in mine.text


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", REFUSED_IN_OTHER_WORDS)
def test_ragged_samples_are_a_runtime_error(case: str) -> None:
    def make(workers: int) -> dict[str, Any]:
        dataset = Made(REFUSED_IN_OTHER_WORDS[case], 4)
        return {"dataset": dataset, "batch_size": 2, "num_workers": workers}

    ours = run_ours(lambda: make(0), failures)
    assert ours == run_torch(lambda: make(0), failures)
    in_worker = run_ours(lambda: make(1), failures)
    assert [failure.kind for failure in ours + in_worker] == [RuntimeError] * 4
    for failure in in_worker:
        assert failure.text.startswith("Caught RuntimeError in DataLoader worker process 0.")


def test_samples_that_require_grad_fail_clearly_or_come_right() -> None:
    """In a worker torch fails over its out= buffer; in-process the batch keeps its history."""

    def make(workers: int) -> dict[str, Any]:
        return {"dataset": Made(with_grad, 4), "batch_size": 2, "num_workers": workers}

    assert run_ours(lambda: make(0), list)[0].requires_grad
    steps = run_ours(lambda: make(1))
    for step in steps:
        if step.event == "error":
            assert step.value.kind is RuntimeError
            assert "grad" in step.value.text
        elif step.event == "batch":
            assert step.value.shape == (2, 2)


def collate_by_default(samples: list[Any]) -> dict[str, Any]:
    """A user's collate that calls torch's."""
    return {"batch": default_collate(samples), "size": len(samples), "first": samples[0]}


def collate_parts(samples: list[Any]) -> list[Any]:
    """Calls it more than once, and the results share tensors."""
    xs = default_collate([floats(3, start=n) for n in samples])
    large = default_collate([floats(200, 300, start=n) for n in samples])
    return [xs, xs[:, 1], default_collate(samples), large, large[0], large.numpy().sum()]


test_a_users_collate_may_call_default_collate = tried(
    2,
    {
        collate.__name__: Case(
            lambda collate=collate: {"dataset": range(7), "batch_size": 3, "collate_fn": collate},
            THREE,
            6,
        )
        for collate in (collate_by_default, collate_parts)
    },
)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_type_added_to_torchs_collate_map_is_collated_by_its_function(workers: int) -> None:
    from torch.utils.data._utils.collate import default_collate_fn_map

    def collate_records(batch: list[Record], *, collate_fn_map: Any = None) -> Record:
        return Record(
            "+".join(record.name for record in batch),
            torch.stack([record.values for record in batch]),
            np.stack([record.array for record in batch]),
        )

    default_collate_fn_map[Record] = collate_records
    try:
        batches = run_both(
            lambda: {
                "dataset": Made(lambda n: Record(str(n), floats(3, start=n), np.ones(2)), 4),
                "batch_size": 2,
                "num_workers": workers,
            }
        )
    finally:
        del default_collate_fn_map[Record]
    assert batches[0].name == "0+1"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("way", [{"num_workers": 0}, {"num_workers": 1}], ids=["in-process", "one"])
@pytest.mark.parametrize("cases", dozens(CONVERTED))
def test_default_convert_makes_the_same_of(cases: list[str], way: dict[str, Any]) -> None:
    batches = run_both(
        lambda: {"dataset": samples_of(CONVERTED, cases, 3), "batch_size": None, **way},
        epochs=1,
        same=naming(cases, 3),
    )
    assert len(batches) == 3 * len(cases)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_batches_may_change_in_size_by_much(workers: int) -> None:
    sizes = [256, 12_500_000, 256, 1, 300_000, 0, 5_000_000, 256]
    batches = run_both(
        lambda: {
            "dataset": Made(lambda n: (n, floats(sizes[n], start=n)), len(sizes)),
            "batch_size": None,
            "num_workers": workers,
        },
        epochs=1,
    )
    assert [tensor.numel() for _, tensor in batches] == sizes


def test_default_collated_batches_may_change_in_size_by_much() -> None:
    sizes = [1, 3_000_000, 1, 40_000]
    batches = run_both(
        lambda: {
            "dataset": Made(lambda n: {"x": floats(sizes[n // 2], start=n), "n": n}, 8),
            "batch_size": 2,
            "num_workers": 1,
        },
        epochs=2,
    )
    assert [batch["x"].shape[1] for batch in batches] == sizes * 2
