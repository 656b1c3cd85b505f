"""Each loader of the comparison, used as its own documentation says.

A peer's function takes a ``Task`` and returns its epochs. Each epoch is an iterator of batches in
the sampler's order. Workers live through all epochs if the peer can do that. Each peer prefetches
two batches for each worker, which is torch's default.

Peers that are made for NumPy get samples that are arrays, and give arrays. These become tensors
here, which counts as the consumer's time, as in a training loop in torch. Each peer runs in a fresh
process without other loaders.
"""

from __future__ import annotations

import itertools
import multiprocessing
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from _shards import (
    shmloader_streams,
    streaming,
    torch_over_hugging_face,
    torch_over_webdataset,
    web_loader,
)
from torch.utils.data import BatchSampler, Sampler, SequentialSampler, default_collate

Batches = Iterator[Any]

_PREFETCH = 2  # batches for each worker
_ALIGNMENT = 64
_DRAWN_EPOCHS = 4  # repeated, for peers that need the order of all epochs at once


@dataclass(frozen=True)
class Task:
    """What each peer has to load.

    Attributes:
        dataset: A map-style dataset.
        arrays: The same dataset with arrays in place of tensors. None: they are made from the
            tensors of ``dataset``.
        batch_size: Samples in a batch. Samples that do not fill the last batch are left out.
        sampler: Each of its iterators draws the order of one epoch.
        epochs: Number of epochs. Each has as many batches as a multiple of the workers.
        workers: Number of processes, or of threads.
        batch_bytes: Bytes of the largest batch, for peers that must know them.
        leaf_count: Tensors in a batch.
        method: Start method of processes.
        held: Batches that the consumer keeps.
        is_by_sample: Whether one sample takes long enough to be worth handing to a thread.
        reads_files: Whether samples are read from files.
        is_text: Whether batches are lists of strings.
        fetch: Makes a batch from its indices, if a user would not do that sample by sample.
        fetch_arrays: The same for a batch of arrays.
        collate: The collate function of shmloader's that makes a batch; None for torch's default.
        collate_of_others: What makes the same batch for a loader with torch's interface.
    """

    dataset: Any
    batch_size: int
    sampler: Sampler[int]
    epochs: int
    workers: int
    batch_bytes: int = 0
    leaf_count: int = 1
    method: str = "fork"
    held: int = 0
    is_by_sample: bool = False
    reads_files: bool = False
    is_text: bool = False
    arrays: Any = None
    fetch: Callable[[Sequence[int]], Any] | None = None
    fetch_arrays: Callable[[Sequence[int]], Any] | None = None
    collate: Callable[[Any], Any] | None = None
    collate_of_others: Callable[[Any], Any] | None = None

    @property
    def array_dataset(self) -> Any:
        """The dataset, with arrays in place of tensors."""
        return _Arrays(self.dataset) if self.arrays is None else self.arrays

    @property
    def ahead(self) -> int:
        """Batches that are prefetched."""
        return _PREFETCH * self.workers

    @property
    def slot_bytes(self) -> int:
        """Bytes that the largest batch takes with each of its tensors aligned."""
        return self.batch_bytes + self.leaf_count * _ALIGNMENT


@dataclass(frozen=True)
class Peer:
    """One loader.

    Attributes:
        name: What tables call it.
        module: The module that must be importable.
        distribution: The distribution that has this module.
        note: How the loader is used, as the page says it.
        epochs: Opens the loader, and returns its epochs. Gets a Task; in row O, a Shelf.
        methods: Start methods that it can be told to use.
        instead: What a table says in place of figures for other start methods.
        shares: Whether ``shmloader.share`` is called on the dataset first.
        rows: Letters of the rows that it is measured on; all rows, if empty.
    """

    name: str
    module: str
    distribution: str
    note: str
    epochs: Callable[[Any], Iterator[Batches]]
    methods: tuple[str, ...] = ("fork", "forkserver", "spawn")
    instead: str = ""
    shares: bool = False
    rows: str = ""


# ---------------------------------------------------------------- shared by peers


