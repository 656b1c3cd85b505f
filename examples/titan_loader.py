"""A loader for pre-training: sources mixed by tokens, documents packed, resumed on half the ranks.

`make_loader` is all that a training needs. Its `state_dict()` and `load_state_dict()` are what
`torch.distributed.checkpoint` calls. The program writes documents of two sources as Parquet, and
reads them under torchrun three times:

    whole      four ranks, all of the data
    stopped    four ranks, which save the loader's state after some steps
    resumed    TWO ranks, which continue from that state

The packs of the last two must be those of the first, in the same order.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
import torch.distributed as dist
from pyarrow import parquet

from shmloader import ShardedDataLoader
from shmloader.collate import Pack
from shmloader.streams import ParquetFormat, Shards, Stream, mix

WEIGHTS = {"web": 0.7, "code": 0.3}  # shares of the tokens
VOCABULARY = 1_000  # of each source, so that a token tells where it comes from
PACK_TOKENS = 2_048
READERS = 8  # at least as many as ranks x workers, now and later

Packs = list[tuple[int, int, int]]  # of each pack: a checksum, tokens of the web, tokens of code


def make_loader(folder: Path, num_workers: int) -> ShardedDataLoader[Any]:
    """Return the loader of this rank, whose batches are packs of whole documents.

    Rank r of n gets packs r, r + n, … of one order, which depends on the shards and the seed.
    """

    def source(name: str) -> Stream:
        files = sorted(map(str, folder.glob(f"{name}-*.parquet")))
        return Shards(files, ParquetFormat(["input_ids"]), seed=0, readers=READERS).shuffle(200)

    # Each reader ends when one source has no further document for it, so the shares hold to the
    # end. stop="all" reads the rest of the others, too; a number repeats the sources.
    weights = [(source(name), weight) for name, weight in WEIGHTS.items()]
    stream = mix(weights, by="tokens", stop="first")
    # Models that are compiled for one shape need packs of one length.
    packs = stream.pack(PACK_TOKENS, too_long="truncate", collate=Pack(fixed_tokens=PACK_TOKENS))
    # All ranks take equally many steps: in the last one, some may repeat the last pack.
    return ShardedDataLoader(packs, batch_size=None, num_workers=num_workers, last_batch="pad")


def write_documents(folder: Path) -> None:
    """Write shards of tokenised documents, whose lengths are log-normal."""
    draw = np.random.default_rng(0)
    for number, (name, shards) in enumerate({"web": 16, "code": 8}.items()):
        for shard in range(shards):
            lengths = draw.lognormal(5, 1, size=80).astype(int).clip(4, 3_000)
            first, last = VOCABULARY * number + 1, VOCABULARY * (number + 1)
            documents = [draw.integers(first, last, size=length) for length in lengths]
            table = pa.table({"input_ids": [each.astype(np.int32) for each in documents]})
            parquet.write_table(table, folder / f"{name}-{shard:02}.parquet", row_group_size=20)


def read(options: argparse.Namespace) -> None:
    """Read as one rank. Torchrun starts a process for each rank."""
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    own: Packs = []
    step = 0
    with make_loader(options.documents, num_workers=1) as loader:
        if options.state.exists():
            loader.load_state_dict(torch.load(options.state, weights_only=True))
        for step, batch in enumerate(loader, 1):
            tokens = batch["input_ids"]  # the training step: model(**batch)
            if not loader.padding:  # else this pack is another rank's as well
                web = int(((tokens > 0) & (tokens < VOCABULARY)).sum())
                code = int((tokens > VOCABULARY).sum())
                own.append((zlib.crc32(tokens.numpy().tobytes()), web, code))
            if step == options.stop_at:
                state = loader.state_dict()  # on all ranks; the same on each
                if rank == 0:
                    torch.save(state, options.state)
                break
    found: list[Any] = [None] * world_size
    dist.all_gather_object(found, (step, own))
    if rank == 0:
        steps = {step for step, _ in found}
        assert len(steps) == 1, f"ranks took different numbers of steps: {steps}"
        print(f"  {world_size} ranks, {step} steps each", flush=True)
        longest = max(len(packs) for _, packs in found)
        order = [packs[n] for n in range(longest) for _, packs in found if n < len(packs)]
        options.packs.write_text(json.dumps(order))
    dist.destroy_process_group()


def start(name: str, folder: Path, ranks: int, state: str, stop_at: int = 0) -> Packs:
    """Read under torchrun. Returns the packs of all ranks, in their order."""
    print(f"{name}:", flush=True)
    packs = folder / f"{name}.json"
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}",
        __file__, f"--documents={folder}", f"--packs={packs}", f"--state={folder / state}",
        f"--stop-at={stop_at}",
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    print(done.stdout, end="", flush=True)
    if done.returncode:
        sys.exit(done.stderr)
    return [tuple(pack) for pack in json.loads(packs.read_text())]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--documents", type=Path, help="read once, as a rank, from this folder")
    parser.add_argument("--packs", type=Path, help="with --documents: the file for what was read")
    parser.add_argument("--state", type=Path, help="with --documents: the file of the state")
    parser.add_argument("--stop-at", type=int, default=0, help="with --documents: the last step")
    options = parser.parse_args()
    if options.documents is not None:
        read(options)
        return 0
    with tempfile.TemporaryDirectory(prefix="titan-") as name:
        folder = Path(name)
        write_documents(folder)
        whole = start("whole", folder, 4, "none.pt")
        stopped = start("stopped", folder, 4, "state.pt", stop_at=len(whole) // 4 // 2)
        resumed = start("resumed", folder, 2, "state.pt")
    web, code = (sum(pack[field] for pack in whole) for field in (1, 2))
    print(f"{len(whole)} packs, {(web + code) / len(whole) / PACK_TOKENS:.1%} full")
    print(f"{web / (web + code):.1%} of the tokens are of the web, {code / (web + code):.1%} code")
    is_same = whole == stopped + resumed
    print("The packs are the same." if is_same else "The packs differ.")
    return 0 if is_same else 1


if __name__ == "__main__":
    sys.exit(main())
