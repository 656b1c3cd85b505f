"""The workloads of the comparison with other loaders, and what is measured of each.

A case is a workload, or one size or start method of it. Its key begins with the row's letter. A
case measures one peer in this process, which has done nothing else, and returns the figures under
the names that ``_report.py`` knows. Some cases also measure the bare work: as many processes as
there are workers do the work of the batches, and hand nothing over.

Assumes Linux. Spawned workers can import the datasets, since these are defined in modules and not
in the script that runs.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import random
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from _ceilings import deliver, gather_alone
from _measure import WARMUP_BATCHES, consume, measure_ceiling, run_processes
from _peers import PEERS, Peer, Task, map_leaves
from _report import ALONE, BARE, UNDELIVERED
from _shards import BATCH, WRITERS, checksum_of, touch_records
from _tables import TOKENS, batches_of, make_table, read_columns, row_gatherer
from _tables import pad_by_torch as pad_columns_by_torch
from _texts import (
    LONGEST,
    Tokens,
    flattening_of_transformers,
    make_samples,
    pad_by_torch,
    padding_of_transformers,
)
from _usage import Meter, descriptor_count, pss_bytes
from _workloads import (
    WORKLOADS,
    ContentHash,
    Samples,
    Workload,
    byte_count,
    leaves,
    smallest,
    touch,
)
from arrays import gatherer, make_dataset
from memory import Texts, make_texts, watch
from stragglers import Order, Sleepers, sample_count, take_epoch
from torch.utils.data import Dataset, RandomSampler, Sampler, SequentialSampler

import shmloader
from shmloader.collate import Fields, Pack, Pad

_MANY_BATCHES = 1_000_000  # more than any run takes
_MANY_EPOCHS = 1_000


@dataclass(frozen=True)
class Settings:
    """How a run is made.

    Attributes:
        workers: Processes or threads of each peer, except in row G.
        seconds: Length of the timed part.
        is_smallest: Whether the run only checks that everything works.
    """

    workers: int
    seconds: float
    is_smallest: bool


# ---------------------------------------------------------------- streams of batches


@dataclass(frozen=True)
class Stream:
    """A task that is too long to be finished, and how it is measured.

    Attributes:
        task: What the peer loads.
        hash_batches: Batches that the content hash covers.
        clock_stride: Batches between two looks at the clock.
    """

    task: Task
    hash_batches: int
    clock_stride: int


def _resident(work: Workload, settings: Settings) -> Stream:
    """Make a stream of samples that are in memory."""
    work = smallest(work) if settings.is_smallest else work
    dataset = Samples(work)
    arrays = copy.copy(dataset)
    arrays.samples = [map_leaves(torch.Tensor.numpy, one, torch.Tensor) for one in dataset.samples]
    sample = dataset.samples[0] if dataset.samples else torch.tensor(0)
    task = Task(
        dataset.first(work.batch_size * _MANY_BATCHES),
        work.batch_size,
        SequentialSampler(range(work.batch_size * _MANY_BATCHES)),
        epochs=1,
        workers=settings.workers,
        batch_bytes=byte_count(sample) * work.batch_size,
        leaf_count=sum(1 for _ in leaves(sample)),
        arrays=arrays.first(work.batch_size * _MANY_BATCHES),
    )
    return Stream(task, work.hash_batches, work.clock_stride)


def _open(peer: Peer, stream: Stream) -> tuple[Iterator[Any], dict]:
    """Start a loader and hash its first batches; return the other batches, and figures."""
    began = time.perf_counter()
    batches = itertools.chain.from_iterable(peer.epochs(stream.task))
    content = ContentHash()
    for number, batch in enumerate(itertools.islice(batches, stream.hash_batches)):
        if not number:
            touch(batch)
            first_s = time.perf_counter() - began
        content.add(batch)
    # No batch is kept: some loaders wait for each to be dropped.
    return batches, {"first_s": first_s, "content": content.hexdigest()}


def _flow(stream: Stream, batches: Iterator[Any], seconds: float) -> dict:
    """Take batches for so many seconds, after a warm-up; return the figures."""
    stride, batch_bytes = stream.clock_stride, stream.task.batch_bytes
    consume(batches, min(0.3, seconds), WARMUP_BATCHES, stride)
    meter = Meter()
    count, elapsed_s = consume(batches, seconds, 1, stride)
    spent = meter.read()
    return _rates(stream.task.batch_size, batch_bytes, count, elapsed_s) | {
        "cpu_s_per_gb": (spent.main_cpu_s + spent.workers_cpu_s) / (count * batch_bytes / 1e9),
        "main_us": spent.main_cpu_s / count * 1e6,
        "faults": spent.minor_faults / count,
        "others_cores": spent.others_cpu_s / elapsed_s,
    }


def _rates(batch_size: int, batch_bytes: int, count: int, elapsed_s: float) -> dict:
    return {
        "batches": count,
        "elapsed_s": elapsed_s,
        "us_per_batch": elapsed_s / count * 1e6,
        "batches_per_s": count / elapsed_s,
        "samples_per_s": count * batch_size / elapsed_s,
        "gb_per_s": count * batch_bytes / 1e9 / elapsed_s,
    }


def _run_stream(make: Callable[[Settings], Stream], peer: Peer, settings: Settings) -> dict:
    stream = make(settings)
    batches, seen = _open(peer, stream)
    return seen | _flow(stream, batches, settings.seconds)


def _bare_stack(work: Workload, settings: Settings) -> dict:
    work = smallest(work) if settings.is_smallest else work
    found = asdict(measure_ceiling(work, settings.workers, settings.seconds))
    rates = _rates(work.batch_size, found["batch_bytes"], found["batches"], found["elapsed_s"])
    gb = found["batches"] * found["batch_bytes"] / 1e9
    return rates | {
        "cpu_s_per_gb": found["workers_cpu_s"] / gb,
        "faults": found["minor_faults"] / found["batches"],
        "content": found["content_hash"],
    }


# ---------------------------------------------------------------- C: descriptors


def _run_many_tensors(peer: Peer, settings: Settings) -> dict:
    stream = _resident(WORKLOADS["d"], settings)
    before = descriptor_count()
    batches, seen = _open(peer, stream)
    figures = _flow(stream, batches, settings.seconds)
    most = max(descriptor_count() for _ in itertools.islice(batches, 64))
    return seen | figures | {"descriptors": most - before}


# ---------------------------------------------------------------- D: photographs


class Photographs(Dataset[torch.Tensor]):
    """The centres of JPEG files, decoded, again and again."""

    def __init__(self, paths: Sequence[Path], length: int) -> None:
        self.paths = paths
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        from PIL import Image

        with Image.open(self.paths[index % len(self.paths)]) as file:
            image = file.convert("RGB")
        left, top = (image.width - _SIDE) // 2, (image.height - _SIDE) // 2
        crop = np.asarray(image.crop((left, top, left + _SIDE, top + _SIDE)))
        return torch.from_numpy(crop.transpose(2, 0, 1).copy())


_SIDE = 224


def _photographs(settings: Settings, folder: Path) -> Stream:
    sys.path.append(str(Path(__file__).parents[1]))
    from examples.jpeg_folder import find_jpegs, write_samples

    batch_size = 4 if settings.is_smallest else 32
    write_samples(folder, 5 if settings.is_smallest else 127, seed=0)
    length = batch_size * _MANY_BATCHES
    task = Task(
        Photographs(find_jpegs(folder), length),
        batch_size,
        SequentialSampler(range(length)),
        epochs=1,
        workers=settings.workers,
        batch_bytes=batch_size * 3 * _SIDE**2,
        is_by_sample=True,
        reads_files=True,
    )
    return Stream(task, hash_batches=4, clock_stride=1)


def _run_photographs(peer: Peer, settings: Settings) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        settings = replace(settings, seconds=_longer(settings, 3))
        return _run_stream(lambda _: _photographs(settings, Path(folder)), peer, settings)


def _bare_photographs(settings: Settings) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        task = _photographs(settings, Path(folder)).task

        def decode(batch: int) -> None:
            for index in range(batch * task.batch_size, (batch + 1) * task.batch_size):
                task.dataset[index]

        found = run_processes(lambda: decode, settings.workers, _longer(settings, 3), 1)
    return _rates(task.batch_size, task.batch_bytes, found["batches"], found["elapsed_s"])


def _longer(settings: Settings, factor: float) -> float:
    return settings.seconds if settings.is_smallest else settings.seconds * factor


# ---------------------------------------------------------------- E: stragglers


def _run_stragglers(peer: Peer, settings: Settings) -> dict:
    options = SimpleNamespace(
        workers=settings.workers,
        batches=2 if settings.is_smallest else 50,
        batch_size=4 if settings.is_smallest else 64,
        sample_ms=1.0,
        train_ms=0.0,
    )
    task = Task(
        Sleepers(options),
        options.batch_size,
        # So many quick batches first that, when the measured epoch begins, all workers have started
        # and none has begun that epoch.
        Order(options, batches=8),
        epochs=2,
        workers=settings.workers,
        batch_bytes=options.batch_size * 16 * 8,
        is_by_sample=True,
    )
    began = time.perf_counter()
    epochs = peer.epochs(task)  # some start their workers here
    for number, _ in enumerate(next(epochs)):
        if not number:
            first_s = time.perf_counter() - began
    found = take_epoch(lambda: next(epochs), options)
    if len(found.waits_ms) != sample_count(options) // options.batch_size:
        raise RuntimeError(f"there were {len(found.waits_ms)} batches")
    waits = statistics.quantiles(found.waits_ms, n=100, method="inclusive")
    return {
        "to_ideal": found.epoch_s / found.ideal_s,
        "wait_50_ms": waits[49],
        "wait_99_ms": waits[98],
        "wait_most_ms": max(found.waits_ms),
        "waits_ms": [round(wait_ms, 3) for wait_ms in found.waits_ms],
        "first_s": first_s,
        "content": found.content,
    }


# ---------------------------------------------------------------- F: ragged


class Ragged(Dataset[torch.Tensor]):
    """Runs of tokens; those of one batch in 100 are ten times as long."""

    LONG_ONE_IN = 100
    FACTOR = 10

    def __init__(self, tokens: Any, size: int, batch_size: int) -> None:
        self.tokens = tokens
        self.size = size
        self.batch_size = batch_size

    def __len__(self) -> int:
        return self.batch_size * _MANY_BATCHES

    def width(self, batch: int) -> int:
        """Tokens in each sample of a batch."""
        is_long = batch % self.LONG_ONE_IN == self.LONG_ONE_IN // 2
        return self.size * self.FACTOR if is_long else self.size

    def __getitem__(self, index: int) -> Any:
        start = index % 61
        return self.tokens[start : start + self.width(index // self.batch_size)]


def _run_ragged(peer: Peer, settings: Settings) -> dict:
    batch_size, size = (4, 64) if settings.is_smallest else (64, 4_096)
    tokens = torch.randint(
        50_000, (Ragged.FACTOR * size + 61,), generator=torch.Generator().manual_seed(0)
    )
    dataset = Ragged(tokens, size, batch_size)
    task = Task(
        dataset,
        batch_size,
        SequentialSampler(dataset),
        epochs=1,
        workers=settings.workers,
        batch_bytes=batch_size * size * Ragged.FACTOR * 8,
        arrays=Ragged(tokens.numpy(), size, batch_size),
    )
    stream = Stream(task, hash_batches=Ragged.LONG_ONE_IN, clock_stride=4)
    before = pss_bytes()
    batches, seen = _open(peer, stream)
    taken, _ = consume(batches, min(0.3, settings.seconds), WARMUP_BATCHES, stream.clock_stride)
    meter = Meter()
    count, elapsed_s = consume(batches, settings.seconds, 1, stream.clock_stride)
    spent = meter.read()
    start = stream.hash_batches + taken
    token_count = batch_size * sum(map(dataset.width, range(start, start + count)))
    most = 0
    for number, batch in enumerate(itertools.islice(batches, 2 * Ragged.LONG_ONE_IN)):
        touch(batch)
        if batch.shape[1] > size or number % 20 == 0:
            most = max(most, pss_bytes())
    return seen | {
        "tokens_per_s": token_count / elapsed_s,
        "main_us": spent.main_cpu_s / count * 1e6,
        "grown_mb": (most - before) / 1e6,
        "others_cores": spent.others_cpu_s / elapsed_s,
    }


# ---------------------------------------------------------------- G: a million strings


class Shuffle(Sampler[int]):
    """Like torch's ``RandomSampler``, but can be sent to a process that is spawned."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.epoch = 0

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        # Runs at the first index, as in torch's: an iterator that is not used changes nothing.
        generator = torch.Generator().manual_seed(self.epoch)
        self.epoch += 1
        yield from torch.randperm(self.length, generator=generator).tolist()


