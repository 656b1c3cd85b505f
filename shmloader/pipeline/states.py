"""Writes and reads the state of a pipeline, and checks that a state fits a pipeline."""

import reprlib
from collections.abc import Callable, Sized
from typing import Any

from shmloader.loader.states import is_whole, sealed
from shmloader.pipeline.config import Aggregate, OpKind, PipelineConfig, RunsOn
from shmloader.pipeline.source import Resumes, Unsaved, how_it_resumes
from shmloader.pipeline.stages import Checkpoint

_VERSION = 1
_KEYS = {"pipeline", "source", "read", "results"}

# What a state and the pipeline that takes it must have in common.
_FACTS = {"resumes": "how the source is resumed", "length": "length", "stages": "stages"}


def save_state(config: PipelineConfig, checkpoint: Callable[[], Checkpoint]) -> dict[str, Any]:
    """Return a pipeline's state.

    Args:
        config: The pipeline's configuration.
        checkpoint: Returns the checkpoint where the resumed epoch begins.

    Raises:
        RuntimeError: If the pipeline cannot be resumed.
        Exception: The exception of the source's ``state_dict()``, or of copying its state.
    """
    _check_resumable(config)
    found = checkpoint()
    if isinstance(found.saved, Unsaved):
        raise found.saved.error
    return sealed(
        {
            "version": _VERSION,
            "pipeline": _facts(config),
            "source": found.saved,
            "read": found.read,
            "results": [list(one) for one in found.results],
        }
    )


def check_state(config: PipelineConfig, state: object) -> Checkpoint:
    """Check a state, and return the checkpoint where the resumed epoch begins.

    Args:
        config: The configuration of the pipeline that loads the state.
        state: What the user passed to ``load_state_dict()``.

    Raises:
        TypeError: If the state is not a dict.
        ValueError: If the state was not saved by a pipeline, is damaged, or does not fit.
        RuntimeError: If the pipeline cannot be resumed.
    """
    _check_resumable(config)
    if not isinstance(state, dict):
        raise TypeError(
            f"state should be a dict that state_dict() returned, but got {type(state).__name__}"
        )
    if not state.keys() >= _KEYS or not isinstance(state["pipeline"], dict):
        raise ValueError(
            "the state was not saved by a pipeline of shmloader; its keys: "
            f"{', '.join(map(repr, state)) or 'none'}"
        )
    if state.get("version") != _VERSION:
        raise ValueError(
            f"the state has version {reprlib.repr(state.get('version'))}, but this release of "
            f"shmloader reads version {_VERSION} of a pipeline's state"
        )
    if not is_whole(state):
        raise ValueError(f"the state is damaged: its checksum is wrong: {reprlib.repr(state)}")
    found, expected = state["pipeline"], _facts(config)
    wrong = [
        f"{name}: {found.get(key)!r} in the state, {expected[key]!r} in this pipeline"
        for key, name in _FACTS.items()
        if found.get(key) != expected[key]
    ]
    if wrong:
        raise ValueError(f"the state does not fit this pipeline ({'; '.join(wrong)})")
    results = tuple((number, count) for number, count in state["results"])
    return Checkpoint(state["source"], state["read"], results)


def _check_resumable(config: PipelineConfig) -> None:
    why = config.why_not_resumable()
    if why:
        raise RuntimeError(why)


def _facts(config: PipelineConfig) -> dict[str, Any]:
    how = how_it_resumes(config.source)
    source = config.source
    by_index = how is Resumes.BY_INDEX and isinstance(source, Sized)
    return {
        "resumes": how.value,
        "length": len(source) if by_index and isinstance(source, Sized) else None,
        "stages": [_fact(stage) for stage in config.stages],
    }


def _fact(stage: Any) -> str:
    """Describe how many results a stage makes of an item."""
    if isinstance(stage, Aggregate):
        return f"aggregate({stage.size}{', drop_last=True' if stage.drop_last else ''})"
    makes_many = stage.kind in {OpKind.GENERATOR, OpKind.ASYNC_GENERATOR}
    return "many results" if makes_many and stage.runs_on is not RunsOn.DEVICE else "one result"
