"""The format of a loader's state, and the check whether a state fits a loader."""

import json
import pickle
import reprlib
import zlib
from typing import Any, Literal

from shmloader.batch.fingerprint import fingerprint
from shmloader.batch.unpicklable import find_unpicklable
from shmloader.interruptions import is_interruption

#: Version of the format, the only one that is read.
VERSION = 3

_shortener = reprlib.Repr()
_shortener.maxstring = _shortener.maxother = 200
_short = _shortener.repr

# Maximum number of batches that may have been delivered ahead of one that is late.
_MOST_AHEAD = 100_000_000

# Maximum of the epoch number, the position and other counts: a larger number shows damage.
_LARGEST = 1 << 53

# Keys whose values a state and the loader that takes it must have in common.
_FACTS = ("length", "global_batch", "order", "last_batch", "seed")

# Orders by which a loader yields samples if it has no sampler of the user's.
_SHUFFLED = ("shuffled", "RandomSampler", "BatchSampler(RandomSampler)")
_SEQUENTIAL = ("in order", "SequentialSampler", "BatchSampler(SequentialSampler)")

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
    if not _is_sound(state):
        raise ValueError(f"the state is damaged: {reprlib.repr(state)}")
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
    found = {key: state[key] for key in facts}
    differing = [key for key in facts if found[key] != facts[key]]
    if len(differing) > 1 and _is_like(found["order"], facts["order"]):
        differing = [key for key in differing if key != "order"]  # the others decide that
    wrong = [_describe(key, found[key], facts[key], batches) for key in differing]
    if wrong:
        raise ValueError("\n- ".join(["the state does not fit this loader:", *wrong]))


def _describe(key: str, saved: object, own: object, batches: BatchArgument) -> str:
    """Return a text that says how a state and a loader differ in a key, and what to set."""
    name, remedy = {
        "length": _of_length,
        "global_batch": _of_batches,
        "order": _of_order,
        "last_batch": _of_last_batch,
        "seed": _of_seed,
    }[key](saved, batches)
    return f"{name}: {_short(saved)} in the state, {_short(own)} in this loader. {remedy}"


def _is_like(one: object, other: object) -> bool:
    """Whether two kinds of samplers differ only by the loader's last_batch or seed."""
    kinds = [str(sampler).removeprefix("Rollover") for sampler in (one, other)]
    both = set(kinds)
    return len(both) == 1 or both <= set(_SHUFFLED) or both <= set(_SEQUENTIAL)


def _of_length(_saved: object, _: BatchArgument) -> tuple[str, str]:
    return "len(dataset)", "Give the dataset with which the state was saved."


def _of_batches(saved: object, batches: BatchArgument) -> tuple[str, str]:
    if batches == "batch_size":
        return "batch_size", f"Set batch_size={_short(saved)}."
    if batches == "batch_sampler":
        # Those of a seeded order are texts, for any number of ranks.
        ranks = "; the number of ranks may differ" if isinstance(saved, str) else ""
        return "batches of batch_sampler", f"Give a batch_sampler that makes such batches{ranks}."
    return (
        "global batch (batch_size * num_shards * world_size)",
        f"Set batch_size so that the product is {_short(saved)}.",
    )


def _of_order(saved: object, _: BatchArgument) -> tuple[str, str]:
    name = "shuffle, sampler or batch_sampler"
    if saved in _SHUFFLED:
        return name, "Set shuffle=True."
    if saved in _SEQUENTIAL:
        return name, "Set shuffle=False, and give no sampler."
    if saved is None:
        return name, "The state is that of an IterableDataset."
    return name, "Give samplers of these classes."


def _of_last_batch(saved: object, batches: BatchArgument) -> tuple[str, str]:
    if batches == "batch_sampler" and saved in ("keep", "discard"):
        return "last_batch", f"Give a batch_sampler with drop_last={saved == 'discard'}."
    also = " (or drop_last=True)" if saved == "discard" else ""
    return "last_batch", f"Set last_batch={_short(saved)}{also}."


def _of_seed(saved: object, _: BatchArgument) -> tuple[str, str]:
    return "seed", "Give no seed." if saved is None else f"Set seed={_short(saved)}."


def is_whole(state: dict[str, Any]) -> bool:
    """Return whether a state is as :func:`sealed` returned it, or as JSON restored that."""
    try:
        return bool(_checksum(state) == state.get("checksum"))
    except (TypeError, ValueError, RecursionError):
        return False


def _is_sound(state: dict[str, Any]) -> bool:
    sampler = state["sampler"]
    return (
        all(map(_is_number, (state["epoch"], state["position"])))
        and isinstance(state.get("ahead", []), list)
        and all(map(_is_run, state.get("ahead", [])))
        and sum(last - first for first, last in state.get("ahead", [])) <= _MOST_AHEAD
        and isinstance(state["persistent"], bool)
        and ("rank" not in state or _is_pair(state["rank"]))
        and isinstance(sampler, dict)
        and isinstance(sampler.get("is_begun"), bool)
        and type(sampler.get("seed", 0)) is int
        and all(
            isinstance(sampler.get(name, []), list)
            for name in ("generators", "epochs", "carry_over")
        )
        and isinstance(sampler.get("base_seed", sampler["is_begun"] or None), bool)
    )


def _is_run(value: Any) -> bool:
    """Whether it is the first number of a run, and the one after the last."""
    return _is_pair(value) and value[0] < value[1]


def _is_pair(value: object) -> bool:
    return isinstance(value, list | tuple) and len(value) == 2 and all(map(_is_number, value))  # noqa: PLR2004


def _is_number(value: object) -> bool:
    return type(value) is int and 0 <= value <= _LARGEST
