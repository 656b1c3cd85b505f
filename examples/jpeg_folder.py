"""Decode, crop and batch a folder of JPEG files.

If no folder is given, a few hundred files are cut from scikit-learn's two sample photographs and
written to a temporary directory, which is removed at the end. The last line says how many images
were read per second.
"""

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

import shmloader

try:
    from PIL import Image
    from sklearn.datasets import load_sample_images
    from tqdm import tqdm
except ImportError as error:
    sys.exit(f"{error}. This example needs: pip install pillow scikit-learn tqdm")

LOADERS = {"shmloader": shmloader.DataLoader, "torch": torch.utils.data.DataLoader}

SAMPLE_SIDES = range(240, 401)  # of the files written here, in pixels; the photographs are 427 high


class JpegFolder(Dataset[Tensor]):
    """Random square crops of JPEG files, as uint8 tensors of shape (3, side, side)."""

    def __init__(self, paths: list[Path], side: int) -> None:
        self.paths = paths
        self.side = side

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Tensor:
        path = self.paths[index]
        try:
            with Image.open(path) as file:
                image = file.convert("RGB")
        except OSError as error:
            raise ValueError(f"{path} cannot be decoded: {error}") from error
        if min(image.size) < self.side:
            scale = self.side / min(image.size)
            image = image.resize([max(self.side, round(length * scale)) for length in image.size])
        # The loader seeds `random` in each worker.
        left = random.randint(0, image.width - self.side)
        top = random.randint(0, image.height - self.side)
        crop = image.crop((left, top, left + self.side, top + self.side))
        return torch.from_numpy(np.array(crop)).permute(2, 0, 1)


def find_jpegs(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.suffix.lower() in {".jpg", ".jpeg"})


def write_samples(folder: Path, count: int, seed: int) -> None:
    """Write random crops of the two sample photographs as JPEG files."""
    photographs = load_sample_images().images
    random_source = random.Random(seed)
    for number in range(count):
        photograph = photographs[number % len(photographs)]
        height, width, _ = photograph.shape
        crop_height, crop_width = random_source.choices(SAMPLE_SIDES, k=2)
        top = random_source.randint(0, height - crop_height)
        left = random_source.randint(0, width - crop_width)
        crop = photograph[top : top + crop_height, left : left + crop_width]
        Image.fromarray(crop).save(folder / f"{number:04}.jpg", quality=90)


def consume(loader: Iterable[Tensor], image_count: int, epochs: int) -> Tensor:
    """Read every pixel, with a progress bar. Returns the mean red, green and blue."""
    colour_sum = torch.zeros(3, dtype=torch.float64)
    pixel_count = 0
    with tqdm(total=epochs * image_count, unit="image", mininterval=0.2) as bar:
        for epoch in range(1, epochs + 1):
            bar.set_description(f"epoch {epoch}/{epochs}")
            for images in loader:
                colour_sum += images.sum(dim=(0, 2, 3))
                pixel_count += images.numel() // 3
                bar.update(len(images))
    return colour_sum / pixel_count


def whole_number(minimum: int) -> Callable[[str], int]:
    """Return a type for argparse: an int of at least `minimum`, with an error that says so."""

    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < minimum:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {minimum} up")
        return int(text)

    return parse


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Decode, crop and batch a folder of JPEG files.")
    add = parser.add_argument
    whole, positive = whole_number(0), whole_number(1)
    folder_help = "searched with its subfolders; if not given, sample files are written and read"
    add("folder", type=Path, nargs="?", help=folder_help)
    loader_help = "whose DataLoader loads the images (%(default)s)"
    add("--loader", choices=LOADERS, default="shmloader", help=loader_help)
    add("--epochs", type=positive, default=3, help="passes over the folder (%(default)s)")
    add("--batch-size", type=positive, default=32, help="images a batch (%(default)s)")
    workers_help = "worker processes, or 0 to load in the main process (%(default)s)"
    add("--num-workers", type=whole, default=2, help=workers_help)
    add("--crop", type=positive, default=224, help="side of the crops in pixels (%(default)s)")
    add("--samples", type=positive, default=400, help="sample files to write (%(default)s)")
    add("--seed", type=whole, default=0, help="seed of all random numbers (%(default)s)")
    return parser


def main() -> int:
    parser = build_parser()
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    with ExitStack() as stack:
        folder = args.folder
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="jpeg_folder-")))
            print(f"Writing {args.samples} sample files")
            write_samples(folder, args.samples, args.seed)
        elif not folder.is_dir():
            parser.error(f"{folder} is not a folder")
        paths = find_jpegs(folder)
        if not paths:
            parser.error(f"{folder} has no .jpg or .jpeg files")

        loader = LOADERS[args.loader](
            JpegFolder(paths, args.crop),
            batch_size=args.batch_size,
            shuffle=True,
            num_workers=args.num_workers,
            persistent_workers=args.num_workers > 0,
            generator=torch.Generator().manual_seed(args.seed),
        )
        started = time.perf_counter()
        colour = consume(loader, len(paths), args.epochs)
        elapsed_s = time.perf_counter() - started

    image_count = args.epochs * len(paths)
    print("Mean colour: red {:.0f}, green {:.0f}, blue {:.0f}".format(*colour.tolist()))
    print(
        f"Read {image_count} images in {elapsed_s:.2f} s: {image_count / elapsed_s:.0f} images/s, "
        f"with {args.loader} and {args.num_workers} workers"
    )
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