def _run_texts(method: str, workers: int, epochs: int, peer: Peer, settings: Settings) -> dict:
    batch_size = 100 if settings.is_smallest else 1_000
    dataset = Texts(make_texts(1_600 if settings.is_smallest else 1_000_000))
    before = pss_bytes()
    began = time.perf_counter()
    if peer.shares:
        dataset = shmloader.share(dataset)  # the plain list is dropped
    task = Task(
        dataset,
        batch_size,
        Shuffle(len(dataset)),
        epochs=epochs,
        workers=workers,
        method=method if method in peer.methods else peer.methods[0],
        arrays=dataset,
        is_text=True,
    )
    batch_count = len(dataset) // batch_size
    found = watch(peer.epochs(task), batch_count, began)
    looks = [nbytes for _, nbytes in found["looks"]]
    per_epoch = len(looks) // epochs
    return {
        "first_s": found["first_s"],
        "total_mb": max(looks) / 1e6,
        "grown_mb": (max(looks) - before) / 1e6,
        "growth": looks[-1] / looks[per_epoch - 1] - 1,
        "looks": [(round(at_s, 3), nbytes) for at_s, nbytes in found["looks"]],
        "content": str(found["content"]),
    }


# ---------------------------------------------------------------- H: a consumer that keeps batches


