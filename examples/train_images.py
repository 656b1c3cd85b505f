"""Train a small network on a folder of images, and resume after a kill.

    python examples/train_images.py shapes

The folder has a subfolder of images for each class. If it does not exist, drawings of three shapes
are written there. The training has all parts of a real one: labels, augmentation, a loader for
validation, and a checkpoint every few steps. Kill it and start it again: it continues after the
last checkpoint with the very next batch, with any `--num-workers`. On a CPU, it ends with the
weights of a run that was not killed.
"""

import argparse
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset

from shmloader import DataLoader

try:
    from PIL import Image, ImageDraw
except ImportError as error:
    sys.exit(f"{error}. This example needs: pip install pillow")

SIDE = 48  # pixels of a crop
CHECKPOINT_STEPS = 5
SEED = 0


class ImageFolder(Dataset[tuple[Tensor, int]]):
    """Images as uint8 tensors of shape (3, SIDE, SIDE), with the number of their class."""

    def __init__(self, folder: Path, *, augment: bool) -> None:
        self.classes = sorted(path.name for path in folder.iterdir() if path.is_dir())
        self.files = [
            (path, label)
            for label, name in enumerate(self.classes)
            for path in sorted((folder / name).glob("*.jpg"))
        ]
        self.augment = augment

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        path, label = self.files[index]
        with Image.open(path) as file:
            image = file.convert("RGB")
        left, top = (image.width - SIDE) // 2, (image.height - SIDE) // 2
        if self.augment:  # `seed=` seeds `random` before each sample
            left, top = random.randint(0, 2 * left), random.randint(0, 2 * top)
            if random.getrandbits(1):
                image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        pixels = np.array(image.crop((left, top, left + SIDE, top + SIDE)))
        return torch.from_numpy(pixels).permute(2, 0, 1), label


def draw_shapes(folder: Path, count: int) -> None:
    """Write drawings of circles, squares and triangles, `count` of each."""
    draws = random.Random(SEED)
    for name, sides in {"circle": 60, "square": 4, "triangle": 3}.items():
        (folder / name).mkdir(parents=True)
        for number in range(count):
            dark, light = draws.choices(range(120), k=3), draws.choices(range(120, 256), k=3)
            image = Image.new("RGB", (64, 64), tuple(dark))
            circle = (draws.randint(26, 38), draws.randint(26, 38), draws.randint(8, 16))
            ImageDraw.Draw(image).regular_polygon(circle, sides, fill=tuple(light))
            image.save(folder / name / f"{number:04}.jpg")


def to_floats(batch: list[Tensor]) -> list[Tensor]:
    """Runs on the device, where it is cheap: the bytes that travel are a quarter of the floats."""
    images, labels = batch
    return [images.float() / 255, labels]


def build_network(class_count: int) -> nn.Module:
    layers: list[nn.Module] = []
    for inputs, outputs in [(3, 16), (16, 32), (32, 64)]:
        convolution = nn.Conv2d(inputs, outputs, 3, stride=2, padding=1)
        layers += [convolution, nn.BatchNorm2d(outputs), nn.ReLU()]
    layers += [nn.MaxPool2d(SIDE // 8), nn.Flatten(), nn.Linear(64, class_count)]
    return nn.Sequential(*layers)


def save(path: Path, checkpoint: dict[str, Any]) -> None:
    """Write a checkpoint. If the process is killed meanwhile, the previous one stays."""
    part = path.with_suffix(".part")
    torch.save(checkpoint, part)
    part.replace(path)


@torch.no_grad()
def accuracy(network: nn.Module, loader: DataLoader[list[Tensor]]) -> float:
    network.eval()
    right = [network(images).argmax(1) == labels for images, labels in loader]
    network.train()
    return torch.cat(right).float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="with a subfolder of .jpg files for each class")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--num-workers", type=int, default=2)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    if not args.folder.exists():
        draw_shapes(args.folder, 300)
    path = args.folder / "checkpoint.pt"

    augmented = ImageFolder(args.folder, augment=True)
    plain = ImageFolder(args.folder, augment=False)
    if not plain.files:
        parser.error(f"{args.folder} has no subfolders of .jpg files")
    order = torch.randperm(len(plain), generator=torch.Generator().manual_seed(SEED)).tolist()
    held_out = len(plain) // 5
    options: dict[str, Any] = {"batch_size": 32, "num_workers": args.num_workers, "seed": SEED}
    options |= {"device": args.device, "device_transform": to_floats}
    options |= {"persistent_workers": args.num_workers > 0}
    torch.set_num_threads(1)  # the network is small, and the workers need cores
    torch.manual_seed(SEED)
    network = build_network(len(plain.classes)).to(args.device)
    optimizer = torch.optim.Adam(network.parameters(), lr=2e-3)
    with (
        DataLoader(Subset(augmented, order[held_out:]), shuffle=True, **options) as training,
        DataLoader(Subset(plain, order[:held_out]), **options) as validation,
    ):
        # All that a resume needs. With dropout, add torch's generators (torch.get_rng_state()).
        parts = {"network": network, "optimizer": optimizer, "training": training}
        if path.exists():
            saved = torch.load(path, map_location=args.device, weights_only=True)
            for name, part in parts.items():
                part.load_state_dict(saved[name])
            print(f"resumes in epoch {training.epoch}", flush=True)
        while training.epoch < args.epochs:
            epoch = training.epoch
            for step, (images, labels) in enumerate(training, 1):
                loss = nn.functional.cross_entropy(network(images), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                if step % CHECKPOINT_STEPS == 0:
                    save(path, {name: part.state_dict() for name, part in parts.items()})
                    print(f"epoch {epoch}: checkpoint, loss {loss.item():.3f}", flush=True)
            print(f"epoch {epoch}: {accuracy(network, validation):.1%} right", flush=True)
        save(path, {name: part.state_dict() for name, part in parts.items()})
        print(training.stats("total").verdict)


if __name__ == "__main__":
    main()
