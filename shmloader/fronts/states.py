"""The form of a loader's state, and whether a state fits a loader."""

import reprlib
from typing import Any

#: Of the form. A state of another version is refused.
VERSION = 1

# What a state and the loader that takes it must have in common.
_FACTS = {
    "length": "dataset length",
    "global_batch": "global batch size",
    "sampler": "sampler",
    "tail": "tail",
    "seed": "seed",
}

_OTHERS = {"epoch", "position", "origin", "persistent"}


def check_state(state: object, facts: dict[str, Any]) -> dict[str, Any]:
    """Check a state before a loader takes it.

    Args:
        state: What the user gave.
        facts: Of the loader: ``length`` and so on.

    Returns:
        The same.

    Raises:
        TypeError: If it is no dict.
        ValueError: If it is no loader's state, of another version, or does not fit.
    """
    if not isinstance(state, dict):
        raise TypeError(
            f"state should be a dict that state_dict() returned, but got {type(state).__name__}"
        )
    version = state.get("version")
    if version is None or not (_FACTS.keys() | _OTHERS) <= state.keys():
        raise ValueError(
            "the state is not one of a shmloader loader: it has "
            f"{', '.join(map(repr, state)) or 'nothing'}"
        )
    if version != VERSION:
        raise ValueError(
            f"the state is of version {version!r}, and this release of shmloader reads version "
            f"{VERSION}"
        )
    wrong = [
        f"{name}: {state[key]!r} found, {facts[key]!r} expected"
        for key, name in _FACTS.items()
        if state[key] != facts[key]
    ]
    if wrong:
        raise ValueError(f"the state does not fit this loader ({'; '.join(wrong)})")
    if not _is_sound(state):
        raise ValueError(f"the state is damaged: {reprlib.repr(state)}")
    return state


def _is_sound(state: dict[str, Any]) -> bool:
    origin = state["origin"]
    return (
        all(map(_is_number, (state["epoch"], state["position"])))
        and isinstance(state.get("ahead", []), list)
        and all(map(_is_run, state.get("ahead", [])))
        and isinstance(state["persistent"], bool)
        and isinstance(origin, dict)
        and isinstance(origin.get("begun"), bool)
        and all(isinstance(origin.get(name, []), list) for name in ("generators", "epochs", "rest"))
        and isinstance(origin.get("base_seed", origin["begun"]), bool)
    )


def _is_run(value: object) -> bool:
    return (
        isinstance(value, list | tuple)
        and len(value) == 2  # noqa: PLR2004 - the first, and that after the last
        and all(map(_is_number, value))
        and value[0] < value[1]
    )


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
