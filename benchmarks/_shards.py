"""Shards of JPEG files and of tokens, and how each loader of row O reads them.

All read the shards from end to end without shuffling, in batches of the same size, and deliver the
bytes of the files as they are. Each as its own documentation says, with workers that stay.
"""

from __future__ import annotations

import io
import sys
import tarfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

TOKENS = 1_024
BATCH = 64
_FILES = 127  # different ones

Batches = Iterator[Any]


@dataclass(frozen=True)
class Shelf:
    """What the loaders of row O read.

    Attributes:
        folder: Where the shards are.
        paths: The shards, in order.
        samples: How many samples they have.
        sample_bytes: How many bytes a sample has on average.
        workers: Number of processes.
    """

    folder: Path
    paths: Sequence[str]
    samples: int
    sample_bytes: float
    workers: int


# ---------------------------------------------------------------- writing


def _jpegs(folder: Path) -> list[bytes]:
    sys.path.append(str(Path(__file__).parents[1]))
    from examples.jpeg_folder import find_jpegs, write_samples

    folder.mkdir()
    write_samples(folder, _FILES, seed=0)
    return [path.read_bytes() for path in find_jpegs(folder)]


def write_tars(folder: Path, shards: int, per_shard: int, workers: int) -> Shelf:
    """Write tar shards of JPEG files."""
    jpegs, paths, nbytes = _jpegs(folder / "jpegs"), [], 0
    for shard in range(shards):
        path = folder / f"{shard:06}.tar"
        with tarfile.open(path, "w") as file:
            for number in range(shard * per_shard, (shard + 1) * per_shard):
                data = jpegs[number % _FILES]
                info = tarfile.TarInfo(f"{number:08}.jpg")
                info.size = len(data)
                nbytes += len(data)
                file.addfile(info, io.BytesIO(data))
        paths.append(str(path))
    count = shards * per_shard
    return Shelf(folder, paths, count, nbytes / count, workers)


def write_streaming(folder: Path, shards: int, per_shard: int, workers: int) -> Shelf:
    """Write the same samples as shards of MosaicML Streaming."""
    from _mosaic import MDSWriter

    jpegs, nbytes = _jpegs(folder / "jpegs"), 0
    out, columns = folder / "mds", {"__key__": "str", "jpg": "bytes"}
    mean = sum(map(len, jpegs)) / _FILES
    with MDSWriter(out=str(out), columns=columns, size_limit=int(mean * per_shard)) as writer:
        for number in range(shards * per_shard):
            data = jpegs[number % _FILES]
            nbytes += len(data)
            writer.write({"__key__": f"{number:08}", "jpg": data})
    count = shards * per_shard
    return Shelf(out, [str(out)], count, nbytes / count, workers)


def write_parquet(folder: Path, shards: int, per_shard: int, workers: int) -> Shelf:
    """Write Parquet shards whose rows are lists of tokens."""
    import pyarrow as pa
    import pyarrow.parquet

    rng, paths = np.random.default_rng(0), []
    for shard in range(shards):
        tokens = rng.integers(0, 50_000, (per_shard, TOKENS))
        lists = pa.FixedSizeListArray.from_arrays(pa.array(tokens.reshape(-1)), TOKENS)
        path = folder / f"{shard:06}.parquet"
        lists = lists.cast(pa.list_(pa.int64()))
        pyarrow.parquet.write_table(pa.table({"tokens": lists}), path, row_group_size=1_000)
        paths.append(str(path))
    return Shelf(folder, paths, shards * per_shard, TOKENS * 8, workers)


# ---------------------------------------------------------------- reading


def shmloader_streams(shelf: Shelf) -> Iterator[Batches]:
    """Open our loader over a stream of the shards."""
    import shmloader
    from shmloader.streams import Shards, open_parquet, open_tar

    form: Any = open_parquet if shelf.paths[0].endswith(".parquet") else open_tar
    readers = min(64, len(shelf.paths))
    stream = Shards(shelf.paths, form, seed=0, shuffle_shards=False, readers=readers).batch(BATCH)
    loader = shmloader.DataLoader(
        stream, batch_size=None, num_workers=shelf.workers, persistent_workers=True
    )
    return _repeat(loader)


def web_loader(shelf: Shelf) -> Iterator[Batches]:
    """Open webdataset's loader, whose workers make the batches."""
    import webdataset

    dataset = webdataset.WebDataset(shelf.paths, shardshuffle=False).map(_without_url)
    loader = webdataset.WebLoader(
        dataset.batched(BATCH), batch_size=None, num_workers=shelf.workers, persistent_workers=True
    )
    return _repeat(loader)


def torch_over_webdataset(shelf: Shelf) -> Iterator[Batches]:
    """Open torch's loader over webdataset's samples, which it batches."""
    import webdataset

    dataset = webdataset.WebDataset(shelf.paths, shardshuffle=False).map(_without_url)
    return _repeat(_torch(dataset, shelf))


def _without_url(sample: dict[str, Any]) -> dict[str, Any]:
    return {"__key__": sample["__key__"], "jpg": sample["jpg"]}


def streaming(shelf: Shelf) -> Iterator[Batches]:
    """Open MosaicML's loader over its own shards, which lie on this machine."""
    from _mosaic import StreamingDataLoader, StreamingDataset

    dataset = StreamingDataset(local=str(shelf.folder), batch_size=BATCH, shuffle=False)
    return _repeat(
        StreamingDataLoader(
            dataset, batch_size=BATCH, num_workers=shelf.workers, persistent_workers=True
        )
    )


def torch_over_hugging_face(shelf: Shelf) -> Iterator[Batches]:
    """Open torch's loader over a streaming ``datasets.IterableDataset``."""
    import datasets

    datasets.disable_progress_bars()
    dataset = datasets.load_dataset(
        "parquet",
        data_files=list(shelf.paths),
        split="train",
        streaming=True,
        cache_dir=str(shelf.folder / "cache"),
    )
    return _repeat(_torch(dataset.with_format("torch"), shelf))


def _torch(dataset: Any, shelf: Shelf) -> Any:
    return torch.utils.data.DataLoader(
        dataset, batch_size=BATCH, num_workers=shelf.workers, persistent_workers=True
    )


def _repeat(loader: Any) -> Iterator[Batches]:
    while True:
        yield iter(loader)


# ---------------------------------------------------------------- the consumer


def touch_records(batch: Any) -> int:
    """Read a byte of each value, and return how many samples a batch has."""
    column = next(iter(batch.values()))
    for values in batch.values():
        if isinstance(values, torch.Tensor):
            values.numpy().item(0)
        else:
            for value in values:
                value[0]
    return len(column)


def checksum_of(batch: Any) -> int:
    """Return the sum of its samples' checksums, which does not depend on their order."""
    columns = [
        list(values.numpy()) if isinstance(values, torch.Tensor) else values
        for _, values in sorted(batch.items())
    ]
    return sum(zlib.crc32(b"|".join(map(_plain, row))) for row in zip(*columns, strict=True))


def _plain(value: Any) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


#: How the samples of a case are written, by the name of the case, and for a loader that reads only
#: shards of its own by its name.
WRITERS: dict[str, Callable[[Path, int, int, int], Shelf]] = {
    "tar": write_tars,
    "parquet": write_parquet,
    "MosaicML Streaming": write_streaming,
}
