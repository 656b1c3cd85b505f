"""A batch loader for PyTorch whose batches lie in shared memory.

``from shmloader import DataLoader`` is a drop-in for ``torch.utils.data.DataLoader``. The other
public names of ``torch.utils.data`` can be imported from here as well, and are torch's own objects.

The layers; imports run downward only::

    cli         the command line
    cluster     an executor over Ray; integrations adapts loaders to frameworks
    installing  runs torch's own loaders on our engine, by stand_in; install_report lists them
    sequence    lazy sequences, and one whose items a loader computes ahead
    pipeline    pipelines of a source, stages and a sink
    loader      the loaders, their arguments and their iterators
    device      what a thread does to a batch after the engine: pin it, or copy it to a device
    engine      an ordered, bounded, parallel map; its docstring draws the path of a batch
    pools       where batches are made: processes, threads, an executor, or the calling thread
    host        what the ranks of one host share
    batch       how a batch is made
    shared      datasets in shared memory, once for all processes
    memory      shared-memory slots, and how batches get in and out
    sampling    orders of samples, and how they are cut for ranks and shards
    threads     background threads, and protection against forks and Ctrl-C
    messages    the messages between processes
    insight     where the time goes: the times of each batch, statistics and the verdict
    errors      the public exceptions; process_state has all state that belongs to the process
"""

from torch.utils.data import (
    BatchSampler,
    ChainDataset,
    ConcatDataset,
    DataChunk,
    Dataset,
    DFIterDataPipe,
    DistributedSampler,
    IterableDataset,
    IterDataPipe,
    MapDataPipe,
    RandomSampler,
    Sampler,
    SequentialSampler,
    StackDataset,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    argument_validation,
    default_collate,
    default_convert,
    functional_datapipe,
    get_worker_info,
    guaranteed_datapipes_determinism,
    non_deterministic,
    random_split,
    runtime_validation,
    runtime_validation_disabled,
)

from shmloader import sampling, sequence
from shmloader.batch.sample_rng import sample_rng
from shmloader.errors import (
    ClosedLoaderError,
    InternalError,
    LoaderTimeoutError,
    SampleTimeoutError,
    SharedMemoryError,
    ShmloaderError,
    TooManyFailures,
    WorkerDiedError,
)
from shmloader.host import share_on_host
from shmloader.insight import LoaderStats
from shmloader.install_report import InstallReport
from shmloader.installing import install, installed, uninstall
from shmloader.loader.dataloader import DataLoader
from shmloader.loader.measured import CachedBatches
from shmloader.loader.sharded import ShardedDataLoader
from shmloader.memory.collate import empty
from shmloader.pipeline.builder import PipelineBuilder
from shmloader.pipeline.loader import PipelineDataLoader
from shmloader.pipeline.pipeline import Pipeline
from shmloader.pipeline.stats import PipelineStats
from shmloader.shared import share

__version__ = "0.1.0"

__all__ = [
    "BatchSampler",
    "CachedBatches",
    "ChainDataset",
    "ClosedLoaderError",
    "ConcatDataset",
    "DFIterDataPipe",
    "DataChunk",
    "DataLoader",
    "Dataset",
    "DistributedSampler",
    "InstallReport",
    "InternalError",
    "IterDataPipe",
    "IterableDataset",
    "LoaderStats",
    "LoaderTimeoutError",
    "MapDataPipe",
    "Pipeline",
    "PipelineBuilder",
    "PipelineDataLoader",
    "PipelineStats",
    "RandomSampler",
    "SampleTimeoutError",
    "Sampler",
    "SequentialSampler",
    "ShardedDataLoader",
    "SharedMemoryError",
    "ShmloaderError",
    "StackDataset",
    "Subset",
    "SubsetRandomSampler",
    "TensorDataset",
    "TooManyFailures",
    "WeightedRandomSampler",
    "WorkerDiedError",
    "__version__",
    "argument_validation",
    "default_collate",
    "default_convert",
    "empty",
    "functional_datapipe",
    "get_worker_info",
    "guaranteed_datapipes_determinism",
    "install",
    "installed",
    "non_deterministic",
    "random_split",
    "runtime_validation",
    "runtime_validation_disabled",
    "sample_rng",
    "sampling",
    "sequence",
    "share",
    "share_on_host",
    "uninstall",
]

# Users import these classes from here, so ``repr``, ``help`` and pickles name this module.
for _value in (
    CachedBatches,
    DataLoader,
    InstallReport,
    LoaderStats,
    Pipeline,
    PipelineBuilder,
    PipelineDataLoader,
    PipelineStats,
    ShardedDataLoader,
    ShmloaderError,
    *ShmloaderError.__subclasses__(),
):
    _value.__module__ = __name__
del _value
