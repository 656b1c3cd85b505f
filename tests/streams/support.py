"""Writes shards, and returns the records that they have."""

import copy
import gzip
import importlib
import io
import json
import sys
import tarfile
from pathlib import Path

import numpy as np
import torch.distributed

from shmloader import ShardedDataLoader


def write(path, data):
    """Write a file, compressed as its name says."""
    if path.endswith((".gz", ".tgz")):
        data = gzip.compress(data)
    elif path.endswith(".zst"):
        from shmloader.streams.files import ZSTD_MODULE

        compress = importlib.import_module(ZSTD_MODULE).compress

        # Two frames, as programs write that compress in parallel.
        half = len(data) // 2
        data = compress(data[:half]) + compress(data[half:])
    Path(path).write_bytes(data)


def tar_bytes(files, **options):
    """Return an archive of files: pairs of a name and bytes, or of a TarInfo and bytes."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", **options) as archive:
        for member, data in files:
            info = tarfile.TarInfo(member) if isinstance(member, str) else member
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def samples(count, seed=0):
    """Return records of tar shards, with files of 0 bytes to 400 kB."""
    rng = np.random.default_rng(seed)
    made = []
    for number in range(count):
        size = 0 if number == 3 else int(rng.integers(400_000 if number % 10 == 0 else 9_000))
        made.append({"__key__": f"part/{number:04}", "jpg": rng.bytes(size), "cls": b"%d" % number})
    return made


def write_tar(path, count, seed=0):
    """Write a tar shard."""
    records = samples(count, seed)
    files = [
        (f"{record['__key__']}.{name}", record[name])
        for record in records
        for name in record
        if name != "__key__"
    ]
    write(path, tar_bytes(files))
    return records


def write_table(path, count, seed=0):
    """Write a shard of Parquet in groups of 7 rows.

    Its records have no arrays, so that they can be compared.
    """
    import pyarrow as pa

    rng = np.random.default_rng(seed)
    records = [
        {"id": number, "x": float(rng.random()), "text": "é" * int(rng.integers(9)), "tags": ["a"]}
        for number in range(count)
    ]
    write_columns(path, pa.Table.from_pylist(records))
    return records


def write_columns(path, table, rows=7):
    """Write a table to a shard of Parquet."""
    from pyarrow import parquet

    parquet.write_table(table, path, row_group_size=rows)


def write_jsonl(path, count, seed=0):
    """Write a shard of JSON Lines."""
    rng = np.random.default_rng(seed)
    records = [{"id": number, "text": "é" * int(rng.integers(300))} for number in range(count)]
    write(
        path, "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records).encode()
    )
    return records


def rest_of_shard(format_, path, start=0):
    """Yield the records of a shard from a number on."""
    return format_.read(path, range(start, sys.maxsize))


def run_ranks(make_stream, world_size, num_workers, steps=None, state=None, **arguments):
    """Iterate the loaders of all ranks in step, to the end or for so many steps.

    Returns their batches, and their states after these.
    """
    store = torch.distributed.HashStore()
    loaders = [
        ShardedDataLoader(
            make_stream(store=store),
            batch_size=None,
            rank=rank,
            world_size=world_size,
            num_workers=num_workers,
            **arguments,
        )
        for rank in range(world_size)
    ]
    for loader in loaders:
        if state is not None:
            loader.load_state_dict(copy.deepcopy(state))
    iterators, batches = [iter(loader) for loader in loaders], []
    while steps is None or steps:
        step = [next(iterator, None) for iterator in iterators]
        if step[0] is None:
            assert step == [None] * world_size
            break
        batches += [batch.tolist() for batch in step]
        steps = None if steps is None else steps - 1
    states = [loader.state_dict() for loader in loaders]
    for loader in loaders:
        loader.close()
    return batches, states
