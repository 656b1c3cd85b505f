"""The program that ``make chaos`` kills, or whose workers it kills: runs and checks loaders.

Runs in the interpreter of :mod:`tests.faults.trial` until the file ``stop`` is in the trial's
directory. Counts its steps in the file ``progress``, so that a hang is seen from the outside, and
writes what goes wrong into ``problems`` at once, since it may be killed at any time. Prints one
line of JSON at its end.
"""

import itertools
import json
import logging
import mmap
import os
import random
from collections import Counter
from collections.abc import Iterator
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

import torch

from tests.faults import actions
from tests.holdings import Holdings

BATCH_SIZE = 4
_SAMPLE_BYTES = 20_000
LEFT_S = 2.0


def make_sample(index: int) -> torch.Tensor:
    """Return bytes that no other index has."""
    return torch.arange(_SAMPLE_BYTES, dtype=torch.int64).mul_(index * 2 + 1).to(torch.uint8)


def draw() -> torch.Tensor:
    """Draw a random number. With a seed, it depends only on the epoch and the position."""
    return torch.randint(2**30, ())


class Draws(torch.utils.data.Dataset):
    """Map-style samples that are only random numbers."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return draw()


class Samples(Draws):
    """Map-style samples: bytes, index, random number."""

    def __getitem__(self, index: int) -> Any:
        return make_sample(index), index, draw()


class Stream(torch.utils.data.IterableDataset):
    """The same samples as a stream, in the same order: workers take whole batches in turn."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[Any]:
        info = torch.utils.data.get_worker_info()
        for start in range(0, self.length, BATCH_SIZE):
            if start // BATCH_SIZE % info.num_workers == info.id:
                for index in range(start, start + BATCH_SIZE):
                    yield make_sample(index), index, draw()


def open_shard(path: str) -> Iterator[Any]:
    """Yield the samples of one batch."""
    first = int(path) * BATCH_SIZE
    for index in range(first, first + BATCH_SIZE):
        yield make_sample(index), index, draw()


