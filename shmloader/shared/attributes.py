"""What an object is made of."""

import copyreg
from typing import Any


def attributes_of(value: object) -> dict[str, Any]:
    """An object's attributes by their names, those in slots included; none of a builtin's."""
    # The names as pickle has them: of all classes, and mangled where they are private.
    slots: list[str] = copyreg._slotnames(type(value))  # type: ignore[attr-defined]
    found = {name: getattr(value, name) for name in slots if hasattr(value, name)}
    fields = getattr(value, "__dict__", None)
    return {**found, **fields} if isinstance(fields, dict) else found
