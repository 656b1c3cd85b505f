"""What the ranks of a job tell one another, through the job's store: mostly of a stream's readers.

Each rank posts what it has found of a reader, once for each batch that it has received. The other
ranks read that when they need it, which is rarely: to draw batches further ahead, and to save a
state. A store holds one short value for each reader, so its size does not grow.
"""

import logging
import pickle
import time
from collections.abc import Sequence
from typing import Any

import torch.distributed

from shmloader.errors import LoaderTimeoutError
from shmloader.streams.rounds import Facts

#: How many positions of a reader are posted: a rank may be that many of its batches behind others.
_POSITIONS = 6

# How long a rank waits between two looks: at first, and at most.
_FIRST_S, _LONGEST_S = 0.0005, 0.02

#: After so many seconds, a rank says that it waits.
_WARN_S = 30.0

_log = logging.getLogger("shmloader")


_FOR_READERS = (
    "the ranks of a stream tell one another where its readers are. Call "
    "torch.distributed.init_process_group() before the first epoch, or give the stream a "
    "store= of torch.distributed that all ranks share."
)


def store_of_job(text: str = _FOR_READERS) -> Any:
    """Return the store of the default group of torch.distributed.

    Raises:
        ValueError: With this text, if there is no group.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        raise ValueError(text)
    from torch.distributed import distributed_c10d  # noqa: PLC0415 - not in every build of torch

    return distributed_c10d._get_default_store()


def gather(store: Any, number: int, value: bytes, ranks: tuple[int, int], wait: Any) -> list[bytes]:
    """Give a value to all ranks, and return those of all ranks, by their numbers. Collective.

    Args:
        store: A store of torch.distributed.
        number: How many values this rank has given before.
        value: The value of this rank.
        ranks: This rank and the number of ranks.
        wait: Generator of :func:`pauses`, whose errors are raised.
    """
    rank, world_size = ranks
    shared: Any = torch.distributed.PrefixStore("shmloader/gather", store)  # type: ignore[attr-defined]
    shared.set(f"{number}/{rank}", value)
    keys = [f"{number}/{other}" for other in range(world_size)]
    while not shared.check(keys):
        next(wait)
    if number:  # all ranks have read it, as they have given the next one
        shared.delete_key(f"{number - 1}/{rank}")
    return list(shared.multi_get(keys))


class Board:
    """Shares what is known of readers with the other ranks, for one epoch of one loader.

    Args:
        store: A store of torch.distributed.
        name: The same on all ranks, and for no other epoch or loader.
        facts: What this rank knows; :meth:`read` adds what others have posted.
        own: Numbers of the readers for which this rank posts the first values.
    """

    def __init__(self, store: Any, name: str, facts: Sequence[Facts], own: Sequence[int]) -> None:
        self._store: Any = torch.distributed.PrefixStore(  # type: ignore[attr-defined]
            f"shmloader/{name}", store
        )
        self._facts = facts
        self._is_complete = False
        # What was last seen in the store of each reader.
        self._seen = [b""] * len(facts)
        for reader in own:
            self.post(reader)

    def post(self, reader: int) -> None:
        """Post what is known of a reader, and add what other ranks have posted meanwhile.

        Several ranks may make batches of one reader, so what one of them posts late must not
        replace what another one knows already.
        """
        while True:
            one, seen = self._facts[reader], self._seen[reader]
            value = pickle.dumps((one.known, one.is_all, one.positions[-_POSITIONS:]))
            if value == seen:
                return
            found = self._store.compare_set(str(reader), seen, value)
            self._add(reader, found)
            if found == value:
                return

    def read(self) -> None:
        """Add what the other ranks have posted. Does not wait for them."""
        keys = [str(reader) for reader in range(len(self._facts))]
        if not self._is_complete and not self._store.check(keys):
            return
        self._is_complete = True
        for reader, data in enumerate(self._store.multi_get(keys)):
            self._add(reader, data)

    def _add(self, reader: int, data: bytes) -> None:
        one, self._seen[reader] = self._facts[reader], data
        known, is_all, positions = pickle.loads(data)
        one.known, one.is_all = max(known, one.known), is_all or one.is_all
        last = one.positions[-1][0]
        one.positions += [each for each in positions if each[0] > last]


def pauses(timeout_s: float, what: str) -> Any:
    """Yield between looks at the board, after a pause.

    Raises:
        LoaderTimeoutError: After ``timeout_s`` seconds; 0 waits without a limit.
    """
    began_s, pause_s, has_warned = time.monotonic(), _FIRST_S, False
    while True:
        waited_s = time.monotonic() - began_s
        if 0 < timeout_s < waited_s:
            raise LoaderTimeoutError(f"{what} for {timeout_s:g} s (timeout=)")
        if waited_s > _WARN_S and not has_warned:
            has_warned = True
            _log.warning("%s for %d s", what, _WARN_S)
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_S)
        yield
