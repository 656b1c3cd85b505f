"""Kill a run in mid-epoch, and resume it with another number of workers and identical batches.

A run here has two epochs of shuffled images with random augmentation. After every step it folds the
batch into one hash, and every few steps it writes a checkpoint: the loader's `state_dict()` and the
hash so far. The program starts three such runs, each in a process of its own:

    unbroken    from beginning to end
    killed      kills itself with SIGKILL in the second epoch, between two checkpoints
    resumed     continues from the last checkpoint, with another number of workers

The augmentation draws from `random`, `numpy.random` and torch. With `seed=` the loader seeds these
before each sample, so neither the number of workers nor resuming changes the numbers drawn. The
hashes of the unbroken and the resumed run are equal.
"""

import argparse
import hashlib
import os
import random
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

import shmloader

EPOCHS = 2
SIDE = 32  # pixels
CHECKPOINT_STEPS = 5


class AugmentedImages(Dataset[tuple[Tensor, int]]):
    """Images computed from their index, each turned, mirrored and made noisy at random."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        rows = torch.arange(SIDE).unsqueeze(1)
        image = ((rows * (index % 7 + 1) + torch.arange(SIDE)) % SIDE).float() / SIDE
        image = torch.rot90(image, random.randrange(4))
        if np.random.randint(2):
            image = image.flip(1)
        return image + 0.05 * torch.randn(SIDE, SIDE), index


def run(options: argparse.Namespace) -> None:
    """Do one run. The program starts a process for each run."""
    loader = shmloader.DataLoader(
        AugmentedImages(options.samples),
        batch_size=32,
        shuffle=True,
        num_workers=options.workers,
        seed=0,
    )
    digest = b""
    step = 0
    if options.checkpoint.exists():
        checkpoint = torch.load(options.checkpoint, weights_only=True)
        loader.load_state_dict(checkpoint["loader"])
        digest, step = bytes.fromhex(checkpoint["digest"]), checkpoint["step"]
        place = checkpoint["loader"]
        print(f"  goes on in epoch {place['epoch']} at batch {place['position']}, step {step}")
    with loader:
        while loader.epoch < EPOCHS:
            for images, labels in loader:
                digest = hashlib.sha256(
                    digest + images.numpy().tobytes() + labels.numpy().tobytes()
                ).digest()
                step += 1
                if step % CHECKPOINT_STEPS == 0:
                    save(options.checkpoint, loader.state_dict(), digest, step)
                if step == options.kill_at:
                    print(f"  kills itself after step {step}", flush=True)
                    os.kill(os.getpid(), signal.SIGKILL)
    print(f"  {step} steps, hash over all batches: {digest.hex()}")


def save(path: Path, state: dict[str, Any], digest: bytes, step: int) -> None:
    """Write a checkpoint. If the process is killed meanwhile, the previous one stays."""
    part = path.with_suffix(".part")
    torch.save({"loader": state, "digest": digest.hex(), "step": step}, part)
    part.replace(path)


def start(name: str, folder: Path, checkpoint: str, arguments: list[str]) -> tuple[int, str]:
    """Start a run. Returns its exit status and the last line that it printed."""
    print(f"{name}: {' '.join(arguments)}", flush=True)
    command = [sys.executable, __file__, f"--checkpoint={folder / checkpoint}", *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    print(done.stdout, end="", flush=True)
    return done.returncode, done.stdout.rstrip().rpartition("\n")[2]


def compare(options: argparse.Namespace) -> int:
    """Start all three runs, and compare their hashes. Returns the exit status."""
    steps_an_epoch = -(-options.samples // 32)
    kill_at = steps_an_epoch + steps_an_epoch // 2
    kill_at += kill_at % CHECKPOINT_STEPS == 0  # between two checkpoints
    size = f"--samples={options.samples}"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        status, unbroken = start("unbroken", folder, "whole", [size, "--workers=0"])
        if status != 0:
            return status
        killed = [size, "--workers=2", f"--kill-at={kill_at}"]
        status, _ = start("killed", folder, "broken", killed)
        if status != -signal.SIGKILL:
            return status or 1
        status, resumed = start("resumed", folder, "broken", [size, "--workers=1"])
        if status != 0:
            return status
    is_same = unbroken == resumed
    print("The hashes are equal." if is_same else "The hashes differ.")
    return 0 if is_same else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--samples", type=int, default=1500, help="samples in an epoch")
    parser.add_argument("--checkpoint", type=Path, help="do one run, with this checkpoint")
    parser.add_argument("--workers", type=int, default=2, help="with --checkpoint: workers")
    parser.add_argument("--kill-at", type=int, help="with --checkpoint: step to be killed after")
    options = parser.parse_args()
    if options.samples < 1:
        parser.error(f"argument --samples: should be 1 or more, but got {options.samples}")
    if options.workers < 0:
        parser.error(f"argument --workers: should not be negative, but got {options.workers}")
    if options.checkpoint is None:
        return compare(options)
    run(options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
