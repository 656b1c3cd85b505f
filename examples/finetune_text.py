"""Fine-tune a small language model on texts of any length: padded, packed, killed and resumed.

The texts are functions of Python's standard library: a prompt (the signature), and what the model
learns to write (the documentation). Batches are planned by tokens, and balanced over the ranks.
Four trainings are started under torchrun:

    packed      two ranks; a batch is one long row of texts
    padded      two ranks; the same texts in each batch, as a matrix with padding
    killed      as packed, but all ranks kill themselves after a checkpoint in the second epoch
    resumed     continues from that checkpoint on ONE rank, with the very next batch

All of them must have the same losses.
"""

import argparse
import importlib
import inspect
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset

from shmloader import ShardedDataLoader
from shmloader.collate import Fields, Pack, Pad
from shmloader.sampling import TokenBatches

MODULES = (
    "argparse", "ast", "collections", "difflib", "email.message", "fractions", "logging", "random",
    "string", "textwrap", "threading",
)  # fmt: skip
MAX_TOKENS = 1_024  # of a batch
LONGEST = 512  # tokens of a text
STEP_BATCHES = 2  # batches of all ranks together in a step
VOCABULARY = 128  # a token is a byte of ASCII; 0 is padding
IGNORED = -100  # a label without a loss
EPOCHS = 2
CHECKPOINT_STEPS = 5
TOLERANCE = 2e-3  # of a loss: sums of floats depend on the order of the terms


class Functions(Dataset[dict[str, np.ndarray]]):
    """Sample i is a function: its signature is the prompt, its documentation the answer."""

    def __init__(self) -> None:
        self.texts = sorted(set(_functions()))
        self.lengths = np.array([len(prompt) + len(answer) for prompt, answer in self.texts])

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        prompt, answer = self.texts[index]
        tokens = np.frombuffer(prompt + answer, dtype=np.uint8).astype(np.int64)
        labels = tokens.copy()
        labels[: len(prompt)] = IGNORED
        return {"input_ids": tokens, "labels": labels}


def _functions() -> Iterator[tuple[bytes, bytes]]:
    """Yield the prompt and the answer of each function and method that has documentation."""
    for name in MODULES:
        members = vars(importlib.import_module(name))
        classes = [member for member in members.values() if inspect.isclass(member)]
        for scope in (members, *map(vars, classes)):
            for key, member in scope.items():
                if inspect.isfunction(member) and member.__doc__:
                    document = inspect.cleandoc(member.__doc__)
                    prompt = f"{key}({', '.join(inspect.signature(member).parameters)}):\n"
                    text = prompt[:100], document[: LONGEST - len(prompt[:100])]
                    yield tuple(part.encode("ascii", "replace") for part in text)


class Model(nn.Module):
    """One layer of attention within each text, and one of a perceptron.

    It takes a batch of either layout: `mask[…, i, j]` says whether token i sees token j.
    """

    def __init__(self, width: int = 48, heads: int = 3) -> None:
        super().__init__()
        self.heads = heads
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(LONGEST, width)
        self.mix = nn.Linear(width, 3 * width)
        self.think = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        hidden = self.tokens(tokens) + self.positions(positions)
        parts = self.mix(hidden).unflatten(-1, (3, self.heads, -1)).transpose(1, 3)
        query, key, value = parts.unbind(2)
        seen = nn.functional.scaled_dot_product_attention(query, key, value, mask.unsqueeze(1))
        hidden = hidden + seen.transpose(1, 2).flatten(2)
        scores: Tensor = self.head(hidden + self.think(hidden))
        return scores