def map_leaves(convert: Callable[[Any], Any], value: Any, kind: type | tuple[type, ...]) -> Any:
    """Convert values of a kind in dicts, lists and tuples. Tuples become lists."""
    if isinstance(value, kind):
        return convert(value)
    if isinstance(value, dict):
        return {key: map_leaves(convert, part, kind) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [map_leaves(convert, part, kind) for part in value]
    return value


def as_tensors(batch: Any) -> Any:
    """Return a batch with tensors in place of its arrays, in the same memory."""
    return map_leaves(torch.from_numpy, batch, np.ndarray)


class _Arrays:
    """A dataset's samples, with arrays in place of tensors."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        return map_leaves(torch.Tensor.numpy, self._dataset[index], torch.Tensor)


def stack_arrays(samples: Sequence[Any]) -> Any:
    """Collate as torch does by default, but into arrays."""
    first = samples[0]
    if isinstance(first, str):
        return list(samples)
    if isinstance(first, dict):
        return {key: stack_arrays([sample[key] for sample in samples]) for key in first}
    if isinstance(first, list | tuple):
        return [stack_arrays(column) for column in zip(*samples, strict=True)]
    return np.stack(samples)


class _Fetch:
    """Makes a batch from its indices, one sample after the other."""

    def __init__(self, dataset: Any, collate: Callable[[Sequence[Any]], Any]) -> None:
        self._dataset = dataset
        self._collate = collate

    def __call__(self, indices: Any) -> Any:
        plain = indices.tolist() if isinstance(indices, np.ndarray) else indices
        return self._collate([self._dataset[index] for index in plain])


class _AllIndices:
    """The indices of all epochs, one after the other. A sequential order takes no memory."""

    def __init__(self, task: Task) -> None:
        size = task.batch_size
        if isinstance(task.sampler, SequentialSampler):
            count = len(task.sampler) // size
            self._drawn: np.ndarray | None = None
            self._period = count * size
            self.batch_counts = [count] * task.epochs
        else:
            drawn = [
                np.fromiter(task.sampler, np.int64) for _ in range(min(task.epochs, _DRAWN_EPOCHS))
            ]
            counts = [len(order) // size for order in drawn]
            self._drawn = np.concatenate(
                [order[: count * size] for order, count in zip(drawn, counts, strict=True)]
            )
            self._period = len(self._drawn)
            self.batch_counts = [counts[number % len(counts)] for number in range(task.epochs)]
        self._length = sum(self.batch_counts) * size

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, place: int) -> int:
        place %= self._period
        return place if self._drawn is None else int(self._drawn[place])

    def part(self, start: int, stop: int) -> range | np.ndarray:
        """Return the indices of one batch."""
        start, stop = start % self._period, (stop - 1) % self._period + 1
        return range(start, stop) if self._drawn is None else self._drawn[start:stop]


# ---------------------------------------------------------------- with torch's interface


def _torch_options(task: Task) -> dict[str, Any]:
    return {
        "batch_size": task.batch_size,
        "sampler": task.sampler,
        "drop_last": True,
        "num_workers": task.workers,
        "multiprocessing_context": task.method,
        "collate_fn": task.collate_of_others,
    }


def _repeat(loader: Iterable[Any], task: Task) -> Iterator[Batches]:
    for _ in range(task.epochs):
        yield iter(loader)


def _shmloader(task: Task, seed: int | None = None) -> Iterator[Batches]:
    import shmloader

    options = {**_torch_options(task), "persistent_workers": True, "seed": seed}
    options["collate_fn"] = task.collate
    return _repeat(shmloader.DataLoader(task.dataset, **options), task)


def _shmloader_alone(task: Task) -> Iterator[Batches]:
    import shmloader

    options = _torch_options(task)
    del options["multiprocessing_context"], options["num_workers"]
    return _repeat(shmloader.DataLoader(task.dataset, **options), task)


def _torch(task: Task) -> Iterator[Batches]:
    options = _torch_options(task)
    loader = torch.utils.data.DataLoader(task.dataset, persistent_workers=True, **options)
    return _repeat(loader, task)


def _torchdata(task: Task) -> Iterator[Batches]:
    from torchdata.stateful_dataloader import StatefulDataLoader

    options = _torch_options(task)
    return _repeat(StatefulDataLoader(task.dataset, persistent_workers=True, **options), task)


def _spdl_processes(task: Task) -> Iterator[Batches]:
    from spdl.dataloader import get_pytorch_dataloader

    torch.set_num_threads(1)  # SPDL leaves it to its user; workers on all cores need it
    options = _torch_options(task)
    loader = get_pytorch_dataloader(task.dataset, in_order=True, **options)
    return _repeat(loader, task)


# ---------------------------------------------------------------- SPDL's pipelines


def _spdl_builder(task: Task, dataset: Any, collate: Any, fetch: Any) -> Any:
    from spdl.pipeline import PipelineBuilder

    builder = PipelineBuilder()
    if task.is_by_sample:
        # Each sample is a task of its own, so that one that takes long holds up no others.
        builder.add_source(task.sampler, continuous=True)
        builder.pipe(dataset.__getitem__, concurrency=task.workers, output_order="input")
        builder.aggregate(task.batch_size, drop_last=True)
        builder.pipe(collate, output_order="input")
    else:
        indices = BatchSampler(task.sampler, task.batch_size, drop_last=True)
        builder.add_source(indices, continuous=True)
        fetch = fetch or _Fetch(dataset, collate)
        builder.pipe(fetch, concurrency=task.workers, output_order="input")
    return builder.add_sink(task.ahead)


def _spdl_threads(task: Task) -> Iterator[Batches]:
    torch.set_num_threads(1)  # as above
    builder = _spdl_builder(task, task.dataset, default_collate, task.fetch)
    pipeline = builder.build(num_threads=task.workers)
    with pipeline.auto_stop():
        for _ in range(task.epochs):
            yield pipeline.get_iterator()


def _spdl_subprocess(task: Task) -> Iterator[Batches]:
    from spdl.pipeline import SharedMemorySegmentPool, run_pipeline_in_subprocess

    options: dict[str, Any] = {"mp_context": task.method, "buffer_size": task.ahead}
    if task.batch_bytes > 4096:  # what is smaller never goes to the arena
        # Besides those that wait: one that is being written, one that the consumer has.
        count = task.ahead + task.held + 2
        options["arena"] = SharedMemorySegmentPool(task.slot_bytes, count)
    # Small tensors would have a segment of their own each; small arrays are just pickled.
    builder = _spdl_builder(task, task.array_dataset, stack_arrays, task.fetch_arrays)
    batches = run_pipeline_in_subprocess(builder.get_config(), num_threads=task.workers, **options)
    epochs = _repeat(batches, task)
    return epochs if task.is_text else (map(as_tensors, epoch) for epoch in epochs)


# ---------------------------------------------------------------- lazy sequences and arrays


class _Blocks:
    """The indices of each batch."""

    def __init__(self, indices: _AllIndices, batch_size: int) -> None:
        self._indices = indices
        self._batch_size = batch_size

    def __len__(self) -> int:
        return sum(self._indices.batch_counts)

    def __getitem__(self, number: int) -> range | np.ndarray:
        if not 0 <= number < len(self):
            raise IndexError(number)
        return self._indices.part(number * self._batch_size, (number + 1) * self._batch_size)


def _seqtools(task: Task) -> Iterator[Batches]:
    import seqtools

    multiprocessing.set_start_method(task.method, force=True)  # SeqTools has no option for it
    indices = _AllIndices(task)
    fetch = task.fetch_arrays or _Fetch(task.array_dataset, stack_arrays)
    blocks = _Blocks(indices, task.batch_size)
    # Two of the slots are for the consumer. SeqTools requires at least four.
    slots = max(4, task.ahead) + 2
    prefetched = seqtools.prefetch(
        seqtools.smap(fetch, blocks), task.workers, "process", max_buffered=slots,
        shm_size=slots * task.slot_bytes if task.batch_bytes else 0,
    )  # fmt: skip

    def load() -> Batches:
        for number in range(len(blocks)):
            batch = prefetched[number]
            if task.held:
                # As SeqTools' documentation asks: kept batches would use up its shared memory.
                batch = map_leaves(np.copy, batch, np.ndarray)
            yield batch if task.is_text else as_tensors(batch)

    return _cut(load(), indices)


def _cut(batches: Batches, indices: _AllIndices) -> Iterator[Batches]:
    """Cut an iterator over the batches of all epochs into epochs."""
    return (itertools.islice(batches, count) for count in indices.batch_counts)


class _Dealt:
    """Samples in an order in which grain makes the same batches as the other loaders.

    grain gives each of its n workers every n-th sample, and each worker makes batches of these.
    """

    def __init__(self, dataset: Any, indices: _AllIndices, task: Task) -> None:
        self._dataset = dataset
        self._indices = indices
        self._workers = task.workers
        self._batch_size = task.batch_size

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, place: int) -> Any:
        turn, worker = divmod(place, self._workers)
        nth, within = divmod(turn, self._batch_size)
        batch = nth * self._workers + worker
        return self._dataset[self._indices[batch * self._batch_size + within]]


def _grain(task: Task) -> Iterator[Batches]:
    import grain

    indices = _AllIndices(task)
    source = _Dealt(task.array_dataset, indices, task)
    # Its documentation advises against reading threads for data that lie in memory.
    reading = grain.ReadOptions() if task.reads_files else grain.ReadOptions(0, 0)
    batch_fn = list if task.is_text else None
    dataset = (
        grain.MapDataset.source(source)
        .to_iter_dataset(reading)
        .batch(task.batch_size, drop_remainder=True, batch_fn=batch_fn)
        .mp_prefetch(grain.MultiprocessingOptions(task.workers, _PREFETCH))
    )
    return _cut(iter(dataset) if task.is_text else map(as_tensors, dataset), indices)


# ---------------------------------------------------------------- all of them

_PEERS = (
    Peer(
        "shmloader", "shmloader", "shmloader",
        "`DataLoader(persistent_workers=True)`.", _shmloader,
    ),
    Peer(
        "shmloader, share", "shmloader", "shmloader",
        "the same over `shmloader.share(dataset)`; in row G only.", _shmloader,
        shares=True, rows="G",
    ),
    Peer(
        "shmloader, seed", "shmloader", "shmloader",
        "the same with `seed=0`: each sample has random streams of its own, and an idle worker "
        "takes the oldest batch; in rows D, E and I only.",
        partial(_shmloader, seed=0),
        rows="DEI",
    ),
    Peer(
        "shmloader, no workers", "shmloader", "shmloader",
        "`DataLoader(num_workers=0)`, as its README advises for small batches of arrays; in row K "
        "only.",
        _shmloader_alone,
        rows="K",
    ),
    Peer(
        "torch", "torch", "torch",
        "`DataLoader(persistent_workers=True)`.", _torch,
    ),
    Peer(
        "torchdata", "torchdata.stateful_dataloader", "torchdata",
        "`StatefulDataLoader(persistent_workers=True)`.", _torchdata,
    ),
    Peer(
        "SPDL, threads", "spdl.pipeline", "spdl",
        "a `PipelineBuilder` whose threads make batches (row D and E: samples) in input order, "
        "with a continuous source: what its documentation calls MT; torch on one thread in each.",
        _spdl_threads,
        ("fork",), "has no processes",
    ),
    Peer(
        "SPDL, subprocess", "spdl.pipeline", "spdl",
        "the same pipeline by `run_pipeline_in_subprocess`, with a `SharedMemorySegmentPool` and "
        "arrays: MTP.",
        _spdl_subprocess,
    ),
    Peer(
        "SPDL, processes", "spdl.dataloader", "spdl",
        "`get_pytorch_dataloader(in_order=True)`, which starts new workers for each epoch; torch "
        "on one thread in each.",
        _spdl_processes,
    ),
    Peer(
        "SeqTools", "seqtools", "SeqTools",
        "`prefetch(smap(fetch, indices), method=\"process\")` with shared memory for all that is "
        "in flight, and arrays.", _seqtools,
    ),
    Peer(
        "grain", "grain", "grain",
        "`MapDataset.source(…).to_iter_dataset().batch(…).mp_prefetch(…)`, with arrays.", _grain,
        ("spawn",), "always spawns: see `G, spawn`",
    ),
    Peer(
        "shmloader, streams", "shmloader", "shmloader",
        "`DataLoader(Shards(…, shuffle_shards=False).batch(64), batch_size=None, "
        "persistent_workers=True)`, with 64 readers; in row O only.",
        shmloader_streams, rows="O",
    ),
    Peer(
        "webdataset", "webdataset", "webdataset",
        "`WebLoader(WebDataset(…).batched(64), batch_size=None, persistent_workers=True)`; in row "
        "O only.",
        web_loader, rows="O",
    ),
    Peer(
        "torch, webdataset", "webdataset", "webdataset",
        "torch's `DataLoader(WebDataset(…), batch_size=64, persistent_workers=True)`; in row O "
        "only.",
        torch_over_webdataset, rows="O",
    ),
    Peer(
        "MosaicML Streaming", "_mosaic", "mosaicml-streaming",
        "`StreamingDataLoader(StreamingDataset(local=…), persistent_workers=True)`, over the same "
        "samples in shards of its own; in row O only.",
        streaming, rows="O",
    ),
    Peer(
        "torch, datasets", "datasets", "datasets",
        "torch's `DataLoader` over `load_dataset(\"parquet\", streaming=True)` with "
        "`with_format(\"torch\")`; in row O only.",
        torch_over_hugging_face, rows="O",
    ),
)  # fmt: skip

PEERS: dict[str, Peer] = {peer.name: peer for peer in _PEERS}
