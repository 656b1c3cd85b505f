"""Fetches the samples of a batch of an iterable dataset, and saves and resumes the stream.

A stream is resumed exactly if its samples depend only on its own state and on the process's global
random generators, which are set to their states at the stream's beginning. Batches that were
delivered since the newest state are read again and discarded. Whether the dataset yields the same
samples again cannot be known beforehand. So the loader's state keeps a checksum over the
fingerprints of the delivered batches, and a resumed dataset is compared with it.

A fingerprint is a checksum of up to four samples of a batch, the first and the last among them. A
missing or repeated sample shifts the samples of all later batches.
"""

import functools
from typing import Any, Literal, TypeVar

from torch.utils.data import get_worker_info

from shmloader.batch.checkpoint import Checkpoint
from shmloader.batch.collator import Collator
from shmloader.batch.dataset_state import Keep, Saved, ask
from shmloader.batch.failures import add_note
from shmloader.batch.fetch import FetchConfig, Get, is_from_outside
from shmloader.batch.fingerprint import fingerprint, fingerprint_of
from shmloader.batch.sample_rng import SampleRng
from shmloader.batch.sample_watch import SampleWatch
from shmloader.errors import SampleTimeoutError
from shmloader.grammar import counted
from shmloader.messages import Unsaved
from shmloader.sampling.hooks import has_own_state, has_state_methods

_T = TypeVar("_T")


class StreamFetcher:
    """Makes batches of an iterable dataset.

    It calls ``iter(dataset)`` when it is made. If the samples have random number generators whose
    epoch is not known by then, it calls that before the first sample.

    Attributes:
        iterator: The iterator of its samples; None until ``iter(dataset)`` was called.
        ended: Whether the iterator has no further sample.
        fingerprint: Fingerprint of the newest batch; None until its samples were read.
    """

    def __init__(
        self,
        config: FetchConfig,
        dataset: Any,
        collate: Collator,
        rng: SampleRng | None = None,
        watch: SampleWatch | None = None,
    ) -> None:
        self._dataset = dataset
        self.iterator: Any = None
        self._config, self._collate, self._rng = config, collate, rng
        self._watch = watch
        self.ended = self._only_reads = False
        self.fingerprint: int | None = None
        # The state that was loaded, so that samples were yielded before.
        self._resumed: Saved | None = None
        # How many samples the iterator has yielded.
        self._count = 0
        # Whether a sample hung: after that there are none, as after an exception of a generator.
        self._has_hung = False
        if rng is None:
            self.iterator = iter(dataset)
        elif rng.epoch is not None:
            self._begin(rng)

    def resume(self, saved: Saved) -> None:
        """Continue after earlier samples. The dataset's own state was loaded before."""
        self.ended, self._resumed = saved.is_short, saved
        if self._rng is not None:
            self._rng.position = saved.position
        if self.iterator is not None:
            self._load_state()

    def _load_state(self) -> None:
        if self._resumed is not None and self._resumed.of == "iterator":
            self.iterator.load_state_dict(self._resumed.state)

    def _begin(self, rng: SampleRng) -> None:
        """Call ``iter(dataset)``, with generators seeded for it."""
        with rng.opening_stream():
            try:
                self.iterator = iter(self._dataset)
            except StopIteration as error:  # it would silently end the epoch
                raise RuntimeError("iter(dataset) raised StopIteration") from error
            self._load_state()

    def _next_seeded(self, _: object) -> Any:
        rng = self._rng
        assert rng is not None
        if self.iterator is None:
            self._begin(rng)
        rng.begin_stream_sample()
        return next(self.iterator)

    def pop_report(self) -> None:
        """Return None, since an iterator that has raised yields nothing more."""

    def fetch(self, indices: Any) -> Any:
        """Return the next batch, or the next sample without batching.

        Raises:
            StopIteration: At the end of the dataset.
        """
        self.fingerprint = None
        if self.ended or self._has_hung:
            raise StopIteration
        is_batch = self._config.auto_collation
        count = len(indices) if is_batch else 1
        samples = self._load(count)
        if is_batch:
            self.ended = len(samples) < count
        if not samples or (self.ended and self._config.drop_last):
            raise StopIteration
        whole = samples if is_batch else samples[0]
        self.fingerprint = fingerprint_of(samples) if is_batch else fingerprint(whole)
        return None if self._only_reads else self._collate(whole)

    def _load(self, count: int) -> list[Any]:
        """Return the iterator's next samples, fewer at its end."""
        iterator, watch = self.iterator, self._watch
        get: Get = next if self._rng is None else self._next_seeded
        if watch is not None:
            what = "the next sample of the dataset's iterator"
            get = functools.partial(watch.load, get, what=what)
        samples: list[Any] = []
        add = samples.append
        try:
            for _ in range(count):
                add(get(iterator))
        except StopIteration:
            pass
        except BaseException as error:
            self._has_hung = isinstance(error, SampleTimeoutError)
            if not is_from_outside(error):
                number, where = self._count + len(samples), " in this worker"
                add_note(
                    error,
                    f"The dataset's iterator failed at sample {number}, counted from 0"
                    f"{where if get_worker_info() is not None else ''} since "
                    f"{'the epoch began' if self._resumed is None else 'its state was loaded'}.",
                )
            raise
        finally:
            self._count += len(samples)
        return samples

    # States ---------------------------------------------------------------------------------

    def save(self, keep: Keep[_T]) -> _T | Unsaved | None:
        """Return the state of the iterator, else that of the dataset, or None."""
        of: Literal["iterator", "dataset"] = "iterator"
        thing, position = self.iterator, 0 if self._rng is None else self._rng.position
        if not has_own_state(thing):
            of, thing = "dataset", self._dataset
            if not has_state_methods(thing):
                return None
        return ask(thing, lambda state: keep(Saved(of, self.ended, state, position)))

    def replay(self, checkpoint: Checkpoint, indices: Any, *, only_reads: bool) -> None:
        """Read again, and discard, the batches that the stream has delivered since its snapshot.

        ``only_reads`` says that batches are not collated, which draws no random numbers. Of a
        ticket's ``indices`` only the number counts.

        Raises:
            ValueError: If the stream ends too early, or yields other samples than before.
            BaseException: What the dataset or ``collate_fn`` raises where it did not raise before.
        """
        found = Checkpoint()
        raised: BaseException | None = None
        self._only_reads = only_reads
        try:
            for number in range(checkpoint.at, checkpoint.given):
                try:
                    self.fetch(indices)
                except StopIteration:
                    raise raised or _too_few(checkpoint, number) from None
                except BaseException as error:
                    if isinstance(error, KeyboardInterrupt):
                        raise
                    raised = raised or error  # the checksum shows whether that was so before, too
                found = found.after_batch(None, self.fingerprint)
        finally:
            self._only_reads = False
        if found.check != checkpoint.check:
            raise raised or _other_samples(checkpoint)


def _too_few(checkpoint: Checkpoint, number: int) -> ValueError:
    return ValueError(
        "the state does not fit this loader: it was saved after "
        f"{counted(checkpoint.given, 'batch', 'batches')} of the dataset, and this loader's "
        f"dataset ends after {number}. Give the dataset with which it was saved."
    )


def _other_samples(checkpoint: Checkpoint) -> ValueError:
    return ValueError(
        f"the state does not fit this loader: from "
        f"{'the start' if checkpoint.snapshot is None else 'its state'} on, its dataset yields "
        f"other samples than in the last {checkpoint.skip} before the state. Let its order "
        "depend only on the loader's seed=, the global random generators of a worker process, or "
        "get_worker_info().seed. Or give it state_dict() and load_state_dict()."
    )
