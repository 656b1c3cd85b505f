"""Train the network of train_digits.py on several processes or GPUs, each with its own loader.

    torchrun --nproc-per-node 2 examples/train_ddp.py

Without torchrun it is one process. Each rank loads its part of every batch with workers of its
own. A batch of all ranks together has `--batch-size` images. These are the same images for any
number of ranks, so only augmentation and dropout differ. DistributedDataParallel averages the
gradients: over NCCL if there are GPUs, one for each rank, else over gloo.
"""

import argparse
import os
import sys
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from train_digits import AugmentedDigits, WaitClock, build_network, load_data, whole_number

from shmloader import ShardedDataLoader, TensorDataset


def join_group(device: torch.device) -> None:
    """Make the process group: of all ranks that torchrun has started, or of this process alone."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    device_id = device if device.type == "cuda" else None
    if dist.is_torchelastic_launched():
        dist.init_process_group(backend, device_id=device_id)
    else:
        store = dist.HashStore()
        dist.init_process_group(backend, store=store, rank=0, world_size=1, device_id=device_id)


def sum_over_ranks(numbers: Tensor) -> list[float]:
    """Sum numbers over all ranks, in place, and return the sums as a list.

    All ranks must call this equally often. So it is called after a loop over batches, of which the
    ranks may have different numbers.
    """
    dist.all_reduce(numbers)
    return numbers.tolist()


def train(
    network: nn.Module, loader: ShardedDataLoader[list[Tensor]], epochs: int, device: torch.device
) -> WaitClock:
    """Train the network in place. Returns how long this rank's loop waited for batches."""
    optimizer = torch.optim.Adam(network.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=0.01, total_steps=epochs * len(loader)
    )
    clock = WaitClock()
    network.train()
    # Each pass over the loader is the next epoch, with an order of its own, so nothing has to be
    # set. A run that continues where another stopped calls loader.set_epoch(number) once.
    for epoch in range(1, epochs + 1):
        totals = torch.zeros(3, dtype=torch.float64, device=device)
        for images, labels in clock.watch(loader):
            scores = network(images)
            losses = nn.functional.cross_entropy(scores, labels, reduction="none")
            optimizer.zero_grad()
            losses.mean().backward()
            optimizer.step()
            schedule.step()
            # Images that only fill up the last batch were counted before. They come last in it.
            own = len(labels) - loader.padding
            right = scores.argmax(1) == labels
            totals[0] += losses[:own].detach().sum()
            totals[1] += right[:own].sum()
            totals[2] += own
        loss_sum, right_sum, seen = sum_over_ranks(totals)
        if loader.rank == 0:
            print(
                f"Epoch {epoch}/{epochs}: loss {loss_sum / seen:.3f}, "
                f"accuracy {right_sum / seen:.1%} of {seen:.0f} images",
                flush=True,
            )
    return clock


@torch.no_grad()
def count_right(
    network: nn.Module, loader: ShardedDataLoader[list[Tensor]], device: torch.device
) -> tuple[int, int]:
    """Return how many images of all ranks are classified correctly, and the number of images.

    Ranks may have different numbers of batches, so nothing in the loop may wait for another rank.
    So `network` is not wrapped in DistributedDataParallel.
    """
    network.eval()
    totals = torch.zeros(2, dtype=torch.int64, device=device)
    for images, labels in loader:
        totals[0] += (network(images).argmax(1) == labels).sum()
        totals[1] += len(labels)
    right, seen = sum_over_ranks(totals)
    return int(right), int(seen)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a small network on handwritten digits; torchrun starts several ranks.",
    )
    add = parser.add_argument
    whole, positive = whole_number(0), whole_number(1)
    add("--epochs", type=positive, default=20, help="passes over the data (%(default)s)")
    batch_help = "images a batch, of all ranks together (%(default)s)"
    add("--batch-size", type=positive, default=64, help=batch_help)
    workers_help = "worker processes of each rank, or 0 to load in the rank (%(default)s)"
    add("--num-workers", type=whole, default=1, help=workers_help)
    add("--seed", type=whole, default=0, help="seed of all random numbers (%(default)s)")
    required_help = "exit with status 1 if the test accuracy is lower"
    add("--require-accuracy", type=float, default=0.0, metavar="PERCENT", help=required_help)
    args = parser.parse_args()
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if args.batch_size % world_size:
        parser.error(
            f"argument --batch-size: {args.batch_size} images can not be divided equally "
            f"among {world_size} ranks"
        )
    gpu_count, local_rank = torch.cuda.device_count(), int(os.environ.get("LOCAL_RANK", "0"))
    if 0 < gpu_count <= local_rank:
        parser.error(
            f"rank {local_rank} of this machine has no GPU of its own: there are {gpu_count}; "
            "CUDA_VISIBLE_DEVICES= trains on the CPU"
        )
    args.device = torch.device("cuda", local_rank) if gpu_count else torch.device("cpu")
    return args


def main() -> int:
    args = parse_arguments()
    device: torch.device = args.device
    # So small a network gains nothing from more threads, and the workers need the cores.
    torch.set_num_threads(1)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    join_group(device)
    rank, world_size = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(args.seed)
    train_images, test_images, train_labels, test_labels = load_data(args.seed)
    network = build_network().to(device)
    parallel = DistributedDataParallel(
        network, device_ids=[device] if device.type == "cuda" else None
    )
    # From here on, each rank draws its own dropout and augmentation. The order of the images does
    # not depend on this seed.
    torch.manual_seed(args.seed * world_size + rank)
    # All ranks get full batches, by repeating a few images. So the average over ranks is correct.
    loader = ShardedDataLoader(
        AugmentedDigits(train_images, train_labels),
        args.batch_size // world_size,
        shuffle=True,
        seed=args.seed,
        num_workers=args.num_workers,
        persistent_workers=args.num_workers > 0,
        device=device,
    )
    # For the test, each image comes once.
    test_loader = ShardedDataLoader(
        TensorDataset(test_images, test_labels),
        args.batch_size // world_size,
        last_batch="keep",
        device=device,
    )

    started = time.perf_counter()
    clock = train(parallel, loader, args.epochs, device)
    elapsed_s = time.perf_counter() - started
    loader.close()
    right, seen = count_right(network, test_loader, device)
    waited_s = torch.tensor(clock.waited_s, dtype=torch.float64, device=device)
    dist.all_reduce(waited_s, dist.ReduceOp.MAX)
    # Not after an error: torchrun then ends the other ranks, which may be waiting for this one.
    dist.destroy_process_group()
    if rank != 0:
        return 0

    percent = 100 * right / seen
    print(f"Test accuracy: {percent:.1f} % of {seen} images")
    print(
        f"Waited for data: {waited_s:.2f} s of {elapsed_s:.2f} s of training "
        f"({waited_s / elapsed_s:.0%}) on the rank that waited longest; "
        f"ranks: {world_size}, workers of each: {args.num_workers}"
    )
    return 1 if percent < args.require_accuracy else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