def make_shards(length: int) -> Any:
    """Return the same samples as a stream of shards, each of which has one batch."""
    from shmloader.streams import Shards

    paths = [str(number) for number in range(length // BATCH_SIZE)]
    shards = Shards(paths, open_shard, seed=0, shuffle_shards=False, readers=min(5, len(paths)))
    shards.length = length
    return shards.batch(BATCH_SIZE)


class Hammered:
    """Runs loaders, epoch after epoch.

    Args:
        seed: Decides the loaders' options.
        method: Start method of the workers.
    """

    def __init__(self, seed: str, method: str) -> None:
        self._random = random.Random(seed)
        self._method = method
        self._directory = Path(os.environ[actions.DIRECTORY])
        with (self._directory / "progress").open("wb+") as file:
            file.truncate(mmap.PAGESIZE)
            self._progress = mmap.mmap(file.fileno(), 8)
        self._steps = 0
        self._words = ""
        self.counts: Counter[str] = Counter()
        self._known = [make_sample(index) for index in range(24 * BATCH_SIZE)]

    def run(self) -> None:
        """Run loaders until told to stop, and check what is left."""
        if self._method != "fork":
            resource_tracker.ensure_running()
            if self._method == "forkserver":
                forkserver.set_forkserver_preload(["torch"])
                forkserver.ensure_running()
        before = Holdings.now()
        while not self._must_stop():
            self.run_loader()
        if left := before.left(LEFT_S):
            self._problem(str(left), "leak")

    def run_loader(self) -> None:
        """Run some epochs of one loader."""
        from shmloader import DataLoader

        options = self._choose()
        self._words = str(options)
        loader = DataLoader(**options, multiprocessing_context=self._method)
        for _ in range(self._random.randint(1, 4)):
            self._run_epoch(loader, options)
            if self._must_stop():
                break
        if self._random.random() < 0.5:
            loader.close()

    def _choose(self) -> dict[str, Any]:
        choose = self._random
        kind = choose.choices([Samples, Stream, make_shards], [10, 5, 5])[0]
        is_stream, has_order = kind is not Samples, kind is make_shards
        options: dict[str, Any] = {
            "dataset": kind(choose.randint(5, 24) * BATCH_SIZE),
            "batch_size": None if has_order else BATCH_SIZE,
            "num_workers": choose.randint(1, 3),
            "prefetch_factor": choose.randint(1, 4),
            "persistent_workers": choose.random() < 0.5,
            "worker_restarts": choose.choice([0, 0, 1, 5]),
        }
        if choose.random() < 0.2 and not has_order:
            options["in_order"] = False
        if choose.random() < 0.3:
            options["timeout"] = 60
        if choose.random() < 0.3:
            options["pin_memory"] = True
        if not is_stream and choose.random() < 0.4:
            options["seed"] = choose.randint(0, 9)
        return options

    def _must_stop(self) -> bool:
        return (self._directory / "stop").exists()

    def _step(self, what: str) -> None:
        self._steps += 1
        self.counts[what] += 1
        self._progress[:8] = self._steps.to_bytes(8, "little")

    def _problem(self, text: str, sort: str = "wrong batch") -> None:
        with (self._directory / "problems").open("a") as file:
            file.write(f"{sort}: {text} ({self._words})\n")

    def _run_epoch(self, loader: Any, options: dict[str, Any]) -> None:
        from shmloader import WorkerDiedError

        length = options["dataset"].length // BATCH_SIZE
        ends_after = self._random.randint(1, length) if self._random.random() < 0.2 else None
        seen: list[int] = []
        kept: list[tuple[Any, int]] = []
        try:
            iterator = iter(loader)
            # Only after iter(): until then, ``epoch`` may be that of an epoch left early.
            drawn = self._draws_of(loader.epoch, options)
            for batch in itertools.islice(iterator, ends_after):
                number = self._number_of(batch)
                if drawn is not None and batch[2].tolist() != drawn[number]:
                    self._problem(f"batch {number} has drawn {batch[2].tolist()}")
                seen.append(number)
                self._step("batches")
                if self._random.random() < 0.2:
                    kept.append((batch, number))
        except WorkerDiedError as error:
            self._step("deaths told")
            if "is killed by signal: Killed" not in str(error):
                self._problem(f"a death in other words: {error}", "other problem")
        except BaseException as error:
            self._problem(f"{error!r} after {seen}", "other problem")
        else:
            self._step("whole epochs" if ends_after is None else "epochs left")
            if len(seen) != (ends_after or length):
                self._problem(f"batches are missing: {seen} of {length}")
        if not options.get("in_order", True):
            seen.sort()
            if len(set(seen)) != len(seen) or not set(seen) <= set(range(length)):
                self._problem(f"batches came twice: {seen}")
        elif seen != list(range(len(seen))):
            self._problem(f"batches in a wrong order: {seen}")
        for batch, number in kept:
            if self._number_of(batch) != number:
                self._problem(f"batch {number} has changed")

    def _draws_of(self, epoch: int, options: dict[str, Any]) -> list[list[int]] | None:
        """Return the numbers that each batch must draw, as drawn in this process."""
        from shmloader import DataLoader

        if "seed" not in options:
            return None
        length = options["dataset"].length
        loader = DataLoader(Draws(length), batch_size=BATCH_SIZE, seed=options["seed"])
        loader.set_epoch(epoch)
        return [batch.tolist() for batch in loader]

    def _number_of(self, batch: Any) -> int:
        """Return the number of a batch; -1 if its content is not right."""
        samples, indices, _ = batch
        first = int(indices[0])
        if first % BATCH_SIZE or indices.tolist() != list(range(first, first + BATCH_SIZE)):
            self._problem(f"indices {indices.tolist()} in a batch")
            return -1
        for sample, index in zip(samples, indices.tolist(), strict=True):
            if not torch.equal(sample, self._known[index]):
                self._problem(f"wrong bytes in sample {index}")
                return -1
        return first // BATCH_SIZE


def run(seed: str, method: str) -> None:
    """Run the program; prints its counts."""
    import shmloader  # noqa: F401 - before holdings are compared

    hammered = Hammered(seed, method)
    log = logging.Handler()
    log.emit = lambda _: hammered._step("workers replaced")
    logging.getLogger("shmloader").addHandler(log)
    hammered.run()
    print(json.dumps(hammered.counts), flush=True)
