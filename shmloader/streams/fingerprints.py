"""Digests of lists of shards, which tell whether a list or a shard has changed.

A state has one of the shards' names, which is compared when it is loaded. To compare all sizes
takes longer than to make a batch, if there are many shards. So a state has short digests of sizes,
one for the shards of each reader, and a reader compares its own before its first batch.
"""

import base64
import hashlib
import itertools
import math
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

from shmloader.streams.files import local_path

#: So many letters are the digest of a group of sizes; one change in 16 million is not seen.
LETTERS = 4

# So many files are looked at in one task. On the disks of a network, threads wait together.
_FILES_PER_TASK = 1000
_THREADS = 16

# Stands for the size of a file that is not there. That of a remote shard is None.
_MISSING = -1


def names_digest(shards: Sequence[str]) -> str:
    """Return a text that depends on the order and the names of shards, without their folder."""
    prefix = os.path.commonprefix(list(shards))  # noqa: RUF071 - cut at a slash
    folder = "\0" + prefix[: prefix.rfind("/") + 1]
    return digest("\0".join(["", *shards]).replace(folder, "\0"))


def sizes_digest(groups: Iterable[Sequence[str]]) -> str:
    """Return ``LETTERS`` letters for each group of shards, which depend on their sizes."""
    groups = list(groups)
    sizes = iter(_sizes(list(itertools.chain.from_iterable(groups))))
    texts = (str(list(itertools.islice(sizes, len(group)))) for group in groups)
    return "".join(base64.b64encode(_digest(text, 3)).decode() for text in texts)


def check_sizes(shards: Sequence[str], expected: str) -> None:
    """Raise ValueError if a group of shards has another digest than when a state was saved."""
    if sizes_digest([shards]) == expected:
        return
    newest = max((each for each in shards if local_path(each) is not None), key=_changed_s)
    among = "" if len(shards) == 1 else f", or another one of {len(shards)} shards,"
    raise ValueError(
        f"the state does not fit the shards: {newest}{among} has another size than when the state "
        "was saved. It is the one that was changed last. Restore it, or begin the epoch anew."
    )


def digest(text: str) -> str:
    """Return a short checksum of a text."""
    return _digest(text, 8).hex()


def _digest(text: str, size: int) -> bytes:
    data = text.encode("utf-8", "surrogateescape")
    return hashlib.blake2b(data, digest_size=size).digest()


def _sizes(shards: Sequence[str]) -> list[int | None]:
    """Return the size of each shard in bytes, None for those that are remote."""
    if len(shards) <= _FILES_PER_TASK:  # needs no thread
        return list(map(_size, shards))
    starts = range(0, len(shards), _FILES_PER_TASK)
    tasks = (shards[start : start + _FILES_PER_TASK] for start in starts)
    with ThreadPoolExecutor(_THREADS) as threads:
        return list(itertools.chain.from_iterable(threads.map(_sizes, tasks)))


def _size(shard: str) -> int | None:
    path = local_path(shard)
    try:
        return None if path is None else os.stat(path).st_size  # noqa: PTH116 - faster
    except OSError:
        return _MISSING


def _changed_s(shard: str) -> float:
    """Return when a shard was changed last, in seconds; infinity if it is not there."""
    try:
        return os.stat(local_path(shard) or "").st_mtime  # noqa: PTH116 - as above
    except OSError:
        return math.inf
