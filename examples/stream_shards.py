"""Train on shards from a web server on two ranks, kill it, and resume it on one rank and back.

The program writes texts (JSON Lines) and images (tar), serves them, and trains a small model on
batches of both. Four trainings are started under torchrun:

    unbroken    two ranks of two workers, from beginning to end
    killed      the same, but all ranks kill themselves after a checkpoint
    alone       continues on ONE rank of three workers with the very next batch; is killed, too
    resumed     continues on two ranks of one worker

Together, the last three must read the same batches in the same order as the first, and have the
same losses.
"""

import argparse
import contextlib
import functools
import http.server
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import zlib
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from PIL import Image
from torch import Tensor, nn

from shmloader import ShardedDataLoader
from shmloader.streams import ShardCache, Shards, open_jsonl, open_tar

SHARDS = 8  # of texts, and of images
RECORDS = 60  # of a shard
LENGTH = 48  # tokens of a text that the model sees
SIDE = 12  # pixels of an image
STEP_BATCHES = 2  # batches of all ranks together in a step
STEPS = 60
CHECKPOINT_STEPS = 5
TOLERANCE = 1e-4  # of a loss: sums of floats depend on the order of the terms

Record = dict[str, Any]


# The streams ------------------------------------------------------------------------------------


def is_long(record: Record) -> bool:
    return len(record["text"]) > LENGTH


def tokenize(record: Record) -> np.ndarray:
    """Return the text's first tokens: bytes of ASCII, of shape (LENGTH + 1,)."""
    return np.frombuffer(record["text"][: LENGTH + 1].encode(), np.uint8).astype(np.int64)


def decode(record: Record) -> tuple[np.ndarray, int]:
    """Return the image as float32 of shape (SIDE, SIDE), and its class."""
    image = Image.open(io.BytesIO(record["png"]))
    return np.asarray(image, np.float32) / 255, int(record["cls"])


def make_streams(options: argparse.Namespace) -> tuple[Shards, Shards]:
    """Return endless streams of batches of texts, and of images."""
    # All processes of this machine share the folder, so each shard is downloaded once.
    cache = ShardCache(options.cache)
    make = functools.partial(Shards, seed=0, readers=SHARDS, cache=cache)
    texts = make(addresses(options.url, "jsonl"), open_jsonl)
    images = make(addresses(options.url, "tar"), open_tar)
    return (
        texts.repeat().filter(is_long).shuffle(40).map(tokenize).batch(8),
        images.repeat().shuffle(40, rolling=True).map(decode).batch(8),
    )


def addresses(url: str, kind: str) -> list[str]:
    return [f"{url}/{number:03}.{kind}" for number in range(SHARDS)]


# The training -----------------------------------------------------------------------------------


class Model(nn.Module):
    """Predicts each byte of a text from those before it, and the class of an image."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(128, 32)
        self.layers = nn.GRU(32, 64, batch_first=True)
        self.next = nn.Linear(64, 128)
        self.classes = nn.Sequential(
            nn.Flatten(), nn.Linear(SIDE * SIDE, 32), nn.ReLU(), nn.Linear(32, 2)
        )

    def forward(self, tokens: Tensor, images: Tensor, classes: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sums of the losses of the texts, and of the images."""
        hidden, _ = self.layers(self.embedding(tokens[:, :-1]))
        loss = functools.partial(nn.functional.cross_entropy, reduction="sum")
        scores = self.next(hidden).flatten(0, 1)
        return loss(scores, tokens[:, 1:].flatten()), loss(self.classes(images), classes)


def checksum(*tensors: Tensor) -> int:
    """Return a number that depends on each bit of some tensors."""
    return zlib.crc32(b"".join(tensor.numpy().tobytes() for tensor in tensors))


