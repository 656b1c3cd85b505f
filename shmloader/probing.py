"""Reads optional attributes of objects that users define."""

from typing import Any

from shmloader.interruptions import Caught, attempt


def probe(value: object, name: str, default: object = None) -> Any:
    """Return an attribute that a user's object may have, or a default.

    This is for names that torch never asks for. A class's own ``__getattr__`` may raise anything
    for an unknown name, which never shows with torch's loader.
    """
    found = attempt(getattr, value, name, default)
    # Whatever was raised, the object has no such attribute.
    return default if type(found) is Caught else found
