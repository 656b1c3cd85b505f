"""The functions of the compiled part; None where the package was installed without a compiler."""

from collections.abc import Callable

copy_rows: Callable[..., None] | None
copy_sequences: Callable[..., bool] | None
receive: Callable[..., bytes | None] | None
try:
    from shmloader.memory._streaming import copy_rows, copy_sequences, receive
except ImportError:
    copy_rows = copy_sequences = receive = None
