"""How fast do batches arrive on a GPU, beside torch's pinned copies and bare ones?

Three things take turns, each run in a fresh process, on the same resident samples:

    * ``shmloader``: ``DataLoader(device=...)``;
    * ``torch``: ``DataLoader(pin_memory=True)`` with a prefetcher, which copies the next batch on
      a stream of its own;
    * ``ceiling``: copies of two pinned blocks on a side stream into two buffers, and no loader.

Batches are images of 38 MB, the same with labels, and dicts of 114 small fields. A training step is
emulated by matrix products of 0, 2 or 10 ms. When it has started a step, the consumer waits for the
end of the step two before it, as a loop that logs its loss does. Each run has five epochs, with
persistent workers and without. The content of every batch is checked on the device.

Prints for each epoch, and writes as JSON: batches a second from its start to its end; the 99th
percentile of the time between the ends of two steps and the device's idle share, which is the time
between one step's end and the next one's start (both by the device's events); CPU time of the
consumer's thread and of its process, without workers; and the most device memory reserved.

Needs an accelerator; without one it says so in a line and ends. ``--device late`` is for trying it
out on the test device. Exit code: 0; 1 if a batch was wrong; 2 if a run failed.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from _accelerator import Accelerator, find_device, open_accelerator
from _files import write_json
from _fresh import try_anew
from _machine import describe_machine
from _sections import three_digits
from torch.utils.data import Dataset, default_collate

import shmloader

LOADERS = ("shmloader", "torch", "ceiling")
WORKLOADS = ("image", "image + label", "114 fields")
STEPS_MS = (0, 10, 2)  # in this order, in case time runs out
EPOCHS = 5
FIELDS = 114

#: The goals: copies beside pinned ones, idle share at steps of 10 ms, speed beside torch's.
GOAL_BANDWIDTH, GOAL_IDLE, GOAL_SPEED = 0.95, 0.02, 3.0

_SAMPLES = 257  # prime: each batch begins at another sample
_RUN_LIMIT_S = 90.0
_MATRIX = 2048


class Shape(NamedTuple):
    """How much a run loads.

    Attributes:
        image: Shape of an image.
        batch_size: Samples in a batch of images. A batch of fields has a quarter as many.
        batches: Batches in an epoch of images with a step. Epochs of fields, and of images without
            a step, have five times as many: they are quicker, and their start would weigh too much.
        epochs: Epochs of a run.
        matrix: Rows of the matrix that steps multiply.
    """

    image: tuple[int, ...] = (3, 224, 224)
    batch_size: int = 256
    batches: int = 60
    epochs: int = EPOCHS
    matrix: int = _MATRIX


_SMALLEST = Shape((3, 64, 64), 8, 6, 2, 64)


class Resident(Dataset):
    """Samples that are ready in memory, and are repeated."""

    def __init__(self, workload: str, shape: Shape, step_ms: float) -> None:
        generator = torch.Generator().manual_seed(20_240_607)
        if workload == "114 fields":
            values = torch.randint(0, 1 << 20, (_SAMPLES, FIELDS, 8), generator=generator)
            self.samples: list[Any] = [
                {f"field {number}": row for number, row in enumerate(rows)}
                for rows in values.to(torch.int32)
            ]
            self.batch_size, is_quick = max(2, shape.batch_size // 4), True
        else:
            size = (_SAMPLES, *shape.image)
            images = list(torch.randint(0, 256, size, dtype=torch.uint8, generator=generator))
            labels = list(torch.randint(0, 1 << 20, (_SAMPLES,), generator=generator))
            has_labels = workload == "image + label"
            self.samples = list(zip(images, labels, strict=True)) if has_labels else images
            self.batch_size, is_quick = shape.batch_size, step_ms == 0
        self.batches = (5 if is_quick else 1) * shape.batches

    def __len__(self) -> int:
        return self.batches * self.batch_size

    def __getitem__(self, index: int) -> Any:
        return self.samples[index % _SAMPLES]

    def batch(self, number: int) -> Any:
        """Return a batch, on the host."""
        first = number * self.batch_size
        return default_collate([self[first + place] for place in range(self.batch_size)])

    def checksums(self) -> list[int]:
        """Return the :func:`checksum` of each batch of an epoch."""
        ones = [int(checksum(default_collate([sample]))) for sample in self.samples]
        indices = range(len(self))
        return [
            sum(ones[index % _SAMPLES] for index in indices[first : first + self.batch_size])
            for first in indices[:: self.batch_size]
        ]


def tensors_of(batch: Any) -> list[torch.Tensor]:
    """Return the tensors of a batch of this file."""
    if isinstance(batch, torch.Tensor):
        return [batch]
    return list(batch.values() if isinstance(batch, dict) else batch)


def checksum(batch: Any) -> torch.Tensor:
    """Return the sum of all numbers of a batch, on the batch's device."""
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors_of(batch):
        by_dtype.setdefault(tensor.dtype, []).append(tensor.reshape(-1))
    sums = [
        (torch.cat(group) if len(group) > 1 else group[0]).sum(dtype=torch.int64)
        for group in by_dtype.values()
    ]
    return sums[0] if len(sums) == 1 else torch.stack(sums).sum()


