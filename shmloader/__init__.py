"""A batch loader for PyTorch whose batches lie in shared memory.

``from shmloader import DataLoader`` is a drop-in for ``torch.utils.data.DataLoader``.

The layers; imports run downward only::

    cli         the command line
    sequence    lazy sequences, and one whose items a loader computes ahead
    pipeline    pipelines of a source, stages and a sink
    loader      the loaders, their arguments and their iterators
    device      what a thread does to a batch after the engine: pin it, or copy it to a device
    engine      an ordered, bounded, parallel map; its docstring draws the path of a batch
    pools       where batches are made: processes, threads, or the calling thread
    batch       how a batch is made
    shared      datasets in shared memory, once for all processes
    memory      shared-memory slots, and how batches get in and out
    sampling    orders of samples, and how they are cut for ranks and shards
    threads     background threads, and what a fork must not interrupt
    messages    the messages between processes
    insight     where the time goes: the times of each batch, statistics and the verdict
    errors, and process_state: all state that belongs to the process
"""

from torch.utils.data import get_worker_info

from shmloader.batch.sample_rng import sample_rng
from shmloader.errors import (
    ClosedLoaderError,
    InternalError,
    LoaderTimeoutError,
    SharedMemoryError,
    ShmloaderError,
    TooManyFailures,
    WorkerDiedError,
)
from shmloader.insight import LoaderStats
from shmloader.loader.dataloader import DataLoader
from shmloader.loader.measured import CachedBatches
from shmloader.loader.sharded import ShardedDataLoader
from shmloader.memory.collate import empty
from shmloader.pipeline.builder import PipelineBuilder
from shmloader.pipeline.loader import PipelineDataLoader
from shmloader.pipeline.pipeline import Pipeline
from shmloader.shared import share

__version__ = "0.1.0"

__all__ = [
    "CachedBatches",
    "ClosedLoaderError",
    "DataLoader",
    "InternalError",
    "LoaderStats",
    "LoaderTimeoutError",
    "Pipeline",
    "PipelineBuilder",
    "PipelineDataLoader",
    "ShardedDataLoader",
    "SharedMemoryError",
    "ShmloaderError",
    "TooManyFailures",
    "WorkerDiedError",
    "__version__",
    "empty",
    "get_worker_info",
    "sample_rng",
    "share",
]
