"""Download, decode and batch images from a web server.

A server on this machine delivers a few hundred JPEG files, which are cut from scikit-learn's two
sample photographs. It waits a little before each answer, as a server that is far away would. First
the images are loaded one after the other, then by a pipeline: coroutines download the files, and
worker processes decode them into shared memory, without a second copy. The last line says how much
faster the pipeline was.
"""

import argparse
import asyncio
import io
import multiprocessing
import random
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from shmloader import Pipeline, PipelineBuilder

try:
    from PIL import Image
    from sklearn.datasets import load_sample_images
    from tqdm import tqdm
except ImportError as error:
    sys.exit(f"{error}. This example needs: pip install pillow scikit-learn tqdm")

SIDE = 224  # of all images, in pixels
TIMEOUT_S = 30


# ------------------------------------------------------------ the server, in a process of its own


def write_samples(folder: Path, count: int) -> None:
    """Write random crops of the two sample photographs as JPEG files."""
    photographs = load_sample_images().images
    random_source = random.Random(0)
    for number in range(count):
        photograph = photographs[number % len(photographs)]
        height, width, _ = photograph.shape
        top = random_source.randint(0, height - SIDE)
        left = random_source.randint(0, width - SIDE)
        crop = photograph[top : top + SIDE, left : left + SIDE]
        Image.fromarray(crop).save(folder / f"{number:04}.jpg", quality=90)


def serve(folder: Path, latency_s: float, port: Connection) -> None:
    files = {path.name: path.read_bytes() for path in folder.iterdir()}

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await reader.readuntil(b"\r\n\r\n")
        await asyncio.sleep(latency_s)
        body = files.get(request.split()[1].decode().rpartition("/")[2])
        status = "404 Not Found" if body is None else "200 OK"
        head = (
            f"HTTP/1.1 {status}\r\nContent-Length: {len(body or b'')}\r\nConnection: close\r\n\r\n"
        )
        writer.write(head.encode() + (body or b""))
        await writer.drain()
        writer.close()

    async def run() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0, backlog=512)
        port.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(run())


@contextmanager
def served(folder: Path, latency_s: float) -> Iterator[str]:
    """Serve a folder's files until the end of the block. Yields the server's address."""
    port, far_end = multiprocessing.Pipe(duplex=False)
    arguments = (folder, latency_s, far_end)
    process = multiprocessing.Process(target=serve, args=arguments, daemon=True)
    process.start()
    try:
        yield f"http://127.0.0.1:{port.recv()}"
    finally:
        process.kill()
        process.join()


# ------------------------------------------------------------ what is done to the images


def fetch(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=TIMEOUT_S) as response:
        body: bytes = response.read()
    return body


async def fetch_soon(url: str) -> bytes:
    parts = urllib.parse.urlsplit(url)
    async with asyncio.timeout(TIMEOUT_S):
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        writer.write(f"GET {parts.path} HTTP/1.1\r\nHost: {parts.netloc}\r\n\r\n".encode())
        head = await reader.readuntil(b"\r\n\r\n")
        body = await reader.read()
        writer.close()
    status = head.split(b"\r\n")[0].decode()
    if " 200 " not in status:
        raise OSError(f"{url}: {status}")
    return body


def decode(data: bytes) -> Tensor:
    with Image.open(io.BytesIO(data)) as image:
        return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)


def decode_batch(files: list[bytes]) -> Tensor:
    # In a worker process, this writes into the batch's shared memory, without a second copy.
    return default_collate([decode(data) for data in files])  # type: ignore[no-any-return]


def one_after_the_other(urls: list[str], batch_size: int) -> Iterator[Tensor]:
    for first in range(0, len(urls), batch_size):
        yield decode_batch([fetch(url) for url in urls[first : first + batch_size]])


def make_pipeline(urls: list[str], batch_size: int, downloads: int, workers: int) -> Pipeline:
    return (
        PipelineBuilder()
        .add_source(urls)
        .pipe(fetch_soon, concurrency=downloads)
        .aggregate(batch_size)
        .pipe(decode_batch, concurrency=workers, executor="process")
        .add_sink(4)
        .build()
    )


def consume(name: str, batches: Iterable[Tensor], image_count: int) -> tuple[Tensor, float]:
    """Read every pixel, with a progress bar. Returns each colour's sum, and images per second."""
    colour_sum = torch.zeros(3, dtype=torch.int64)
    started = time.perf_counter()
    with tqdm(total=image_count, unit="image", desc=name, mininterval=0.2) as bar:
        for images in batches:
            colour_sum += images.sum(dim=(0, 2, 3))
            bar.update(len(images))
    return colour_sum, image_count / (time.perf_counter() - started)


# ------------------------------------------------------------ the command line


def whole_number(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 up")
    return int(text)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Load images from a web server, in two ways.")
    add = parser.add_argument
    add("--images", type=whole_number, default=400, help="number of images (%(default)s)")
    add("--batch-size", type=whole_number, default=32, help="images a batch (%(default)s)")
    add("--downloads", type=whole_number, default=64, help="downloads at once (%(default)s)")
    add("--workers", type=whole_number, default=2, help="processes that decode (%(default)s)")
    add("--latency-ms", type=whole_number, default=20, help="delay of each answer (%(default)s)")
    add("--require-speedup", type=float, default=0, help="exit with status 1 below this factor")
    return parser


def main() -> int:
    args = build_parser().parse_args()
    with ExitStack() as stack:
        temporary = tempfile.TemporaryDirectory(prefix="http_images-")
        folder = Path(stack.enter_context(temporary))
        print(f"Writing {args.images} sample files")
        write_samples(folder, args.images)
        address = stack.enter_context(served(folder, args.latency_ms / 1000))
        urls = [f"{address}/{path.name}" for path in sorted(folder.iterdir())]

        forms: dict[str, Callable[[], Iterable[Tensor]]] = {
            "one after the other": lambda: one_after_the_other(urls, args.batch_size),
            "pipeline": lambda: make_pipeline(urls, args.batch_size, args.downloads, args.workers),
        }
        figures = {name: consume(name, make(), len(urls)) for name, make in forms.items()}

    (colours, slow), (same_colours, fast) = figures.values()
    if not torch.equal(colours, same_colours):
        print("The two have seen different images", file=sys.stderr)
        return 1
    mean = colours.double() / (args.images * SIDE * SIDE)
    print("Mean colour: red {:.0f}, green {:.0f}, blue {:.0f}".format(*mean.tolist()))
    print(
        f"One after the other: {slow:.0f} images/s; pipeline: {fast:.0f} images/s, "
        f"{fast / slow:.1f} times as fast, at {args.latency_ms} ms of latency"
    )
    return 0 if fast >= args.require_speedup * slow else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
