"""A batch loader for PyTorch whose batches never leave shared memory.

``from shmloader import DataLoader`` is a drop-in for ``torch.utils.data.DataLoader``.

The layers; imports run downward only::

    cli         the command line
    sequence    lazy sequences, and one that is computed ahead by a loader
    loader      the loaders and their iterators
    pipeline    pipelines of a source, stages and a sink
    device      what happens to a batch after the engine, on a thread: pinning, copying to a device
    engine      an ordered, bounded, parallel map; the path of a batch is drawn there
    pools       where batches are made: processes, threads, or the thread that asks
    batch       how a batch is made
    shared      datasets in shared memory, once for all processes
    memory      shared-memory slots, and how batches get in and out
    sampling    orders of samples, and how they are cut for ranks and shards
    threads     background threads, and what a fork must not catch in the middle
    messages    what crosses between processes
    options     the checks of arguments
    insight     where the time goes: what is noted of each batch, and the verdict
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
from shmloader.loader.cached import CachedBatches
from shmloader.loader.dataloader import DataLoader
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
