"""A batch loader for PyTorch whose batches never leave shared memory.

``from shmloader import DataLoader`` is a drop-in for ``torch.utils.data.DataLoader``.

The layers; imports run downward only::

    commands    the command line
    sequence    lazy sequences, and one that is computed ahead by a loader
    fronts      what users see: loaders and their iterators, and pipelines
    stages      what happens to a batch after the engine, on a thread: pinning, copying to a device
    engine      an ordered, bounded, parallel map; the way of one batch is drawn there
    pools       who makes the batches: processes, whose batches come in slots, or threads
    workers     what a worker does; how processes start and end; who stands still meanwhile
    shared      datasets in shared memory, once for all processes
    memory      shared-memory slots, and how batches get in and out
    sampling    orders of samples, and how they are cut for ranks and shards
    messages    what crosses between processes
    options     the checks of arguments
    errors, and process_state: all state that belongs to the process
    stats       where the time goes: what is noted of each batch, and the verdict
"""

from torch.utils.data import get_worker_info

from shmloader.errors import (
    ClosedLoaderError,
    InternalError,
    LoaderTimeoutError,
    SharedMemoryError,
    ShmloaderError,
    TooManyFailures,
    WorkerDiedError,
)
from shmloader.fronts.cached import CachedBatches
from shmloader.fronts.dataloader import DataLoader
from shmloader.fronts.pipeline.builder import PipelineBuilder
from shmloader.fronts.pipeline.loader import PipelineDataLoader
from shmloader.fronts.pipeline.pipeline import Pipeline
from shmloader.fronts.sharded import ShardedDataLoader
from shmloader.memory.collate import empty
from shmloader.shared import share
from shmloader.stats import LoaderStats
from shmloader.workers.sample_rng import sample_rng

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
