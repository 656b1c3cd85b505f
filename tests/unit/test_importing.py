"""Public names are imported when they are asked for."""

import gc

import pytest

import shmloader


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


def test_all_public_names_are_there() -> None:
    for name in shmloader.__all__:
        assert name in dir(shmloader)
        assert getattr(shmloader, name) is not None
