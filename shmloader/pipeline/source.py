"""Iterates a source, and makes the checkpoints and the states from which an epoch can be resumed.

A source can be resumed

* by its own state, if it has both ``state_dict()`` and ``load_state_dict()``. The state is taken on
  the thread that iterates the source, after an item and before the next one is requested. If it is
  not taken after each item, the items since then are counted, and a resumed epoch reads them again.
* by index, if it is a ``collections.abc.Sequence`` (a list, a range, …).
"""

import copy
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from shmloader.grammar import counted, described_type
from shmloader.pipeline.config import PipelineConfig, Source
from shmloader.pipeline.stages import Checkpoint
from shmloader.sampling.hooks import has_own_state

_VERSION = 2


def _saved_state(source: Any) -> object:
    """Return a source's own state, or the exception for which it cannot be taken."""
    try:
        return copy.deepcopy(source.state_dict())
    except Exception as error:  # noqa: BLE001 - raised where the pipeline's state is asked for
        return error


def fresh(source: Source) -> Checkpoint | None:
    """Return the checkpoint where a new epoch begins; None if the source cannot be resumed."""
    if has_own_state(source):
        return Checkpoint(_saved_state(source), 0)
    return Checkpoint(None, 0) if isinstance(source, Sequence) else None


class SourceReader:
    """Iterates a source once, from a checkpoint on (None if the pipeline cannot be resumed).

    A source with a state of its own has loaded ``start.saved`` before.
    """

    def __init__(self, config: PipelineConfig, start: Checkpoint | None) -> None:
        self.start = start
        self._source: Any = config.source
        self._has_state = start is not None and has_own_state(config.source)
        self._every = config.snapshot_every if self._has_state else 0
        self._saved, self._read = (None, 0) if start is None else (start.saved, start.read)

    def iterate(self) -> Iterator[Any]:
        """Return an iterator over the items that are left. Called on the source's thread."""
        if self._read and not self._has_state:
            return map(self._source.__getitem__, range(self._read, len(self._source)))
        items: Iterator[Any] = iter(self._source)
        found = sum(1 for _ in itertools.islice(items, self._read))
        if found < self._read:
            raise RuntimeError(
                f"the source yielded {counted(found, 'item')} from its loaded state on, but "
                f"{self._read} were read when the state was saved. Its data has changed, or its "
                "load_state_dict() does not restore what its state_dict() returned."
            )
        return items

    def checkpoint(self) -> Checkpoint | None:
        """Return the checkpoint after the next item. Called where the source has yielded it."""
        if self.start is None:
            return None
        self._read += 1
        if self._read == self._every:
            self._saved, self._read = _saved_state(self._source), 0
        return Checkpoint(self._saved, self._read)

    def end(self) -> Checkpoint | None:
        """Return where the next epoch begins. Called where the source has ended."""
        return None if self.start is None else fresh(self._source)


def why_not_resumable(config: PipelineConfig) -> str:
    """Return why a pipeline has no state; "" if it has one."""
    if not has_own_state(config.source) and not isinstance(config.source, Sequence):
        return (
            f"the pipeline's source, {described_type(config.source)}, cannot be resumed: give "
            "add_source a sequence (a list, a range), or an object with state_dict() and "
            "load_state_dict()"
        )
    for stage in config.stages:
        # A single worker process, too, takes one item after another.
        if not (stage.in_order or stage.concurrency == 1):
            return (
                f"{stage.title} of the pipeline passes results on as they are ready, so a "
                "position does not tell which items came before: give the stage "
                "output_order='input'"
            )
    return ""


def save_state(config: PipelineConfig, found: Checkpoint) -> dict[str, Any]:
    """Return the state of a pipeline. Raises what the source's ``state_dict()`` has raised."""
    if isinstance(found.saved, Exception):
        raise found.saved
    return {
        "version": _VERSION,
        "pipeline": _facts(config),
        "source": found.saved,
        "read": found.read,
        "results": [list(one) for one in found.results],
    }


def checked_state(config: PipelineConfig, state: Any) -> Checkpoint:
    """Check a state, and return the checkpoint where the resumed epoch begins."""
    if not isinstance(state, dict) or "pipeline" not in state or state["version"] != _VERSION:
        raise ValueError(
            f"the state was not saved by a pipeline of shmloader (version {_VERSION}): it is "
            f"{described_type(state)} with {', '.join(map(repr, state)) or 'nothing'}"
        )
    found, facts = state["pipeline"], _facts(config)
    if found != facts:
        raise ValueError(
            f"the state does not fit this pipeline ({facts}): it is of one with {found}"
        )
    results = tuple((number, count) for number, count in state["results"])
    return Checkpoint(state["source"], state["read"], results)


def _facts(config: PipelineConfig) -> str:
    """Return what a state and the pipeline that takes it must have in common."""
    source: Any = config.source
    facts = ["its own state" if has_own_state(source) else f"length {len(source)}"]
    for stage in config.stages:
        ending = ", drop_last=True" if stage.drop_last else ""
        many = "many results" if stage.makes_many else "one result"
        facts.append(f"{stage.name}{ending}" if stage.size else many)
    return "; ".join(facts)
