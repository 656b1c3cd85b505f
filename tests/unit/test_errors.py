"""The tree of exceptions, and the package's public names."""

import pickle

import pytest

import shmloader
from shmloader import errors

TREE = {
    "ShmloaderError": (Exception,),
    "WorkerDiedError": (errors.ShmloaderError, RuntimeError),
    "LoaderTimeoutError": (errors.ShmloaderError, RuntimeError),
    "SharedMemoryError": (errors.ShmloaderError, MemoryError),
    "TooManyFailures": (errors.ShmloaderError, RuntimeError),
    "ClosedLoaderError": (errors.ShmloaderError, RuntimeError),
    "InternalError": (errors.ShmloaderError, RuntimeError),
}


@pytest.mark.parametrize(("name", "bases"), TREE.items())
def test_each_error_derives_from_ours_and_from_what_torch_raises(name, bases):
    assert getattr(errors, name).__bases__ == bases


def test_the_tree_has_no_other_errors():
    defined = {name for name, value in vars(errors).items() if isinstance(value, type)}
    assert defined == set(TREE)


@pytest.mark.parametrize("name", TREE)
def test_each_error_is_drawn_in_the_module_and_crosses_a_process(name):
    assert name in errors.__doc__
    error = pickle.loads(pickle.dumps(getattr(errors, name)("text")))
    assert (type(error), str(error)) == (getattr(errors, name), "text")


def test_the_public_names_are_these():
    assert set(shmloader.__all__) == {
        *("DataLoader", "ShardedDataLoader", "empty", "get_worker_info", "__version__"),
        *("Pipeline", "PipelineBuilder", "PipelineDataLoader"),
        *("sample_rng", "share", "CachedBatches", "LoaderStats"),
        *("ShmloaderError", "WorkerDiedError", "LoaderTimeoutError", "SharedMemoryError"),
        *("ClosedLoaderError", "InternalError", "TooManyFailures"),
    }
    assert shmloader.__all__ == sorted(shmloader.__all__)
    assert all(hasattr(shmloader, name) for name in shmloader.__all__)