# Loaders ---------------------------------------------------------------------------------


def loaded_by_us(accelerator: Accelerator, dataset: Resident, options: dict) -> Iterator[Iterator]:
    """Yield epochs of our loader."""
    loader = shmloader.DataLoader(dataset, device=accelerator.device, **options)
    with contextlib.closing(loader):
        while True:
            yield iter(loader)


def loaded_by_torch(
    accelerator: Accelerator, dataset: Resident, options: dict
) -> Iterator[Iterator]:
    """Yield epochs of torch's loader, behind a prefetcher."""
    loader = torch.utils.data.DataLoader(dataset, pin_memory=True, **options)
    stream = accelerator.new_stream()
    while True:
        yield _prefetched(accelerator, stream, iter(loader))


def _prefetched(accelerator: Accelerator, stream: Any, batches: Iterator) -> Iterator:
    def start_next() -> Any:
        batch = next(batches, None)
        if batch is None:
            return None
        with accelerator.on(stream):
            return _moved(batch, accelerator.device)

    following = start_next()
    while following is not None:
        current, batch = accelerator.current_stream(), following
        current.wait_stream(stream)
        for tensor in tensors_of(batch):
            tensor.record_stream(current)
        following = start_next()
        yield batch
        del batch


def _moved(batch: Any, device: torch.device) -> Any:
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, dict):
        return {key: _moved(part, device) for key, part in batch.items()}
    return [_moved(part, device) for part in batch]


def copied_from_two_buffers(
    accelerator: Accelerator, dataset: Resident, _: dict
) -> Iterator[Iterator]:
    """Yield epochs of the batches 0 and 1 in turn, each copied by one copy."""
    hosts = [_Block.of(dataset.batch(number)) for number in (0, 1)]
    targets = [host.on(accelerator.device) for host in hosts]
    stream = accelerator.new_stream()
    while True:
        yield _double_buffered(accelerator, stream, hosts, targets, dataset.batches)
        accelerator.synchronize()


