"""The format of a loader's state, and the check whether a state fits a loader."""

import json
import pickle
import reprlib
import zlib
from typing import Any, Literal

from shmloader.batch.explain import find_unpicklable
from shmloader.batch.fingerprint import fingerprint
from shmloader.interruptions import is_interruption

#: Version of the format, the only one that is read.
VERSION = 4

_shortener = reprlib.Repr()
_shortener.maxstring = _shortener.maxother = 200
_short = _shortener.repr

# Keys whose values a state and the loader that takes it must have in common.
_FACTS = ("length", "global_batch", "order", "last_batch", "seed")

# Orders by which a loader yields samples if it has no sampler of the user's.
_REMEDIES = {
    **dict.fromkeys(("shuffled", "RandomSampler", "BatchSampler(RandomSampler)"), "shuffle=True"),
    **dict.fromkeys(("in order", "SequentialSampler", "BatchSampler(SequentialSampler)"), ""),
}

#: The argument that decides the size of the batches that a state counts.
BatchArgument = Literal["batch_size", "batch_sampler", "global batch"]

_OTHERS = {"epoch", "position", "sampler", "persistent"}


def copied(state: dict[str, Any]) -> dict[str, Any]:
    """Return a deep copy of a state, which shares nothing with the user's objects.

    Raises:
        RuntimeError: If the state of a sampler could not be taken, or a part cannot be pickled.
    """
    unsaved = state["sampler"].get("unsaved")
    if unsaved is not None:
        raise RuntimeError(unsaved.text)
    try:
        copy: dict[str, Any] = pickle.loads(pickle.dumps(state, pickle.HIGHEST_PROTOCOL))
        return copy
    except Exception as error:
        if is_interruption(error):
            raise
        found = find_unpicklable([state], ["state"])
        where = "the state" if found is None else found.path
        raise RuntimeError(
            f"the loader's state cannot be pickled: {where}, which the dataset or the sampler has "
            "returned. Return only values that can be pickled from its state_dict(); or set "
            "state_dict = None in its class, or snapshot_every_n_steps=0 for a dataset"
        ) from error


def sealed(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state with a version, and a checksum that shows damage when it is loaded."""
    state = {"version": VERSION, **state}
    return {**state, "checksum": _checksum(state)}


def _checksum(state: dict[str, Any]) -> int:
    """Return a checksum over all values that JSON can write, and fingerprints of all others.

    Only what a dataset's or sampler's own ``state_dict()`` returned has values of other types.
    """
    plain = {**state, "checksum": None}
    # In JSON, tuples become lists and all keys become strings.
    return zlib.crc32(_sorted.encode(_decode(_plain.encode(plain))).encode())


def _describe_value(value: object) -> str:
    return f"{type(value).__qualname__} {fingerprint(value)}"


_plain = json.JSONEncoder(default=_describe_value, skipkeys=True)
_sorted = json.JSONEncoder(sort_keys=True)
_decode = json.JSONDecoder().decode


def check_state(
    state: object, facts: dict[str, Any], batches: BatchArgument = "batch_size"
) -> dict[str, Any]:
    """Check a state before a loader takes it.

    Args:
        state: What the user passed.
        facts: The loader's values of the keys that a state and a loader must have in common.
        batches: The loader's argument that decides the size of its batches.

    Returns:
        The state as it was passed.

    Raises:
        TypeError: If the state is not a dict.
        ValueError: If it was not saved by a loader, has another version, is damaged or does not
            fit.
    """
    if not isinstance(state, dict):
        raise TypeError(
            f"state should be a dict that state_dict() returned, but got {type(state).__name__}"
        )
    version = state.get("version")
    if version not in (None, VERSION):
        raise ValueError(
            f"the state has version {_short(version)}, and this release of shmloader reads version "
            f"{VERSION}. Install the release that has saved it, or begin the epoch anew."
        )
    if version is None or not _OTHERS.union(_FACTS) <= state.keys():
        raise ValueError(
            "the state was not saved by a loader of shmloader: pass what state_dict() of such a "
            f"loader returned. The keys of this one: {', '.join(map(repr, state)) or 'none'}"
        )
    if not is_whole(state):
        raise ValueError(
            "the state is damaged, or was changed after state_dict() had returned it: its checksum "
            f"is wrong: {reprlib.repr(state)}"
        )
    check_facts(state, facts, batches)
    return state


def check_facts(
    state: dict[str, Any], facts: dict[str, Any], batches: BatchArgument = "batch_size"
) -> None:
    """Raise ValueError if a loader's values differ from those in a state.

    Args:
        state: The state.
        facts: The loader's values of keys that a state and a loader must have in common.
        batches: The loader's argument that decides the size of its batches.
    """
    differing = [key for key in facts if state[key] != facts[key]]
    if "order" in differing and {"seed", "last_batch"}.intersection(differing):
        differing.remove("order")  # the others decide the class of a sampler of ours
    wrong = [_describe(key, state[key], facts[key], batches) for key in differing]
    if wrong:
        raise ValueError("\n- ".join(["the state does not fit this loader:", *wrong]))


def _describe(key: str, saved: Any, own: object, batches: BatchArgument) -> str:
    """Return a text that says how a state and a loader differ in a key, and what to set."""
    name, remedy = key, f"Set {key}={_short(saved)}."
    if key == "length":
        name, remedy = "len(dataset)", "Give the dataset with which the state was saved."
    elif key == "order":
        name = "shuffle, sampler or batch_sampler"
        remedy = f"Set {_REMEDIES.get(saved) or 'shuffle=False, and give no sampler'}."
        if saved not in _REMEDIES:
            remedy = "Give samplers of these classes."
    elif key == "global_batch" and batches == "batch_sampler":
        # Those of a seeded order are texts, for any number of ranks.
        ranks = "; the number of ranks may differ" if isinstance(saved, str) else ""
        name = "batches of batch_sampler"
        remedy = f"Give a batch_sampler that makes such batches{ranks}."
    elif key == "global_batch" and batches == "batch_size":
        name, remedy = batches, f"Set batch_size={_short(saved)}."
    elif key == "global_batch":
        name = "global batch (batch_size * num_shards * world_size)"
        remedy = f"Set batch_size so that the product is {_short(saved)}."
    elif key == "last_batch" and batches == "batch_sampler" and saved in ("keep", "discard"):
        remedy = f"Give a batch_sampler with drop_last={saved == 'discard'}."
    return f"{name}: {_short(saved)} in the state, {_short(own)} in this loader. {remedy}"


def is_whole(state: dict[str, Any]) -> bool:
    """Return whether a state is as :func:`sealed` returned it, or as JSON restored that."""
    try:
        return bool(_checksum(state) == state.get("checksum"))
    except (TypeError, ValueError, RecursionError):
        return False
