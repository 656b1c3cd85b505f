"""A batch loader for PyTorch whose batches lie in shared memory.

``from shmloader import DataLoader`` is a drop-in for ``torch.utils.data.DataLoader``. The other
public names of ``torch.utils.data`` can be imported from here as well, and are torch's own objects.

The layers; imports run downward only::

    cli         the command line
    cluster     executors over Dask and Ray; integrations adapts loaders to frameworks
    installing  runs torch's own loaders on our engine
    sequence    lazy sequences, and one whose items a loader computes ahead
    pipeline    pipelines of a source, stages and a sink
    loader      the loaders, their arguments and their iterators
    device      what a thread does to a batch after the engine: pin it, or copy it to a device
    engine      an ordered, bounded, parallel map; its docstring draws the path of a batch
    pools       where batches are made: processes, threads, or the tasks of an executor
    host        what the ranks of one host share
    batch       how a batch is made
    streams     datasets in shards that are read from end to end
    arrow       datasets in Arrow tables, read from their buffers
    shared      datasets in shared memory, once for all processes
    collate     collate functions for samples of different lengths
    memory      shared-memory slots, and how batches get in and out
    sampling    orders of samples, and how they are cut for ranks
    threads     background threads, and protection against forks and Ctrl-C
    messages    the messages between processes
    insight     where the time goes: the times of each batch, statistics and the verdict
    errors      the public exceptions; process_state has all state that belongs to the process
"""

import importlib
from typing import TYPE_CHECKING, Any

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

from shmloader.errors import (
    ClosedLoaderError,
    InternalError,
    LoaderTimeoutError,
    SampleTimeoutError,
    ShardError,
    SharedMemoryError,
    ShmloaderError,
    TooManyFailures,
    WorkerDiedError,
)

if TYPE_CHECKING:
    from shmloader import arrow, collate, sampling, sequence, streams
    from shmloader.batch.sample_rng import sample_rng
    from shmloader.batch.token_blocks import TokenBlocks
    from shmloader.host import share_on_host
    from shmloader.insight.stats import LoaderStats
    from shmloader.installing import InstallReport, install, installed, uninstall
    from shmloader.loader.dataloader import DataLoader
    from shmloader.loader.sharded import ShardedDataLoader
    from shmloader.memory.writer import empty
    from shmloader.pipeline.builder import PipelineBuilder
    from shmloader.pipeline.pipeline import Pipeline
    from shmloader.pipeline.stats import PipelineStats
    from shmloader.shared.sharing import share

__version__ = "0.1.0"

__all__ = [
    "BatchSampler", "ChainDataset", "ClosedLoaderError", "ConcatDataset", "DFIterDataPipe",
    "DataChunk", "DataLoader", "Dataset", "DistributedSampler", "InstallReport",
    "InternalError", "IterDataPipe", "IterableDataset", "LoaderStats", "LoaderTimeoutError",
    "MapDataPipe", "Pipeline", "PipelineBuilder", "PipelineStats", "RandomSampler",
    "SampleTimeoutError", "Sampler", "SequentialSampler", "ShardError",
    "ShardedDataLoader", "SharedMemoryError", "ShmloaderError", "StackDataset", "Subset",
    "SubsetRandomSampler", "TensorDataset", "TokenBlocks", "TooManyFailures",
    "WeightedRandomSampler", "WorkerDiedError", "__version__", "argument_validation", "arrow",
    "collate", "default_collate", "default_convert", "empty", "functional_datapipe",
    "get_worker_info", "guaranteed_datapipes_determinism", "install", "installed",
    "non_deterministic", "random_split", "runtime_validation", "runtime_validation_disabled",
    "sample_rng", "sampling", "sequence", "share", "share_on_host", "streams",
    "uninstall",
]  # fmt: skip

# Where the names are that are imported when they are asked for, except for modules. The modules set
# __module__ of these classes to this one, so that ``repr``, ``help`` and pickles name it.
_HOMES = {
    "DataLoader": "loader.dataloader",
    "InstallReport": "installing",
    "LoaderStats": "insight.stats",
    "Pipeline": "pipeline.pipeline",
    "PipelineBuilder": "pipeline.builder",
    "PipelineStats": "pipeline.stats",
    "ShardedDataLoader": "loader.sharded",
    "TokenBlocks": "batch.token_blocks",
    "empty": "memory.writer",
    "install": "installing",
    "installed": "installing",
    "sample_rng": "batch.sample_rng",
    "share": "shared.sharing",
    "share_on_host": "host",
    "uninstall": "installing",
}

for _value in (ShmloaderError, *ShmloaderError.__subclasses__()):
    _value.__module__ = __name__
del _value


def __getattr__(name: str) -> Any:
    """Import a public name when it is asked for."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.{_HOMES.get(name, name)}")
    value = globals()[name] = getattr(module, name) if name in _HOMES else module
    return value


def __dir__() -> list[str]:
    """Return the names, whether they are imported already or not."""
    return sorted({*globals(), *__all__})
