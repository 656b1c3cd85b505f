"""Computes the seeds of workers, ranks and samples.

With ``seed=``, the seeds of workers and samples come from one hash, BLAKE2b, of five decimal
numbers: the use, the loader's seed, the epoch, and two more (see :class:`Use`). So a seed does not
depend on the number of workers, or on when, where and how often a sample is loaded.
"""

import enum
import hashlib
import random

import numpy as np
import torch
from torch.utils.data._utils.worker import _generate_state

_DIGEST_BYTES = 64


class Use(enum.IntEnum):
    """What a digest is for. The comments say which two numbers follow the epoch in its text.

    The values of the members never change between versions.
    """

    #: A sample of a map-style dataset: its position and 0. If a batch sampler made the batch: the
    #: number of the batch, and the number of the sample in the batch.
    SAMPLE = 0
    #: Collating a batch of a map-style dataset: the two numbers of its first sample.
    COLLATE = 1
    #: A sample of an iterable dataset: the number of the worker, and the number of the sample in
    #: the worker's stream.
    STREAM_SAMPLE = 2
    #: Collating a batch of an iterable dataset: the two numbers of its first sample.
    STREAM_COLLATE = 3
    #: ``iter(dataset)``: the number of the worker, and 0.
    STREAM = 4
    #: The workers' base seed, in place of torch's: 0 and 0.
    BASE_SEED = 5


def begin_digest(use: Use, seed: int, epoch: int) -> "hashlib.blake2b":
    """Return the part of a digest that all samples of an epoch have in common."""
    text = b"%d,%d,%d," % (use, seed, epoch)
    return hashlib.blake2b(text, digest_size=_DIGEST_BYTES, person=b"shmloader sample")


def end_digest(begun: "hashlib.blake2b", first: int, second: int) -> bytes:
    """Complete a digest with two more numbers. Returns its 64 bytes."""
    # A copy, since beginning a digest takes three times as long as the rest.
    whole = begun.copy()
    whole.update(b"%d,%d" % (first, second))
    return whole.digest()


def base_seed(seed: int, epoch: int) -> int:
    """Return the base seed of the workers that start in this epoch. torch would draw one."""
    digest = end_digest(begin_digest(Use.BASE_SEED, seed, epoch), 0, 0)
    return int.from_bytes(digest[:8], "little") >> 1


def seed_worker(base_seed: int, worker_id: int) -> int:
    """Seed ``random``, ``torch`` and ``numpy.random`` of this process, as torch does in a worker.

    ``random`` and ``torch`` get the sum of both numbers. ``numpy.random`` gets four words that
    torch mixes from the two, so that it does not draw the same numbers.

    Returns:
        The worker's seed, as ``get_worker_info().seed`` shows it.
    """
    seed = base_seed + worker_id
    random.seed(seed)
    torch.manual_seed(seed)
    np.random.seed(_generate_state(base_seed, worker_id))
    return seed


def seed_of_rank(seed: int, rank: int) -> int:
    """Return the seed of 128 bits that replaces ``seed`` for the samples of one rank.

    It is for loaders that count positions within the rank's own share of the samples. Like the
    digests, the result never changes between versions.
    """
    digest = hashlib.blake2b(b"%d,%d" % (seed, rank), digest_size=16, person=b"shmloader rank")
    return int.from_bytes(digest.digest(), "little")
