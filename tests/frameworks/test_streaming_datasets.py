"""The streaming datasets of litdata and MosaicML load and resume as the documentation says."""

from pathlib import Path
from typing import Any

import pytest
import torch

from shmloader import DataLoader

pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.timeout(180)]

LENGTH = 40
WORKERS = 2


def make_litdata(folder: Path) -> Any:
    litdata = pytest.importorskip("litdata")
    from litdata.streaming.writer import BinaryWriter

    if not (folder / "index.json").exists():
        writer = BinaryWriter(cache_dir=str(folder), chunk_size=5)
        for i in range(LENGTH):
            writer[i] = torch.tensor([i])
        writer.done()
        writer.merge()
    return litdata.StreamingDataset(str(folder), shuffle=True)


def make_streaming(folder: Path) -> Any:
    streaming = pytest.importorskip("streaming")
    from streaming.base.util import clean_stale_shared_memory

    if not (folder / "mds").exists():
        with streaming.MDSWriter(
            out=str(folder / "mds"), columns={"x": "int"}, size_limit=200
        ) as writer:
            for i in range(LENGTH):
                writer.write({"x": i})
    clean_stale_shared_memory()
    return streaming.StreamingDataset(local=str(folder / "mds"), batch_size=4, shuffle=True)


def make_loader(dataset: Any, num_workers: int = WORKERS) -> DataLoader[Any]:
    return DataLoader(dataset, batch_size=4, num_workers=num_workers, collate_fn=str)


@pytest.mark.parametrize("make", [make_litdata, make_streaming])
def test_it_resumes_exactly_on_the_same_number_of_workers(make, tmp_path):
    with make_loader(make(tmp_path)) as loader:
        expected = list(loader)
        assert len(expected) == LENGTH // 4
    with make_loader(make(tmp_path)) as loader:
        iterator = iter(loader)
        first = [next(iterator) for _ in range(3)]
        state = loader.state_dict()
        del iterator
    with make_loader(make(tmp_path)) as loader:
        loader.load_state_dict(state)
        assert [*first, *loader] == expected
    with (
        make_loader(make(tmp_path), WORKERS - 1) as loader,
        pytest.raises(ValueError, match=r"num_workers: 2 in the state, 1 in this loader"),
    ):
        loader.load_state_dict(state)
