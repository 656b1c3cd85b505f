"""Mixes of streams, by shares of their samples or of their tokens."""

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from numbers import Real
from typing import Any, Literal

from shmloader.sampling.arguments import choice, whole_number
from shmloader.streams.mixed import Mixed, Phase
from shmloader.streams.stages import Length, Repeated, Run, Stage, share_of, token_count
from shmloader.streams.stream import Stream

#: A weight for each stream.
Weights = Mapping[Stream, float] | Sequence[tuple[Stream, float]]

# The sum of weights as whole numbers, but for rounding.
_ONE = 1 << 30


def mix(
    weights: Weights,
    *,
    by: Literal["samples", "tokens"] = "samples",
    stop: Literal["first", "all"] | int = "first",
    schedule: Mapping[int, Weights] | None = None,
    length: Length | None = None,
) -> Stream:
    """Return a stream that draws each record from one of several streams.

    Reader r of the mix draws from the readers r of the streams, so all need the same number of
    readers. There are no random numbers: the next record comes from the stream that lags most
    behind its share. So shares hold in every part of the order: to a percentage point in 1,000
    samples, in batches of 64 from 64 readers. A mix can be shuffled, mapped, batched and mixed:
    ``mix({web: 0.7, code: 0.3}, stop="all").shuffle(1_000).batch(64)``.

    Args:
        weights: The weight of each stream, above 0, as a dict or a list of pairs. What counts is
            their ratio.
        by: Whether shares count samples or tokens.
        stop: "first": each reader ends when a stream has no further record for it. "all": it goes
            on with the others, whose shares keep their ratio. A number: the mix ends after so many
            samples, and streams are repeated as long as that takes, in the order of further epochs.
        schedule: Weights from later samples on: ``{1_000_000: {web: 0.5, code: 0.5}}``. Samples of
            the mix are counted across its readers in turns, as :meth:`Stream.take` does, from 0 in
            each epoch. A stream that is left out is not drawn then.
        length: Returns the number of tokens of a record. By default, that is the length of the
            record, or of its field "input_ids" if it is a dict. A record without tokens counts as
            one.

    Raises:
        TypeError: If something is no stream, or makes batches, or a weight is no number.
        ValueError: If there is no stream, one comes twice, they have different numbers of readers,
            or a weight is not above 0.
    """
    choice(by, "by", ("samples", "tokens"))
    if stop not in ("first", "all"):
        if isinstance(stop, str):
            raise ValueError(f"stop should be 'first', 'all' or a number, but is {stop!r}")
        stop = whole_number(stop, "stop", minimum=1)
    if by == "samples" and length is not None:
        raise ValueError("length is used with by='tokens' only: leave it out")
    pairs = _checked(weights, "weights")
    streams = [stream for stream, _ in pairs]
    readers = [stream.readers for stream in streams]
    if len(set(readers)) > 1:
        raise ValueError(
            f"the streams of a mix need the same number of readers, but have {readers}: give all "
            f"of them readers={min(readers)}"
        )
    phases = [(0, _shares([weight for _, weight in pairs]))]
    for first, given in sorted((schedule or {}).items()):
        whole_number(first, "a sample in schedule", minimum=0)
        later = dict(_checked(given, f"schedule[{first}]"))
        unknown = [stream for stream in later if stream not in streams]
        if unknown:
            raise ValueError(f"schedule[{first}] has {unknown[0]!r}, which weights do not have")
        phases.append((first, _shares([later.get(stream, 0) for stream in streams])))
    of_record = (length or token_count) if by == "tokens" else None
    return Mix(streams, phases, of_record, stop)


def _checked(weights: Weights, name: str) -> list[tuple[Stream, float]]:
    pairs: list[Any] = list(weights.items() if isinstance(weights, Mapping) else weights)
    if any(isinstance(pair, Stream) for pair in pairs):
        raise TypeError(f"{name} should be a dict of streams to weights, or a list of such pairs")
    if not pairs:
        raise ValueError(f"{name} should have a weight for at least one stream, but is empty")
    seen: list[Stream] = []
    weight: Any
    for number, (stream, weight) in enumerate(pairs):
        if not isinstance(stream, Stream):
            raise TypeError(f"{name} should have streams, but stream {number} is {stream!r}")
        if stream.is_batched:
            raise TypeError(
                f"stream {number} in {name} makes batches, and a mix draws records: call batch() "
                "or pack() of the mix"
            )
        if any(stream is one for one in seen):
            raise ValueError(f"stream {number} in {name} is given twice")
        seen.append(stream)
        if isinstance(weight, bool) or not isinstance(weight, Real):
            raise TypeError(f"weight {number} in {name} should be a number, but is {weight!r}")
        if not 0 < float(weight) < math.inf:
            raise ValueError(f"weight {number} in {name} should be above 0, but is {weight!r}")
    return pairs


def _shares(weights: Sequence[float]) -> tuple[int, ...]:
    """Return weights as whole numbers, at least 1 for a weight above 0."""
    total = sum(weights)
    return tuple(max(1, round(weight / total * _ONE)) if weight else 0 for weight in weights)


class Mix(Stream):
    """Draws the records of streams. See :func:`mix` for the arguments."""

    def __init__(
        self,
        streams: Sequence[Stream],
        phases: Sequence[Phase],
        length: Length | None,
        stop: Literal["first", "all"] | int,
    ) -> None:
        first, paths = streams[0], [path for stream in streams for path in stream.paths]
        seeks = all(stream.seeks for stream in streams)
        super().__init__(paths, first.readers, first.seed, first.store, seeks)
        self._streams, self._phases, self._length, self._stop = streams, phases, length, stop

    @property
    def repeats(self) -> bool:
        """Whether a reader reads shards of other readers in later passes of an epoch."""
        again = isinstance(self._stop, int) or any(stream.repeats for stream in self._streams)
        return again or super().repeats

    def shards(self, epoch: int, reader: int) -> list[str]:
        """Return the shards of a reader in the first pass of an epoch."""
        of_each = (stream.shards(epoch, reader) for stream in self._streams)
        return list(itertools.chain.from_iterable(of_each))

    def _open(self, run: Run) -> Stage:
        """Return the stage that draws the records of a reader."""
        share = functools.partial(share_of, reader=run.reader, readers=run.readers)
        own = [(share(first), weights) for first, weights in self._phases]
        stop = share(self._stop) if isinstance(self._stop, int) else self._stop
        sources = list[Stage]()
        for number, stream in enumerate(self._streams):
            each = replace(run, source=(*run.source, number))
            sources.append(stream.stage(each))
            if isinstance(stop, int):
                sources[-1] = Repeated(sources[-1], each, stream.stage)
        return Mixed(run, sources, own, self._length, stop)

    def _source_counts(self, epoch: int) -> list[int]:
        """Return how many records each reader's lowest stage has in an epoch."""
        if isinstance(self._stop, int):
            return [share_of(self._stop, each, self.readers) for each in range(self.readers)]
        if self._stop == "first" or len(self._phases) > 1:
            raise TypeError(
                "the number of batches of a mix is known only with stop='all' and no schedule, or "
                "with a number for stop"
            )
        counts = [stream.record_counts(epoch) for stream in self._streams]
        return list(map(sum, zip(*counts, strict=True)))

    def _source_facts(self) -> str:
        """Return what the order of the records depends on, as a text."""
        streams = "; ".join(stream.facts() for stream in self._streams)
        by = "samples" if self._length is None else "tokens"
        return f"a mix by {by} with stop={self._stop!r} and weights {self._phases} of [{streams}]"
