from typing import Any

def copy_rows(target: int, sources: list[int], row_bytes: int, /) -> None: ...
def gather_rows(
    target: int,
    source: int,
    step: int,
    count: int,
    from_: str,
    to: str,
    rows: int,
    at: Any,
    streams: bool,
    /,
) -> bool: ...
def gather_fields(target: int, table: Any, rows: int, at: Any, /) -> bool: ...
def find_lists(rows: Any, chunks: Any, offsets: int, width: int, found: Any, /) -> int: ...
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
def receive_any(descriptors: Any, sockets: int, looks: int, /) -> list[tuple[int, bytes]]: ...
def receive(channel: Any, most_bytes: int, looks: int, /) -> bytes | None: ...