def train(options: argparse.Namespace) -> None:
    """Train as one rank. Torchrun starts a process for each rank."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    own_batches = STEP_BATCHES // world_size
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    # Rank r of n gets batches r, r + n, … of the one order that each stream has.
    loaders = [
        ShardedDataLoader(stream, batch_size=None, num_workers=options.num_workers)
        for stream in make_streams(options)
    ]
    losses: list[tuple[float, int]] = []  # with checksums of what was read
    if options.checkpoint.exists():
        saved = torch.load(options.checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        losses = saved["losses"]
        for loader, state in zip(loaders, saved["loaders"], strict=True):
            loader.load_state_dict(state)  # also on another number of ranks
        if rank == 0:
            ranks = "1 rank" if world_size == 1 else f"{world_size} ranks"
            print(f"  resumes on {ranks} after step {len(losses)}", flush=True)

    batches = zip(*loaders, strict=True)
    while len(losses) < STEPS:
        optimizer.zero_grad()
        sums = torch.zeros(3, dtype=torch.float64)  # exact for the whole numbers of the checksum
        for number, (tokens, (images, classes)) in enumerate(islice(batches, own_batches)):
            of_texts, of_images = model(tokens, images, classes)
            loss = of_texts / tokens[:, 1:].numel() + of_images / len(images)
            loss.backward()
            place = number * world_size + rank  # of this batch in the step
            read = checksum(tokens, images, classes)
            sums += torch.tensor([loss.item(), 1, (place + 1) * read], dtype=torch.float64)
        # The gradients are the mean over the batches of all ranks, however many ranks there are.
        dist.all_reduce(sums)
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= sums[1]
        optimizer.step()
        losses.append((float(sums[0] / sums[1]), int(sums[2])))
        if len(losses) % CHECKPOINT_STEPS == 0:
            states = [loader.state_dict() for loader in loaders]  # the same on all ranks
            if rank == 0:
                save(options.checkpoint, {
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "loaders": states,
                    "losses": losses,
                })  # fmt: skip
        if len(losses) == options.kill_at:
            if rank == 0:
                print(f"  is killed after step {len(losses)}", flush=True)
            dist.barrier()
            os.kill(os.getpid(), signal.SIGKILL)
    for loader in loaders:
        loader.close()
    if rank == 0:
        print(f"  {STEPS} steps, loss {losses[0][0]:.4f} at first, {losses[-1][0]:.4f} at last")
        torch.save(losses, options.losses)
    dist.destroy_process_group()


def save(path: Path, checkpoint: dict[str, object]) -> None:
    """Write a checkpoint. If the process is killed meanwhile, the previous one stays."""
    temporary = path.with_suffix(".new")
    torch.save(checkpoint, temporary)
    temporary.replace(path)


# The shards and their server --------------------------------------------------------------------


def write_shards(folder: Path) -> None:
    """Write texts in which the next word follows from the one before, and images of two classes."""
    draw = np.random.default_rng(0)
    words = ["shards ", "are ", "read ", "from ", "end ", "to ", "end, ", "and ", "so "]
    for number in range(SHARDS):
        lines = []
        for _ in range(RECORDS):
            first, count = draw.integers(len(words)), draw.integers(5, 24)
            text = "".join(words[(first + each) % len(words)] for each in range(count))
            lines.append(json.dumps({"text": text}) + "\n")
        (folder / f"{number:03}.jsonl").write_text("".join(lines))
        with tarfile.open(folder / f"{number:03}.tar", "w") as archive:
            for record in range(RECORDS):
                kind = int(draw.integers(2))
                pixels = draw.integers(0, 200, (SIDE, SIDE), dtype=np.uint8)
                pixels[:, kind * SIDE // 2 :][:, : SIDE // 2] += 55  # the brighter half
                buffer = io.BytesIO()
                Image.fromarray(pixels).save(buffer, "PNG")
                for ending, data in (("png", buffer.getvalue()), ("cls", b"%d" % kind)):
                    info = tarfile.TarInfo(f"{number:03}-{record:04}.{ending}")
                    info.size = len(data)
                    archive.addfile(info, io.BytesIO(data))


@contextlib.contextmanager
def serve(folder: Path) -> Iterator[tuple[str, Counter[str]]]:
    """Serve a folder in a block, which gets the address, and how often each file was sent."""
    sent = Counter[str]()

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args, directory=str(folder))

        def do_GET(self) -> None:
            sent[self.path] += 1
            super().do_GET()

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", sent
        finally:
            server.shutdown()
            thread.join()


def start(name: str, arguments: list[str], ranks: int, workers: int, kill_at: int = 0) -> None:
    """Train under torchrun, and fail if that ends in another way than it should."""
    print(f"{name}:", flush=True)
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}",
        __file__, *arguments, f"--num-workers={workers}", f"--kill-at={kill_at}",
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    print(done.stdout, end="", flush=True)
    if (done.returncode != 0) != (kill_at > 0):
        sys.exit(done.stderr)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--url", help="train once, as a rank, on the shards at this address")
    add("--cache", type=Path, help="with --url: the folder for shards on this machine")
    add("--losses", type=Path, help="with --url: the file for the losses")
    add("--checkpoint", type=Path, help="with --url: the checkpoint's file")
    add("--num-workers", type=int, default=1, help="with --url: workers of each rank and loader")
    add("--kill-at", type=int, default=0, help="with --url: the step to be killed after")
    options = parser.parse_args()
    if options.url is not None:
        train(options)
        return 0
    with tempfile.TemporaryDirectory(prefix="stream-shards-") as name:
        folder = Path(name)
        (folder / "served").mkdir()
        write_shards(folder / "served")
        with serve(folder / "served") as (url, sent):
            shared = [f"--url={url}", f"--cache={folder / 'cache'}"]
            whole = [*shared, f"--losses={folder / 'whole'}", f"--checkpoint={folder / 'whole.pt'}"]
            broken = [
                *shared, f"--losses={folder / 'broken'}", f"--checkpoint={folder / 'broken.pt'}",
            ]  # fmt: skip
            start("unbroken", whole, ranks=2, workers=2)
            start("killed", broken, ranks=2, workers=2, kill_at=22)
            start("alone", broken, ranks=1, workers=3, kill_at=41)
            start("resumed", broken, ranks=2, workers=1)
        unbroken, resumed = (
            torch.load(folder / name, weights_only=True) for name in ("whole", "broken")
        )
    print(f"{len(sent)} shards were sent, none more than {max(sent.values())} time(s).")
    difference = max(abs(a - b) for (a, _), (b, _) in zip(unbroken, resumed, strict=True))
    print(f"Losses unbroken and resumed: at most {difference:.1e} apart.")
    is_same = difference <= TOLERANCE
    is_same &= [read for _, read in unbroken] == [read for _, read in resumed]
    print("The trainings are equal." if is_same else "The trainings differ.")
    return 0 if is_same else 1


if __name__ == "__main__":
    sys.exit(main())
