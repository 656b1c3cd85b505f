"""Where the streams of an iterable dataset are: one in each worker, or one in this process.

Twice for each epoch with workers: as far as their answers came (:mod:`shmloader.engine.streams`),
from which a worker is replaced; and as far as the user was given their batches, from which the
loader is saved. The latter is noted on the user's thread, by the receipts of what was handed over.

In order, batches are handed over on a walk round the workers that passes over those whose streams
have ended, however fast each of them is. So the places of the streams, and whose turn it is,
say how an epoch goes on.
"""

import copy
from collections.abc import Iterable
from typing import Any, NamedTuple, Self

from shmloader.sampling.origin import has_own_state
from shmloader.workers.sample_streams import SeededIterator
from shmloader.workers.stream import (
    Saved,
    dump_for_workers,
    parts_of,
    read,
    save,
    save_dataset,
)


class Place(NamedTuple):
    """How far one stream has come.

    Attributes:
        given: Batches that it gave in this epoch, or exceptions in their place.
        snapshot: Its newest state, as it is written down; None: the stream's beginning.
        at: After how many batches it was taken.
        has_ended: Whether no more will come. The snapshot is the dataset's then, for the next
            epoch.
    """

    given: int = 0
    snapshot: bytes | None = None
    at: int = 0
    has_ended: bool = False

    @property
    def skip(self) -> int:
        """Batches given since the snapshot."""
        return self.given - self.at

    def gave(self, snapshot: bytes | None) -> "Place":
        """The same after a further batch, and its snapshot if there is one."""
        given = self.given + 1
        if snapshot is None:
            return self._replace(given=given)
        return Place(given, snapshot, given)

    def ended(self, snapshot: bytes | None) -> "Place":
        """The same at the end."""
        return Place(self.given, snapshot, self.given, has_ended=True)

    def begun_anew(self) -> "Place":
        """The next epoch's beginning, if the dataset lives on."""
        return Place(0, self.snapshot) if self.has_ended else Place()


class StreamNote(NamedTuple):
    """A worker's stream has given a batch, which was handed over; or it has ended before one."""

    worker_id: int
    snapshot: bytes | None = None
    is_end: bool = False


class StreamStates:
    """The places of all workers' streams.

    Attributes:
        places: By worker number.
        next_worker: Whose turn it is; it may have ended.

    Args:
        places: See there.
        next_worker: See there.
        worker_count: 0 where the one stream is in this process.
    """

    def __init__(
        self, places: Iterable[Place], next_worker: int = 0, worker_count: int | None = None
    ) -> None:
        self.places = tuple(places)
        self.next_worker = next_worker
        self._worker_count = len(self.places) if worker_count is None else worker_count

    @classmethod
    def at_beginning(cls, worker_count: int) -> Self:
        """All at their beginnings."""
        return cls([Place()] * worker_count)

    def copy(self) -> "StreamStates":
        """The same, to be noted in by itself."""
        return StreamStates(self.places, self.next_worker, self._worker_count)

    def note(self, notes: Iterable[StreamNote]) -> None:
        """Take note of what was handed over, in its order."""
        places = list(self.places)
        for worker_id, snapshot, is_end in notes:
            place = places[worker_id]
            if is_end:
                places[worker_id] = place.ended(snapshot)
            else:
                places[worker_id] = place.gave(snapshot)
                self.next_worker = (worker_id + 1) % len(places)
        self.places = tuple(places)

    def mark(self) -> tuple[tuple[Place, ...], int]:
        """What :meth:`go_back` takes."""
        return self.places, self.next_worker

    def go_back(self, mark: tuple[tuple[Place, ...], int]) -> None:
        """Take back what was noted since: it did not reach the user."""
        self.places, self.next_worker = mark

    def next_epoch(self) -> "StreamStates":
        """The next epoch's beginning: datasets go on from where their streams ended.

        Only those whose workers live on were saved there.
        """
        places = [place.begun_anew() for place in self.places]
        return StreamStates(places, 0, self._worker_count)

    def dump(self) -> dict[str, Any]:
        """All that it takes to go on, as a dict of its own at each call.

        Plain numbers, bools and lists, but for ``state``: what the user's ``state_dict()`` gave.

        Raises:
            Exception: What unpickling the user's state raises.
        """
        return _dumped(self._worker_count, self.next_worker, map(_dump_place, self.places))

    @classmethod
    def load(cls, state: dict[str, Any], worker_count: int) -> "StreamStates":
        """Read what :meth:`dump` gave; nothing of it is kept.

        Args:
            state: It.
            worker_count: Workers of the loader that is to go on; 0 in-process.

        Raises:
            ValueError: If it was saved with another number of workers, or is not of that form.
            Exception: What pickling the user's state raises.
        """
        try:
            saved_count, next_worker = state["num_workers"], state["next_worker"]
            streams = list(state["streams"])
        except (KeyError, TypeError) as error:
            raise ValueError(
                f"the state of an iterable dataset's streams lacks {error}, or is none"
            ) from error
        if saved_count != worker_count:
            raise ValueError(
                f"the state of an iterable dataset was saved with num_workers={saved_count}, each "
                f"with a stream of its own, and can not be loaded with num_workers={worker_count}"
            )
        if len(streams) != max(1, worker_count) or next_worker not in range(len(streams)):
            raise ValueError(
                f"the state of an iterable dataset has {len(streams)} streams and is at worker "
                f"{next_worker!r}, for num_workers={worker_count}"
            )
        return StreamStates(map(_load_place, streams), next_worker, worker_count)


