"""The order of a loader over a stream: one reading a batch, for this rank.

The order is that of :mod:`shmloader.streams.rounds`. Rank r of W has batches r, r + W, and so on.
What workers find out about readers comes back with their answers (:meth:`ReaderOrder.hear`), and
the next readings begin from the positions found. Ranks tell one another by :class:`Board`.

Used on the user's thread, apart from :meth:`ReaderOrder.hear`.
"""

import collections
import itertools
from collections.abc import Callable
from typing import Any, Self

from shmloader.grammar import warn_user
from shmloader.sampling.arguments import Ranks
from shmloader.sampling.progress import Progress
from shmloader.sampling.sampler_state import Order
from shmloader.streams.board import Board, pauses, store_of_job
from shmloader.streams.fingerprints import LETTERS, check_sizes, digest, sizes_digest
from shmloader.streams.reader import Found, Reading
from shmloader.streams.rounds import Facts, Rounds, Unknown
from shmloader.streams.stream import Stream

#: How many batches of a reader are known ahead of the one that is made. With ranks, a further one,
#: so that a rank need not wait for the others' newest batches before it draws its next ones.
_AHEAD, _AHEAD_OF_RANKS = 1, 2

# How long state_dict() waits for what other ranks have delivered.
_STATE_TIMEOUT_S = 60.0


# How many loaders of this process have streams with the same facts, by a checksum of these.
_LOADERS: collections.Counter[str] = collections.Counter()


class NotYet(StopIteration):
    """No batch can be drawn now: other ranks have to make theirs first."""


