"""Reads optional attributes of objects that users define."""

from typing import Any

from shmloader.interruptions import is_interruption


def probe(value: object, name: str, default: object = None) -> Any:
    """Return an attribute that a user's object may have, or a default.

    This is for names that torch never asks for. A class's own ``__getattr__`` may raise anything
    for an unknown name, which never shows with torch's loader.
    """
    try:
        return getattr(value, name, default)
    except Exception as error:
        # Whatever was raised, the object has no such attribute.
        if is_interruption(error):
            raise
        return default
