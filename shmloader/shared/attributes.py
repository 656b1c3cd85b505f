"""What an object is made of."""

import copyreg
from typing import Any

from shmloader.probing import probe

# No value of a slot's.
_MISSING = object()


def attributes_of(value: object) -> dict[str, Any]:
    """An object's attributes by their names, those in slots included; none of a builtin's."""
    # The names as pickle has them: of all classes, and mangled where they are private.
    slots: list[str] = copyreg._slotnames(type(value))  # type: ignore[attr-defined]
    filled = ((name, probe(value, name, _MISSING)) for name in slots)
    found = {name: one for name, one in filled if one is not _MISSING}
    fields = probe(value, "__dict__")
    return {**found, **fields} if isinstance(fields, dict) else found
