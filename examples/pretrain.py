"""Pre-train a small language model from a token file on two ranks, kill it, and resume it.

The program writes a file of tokens, as a tokenizer would, and starts three trainings of two ranks
each under torchrun:

    unbroken    from beginning to end
    killed      all ranks kill themselves in the second epoch, after a checkpoint
    resumed     continues from that checkpoint with the very next batch

The resumed training must read the same tokens as the unbroken one, and end with the same loss.
"""

import argparse
import hashlib
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from shmloader import ShardedDataLoader, TokenBlocks

RANKS = 2
VOCABULARY = 64
LENGTH = 32  # tokens of a sequence
GLOBAL_BATCH = 32  # sequences of all ranks together
EPOCHS = 2
CHECKPOINT_STEPS = 5


class Model(nn.Module):
    """Predicts each token from the ones before it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 32)
        self.layers = nn.GRU(32, 64, batch_first=True)
        self.head = nn.Linear(64, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden, _ = self.layers(self.embedding(tokens))
        scores: Tensor = self.head(hidden)
        return scores


def write_tokens(path: Path, count: int) -> None:
    """Write a random text in which each token mostly follows from the one before."""
    draw = np.random.default_rng(0)
    tokens = np.cumsum(draw.choice([1, 1, 1, 7], size=count)) % VOCABULARY
    tokens.astype(np.uint16).tofile(path)


def train(options: argparse.Namespace) -> None:
    """Train as one rank. Torchrun starts a process for each rank."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(Model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = ShardedDataLoader(
        # All processes map the same pages. The last token of a sample is only predicted.
        TokenBlocks(options.tokens, LENGTH, dtype=np.uint16, next_token=True),
        GLOBAL_BATCH // world_size,
        shuffle=True,
        seed=0,
        last_batch="discard",
        num_workers=1,
    )
    step, digest, mean = 0, "", 0.0
    if options.checkpoint.exists():
        saved = torch.load(options.checkpoint, weights_only=True)
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        loader.load_state_dict(saved["loader"])  # all ranks load the same state
        step, digest = saved["step"], saved["digests"][rank]
        if rank == 0:
            print(f"  resumes after step {step}, in epoch {loader.epoch}", flush=True)

    with loader:
        while loader.epoch < EPOCHS:
            for tokens in loader:
                scores = model(tokens[:, :-1])
                loss = nn.functional.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten())
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                step += 1
                digest = hashlib.sha256(digest.encode() + tokens.numpy().tobytes()).hexdigest()
                total = loss.detach().clone()
                dist.all_reduce(total)
                mean = total.item() / world_size
                if step % CHECKPOINT_STEPS == 0:
                    digests = [""] * world_size
                    dist.all_gather_object(digests, digest)
                    if rank == 0:
                        save(options.checkpoint, {
                            "model": model.module.state_dict(),
                            "optimizer": optimizer.state_dict(),
                            "loader": loader.state_dict(),
                            "step": step,
                            "digests": digests,
                        })  # fmt: skip
                    dist.barrier()
                if step == options.kill_at:
                    if rank == 0:
                        print(f"  is killed after step {step}", flush=True)
                    dist.barrier()
                    os.kill(os.getpid(), signal.SIGKILL)
    digests = [""] * world_size
    dist.all_gather_object(digests, digest)
    if rank == 0:
        read = hashlib.sha256("".join(digests).encode()).hexdigest()
        print(f"  {step} steps, loss {mean:.4f}, hash over all tokens {read[:16]}", flush=True)
    dist.destroy_process_group()


def save(path: Path, checkpoint: dict[str, object]) -> None:
    """Write a checkpoint. If the process is killed meanwhile, the previous one stays."""
    temporary = path.with_suffix(".new")
    torch.save(checkpoint, temporary)
    temporary.replace(path)


def start(name: str, *arguments: str) -> str:
    """Start a training under torchrun. Returns what rank 0 printed."""
    print(f"{name}:", flush=True)
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone",
        f"--nproc-per-node={RANKS}", __file__, *arguments,
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    print(done.stdout, end="", flush=True)
    was_killed = any(argument.startswith("--kill-at") for argument in arguments)
    if (done.returncode != 0) != was_killed:
        sys.exit(done.stderr)
    return done.stdout


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=20_000, help="tokens to write (%(default)s)")
    parser.add_argument("--tokens", type=Path, help="train once, as a rank, with this file")
    parser.add_argument("--checkpoint", type=Path, help="with --tokens: the checkpoint's file")
    parser.add_argument("--kill-at", type=int, help="with --tokens: the step to be killed after")
    options = parser.parse_args()
    if options.tokens is not None:
        train(options)
        return 0
    steps = (options.count - 1) // LENGTH // GLOBAL_BATCH
    if steps <= CHECKPOINT_STEPS:
        parser.error(f"argument --count: {options.count} tokens are too few for a checkpoint")
    kill_at = steps + CHECKPOINT_STEPS + 2  # in the second epoch, between two checkpoints
    with tempfile.TemporaryDirectory(prefix="pretrain-") as name:
        folder = Path(name)
        tokens = folder / "tokens.bin"
        write_tokens(tokens, options.count)
        print(f"{options.count:,} tokens, {tokens.stat().st_size:,} bytes")
        whole = f"--checkpoint={folder / 'whole.pt'}"
        broken = f"--checkpoint={folder / 'broken.pt'}"
        unbroken = start("unbroken", f"--tokens={tokens}", whole)
        start("killed", f"--tokens={tokens}", broken, f"--kill-at={kill_at}")
        resumed = start("resumed", f"--tokens={tokens}", broken)
    is_same = unbroken.splitlines()[-1] == resumed.splitlines()[-1]
    print("The trainings are equal." if is_same else "The trainings differ.")
    return 0 if is_same else 1


if __name__ == "__main__":
    sys.exit(main())