_KEPT = 50


def _run_keeper(peer: Peer, settings: Settings) -> dict:
    stream = _resident(WORKLOADS["c"], settings)
    stream = replace(stream, task=replace(stream.task, held=_KEPT))
    before = {kind: pss_bytes(kind) for kind in ("Pss", "Pss_Shmem")}
    batches, seen = _open(peer, stream)
    kept: deque[Any] = deque(maxlen=_KEPT)

    def keep() -> Iterator[Any]:
        for batch in batches:
            kept.append(batch)
            yield batch

    keeping = keep()
    consume(keeping, 0.0, _KEPT, 1)
    figures = _flow(stream, keeping, settings.seconds)
    arrived = []
    for batch in itertools.islice(keeping, _KEPT):
        touch(batch)
        arrived.append(_digest(batch))
    if [_digest(batch) for batch in kept] != arrived:
        raise RuntimeError("batches that were kept have changed")
    return (
        seen
        | figures
        | {
            "shared_mb": (pss_bytes("Pss_Shmem") - before["Pss_Shmem"]) / 1e6,
            "grown_mb": (pss_bytes() - before["Pss"]) / 1e6,
        }
    )


def _digest(batch: Any) -> str:
    content = ContentHash()
    content.add(batch)
    return content.hexdigest()


