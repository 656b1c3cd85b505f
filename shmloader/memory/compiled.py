"""The functions of the compiled part; None where the package was installed without a compiler.

A function is None as well where the part was built from an earlier version of its source.
"""

from collections.abc import Callable
from typing import Any

_streaming: Any
try:
    from shmloader.memory import _streaming
except ImportError:
    _streaming = None

copy_rows: Callable[..., None] | None = getattr(_streaming, "copy_rows", None)
gather_fields: Callable[..., bool] | None = getattr(_streaming, "gather_fields", None)
find_lists: Callable[..., int] | None = getattr(_streaming, "find_lists", None)
copy_sequences: Callable[..., bool] | None = getattr(_streaming, "copy_sequences", None)
receive_one: Callable[..., bytes | None] | None = getattr(_streaming, "receive_one", None)
receive_each: Callable[..., list[tuple[int, bytes]]] | None
receive_each = getattr(_streaming, "receive_each", None)
