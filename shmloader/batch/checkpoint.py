"""Where a worker's dataset is. Pure.

A :class:`Checkpoint` is all that is known of one dataset. A worker sends what it consists of, the
engine keeps the newest one in the worker's record and with each batch, and a loader's state has one
for each worker. :mod:`shmloader.batch.dataset_state` takes states and resumes datasets.
"""

import zlib
from typing import Any, NamedTuple, Self

from shmloader.messages import Unsaved


class Checkpoint(NamedTuple):
    """How far the dataset of one worker has come in an epoch.

    If a map-style dataset has a state, it is taken after every batch. No batch is read again, so
    only ``given`` and ``snapshot`` are used.

    Attributes:
        given: Number of batches that were delivered in this epoch, including exceptions that were
            raised in place of a batch.
        snapshot: Newest state of the dataset, a pickled
            :class:`~shmloader.batch.dataset_state.Saved`; None for the beginning.
        at: Number of batches after which the snapshot was taken.
        check: Checksum over the fingerprints of the batches since the snapshot.
        rng: States of the global random generators before ``iter(dataset)``. Without workers, also
            those before the first sample, since other code uses these generators, too. Empty for
            the states that a worker's base seed and ``worker_init_fn`` leave, or if samples do not
            depend on them.
        unsaved: Why a newer state could not be taken. Only a replaced worker resumes from this
            checkpoint then; the loader's ``state_dict()`` raises.
        has_ended: Whether the stream has ended. The other fields are then those with which the next
            epoch begins.
    """

    given: int = 0
    snapshot: bytes | None = None
    at: int = 0
    check: int = 0
    rng: tuple[dict[str, Any], ...] = ()
    unsaved: Unsaved | None = None
    has_ended: bool = False

    @property
    def skip(self) -> int:
        """The number of batches that were delivered since the snapshot."""
        return self.given - self.at

    @classmethod
    def beginning(
        cls, snapshot: bytes | Unsaved | None, rng: tuple[dict[str, Any], ...] = ()
    ) -> Self:
        """Return the checkpoint of a dataset at an epoch's beginning."""
        if isinstance(snapshot, Unsaved):
            return cls(rng=rng, unsaved=snapshot)
        return cls(snapshot=snapshot, rng=rng)

    def after_batch(
        self, snapshot: bytes | Unsaved | None, fingerprint: int | None
    ) -> "Checkpoint":
        """Return the checkpoint after a further batch, or after an exception in its place.

        Args:
            snapshot: The state after the batch, or why there is none; None if none was due.
            fingerprint: The batch's fingerprint; None if its samples could not be read.
        """
        given, at, kept = self.given + 1, self.at, self.snapshot
        check, unsaved = self.check, self.unsaved
        if fingerprint is not None:
            check = zlib.crc32(fingerprint.to_bytes(4, "little"), check)
        if isinstance(snapshot, Unsaved):
            unsaved = snapshot
        elif snapshot is not None:
            kept, at, check, unsaved = snapshot, given, 0, None
        return Checkpoint(given, kept, at, check, self.rng, unsaved)

    def at_next_epoch(self, *, is_iterable: bool) -> "Checkpoint":
        """Return the checkpoint at the next epoch's beginning, if the dataset persists."""
        if self.has_ended:
            return self._replace(has_ended=False)
        if is_iterable:  # it begins anew
            return Checkpoint()
        return Checkpoint(0, self.snapshot, unsaved=self.unsaved)