def run_model(model: Model, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Return the sum of the losses of a batch, in either layout, and how many they are."""
    tokens, labels = batch["input_ids"], batch["labels"]
    count = tokens.shape[1]
    mask = torch.ones(count, count, dtype=torch.bool).tril()
    if "cu_seq_lens_q" in batch:
        # A kernel for texts of different lengths, such as FlashAttention's, takes cu_seq_lens.
        texts = batch["seq_idx"]
        mask = mask & (texts.unsqueeze(2) == texts.unsqueeze(1))
        positions = batch["position_ids"]
    else:
        mask = mask & batch["attention_mask"].bool().unsqueeze(1)
        positions = torch.arange(count).expand_as(tokens)
    scores = model(tokens, positions, mask)[:, :-1].flatten(0, 1)
    # A text's first label is ignored, so no text has to predict the next one's beginning.
    wanted = labels[:, 1:].flatten()
    loss = nn.functional.cross_entropy(scores, wanted, ignore_index=IGNORED, reduction="sum")
    return loss, (wanted != IGNORED).sum()


def train(options: argparse.Namespace) -> None:
    """Train as one rank. Torchrun starts a process for each rank."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    dataset = Functions()
    plan = TokenBatches(dataset.lengths, MAX_TOKENS, balance="attention")
    pad = Fields(input_ids=Pad(0, with_mask=True), labels=Pad(IGNORED))
    loader = ShardedDataLoader(
        dataset,
        batch_sampler=plan,  # rank r of n gets its batches r, r + n, …
        collate_fn=pad if options.layout == "padded" else Pack(),
        seed=0,
        num_workers=1,
    )
    losses: list[float] = []
    if options.checkpoint.exists():
        saved = torch.load(options.checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        loader.load_state_dict(saved["loader"])  # also on another number of ranks
        losses = saved["losses"]
        if rank == 0:
            print(f"  resumes on {world_size} rank after step {len(losses)}", flush=True)

    with loader:
        while loader.epoch < EPOCHS:
            batches = iter(loader)
            while own := list(islice(batches, STEP_BATCHES // world_size)):
                optimizer.zero_grad()
                sums = torch.zeros(2)
                for batch in own:
                    loss, count = run_model(model, batch)
                    loss.backward()
                    sums += torch.stack([loss.detach(), count])
                # The mean is over all tokens of the step, however they are divided into batches.
                dist.all_reduce(sums)
                for parameter in model.parameters():
                    dist.all_reduce(parameter.grad)
                    parameter.grad /= sums[1]
                optimizer.step()
                losses.append(float(sums[0] / sums[1]))
                if len(losses) % CHECKPOINT_STEPS == 0 and rank == 0:
                    save(options.checkpoint, {
                        "model": model.state_dict(),
                        "optimizer": optimizer.state_dict(),
                        "loader": loader.state_dict(),  # the same on all ranks
                        "losses": losses,
                    })  # fmt: skip
                if len(losses) == options.kill_at:
                    if rank == 0:
                        print(f"  is killed after step {len(losses)}", flush=True)
                    dist.barrier()
                    os.kill(os.getpid(), signal.SIGKILL)
    if rank == 0:
        print(f"  {len(losses)} steps, loss {losses[0]:.4f} at first, {losses[-1]:.4f} at last")
        torch.save(losses, options.losses)
    dist.destroy_process_group()


def save(path: Path, checkpoint: dict[str, object]) -> None:
    """Write a checkpoint. If the process is killed meanwhile, the previous one stays."""
    temporary = path.with_suffix(".new")
    torch.save(checkpoint, temporary)
    temporary.replace(path)


def start(name: str, folder: Path, ranks: int, layout: str = "packed", kill_at: int = 0) -> Any:
    """Train under torchrun. Returns the losses of all steps; None if it was killed."""
    print(f"{name}:", flush=True)
    losses = folder / f"{name}.losses"
    checkpoint = folder / ("broken.pt" if name in {"killed", "resumed"} else f"{name}.pt")
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}",
        __file__, f"--layout={layout}", f"--losses={losses}", f"--checkpoint={checkpoint}",
        f"--kill-at={kill_at}",
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    print(done.stdout, end="", flush=True)
    if (done.returncode != 0) != (kill_at > 0):
        sys.exit(done.stderr)
    return None if kill_at else torch.load(losses, weights_only=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--layout", choices=["packed", "padded"], help="train once, as a rank, in this layout")
    add("--losses", type=Path, help="with --layout: the file for the losses")
    add("--checkpoint", type=Path, help="with --layout: the checkpoint's file")
    add("--kill-at", type=int, default=0, help="with --layout: the step to be killed after")
    options = parser.parse_args()
    if options.layout is not None:
        train(options)
        return 0
    lengths = Functions().lengths
    for layout in ("packed", "padded"):
        plan = TokenBatches(lengths, MAX_TOKENS, layout=layout, balance="attention")
        print(f"A plan of {layout} batches: {plan.report(world_size=2)}")
    with tempfile.TemporaryDirectory(prefix="finetune-") as name:
        folder = Path(name)
        packed = start("packed", folder, 2)
        padded = start("padded", folder, 2, "padded")
        # In the second epoch, between two checkpoints.
        kill_at = (len(packed) // 2 // CHECKPOINT_STEPS + 1) * CHECKPOINT_STEPS + 2
        start("killed", folder, 2, kill_at=kill_at)
        resumed = start("resumed", folder, 1)
    is_same = True
    for name, losses in (("padded", padded), ("killed and resumed", resumed)):
        difference = max(abs(a - b) for a, b in zip(packed, losses, strict=True))
        is_same &= difference <= TOLERANCE
        print(f"Losses packed and {name}: at most {difference:.1e} apart.")
    print("The trainings are equal." if is_same else "The trainings differ.")
    return 0 if is_same else 1


if __name__ == "__main__":
    sys.exit(main())
