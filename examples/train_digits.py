"""Train a small network on handwritten digits, with augmentation in the loader's workers.

The data are scikit-learn's 1,797 scanned digits of 8×8 pixels. The workers shift, turn and add
noise to each training image, anew in every epoch, while the main process trains. The last line
says how long the training loop waited for data, what limits the loader, and what to change.
`--loader torch` runs the same program, with the same batches, on torch's own loader, which cannot
say what limits it.
"""

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import shmloader

try:
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split
    from tqdm import tqdm
except ImportError as error:
    sys.exit(f"{error}. This example needs: pip install scikit-learn tqdm")

LOADERS = {"shmloader": shmloader.DataLoader, "torch": torch.utils.data.DataLoader}

SIDE = 8  # pixels
MAX_SHIFT = 1.0  # pixels
MAX_TURN = math.radians(12)
NOISE = 0.05  # standard deviation; pixels are between 0 and 1

T = TypeVar("T")


class AugmentedDigits(Dataset[tuple[Tensor, Tensor]]):
    """Images, each shifted, turned and made noisy at random whenever it is loaded.

    The random numbers are torch's global ones, which the loader seeds in each worker.
    """

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images = images
        self.labels = labels

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        turn, right, down = (torch.rand(3) * 2 - 1).tolist()
        cos, sin = math.cos(turn * MAX_TURN), math.sin(turn * MAX_TURN)
        pixel = 2 / SIDE  # the grid's coordinates go from -1 to 1
        x, y = right * MAX_SHIFT * pixel, down * MAX_SHIFT * pixel
        grid = nn.functional.affine_grid(
            torch.tensor([[[cos, -sin, x], [sin, cos, y]]]), [1, 1, SIDE, SIDE], align_corners=False
        )
        image = nn.functional.grid_sample(self.images[index, None], grid, align_corners=False)[0]
        noise = NOISE * torch.randn(image.shape)
        return (image + noise).clamp(0, 1), self.labels[index]


class WaitClock:
    """Adds up the seconds of a loop, and those that it waits for its next item."""

    def __init__(self) -> None:
        self.waited_s = self.elapsed_s = 0.0

    def watch(self, items: Iterable[T]) -> Iterator[T]:
        """Yield the items. The start of the iterator also counts as waiting."""
        began = started = time.perf_counter()
        iterator = iter(items)
        for item in iterator:
            self.waited_s += time.perf_counter() - started
            yield item
            started = time.perf_counter()
        self.waited_s += time.perf_counter() - started
        self.elapsed_s += time.perf_counter() - began


def load_data(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return training images, test images, training labels and test labels.

    Images are float32 of shape (count, 1, 8, 8), between 0 and 1. A fifth of all is for the test.
    """
    digits = load_digits()
    parts = train_test_split(
        digits.images, digits.target, test_size=0.2, stratify=digits.target, random_state=seed
    )
    train_x, test_x, train_y, test_y = map(torch.as_tensor, parts)
    # The scans have 17 grey levels, 0 to 16, and no channel axis.
    return (train_x[:, None] / 16).float(), (test_x[:, None] / 16).float(), train_y, test_y


def build_network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.25),
        nn.Linear(64 * (SIDE // 2) ** 2, 10),
    )


def train(
    network: nn.Module, loader: Iterable[list[Tensor]], batch_count: int, epochs: int
) -> WaitClock:
    """Train in place, with a progress bar. Returns how long the loop waited for batches."""
    optimizer = torch.optim.Adam(network.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=0.01, total_steps=epochs * batch_count
    )
    clock = WaitClock()
    network.train()
    with tqdm(total=epochs * batch_count, unit="batch", mininterval=0.2) as bar:
        for epoch in range(1, epochs + 1):
            bar.set_description(f"epoch {epoch}/{epochs}")
            loss_sum = 0.0
            right = seen = 0
            for images, labels in clock.watch(loader):
                scores = network(images)
                loss = nn.functional.cross_entropy(scores, labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
                seen += len(labels)
                right += int((scores.argmax(1) == labels).sum())
                loss_sum += loss.item() * len(labels)
                bar.set_postfix(
                    loss=f"{loss_sum / seen:.3f}", acc=f"{right / seen:.1%}", refresh=False
                )
                bar.update()
    return clock


@torch.no_grad()
def accuracy(network: nn.Module, images: Tensor, labels: Tensor) -> float:
    network.eval()
    return (network(images).argmax(1) == labels).float().mean().item()


def whole_number(minimum: int) -> Callable[[str], int]:
    """Return a type for argparse: an int of at least `minimum`, with an error that says so."""

    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < minimum:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {minimum} up")
        return int(text)

    return parse


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a small network on handwritten digits, augmented in the workers.",
    )
    add = parser.add_argument
    whole, positive = whole_number(0), whole_number(1)
    loader_help = "whose DataLoader loads the data (%(default)s)"
    add("--loader", choices=LOADERS, default="shmloader", help=loader_help)
    add("--epochs", type=positive, default=20, help="passes over the data (%(default)s)")
    add("--batch-size", type=positive, default=64, help="images a batch (%(default)s)")
    workers_help = "worker processes, or 0 to load in the main process (%(default)s)"
    add("--num-workers", type=whole, default=2, help=workers_help)
    add("--seed", type=whole, default=0, help="seed of all random numbers (%(default)s)")
    required_help = "exit with status 1 if the test accuracy is lower"
    add("--require-accuracy", type=float, default=0.0, metavar="PERCENT", help=required_help)
    return parser.parse_args()


def main() -> int:
    args = parse_arguments()
    torch.manual_seed(args.seed)
    # So small a network gains nothing from more threads, and the workers need the cores.
    torch.set_num_threads(1)

    train_images, test_images, train_labels, test_labels = load_data(args.seed)
    loader = LOADERS[args.loader](
        AugmentedDigits(train_images, train_labels),
        batch_size=args.batch_size,
        shuffle=True,
        num_workers=args.num_workers,
        persistent_workers=args.num_workers > 0,
        generator=torch.Generator().manual_seed(args.seed),
    )
    network = build_network()

    clock = train(network, loader, len(loader), args.epochs)
    percent = 100 * accuracy(network, test_images, test_labels)
    print(f"Test accuracy: {percent:.1f} % of {len(test_labels)} images")
    if isinstance(loader, shmloader.DataLoader):
        print(loader.stats("total").verdict)
    else:
        share = clock.waited_s / clock.elapsed_s
        print(f"Your loop waited {clock.waited_s:.2f} s ({share:.0%}) for data.")
    return 1 if percent < args.require_accuracy else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