class _Block(NamedTuple):
    """One piece of memory, and the tensors of a batch in it."""

    memory: torch.Tensor
    parts: list[torch.Tensor]

    @classmethod
    def of(cls, batch: Any) -> _Block:
        tensors = tensors_of(batch)
        memory = torch.empty(sum(_room(tensor) for tensor in tensors), dtype=torch.uint8)
        block = cls(memory.pin_memory(), tensors)
        block = cls(block.memory, block._parts_in(block.memory))
        for part, tensor in zip(block.parts, tensors, strict=True):
            part.copy_(tensor)
        return block

    def on(self, device: torch.device) -> _Block:
        memory = torch.empty_like(self.memory, device=device)
        return _Block(memory, self._parts_in(memory))

    def _parts_in(self, memory: torch.Tensor) -> list[torch.Tensor]:
        ends = itertools.accumulate(_room(tensor) for tensor in self.parts)
        return [
            memory[end - _room(tensor) :][: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for end, tensor in zip(ends, self.parts, strict=True)
        ]


def _room(tensor: torch.Tensor) -> int:
    return math.ceil(tensor.nbytes / 64) * 64


def _double_buffered(
    accelerator: Accelerator,
    stream: Any,
    hosts: Sequence[_Block],
    targets: Sequence[_Block],
    count: int,
) -> Iterator:
    copied: list[Any] = [None, None]
    used: list[Any] = [None, None]

    def start(number: int) -> None:
        side = number % 2
        with accelerator.on(stream):
            if used[side] is not None:
                stream.wait_event(used[side])
            targets[side].memory.copy_(hosts[side].memory, non_blocking=True)
            copied[side] = accelerator.event()

    start(0)
    for number in range(count):
        if number + 1 < count:
            start(number + 1)
        accelerator.current_stream().wait_event(copied[number % 2])
        yield targets[number % 2].parts
        used[number % 2] = accelerator.event()


_EPOCHS_OF = {
    "shmloader": loaded_by_us,
    "torch": loaded_by_torch,
    "ceiling": copied_from_two_buffers,
}


# One run ---------------------------------------------------------------------------------


class Steps:
    """Training steps: matrix products of about so many milliseconds, and the check of a batch.

    Args:
        accelerator: The device that they run on.
        step_ms: The length of the products.
        rows: Rows of the matrix.
        expected: The checksums of an epoch's batches.
    """

    def __init__(
        self, accelerator: Accelerator, step_ms: float, rows: int, expected: list[int]
    ) -> None:
        self._accelerator = accelerator
        self._matrix = torch.ones(rows, rows, device=accelerator.device)
        self._product = torch.empty_like(self._matrix)
        self._expected = torch.tensor(expected, device=accelerator.device)
        self._found = torch.zeros_like(self._expected)
        self._repeats = 0
        if step_ms > 0:
            self._multiply(3)
            accelerator.synchronize()
            began = time.perf_counter()
            self._multiply(20)
            accelerator.synchronize()
            self._repeats = max(1, round(step_ms / ((time.perf_counter() - began) * 1e3 / 20)))
        self.begin_epoch()

    def begin_epoch(self) -> None:
        """Forget the steps of earlier epochs."""
        self._found.fill_(-1)
        self._starts: list[Any] = []
        self._ends: list[Any] = []
        self._ended_s: list[float] = []

    def _multiply(self, repeats: int) -> None:
        for _ in range(repeats):
            torch.mm(self._matrix, self._matrix, out=self._product)

    def run(self, batch: Any) -> None:
        """Start a step, and wait for the end of the step two before it."""
        number = len(self._ends)
        self._starts.append(self._accelerator.event())
        if number < len(self._found):
            self._found[number].copy_(checksum(batch))
        self._multiply(self._repeats)
        self._ends.append(self._accelerator.event())
        if number >= 2:
            self._ends[number - 2].synchronize()
        self._ended_s.append(time.perf_counter())

    def wrong_count(self) -> int:
        """Return how many of the epoch's batches were wrong, missing or surplus."""
        surplus = max(0, len(self._ends) - len(self._found))
        return int((self._found != self._expected).sum()) + surplus

    def idle_share(self) -> float | None:
        """Return the share of time in which no step ran, from the first step to the last."""
        if not self._accelerator.can_time:
            return None
        pairs = zip(self._ends, self._starts[1:], strict=False)
        idle_ms = sum(max(0.0, end.elapsed_time(start)) for end, start in pairs)
        return idle_ms / self._starts[0].elapsed_time(self._ends[-1])

    def step_ms(self) -> float | None:
        """Return the median time that a step really took on the device."""
        if not self._accelerator.can_time:
            return None
        pairs = zip(self._starts, self._ends, strict=True)
        return statistics.median(start.elapsed_time(end) for start, end in pairs)

    def late_ms(self) -> float:
        """Return the 99th percentile of the time from one step's end to the next one's.

        It is measured by the device's events or, if they measure no time, by the consumer's clock.
        """
        if self._accelerator.can_time:
            times = [one.elapsed_time(other) for one, other in itertools.pairwise(self._ends)]
        else:
            times = [(other - one) * 1e3 for one, other in itertools.pairwise(self._ended_s)]
        return sorted(times)[len(times) * 99 // 100]


def measure(accelerator: Accelerator, options: argparse.Namespace, shape: Shape) -> dict[str, Any]:
    """Do one run, in this process."""
    dataset = Resident(options.workload, shape, options.step_ms)
    expected = dataset.checksums()
    if options.run == "ceiling":
        expected = [expected[number % 2] for number in range(dataset.batches)]
    steps = Steps(accelerator, options.step_ms, shape.matrix, expected)
    how = {
        "batch_size": dataset.batch_size,
        "num_workers": options.workers,
        "persistent_workers": options.persistent,
    }
    found: dict[str, Any] = {"epochs": [], "wrong": 0}
    found["batch bytes"] = sum(tensor.nbytes for tensor in tensors_of(dataset.batch(0)))
    with contextlib.closing(_EPOCHS_OF[options.run](accelerator, dataset, how)) as epochs:
        for _ in range(shape.epochs):
            found["epochs"].append(_measure_epoch(accelerator, steps, epochs))
            found["wrong"] += steps.wrong_count()
    return found


def _measure_epoch(
    accelerator: Accelerator, steps: Steps, epochs: Iterator[Iterator]
) -> dict[str, float | None]:
    steps.begin_epoch()
    accelerator.synchronize()
    thread_s, process_s, began_s = time.thread_time(), time.process_time(), time.perf_counter()
    count, first_s = 0, 0.0
    for batch in next(epochs):
        count += 1
        if count == 1:
            first_s = time.perf_counter() - began_s
        steps.run(batch)
        del batch
    accelerator.synchronize()
    took_s = time.perf_counter() - began_s
    reserved = accelerator.most_reserved_bytes()
    return {
        "batches/s": count / took_s,
        "first batch s": first_s,
        "step ms": steps.step_ms(),
        "99 % ms": steps.late_ms(),
        "idle": steps.idle_share(),
        "consumer CPU ms": (time.thread_time() - thread_s) * 1e3 / count,
        "process CPU ms": (time.process_time() - process_s) * 1e3 / count,
        "reserved MB": None if reserved is None else reserved / 1e6,
    }


# All runs --------------------------------------------------------------------------------


class Run(NamedTuple):
    """One run of a loader."""

    loader: str
    workload: str
    step_ms: float
    is_persistent: bool


def runs_of(*, smallest: bool) -> list[Run]:
    """Return all runs, the most important ones first."""
    if smallest:
        settings = [
            (True, 0, "image"),
            (True, 0, "114 fields"),
            (True, 10, "image + label"),
            (False, 0, "image"),
        ]
    else:
        settings = list(itertools.product((True, False), STEPS_MS, WORKLOADS))
    return [
        Run(loader, workload, step_ms, is_persistent)
        for is_persistent, step_ms, workload in settings
        for loader in LOADERS
        if is_persistent or loader != "ceiling"  # which has no workers
    ]


def compare(options: argparse.Namespace) -> dict[str, Any]:
    """Do all runs, round after round, until they are done or the time is over."""
    found: dict[str, Any] = {"workers": options.workers, "runs": [], "left out": []}
    began, longest_s = time.monotonic(), 0.0
    for round_ in range(options.rounds):
        for run in runs_of(smallest=options.smallest):
            left_s = options.budget_s - (time.monotonic() - began)
            if left_s < 1.5 * longest_s:
                if round_ == 0:
                    found["left out"].append(run._asdict())
                continue
            run_began = time.monotonic()
            one = _run_anew(options, run, min(_RUN_LIMIT_S, left_s))
            longest_s = max(longest_s, time.monotonic() - run_began)
            print(f"round {round_ + 1} {run}: {_in_short(one)}", file=sys.stderr, flush=True)
            result = {"error": one} if isinstance(one, str) else one
            found["runs"].append({**run._asdict(), "round": round_ + 1, **result})
            if options.json:
                write_json(options.json, found)
    return found


def _run_anew(options: argparse.Namespace, run: Run, limit_s: float) -> dict[str, Any] | str:
    arguments = [
        f"--run={run.loader}", f"--workload={run.workload}", f"--step-ms={run.step_ms}",
        f"--workers={options.workers}",
    ]  # fmt: skip
    arguments += [f"--device={options.device}"] * bool(options.device)
    arguments += ["--persistent"] * run.is_persistent + ["--smallest"] * options.smallest
    return try_anew(__file__, arguments, limit_s)


def _in_short(one: dict[str, Any] | str) -> str:
    if isinstance(one, str):
        return one
    rates = ", ".join(three_digits(epoch["batches/s"]) for epoch in one["epochs"])
    return f"{rates} batches/s, {one['wrong']} wrong"


# What was found --------------------------------------------------------------------------


def figure(found: dict[str, Any], run: Run, name: str) -> float | None:
    """Return the median of a figure over the epochs after the first, of all rounds."""
    values = [
        epoch[name]
        for one in _matching(found, run)
        for epoch in one["epochs"][1:]
        if epoch[name] is not None
    ]
    return statistics.median(values) if values else None


def _matching(found: dict[str, Any], run: Run) -> list[dict[str, Any]]:
    wanted = run._asdict().items()
    return [one for one in found.get("runs", ()) if "epochs" in one and wanted <= one.items()]


class Goal(NamedTuple):
    """A goal, what was measured, and the verdict."""

    text: str
    measured: str
    verdict: str


def judge(found: dict[str, Any], probed: dict[str, Any]) -> list[Goal]:
    """Compare what was found with the goals."""
    return [_judge_content(found), *_judge_bandwidth(found, probed), *_judge_idle(found)] + [
        _judge_speed(found, workload) for workload in WORKLOADS
    ]


def _judge_content(found: dict[str, Any]) -> Goal:
    runs = [one for one in found.get("runs", ()) if "epochs" in one]
    wrong = sum(one["wrong"] for one in runs)
    verdict = "not measured" if not runs else "missed" if wrong else "reached"
    return Goal("no wrong batch", f"{wrong} wrong in {len(runs)} runs", verdict)


def _judge_bandwidth(found: dict[str, Any], probed: dict[str, Any]) -> list[Goal]:
    rows = probed.get("bandwidth, GB/s", ())
    ratios = {
        row["KiB"]: row["registered"] / row["pinned"]
        for row in (() if isinstance(rows, str) else rows)
        if isinstance(row["registered"], float) and row["KiB"] >= 16_384
    }
    text = f"at least {GOAL_BANDWIDTH} of the bandwidth of pinned copies"
    least = min(ratios.values(), default=None)
    ours, ceiling = (
        figure(found, Run(loader, "image", 0, True), "batches/s")
        for loader in (LOADERS[0], "ceiling")
    )
    whole = ours / ceiling if ours is not None and ceiling is not None else None
    return [
        _compared(f"{text}: copies of 16 MB and more", least, GOAL_BANDWIDTH),
        _compared(f"{text}: the loader, images, no step", whole, GOAL_BANDWIDTH),
    ]


def _compared(text: str, ratio: float | None, least: float) -> Goal:
    if ratio is None:
        return Goal(text, "–", "not measured")
    return Goal(text, three_digits(ratio), "reached" if ratio >= least else "missed")


def _judge_idle(found: dict[str, Any]) -> list[Goal]:
    goals = []
    for workload in WORKLOADS:
        idle = figure(found, Run("shmloader", workload, 10, True), "idle")
        verdict = "not measured" if idle is None else "reached" if idle <= GOAL_IDLE else "missed"
        measured = "–" if idle is None else f"{idle:.2%}"
        goals.append(
            Goal(f"idle at most {GOAL_IDLE:.0%} at steps of 10 ms: {workload}", measured, verdict)
        )
    return goals


def _judge_speed(found: dict[str, Any], workload: str) -> Goal:
    """Judge the speed beside torch's. Copies bind torch if the ceiling is three times as fast."""
    text = f"{GOAL_SPEED:g} times torch where copies bind it: {workload}, no step"
    rates = [figure(found, Run(loader, workload, 0, True), "batches/s") for loader in LOADERS]
    if any(rate is None for rate in rates):
        return Goal(text, "–", "not measured")
    ours, torchs, ceiling = (rate for rate in rates if rate is not None)
    measured = f"{three_digits(ours / torchs)} (ceiling {three_digits(ceiling / torchs)})"
    if ours / torchs >= GOAL_SPEED:
        return Goal(text, measured, "reached")
    return Goal(text, measured, "missed" if ceiling / torchs >= GOAL_SPEED else "does not apply")


def goals_of(found: dict[str, Any], probed: dict[str, Any]) -> str:
    """Return the goals as a table."""
    lines = ["| goal | measured | |", "|---|---|---|"]
    lines += [
        f"| {goal.text} | {goal.measured} | {goal.verdict} |" for goal in judge(found, probed)
    ]
    return "\n".join(lines)


def to_markdown(found: dict[str, Any]) -> str:
    """Return tables of what was measured."""
    runs = found.get("runs", ())
    parts = [_table_of_steps(found), _table_of_epochs(found)]
    errors = [
        f"- {one['loader']}, {one['workload']}, {one['step_ms']} ms: {one['error']}"
        for one in runs
        if "error" in one
    ]
    if errors:
        parts.append("\n".join(["Runs that failed:", *errors]))
    if left_out := found.get("left out"):
        parts.append(f"Left out, since the time was over: {len(left_out)} runs.")
    return "\n\n".join(parts)


def _table_of_steps(found: dict[str, Any]) -> str:
    columns = ("batches/s", "99 % ms", "idle", "consumer CPU ms", "process CPU ms", "reserved MB")
    lines = [
        f"Persistent workers ({found.get('workers', '?')}), medians of the epochs after the first:",
        "",
        f"| batch | step, ms | loader | {' | '.join(columns)} |",
        "|" + "---|" * (3 + len(columns)),
    ]
    for workload in WORKLOADS:
        for step_ms in sorted(STEPS_MS):
            for loader in LOADERS:
                run = Run(loader, workload, step_ms, True)
                if _matching(found, run):
                    cells = [_cell(figure(found, run, name)) for name in columns]
                    lines.append(f"| {workload} | {step_ms} | {loader} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _table_of_epochs(found: dict[str, Any]) -> str:
    lines = [
        "Batches a second in each epoch, no step:",
        "",
        f"| batch | workers | loader | {' | '.join(str(1 + epoch) for epoch in range(EPOCHS))} |",
        "|" + "---|" * (3 + EPOCHS),
    ]
    for workload in WORKLOADS:
        for is_persistent in (True, False):
            for loader in LOADERS[:2]:
                runs = _matching(found, Run(loader, workload, 0, is_persistent))
                if not runs:
                    continue
                rates = zip(
                    *([epoch["batches/s"] for epoch in one["epochs"]] for one in runs), strict=True
                )
                cells = [_cell(statistics.median(rate)) for rate in rates]
                cells += [""] * (EPOCHS - len(cells))
                kind = "persistent" if is_persistent else "new in each epoch"
                lines.append(f"| {workload} | {kind} | {loader} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(value: float | None) -> str:
    return "–" if value is None else three_digits(value)


def main() -> int:
    """Compare, or do one run for a comparison."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--device", help="such as cuda:1 (default: the one that torch finds)")
    parser.add_argument("--workers", type=int, default=max(1, min(8, cores - 2)))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--budget-s", type=float, default=1800, help="begin no run after so long")
    parser.add_argument("--smallest", action="store_true", help="only check that it runs")
    parser.add_argument("--json", type=Path, help="file for results, run by run")
    parser.add_argument("--run", choices=LOADERS, help=argparse.SUPPRESS)
    parser.add_argument("--workload", choices=WORKLOADS, help=argparse.SUPPRESS)
    parser.add_argument("--step-ms", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--persistent", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        accelerator = open_accelerator(options.device)
        assert isinstance(accelerator, Accelerator), accelerator
        shape = _SMALLEST if options.smallest else Shape()
        print(json.dumps(measure(accelerator, options, shape)))
        return 0
    device = find_device(options.device)
    if isinstance(device, str):
        print(device)
        return 0
    if options.smallest:
        options.rounds = 1
    for name, value in describe_machine().items():
        print(f"{name}: {value}")
    found = compare(options)
    print(f"device: {device}\n\n{goals_of(found, {})}\n\n{to_markdown(found)}")
    failed = [one for one in found["runs"] if "error" in one]
    wrong = sum(one.get("wrong", 0) for one in found["runs"])
    if failed or wrong:
        print(f"{len(failed)} runs failed, {wrong} batches were wrong")
    return 1 if wrong else 2 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
