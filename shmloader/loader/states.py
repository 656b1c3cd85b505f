"""The format of a loader's state, and the check whether a state fits a loader."""

import pickle
import reprlib
from typing import Any

from shmloader.interruptions import Caught, attempt

#: Version of the format, the only one that is read.
VERSION = 8

_shortener = reprlib.Repr()
_shortener.maxstring = _shortener.maxother = 200

# Keys whose values a state and the loader that takes it must have in common, as messages name them.
_FACTS = {
    "length": "len(dataset)",
    "global_batch": "size of a batch, over all ranks",
    "order": "stream, shuffle, sampler or batch_sampler",
    "last_batch": "last_batch or drop_last",
    "seed": "seed",
}

# Others, and their types.
_KINDS = {"epoch": int, "position": int, "sampler": dict}


def versioned(state: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a state, with a version, which shares nothing with the user.

    Raises:
        RuntimeError: If the state of a sampler could not be taken, or a part cannot be pickled.
    """
    unsaved = state["sampler"].get("unsaved")
    if unsaved is not None:
        raise RuntimeError(unsaved.text)
    pickled = attempt(pickle.dumps, {"version": VERSION, **state}, pickle.HIGHEST_PROTOCOL)
    if isinstance(pickled, Caught):
        raise RuntimeError(
            f"the loader's state cannot be pickled: {pickled.error}. Return only values that can "
            "be pickled from state_dict() of the dataset and the sampler. To leave that state out, "
            "set state_dict = None in its class, or snapshot_every_n_steps=0 for a dataset."
        ) from pickled.error
    copy: dict[str, Any] = pickle.loads(pickled)
    return copy


def check_state(state: object, facts: dict[str, Any]) -> dict[str, Any]:
    """Check a state before a loader takes it, and return it.

    Raises:
        TypeError: If the state is not a dict.
        ValueError: If it was not saved by a loader, has another version or does not fit.
    """
    if not isinstance(state, dict):
        raise TypeError(
            f"state should be a dict that state_dict() returned, but got {type(state).__name__}"
        )
    version = state.get("version")
    if version not in (None, VERSION):
        raise ValueError(
            f"the state has version {_shortener.repr(version)}, and this release of shmloader "
            f"reads version {VERSION}. Install the release that has saved it, or begin the epoch "
            "anew."
        )
    is_whole = {*_FACTS, *_KINDS, "persistent"} <= state.keys()
    is_right = is_whole and all(isinstance(state[key], kind) for key, kind in _KINDS.items())
    if version is None or not is_right or state["position"] < 0:
        raise ValueError(
            "the state was not saved by a loader of shmloader: pass what state_dict() of such a "
            f"loader returned. The keys of this one: {', '.join(map(repr, state)) or 'none'}"
        )
    check_facts(state, facts)
    return state


def check_facts(state: dict[str, Any], facts: dict[str, Any]) -> None:
    """Raise ValueError if a loader's values differ from those of the same keys in a state."""
    wrong = [
        f"- {_FACTS[key]}: {_shortener.repr(state[key])} in the state, "
        f"{_shortener.repr(fact)} in this loader.\n"
        for key, fact in facts.items()
        if state[key] != fact
    ]
    if wrong:
        raise ValueError(
            f"the state does not fit this loader:\n{''.join(wrong)}"
            "Give the arguments with which the state was saved."
        )
