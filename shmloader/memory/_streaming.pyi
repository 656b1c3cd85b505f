from typing import Any

def copy_rows(target: int, sources: list[int], row_bytes: int, /) -> None: ...
def copy_sequences(
    target: int,
    rows: int,
    row_bytes: int,
    samples: list[Any],
    starts: Any,
    counts: Any,
    item: Any,
    /,
) -> bool: ...
def receive(channel: Any, most_bytes: int, looks: int, /) -> bytes | None: ...
