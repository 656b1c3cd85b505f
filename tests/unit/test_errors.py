"""The tree of exceptions, and the package's public names and how they are imported."""

import gc
import pickle

import pytest
import torch.utils.data

import shmloader
from shmloader import errors
from tests.process.support import run_program

TREE = {
    "ShmloaderError": (Exception,),
    "WorkerDiedError": (errors.ShmloaderError, RuntimeError),
    "LoaderTimeoutError": (errors.ShmloaderError, RuntimeError),
    "SampleTimeoutError": (errors.ShmloaderError, TimeoutError),
    "SharedMemoryError": (errors.ShmloaderError, MemoryError),
    "TooManyFailures": (errors.ShmloaderError, RuntimeError),
    "ShardError": (errors.ShmloaderError, RuntimeError),
    "ClosedLoaderError": (errors.ShmloaderError, RuntimeError),
    "InternalError": (errors.ShmloaderError, RuntimeError),
}


@pytest.mark.parametrize(("name", "bases"), TREE.items())
def test_each_error_derives_from_what_torch_raises_is_drawn_and_crosses_a_process(name, bases):
    kind = getattr(errors, name)
    assert kind.__bases__ == bases
    assert name in errors.__doc__
    error = pickle.loads(pickle.dumps(kind("text")))
    assert (type(error), str(error)) == (kind, "text")


def test_the_tree_has_no_other_errors():
    defined = {name for name, value in vars(errors).items() if isinstance(value, type)}
    assert defined == set(TREE)


OURS = {
    *("DataLoader", "ShardedDataLoader", "empty", "__version__", "sampling", "sequence", "collate"),
    *("arrow", "streams"),
    *("Pipeline", "PipelineBuilder"),
    *("sample_rng", "share", "share_on_host", "LoaderStats", "PipelineStats"),
    *("install", "installed", "uninstall", "InstallReport"),
    *("ShmloaderError", "WorkerDiedError", "LoaderTimeoutError", "SharedMemoryError"),
    *("SampleTimeoutError", "ShardError", "TokenBlocks"),
    *("ClosedLoaderError", "InternalError", "TooManyFailures"),
}
# The loader is ours, and an underscore is not public.
TORCHS = set(torch.utils.data.__all__) - {"DataLoader", "_DatasetKind"}


def test_the_public_names_are_these():
    assert set(shmloader.__all__) == OURS | TORCHS
    assert shmloader.__all__ == sorted(shmloader.__all__)
    assert all(hasattr(shmloader, name) for name in shmloader.__all__)


@pytest.mark.parametrize("name", sorted(TORCHS))
def test_what_users_import_from_torch_is_torchs_own_object(name):
    assert getattr(shmloader, name) is getattr(torch.utils.data, name)


def test_our_public_classes_say_where_users_import_them_from():
    classes = {name: getattr(shmloader, name) for name in OURS}
    classes = {name: kind for name, kind in classes.items() if isinstance(kind, type)}
    assert len(classes) == 17
    for name, kind in classes.items():
        assert (kind.__module__, kind.__qualname__) == ("shmloader", name)
        assert pickle.loads(pickle.dumps(kind)) is kind


def test_a_loader_can_be_pickled_by_the_name_that_users_import():
    loader = shmloader.DataLoader(range(4), batch_size=2)
    pickled = pickle.dumps(loader)
    assert b"shmloader.loader.dataloader" not in pickled
    assert [batch.tolist() for batch in pickle.loads(pickled)] == [[0, 1], [2, 3]]


def test_parts_are_imported_when_somebody_asks_for_them_and_need_no_import_of_their_own():
    program = """
import sys, warnings
import torch.utils.data
assert "shmloader" not in sys.modules
warnings.simplefilter("error")
import shmloader
print([name for name in sys.modules if name.startswith("shmloader.")])
assert "Pipeline" in dir(shmloader)
assert len(list(shmloader.DataLoader(torch.arange(8), 4))) == 2
elsewhere = {"loader.sharded", "pipeline", "pools.host_pool"}
print([name for name in elsewhere if f"shmloader.{name}" in sys.modules])
print(shmloader.sampling.TokenBatches.__name__, shmloader.sequence.smap.__name__)
"""
    done = run_program(program)
    assert done.out == "['shmloader.errors']\n[]\nTokenBatches smap\n", done.err
    done.assert_quiet()


def test_what_only_some_users_need_is_not_imported():
    program = """
import sys
import torch.utils.data
imported = set(sys.modules)
import shmloader
numbers = torch.arange(8)
for options in ({}, {"num_workers": 1}, {"num_workers": 1, "thread_pool": True, "seed": 0}):
    assert len(list(shmloader.DataLoader(numbers, 4, **options))) == 2
pipeline = shmloader.PipelineBuilder().add_source(range(8)).aggregate(4).add_sink(2).build()
with pipeline.auto_stop():
    assert len(list(pipeline)) == 2
packages = {name.partition(".")[0] for name in set(sys.modules) - imported}
print(sorted(packages & {
    "IPython", "accelerate", "dask", "datasets", "distributed", "fsspec", "grain", "lightning",
    "matplotlib", "mpi4py", "pandas", "pyarrow", "pytorch_lightning", "ray", "rich", "torchdata",
    "tqdm", "transformers",
}))
ours = ("shmloader.cli", "shmloader.cluster", "shmloader.integrations")
print(sorted(name for name in sys.modules if name.startswith(ours)))
"""
    done = run_program(program)
    assert done.out == "[]\n[]\n", done.err
    done.assert_quiet()


@pytest.mark.parametrize("is_collecting", [True, False])
def test_asking_for_a_name_leaves_the_garbage_collector_as_it_was(is_collecting) -> None:
    if not is_collecting:
        gc.disable()
    try:
        assert shmloader.__getattr__("DataLoader") is shmloader.DataLoader
        assert gc.isenabled() == is_collecting
        with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
            shmloader.__getattr__("Nothing")
        assert gc.isenabled() == is_collecting
    finally:
        gc.enable()
