"""Computes the seeds of workers, ranks and samples.

With ``seed=``, every seed comes from one hash, BLAKE2b, of five decimal numbers: the use, the
loader's seed, the epoch, and two more (see :class:`Use`). So it does not depend on the number of
workers, or on when, where and how often a sample is loaded.
"""

import enum
import hashlib
import random

import numpy as np
import torch
from torch.utils.data._utils.worker import _generate_state

_DIGEST_BYTES = 64


class Use(enum.IntEnum):
    """What a digest is for, and which two numbers follow the epoch. These numbers never change.

    A sample of a map-style dataset has its position and 0; in a batch that a batch sampler made,
    it has the batch's number and its own in the batch. A batch has those of its first sample.
    """

    SAMPLE = 0
    COLLATE = 1
    #: Of an iterable dataset: the worker's number, and the sample's in the worker's stream.
    STREAM_SAMPLE = 2
    STREAM_COLLATE = 3
    #: iter(dataset): the worker's number, and 0.
    STREAM = 4
    #: The workers' base seed, in place of torch's: 0, and 0.
    BASE_SEED = 5


def begin_digest(use: Use, seed: int, epoch: int) -> "hashlib.blake2b":
    """Return the part of a digest that all samples of an epoch have in common."""
    text = b"%d,%d,%d," % (use, seed, epoch)
    return hashlib.blake2b(text, digest_size=_DIGEST_BYTES, person=b"shmloader sample")


def end_digest(begun: "hashlib.blake2b", first: int, second: int) -> bytes:
    """Return a digest of 64 bytes, of the begun one and two more numbers."""
    # A copy, since beginning a digest takes three times as long as the rest.
    whole = begun.copy()
    whole.update(b"%d,%d" % (first, second))
    return whole.digest()


def base_seed(seed: int, epoch: int) -> int:
    """Return the base seed of workers that start in this epoch, which torch would draw."""
    digest = end_digest(begin_digest(Use.BASE_SEED, seed, epoch), 0, 0)
    return int.from_bytes(digest[:8], "little") >> 1


def seed_worker(base_seed: int, worker_id: int) -> int:
    """Seed ``random``, ``torch`` and ``numpy.random`` of this process, as torch does in a worker.

    The first two get the sum of both numbers; ``numpy.random`` gets four words that torch mixes
    from them, so that the libraries do not draw alike.

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

    For loaders whose positions are those in a rank's own share of the samples. The result never
    changes between versions, like the digests.
    """
    digest = hashlib.blake2b(b"%d,%d" % (seed, rank), digest_size=16, person=b"shmloader rank")
    return int.from_bytes(digest.digest(), "little")