# ---------------------------------------------------------------- I: a training step


def _run_training(peer: Peer, settings: Settings) -> dict:
    stream = _resident(WORKLOADS["a"], settings)
    batches, seen = _open(peer, stream)
    steps = 5 if settings.is_smallest else max(50, round(settings.seconds / 0.02))
    for _ in range(WARMUP_BATCHES):
        time.sleep(0.02)
        touch(next(batches))
    meter = Meter()
    waits = []
    began = time.perf_counter()
    for _ in range(steps):
        asked = time.perf_counter()
        batch = next(batches)
        waits.append(time.perf_counter() - asked)
        touch(batch)
        time.sleep(0.02)
    elapsed_s = time.perf_counter() - began
    spent = meter.read()
    return seen | {
        "waited": sum(waits) / elapsed_s,
        "wait_50_ms": statistics.median(waits) * 1e3,
        "wait_most_ms": max(waits) * 1e3,
        "main_us": spent.main_cpu_s / steps * 1e6,
        "others_cores": spent.others_cpu_s / elapsed_s,
    }


# ---------------------------------------------------------------- K: data in an array


_ARRAY_BATCH = 1_024


class Gather:
    """Makes a batch from its indices, column by column."""

    def __init__(self, columns: Sequence[Any]) -> None:
        self.columns = columns

    def __call__(self, indices: Sequence[int]) -> list[Any]:
        if isinstance(self.columns[0], torch.Tensor):
            chosen = torch.as_tensor(indices)
            return [column.index_select(0, chosen) for column in self.columns]
        return [column.take(indices, axis=0) for column in self.columns]