class ReaderOrder(Order):
    """Yields the readings of one rank, epoch by epoch.

    Attributes:
        may_wait: Whether to wait for other ranks: only while no batch is being made here.
        timeout_s: How long to wait for other ranks, in seconds; 0 waits without a limit.
        repeats: How many steps this rank has made once it has repeated a batch; -1 if it repeats
            none.

    Args:
        stream: The stream.
        seed: The loader's seed; None if there is none.
        ranks: Finds rank and world size; None for one rank.
        last_batch: With several ranks, what the last step does that has fewer batches than ranks.
            "pad": the other ranks repeat the last batch of all. "discard": the step is left out, as
            is what is left once fewer readers than ranks have batches. A step of the first
            round, or of the first two after a resume, is filled up instead.
    """

    def __init__(
        self,
        stream: Stream,
        seed: int | None,
        ranks: Ranks | None = None,
        last_batch: str = "pad",
    ) -> None:
        super().__init__(None)
        self._stream, self._seed = stream, seed
        self._ranks, self._last_batch = ranks, last_batch
        self.timeout_s, self.may_wait, self.repeats = 0.0, False, -1
        # Number the loader, and its epochs in this process, as the other ranks number theirs.
        self._loader, self._epoch_count = -1, 0
        self._warned = set[str]()

    def __getstate__(self) -> dict[str, Any]:
        """Return everything but a running epoch: a copy begins its own."""
        return vars(ReaderOrder(self._stream, self._seed, self._ranks, self._last_batch))

    @property
    def index_sampler(self) -> "ReaderOrder":
        """The sampler that torch's iterators iterate."""
        return self

    def count(self, epoch: int) -> int:
        """Return the number of batches that this rank gets in an epoch from its beginning on.

        Raises:
            TypeError: If that is known only once the shards have been read.
        """
        counts = self._stream.batch_counts(epoch)
        world_size = 1 if self._ranks is None else self._ranks.find()[1]
        if self._last_batch == "discard":
            # Up to the round in which fewer readers than ranks have a batch.
            most = sorted(counts, reverse=True)[min(world_size, len(counts)) - 1]
            return sum(min(each, most) for each in counts) // world_size
        return -(-sum(counts) // world_size)

    # Epochs ------------------------------------------------------------------------------

    def begin(self, number: int, progress: Progress, saved: dict[str, Any] | None = None) -> None:
        """Set the epoch that is iterated next; see :meth:`Order.begin`."""
        super().begin(number, progress, saved)
        stream, saved = self._stream, saved or {}
        rank, world_size = self._cut = (0, 1) if self._ranks is None else self._ranks.find()
        if self._ranks is None and (known := Ranks(None, None).known) and known[1] > 1:
            self._warn(
                f"DataLoader does not divide a stream: each of the {known[1]} ranks reads all of "
                "it. ShardedDataLoader divides it."
            )
        if stream.readers < world_size:
            raise ValueError(
                f"the stream has readers={stream.readers} for {world_size} ranks, and each rank "
                f"needs one: give readers={world_size} or more"
            )
        # Digests of the sizes of shards for the epoch's states, once there is one; and those that
        # readers compare.
        self._sizes = saved.get("sizes", "")
        self._expected = self._sizes if len(self._sizes) > LETTERS else ""
        new = {"at": (0, -1), "facts": [(0, 0, None)] * stream.readers}
        readers = saved.get("readers", new)
        self._facts = list(map(Facts.load, readers["facts"]))
        # The batch that was delivered last; those drawn after it; how many were delivered, and how
        # many of these are gaps.
        self._at: tuple[int, int] = tuple(readers["at"])
        self._drawn: collections.deque[tuple[int, int]] = collections.deque()
        self._passed = self._gaps = self._forgets_at = 0
        self._rounds = Rounds(self._facts, self._at, is_strict=world_size > 1)
        self._heard: collections.deque[Found] = collections.deque()
        # The batches that were found of the order, and that of this rank in the step's, if it was.
        self._found_count = 0
        self._own: tuple[int, int] | None = None
        # Whether the present step is left out if it has too few batches. Not one that begins in the
        # first round, or in the first two after a resume: how many batches the next round has may
        # be known only when those of this step were made.
        self._discards, self._lenient_round = False, self._at[0] + ("readers" in saved)
        # How many readings could not be drawn when they were asked for.
        self._owed = 0
        self._is_over = False
        self.repeats, self._repeated = -1, 0
        self._board: Board | None = None
        if world_size > 1:
            store = stream.store or store_of_job()
            name = f"{self._number()}/{self._epoch_count}"
            self._epoch_count += 1
            self._board = Board(store, name, self._facts, range(rank, stream.readers, world_size))

    def _warn(self, text: str) -> None:
        """Warn once."""
        if text not in self._warned:
            self._warned.add(text)
            warn_user(text)

    def check_workers(self, count: int) -> None:
        """Warn once if some of a rank's workers will have no reader."""
        readers, world_size = self._stream.readers, self._cut[1]
        if count > max(1, readers // world_size):
            self._warn(
                f"{count} workers share the {readers // world_size} readers of this rank, so some "
                f"have nothing to do: give the stream readers={count * world_size} or more"
            )

    def _number(self) -> str:
        """Return a name of this loader that its loaders on other ranks have as well."""
        facts = digest(self._stream.facts())
        if self._stream.store is not None:
            return facts
        if self._loader < 0:
            self._loader = _LOADERS[facts]
            _LOADERS[facts] += 1
        return f"{facts}/{self._loader}"

    def __iter__(self) -> Self:
        """Return this: the epoch's readings, of which there may be more after StopIteration."""
        return self

    def hear(self, found: Found, *, is_told_now: bool) -> None:
        """Record what was found with a batch.

        Called on the engine's thread, or with ``is_told_now`` on the user's, which tells other
        ranks now. Otherwise they are told with the next reading, which is drawn before the batch is
        delivered.
        """
        self._heard.append(found)
        if is_told_now:
            self._hear_all()

    def _hear_all(self) -> None:
        while self._heard:
            found = self._heard.popleft()
            if self.repeats >= 0 and (found.round, found.reader) == self._rounds.at:
                self._repeated = found.size
            self._facts[found.reader].add(found)
            if self._board is None:
                continue
            if not found.size and not found.round:
                raise ValueError(
                    f"reader {found.reader} of the stream has no batch, and with "
                    f"{self._cut[1]} ranks each reader needs one. Give fewer readers than "
                    f"{self._stream.readers}, or smaller batches."
                )
            self._board.post(found.reader)

    def __next__(self) -> Reading:
        """Return the next reading of this rank.

        Raises:
            StopIteration: At the end.
            NotYet: If other ranks have to make their batches first.
            LoaderTimeoutError: If they were waited for too long.
        """
        self._pass()
        if self._is_over:
            raise StopIteration
        waits = pauses(self.timeout_s, self._describe_wait()) if self.may_wait else ()
        looks = itertools.chain((None,), waits)  # what others have posted may be enough
        while True:
            try:
                return self._next()
            except Unknown:
                assert self._board is not None
                if next(looks, self) is self:
                    self._owed += 1
                    raise NotYet from None
                self._board.read()

    def draw_owed(self, draw: Callable[[], object], *, may_wait: bool = False) -> int:
        """Draw readings again that could not be drawn before, and return how many there were.

        Args:
            draw: Draws one.
            may_wait: Whether to wait for other ranks with the first one.
        """
        owed, self._owed = self._owed, 0
        for number in range(owed):
            self.may_wait = may_wait and not number
            try:
                draw()
            finally:
                self.may_wait = False
        return owed

    def _describe_wait(self) -> str:
        rank, world_size = self._cut
        return (
            f"rank {rank} of {world_size} waits to hear from the other ranks which readers of the "
            "stream have ended. All ranks have to iterate their loaders in step"
        )

    def _next(self) -> Reading:
        """Return the next reading; raise Unknown if more has to be known first."""
        rank, world_size = self._cut
        while True:
            is_start = self._found_count % world_size == 0
            own = self._own
            if own is not None and (is_start or not self._discards):
                self._own = None
                return self._reading(*own)
            least = world_size if self._last_batch == "discard" and is_start else 1
            following = self._rounds.next(world_size if self._discards else least)
            if following is None:
                return self._end()
            if is_start:
                is_lenient = following[0] <= self._lenient_round
                self._discards = self._last_batch == "discard" and not is_lenient
            if self._found_count % world_size == rank:
                self._own = following
            self._found_count += 1

    def _end(self) -> Reading:
        """Return the reading that fills up the last step; raise StopIteration if that has one."""
        rank, count = self._cut[0], self._found_count % self._cut[1]
        self._is_over = True
        if self._discards or not count or rank < count:
            raise StopIteration
        # The last batch of all, on each of these ranks.
        self.repeats = self._passed + len(self._drawn) + 1
        return self._reading(*self._rounds.at)

    def _reading(self, number: int, reader: int) -> Reading:
        self._drawn.append((number, reader))
        at, state = self._facts[reader].before(number)
        world_size = self._cut[1]
        ahead = _AHEAD if world_size == 1 else _AHEAD_OF_RANKS
        route = reader // world_size
        sizes = self._expected[LETTERS * reader :][:LETTERS]
        return Reading(self._epoch.number, reader, number, at, state, ahead, route, sizes)

    def repeats_before(self, position: int) -> int:
        """Return how many records of the newest epoch's batch before a position are repeats."""
        self._hear_all()
        progress = self._epoch.progress
        steps = (position - progress.start) // progress.unit
        return self._repeated if steps == self.repeats else 0

    # States ------------------------------------------------------------------------------

    def _pass(self) -> None:
        """Go past what was delivered."""
        self._hear_all()
        progress = self._epoch.progress
        passed = (progress.position - progress.start) // progress.unit
        while self._passed < passed:
            self._passed += 1
            self._at = number, reader = self._drawn.popleft()
            self._gaps += self._facts[reader].has(number) is False
        if self._passed >= self._forgets_at:
            self._forgets_at = self._passed + len(self._facts)
            for one in self._facts:
                one.forget(self._at[0])

    def _last_of_step(self) -> tuple[int, int]:
        """Return the last batch of the step that was delivered last, on all ranks."""
        rank, world_size = self._cut
        if not self._passed or world_size == 1:
            return self._at
        assert self._board is not None
        for _ in pauses(_STATE_TIMEOUT_S, self._describe_wait()):
            self._board.read()
            rounds = Rounds(self._facts, self._at, is_strict=True)
            try:
                for _ in range(world_size - 1 - rank):
                    rounds.next()
            except Unknown:
                continue
            # The ranks that resume would all wait for a batch of which the state knows nothing.
            number, reader = rounds.at
            following = (number + (each <= reader) for each in range(len(self._facts)))
            pairs = zip(self._facts, following, strict=True)
            if all(not each or one.has(each) is not None for one, each in pairs):
                return rounds.at
        raise AssertionError  # pauses() has no end

    def dump(self) -> dict[str, Any]:
        """Return where the newest epoch is, as plain values."""
        self._pass()
        number, reader = self._last_of_step()
        facts = [one.dump(number + (at <= reader)) for at, one in enumerate(self._facts)]
        readers = {"at": [number, reader], "facts": facts}
        if not self._sizes:
            self._sizes = self._sizes_now(self._epoch.number)
        state = self.state().dump(has_started=False)
        return {**state, "has_started": True, "readers": readers, "sizes": self._sizes}

    def dump_next(self) -> dict[str, Any]:
        """Return the state of the next epoch, as plain values."""
        state = self.state().dump(has_started=False)
        return {**state, "sizes": self._sizes_now(None)}

    def _sizes_now(self, epoch: int | None) -> str:
        """Return the digests of the sizes of shards: of each reader, or of all for no epoch.

        Of all as well if readers share them in later passes of the epoch.
        """
        stream = self._stream
        if epoch is None or stream.repeats:
            return sizes_digest([stream.paths])
        return sizes_digest(stream.shards(epoch, reader) for reader in range(stream.readers))

    def facts(self) -> dict[str, Any]:
        """Return what a state and this loader must have in common, on any number of ranks."""
        order = self._stream.facts()
        return {"global_batch": None, "order": order, "last_batch": None, "seed": self._seed}

    def check_progress(self, state: dict[str, Any]) -> None:
        """Raise ValueError if shards have other sizes than in the state, unless readers do that."""
        sizes = state["sampler"].get("sizes", "")
        if len(sizes) == LETTERS:
            check_sizes(self._stream.paths, sizes)

    def dump_progress(self, *, in_order: bool) -> dict[str, Any]:  # noqa: ARG002 - always in order
        """Return how many batches of all ranks were delivered, as plain values."""
        self._pass()
        return {"position": self._epoch.progress.position - self._gaps}

    def load_progress(self, state: dict[str, Any] | None) -> Progress:
        """Return a new progress, or that which :meth:`dump_progress` has saved, on these ranks."""
        return Progress.load(state, 1 if self._ranks is None else self._ranks.find()[1])