class StreamHere:
    """The stream of a loader without workers: its state is taken when it is asked for.

    Holds what has a state, not the loader, nor an iterator that cannot be saved.

    Args:
        fetcher: torch's, of the dataset.
        given: Batches that the stream gave before.
    """

    def __init__(self, fetcher: Any, given: int = 0) -> None:
        iterator, dataset, _ = parts_of(fetcher)
        if isinstance(fetcher.dataset_iter, SeededIterator):
            iterator = fetcher.dataset_iter
        elif not has_own_state(iterator):
            iterator = None
        self._fetcher: Any = _Sources(iterator, dataset, fetcher.ended)
        self.given = given
        self.has_ended = False

    def note(self, given: int, *, is_short: bool) -> None:
        """So many batches are given."""
        self.given = given
        self._fetcher.ended = is_short

    def dump(self) -> dict[str, Any]:
        """As :meth:`StreamStates.dump`.

        Raises:
            Exception: What the user's ``state_dict()`` raises, or copying its state.
        """
        saved = save_dataset(self._fetcher.dataset) if self.has_ended else save(self._fetcher)
        stream = _place_dict(self.given, self.has_ended, self.given, copy.deepcopy(saved))
        return _dumped(0, 0, [stream])


class _Sources:
    """What :func:`save` looks at of a fetcher."""

    def __init__(self, dataset_iter: Any, dataset: Any, ended: bool) -> None:
        self.dataset_iter = dataset_iter
        self.dataset = dataset
        self.ended = ended


def _dumped(
    worker_count: int, next_worker: int, streams: Iterable[dict[str, Any]]
) -> dict[str, Any]:
    return {"num_workers": worker_count, "next_worker": next_worker, "streams": list(streams)}


def _dump_place(place: Place) -> dict[str, Any]:
    saved = None if place.snapshot is None else read(place.snapshot)
    return _place_dict(place.given, place.has_ended, place.at, saved)


def _place_dict(given: int, has_ended: bool, at: int, saved: Saved | None) -> dict[str, Any]:
    stream: dict[str, Any] = {"given": given, "has_ended": has_ended}
    if saved is not None:
        stream["snapshot"] = {"at": at, **saved._asdict()}
    return stream


def _load_place(stream: dict[str, Any]) -> Place:
    try:
        given, has_ended = int(stream["given"]), bool(stream["has_ended"])
        snapshot = stream.get("snapshot")
        if snapshot is None:
            return Place(given, None, given if has_ended else 0, has_ended)
        fields = dict(snapshot)
        at = int(fields.pop("at"))
        saved = Saved(**fields)
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"the state of a stream is malformed: {error}") from error
    if not 0 <= at <= given or saved.of not in ("iterator", "dataset"):
        raise ValueError(f"a stream gave {given} batches, and its state is after {at}")
    return Place(given, dump_for_workers(saved), at, has_ended)