class Columns:
    """Samples that have one element of each column."""

    def __init__(self, columns: Sequence[Any]) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(self.columns[0])

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        return tuple(column[index] for column in self.columns)


def _table(settings: Settings) -> Any:
    """Make a million rows, and as many more as make whole batches for each worker."""
    wanted = 8 * _ARRAY_BATCH if settings.is_smallest else 1_000_000
    round_ = _ARRAY_BATCH * settings.workers
    return make_dataset(-(-wanted // round_) * round_)


def _array(settings: Settings) -> Stream:
    dataset = _table(settings)
    columns = [column.numpy() for column in dataset.tensors]
    task = Task(
        dataset,
        _ARRAY_BATCH,
        RandomSampler(dataset, generator=torch.Generator().manual_seed(0)),
        epochs=_MANY_EPOCHS,
        workers=settings.workers,
        batch_bytes=_ARRAY_BATCH * sum(column.strides[0] for column in columns),
        leaf_count=len(columns),
        arrays=Columns(columns),
        fetch=Gather(dataset.tensors),
        fetch_arrays=Gather(columns),
    )
    return Stream(task, hash_batches=20, clock_stride=4)


def _bare_gather(settings: Settings) -> dict:
    dataset = _table(settings)
    found = run_processes(lambda: gatherer(dataset), settings.workers, settings.seconds, 8)
    return _rates(_ARRAY_BATCH, _ARRAY_BATCH * 136, found["batches"], found["elapsed_s"])


_IN_USE = 6  # slots that our loader fills in a plain loop with two workers, three for each


def _bare_batches(
    columns: Any, indices: Any, dtype: Any, settings: Settings, *, delivered: bool
) -> dict:
    """Measure a program that gathers batches by hand, with the consumer of a loader."""
    if delivered:
        slots = _IN_USE // 2 * settings.workers
        batches = deliver(columns, indices, dtype, settings.workers, slots)
    else:
        batches = gather_alone(columns, indices, dtype)
    with contextlib.closing(batches):
        nbytes = byte_count(next(batches))
        task = Task(None, len(indices[0]), None, 1, settings.workers, batch_bytes=nbytes)
        return _flow(Stream(task, 0, clock_stride=4), batches, settings.seconds)


def _bare_array(delivered: bool, settings: Settings) -> dict:
    dataset = _table(settings)
    columns = {str(number): one.numpy() for number, one in enumerate(dataset.tensors)}
    indices = torch.randperm(len(dataset)).view(-1, _ARRAY_BATCH).numpy()
    return _bare_batches(columns, indices, None, settings, delivered=delivered)


# ---------------------------------------------------------------- L, M: texts


_TEXTS, _PACKED_TEXTS, _PACKED_TOKENS = 512, 64, 16_384


def _texts(
    settings: Settings,
    kind: str,
    collate: Callable[[Any], Any],
    make_others: Callable[[], Callable[[Any], Any]],
    *,
    key: str | None = None,
    packed: bool = False,
) -> Stream:
    """Make a stream of texts that are padded, or packed to a number of tokens."""
    batch_size = _PACKED_TEXTS if packed else 8 if settings.is_smallest else _TEXTS
    samples = make_samples(batch_size, kind, key, _PACKED_TOKENS if packed else None)
    length = batch_size * _MANY_BATCHES
    task = Task(
        Tokens(samples, length),
        batch_size,
        SequentialSampler(range(length)),
        epochs=1,
        workers=settings.workers,
        batch_bytes=batch_size * LONGEST * 8,
        collate=collate,
        collate_of_others=make_others(),
    )
    return Stream(task, hash_batches=6, clock_stride=4)


def _bare_texts(make: Callable[[Settings], Stream], settings: Settings) -> dict:
    """Load the samples as a loader's worker does, and do nothing else."""
    task = make(settings).task
    dataset, size = task.dataset, task.batch_size

    def load(batch: int) -> None:
        for index in range(batch * size, (batch + 1) * size):
            dataset[index]

    found = run_processes(lambda: load, settings.workers, settings.seconds, 8)
    return _rates(size, task.batch_bytes, found["batches"], found["elapsed_s"])


# ---------------------------------------------------------------- N: a table of tokens


_TABLE_BATCH = 64


def _table_rows(settings: Settings) -> int:
    return _TABLE_BATCH * settings.workers * (4 if settings.is_smallest else 500)


def _tokens(settings: Settings, folder: Path, *, is_ragged: bool) -> Stream:
    """Make a stream of a tokenised ``datasets.Dataset``, shuffled, padded if it is ragged."""
    dataset = make_table(folder, _table_rows(settings), is_ragged=is_ragged)
    task = Task(
        dataset,
        _TABLE_BATCH,
        RandomSampler(dataset, generator=torch.Generator().manual_seed(0)),
        epochs=_MANY_EPOCHS,
        workers=settings.workers,
        batch_bytes=2 * _TABLE_BATCH * TOKENS * 8,
        leaf_count=2,
        collate=Fields(input_ids=Pad(), attention_mask=Pad()) if is_ragged else None,
        collate_of_others=pad_columns_by_torch if is_ragged else None,
    )
    return Stream(task, hash_batches=6, clock_stride=4)


def _run_tokens(is_ragged: bool, peer: Peer, settings: Settings) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        make = partial(_tokens, folder=Path(folder), is_ragged=is_ragged)
        return _run_stream(make, peer, settings)


def _bare_table(delivered: bool, settings: Settings) -> dict:
    rows = _table_rows(settings)
    with tempfile.TemporaryDirectory() as folder:
        columns = read_columns(Path(folder), rows)
        indices = batches_of(rows, _TABLE_BATCH)
        return _bare_batches(columns, indices, np.int64, settings, delivered=delivered)


def _bare_tokens(settings: Settings) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        gather = row_gatherer(Path(folder), _table_rows(settings), _TABLE_BATCH)
        found = run_processes(lambda: gather, settings.workers, settings.seconds, 8)
    nbytes = 2 * _TABLE_BATCH * TOKENS * 8
    return _rates(_TABLE_BATCH, nbytes, found["batches"], found["elapsed_s"])


# ---------------------------------------------------------------- O: shards


def _run_shards(form: str, peer: Peer, settings: Settings) -> dict:
    """Read whole epochs of shards, after a first one whose content is compared."""
    write = WRITERS.get(peer.name, WRITERS[form])
    shards, per_shard = (4, 32) if settings.is_smallest else (64, 256)
    with tempfile.TemporaryDirectory() as folder:
        shelf = write(Path(folder), shards, per_shard, settings.workers)
        began = time.perf_counter()
        epochs = peer.epochs(shelf)
        content, first_s = 0, 0.0
        for batch in next(epochs):
            first_s = first_s or time.perf_counter() - began
            content += checksum_of(batch)
        meter = Meter()
        began = time.perf_counter()
        count = 0
        while not count or time.perf_counter() - began < settings.seconds:
            count += sum(map(touch_records, next(epochs)))
        elapsed_s = time.perf_counter() - began
        spent = meter.read()
    rates = _rates(BATCH, int(BATCH * shelf.sample_bytes), max(1, count // BATCH), elapsed_s)
    return rates | {
        "samples_per_s": count / elapsed_s,
        "cpu_us": (spent.main_cpu_s + spent.workers_cpu_s) / count * 1e6,
        "main_us": spent.main_cpu_s / count * BATCH * 1e6,
        "others_cores": spent.others_cpu_s / elapsed_s,
        "first_s": first_s,
        "content": f"{content:x}",
    }


# ---------------------------------------------------------------- all of them


@dataclass(frozen=True)
class Case:
    """One workload of the comparison.

    Attributes:
        key: The row's letter, and what distinguishes the case from others of the row.
        run: Measures a peer.
        bare: Measures the bare work. None: the case has none.
        bares: Measure other bare work, by name.
        limit_s: Seconds after which a run counts as a hang, besides the time for its timed part.
        method: Start method, if that is what the case is about.
        peers: The peers that are measured; all of those that are on the row, if empty.
    """

    key: str
    run: Callable[[Peer, Settings], dict]
    bare: Callable[[Settings], dict] | None = None
    limit_s: float = 120.0
    method: str | None = None
    peers: tuple[str, ...] = ()
    bares: Mapping[str, Callable[[Settings], dict]] = field(default_factory=dict)


def _text_case(key: str, kind: str, /, *arguments: Any, **options: Any) -> Case:
    """Return a case of texts. The arguments are those of ``_texts``."""

    def make(settings: Settings) -> Stream:
        return _texts(settings, kind, *arguments, **options)

    return Case(
        key, partial(_run_stream, make), partial(_bare_texts, make), peers=("shmloader", "torch")
    )


def _stream_case(key: str, work: Workload, *, has_bare: bool) -> Case:
    bare = partial(_bare_stack, work) if has_bare else None
    return Case(key, partial(_run_stream, partial(_resident, work)), bare)


_SMALL_IMAGES = replace(WORKLOADS["a"], title="uint8 3×224×224, batch 64", batch_size=64)

CASES = {
    case.key: case
    for case in (
        _stream_case("A", WORKLOADS["e"], has_bare=False),
        _stream_case("B, 9.6 MB", _SMALL_IMAGES, has_bare=True),
        _stream_case("B, 38 MB", WORKLOADS["a"], has_bare=True),
        _stream_case("B, 77 MB", WORKLOADS["b"], has_bare=True),
        Case("C", _run_many_tensors),
        Case("D", _run_photographs, _bare_photographs),
        Case("E", _run_stragglers),
        Case("F", _run_ragged),
        Case("G, fork", partial(_run_texts, "fork", 4, 3), None, 600.0, "fork"),
        Case("G, forkserver", partial(_run_texts, "forkserver", 4, 3), None, 600.0, "forkserver"),
        Case("G, spawn", partial(_run_texts, "spawn", 4, 3), None, 600.0, "spawn"),
        Case("G, spawn, 8 workers", partial(_run_texts, "spawn", 8, 1), None, 600.0, "spawn"),
        Case("H", _run_keeper),
        Case("I", _run_training),
        Case(
            "K",
            partial(_run_stream, _array),
            partial(_bare_array, True),
            bares={UNDELIVERED: _bare_gather, ALONE: partial(_bare_array, False)},
        ),
        _text_case("L, arrays", "arrays", Pad(), lambda: pad_by_torch),
        _text_case("L, lists", "lists", Pad(), lambda: pad_by_torch),
        _text_case(
            "L, dicts of lists",
            "lists",
            Fields(input_ids=Pad(with_mask=True)),
            padding_of_transformers,
            key="input_ids",
        ),
        _text_case(
            "L, dicts of arrays",
            "arrays",
            Fields(input_ids=Pad(with_mask=True)),
            padding_of_transformers,
            key="input_ids",
        ),
        _text_case(
            "M, lists", "lists", Pack(), flattening_of_transformers, key="input_ids", packed=True
        ),
        _text_case(
            "M, arrays", "arrays", Pack(), flattening_of_transformers, key="input_ids", packed=True
        ),
        Case(
            "N",
            partial(_run_tokens, False),
            partial(_bare_table, True),
            peers=("shmloader", "torch"),
            bares={UNDELIVERED: _bare_tokens, ALONE: partial(_bare_table, False)},
        ),
        Case("N, padded", partial(_run_tokens, True), peers=("shmloader", "torch")),
        Case(
            "O, tar",
            partial(_run_shards, "tar"),
            limit_s=300.0,
            peers=(
                "shmloader, streams",
                "webdataset",
                "torch, webdataset",
                "MosaicML Streaming",
            ),
        ),
        Case(
            "O, parquet",
            partial(_run_shards, "parquet"),
            limit_s=300.0,
            peers=("shmloader, streams", "torch, datasets"),
        ),
    )
}


def names_of(case: Case) -> list[str]:
    """Return the names of the peers, and of the bare work, that are measured on a case."""
    names = [name for name, peer in PEERS.items() if not peer.rows or case.key[0] in peer.rows]
    names = [name for name in names if not case.peers or name in case.peers]
    return [*names, *([BARE] if case.bare else []), *case.bares]


def run(key: str, name: str, settings: Settings) -> dict:
    """Measure one peer, or the bare work, on one case, in this process."""
    random.seed(0)
    torch.manual_seed(0)
    case = CASES[key]
    if name == BARE:
        assert case.bare is not None
        return case.bare(settings)
    if name in case.bares:
        return case.bares[name](settings)
    return case.run(PEERS[name], settings)
