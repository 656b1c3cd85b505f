"""Opens Arrow, Feather and Parquet files as one table of pyarrow's. Imports pyarrow."""

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from shmloader.grammar import described_type

_PARQUET = (".parquet", ".pq")


def open_table(source: Any, columns: Sequence[str] | None) -> pa.Table:
    """Return the rows of all files, one after the other. Arrow files are mapped into memory.

    Args:
        source: A list of paths; or a table, which is returned.
        columns: The columns that the table gets, in this order; None for all.

    Raises:
        TypeError: If the source is another one.
        KeyError: If there is no column of a name; names those that there are.
        ValueError: If a file is of no such kind, or has other columns than the first; names it.
        OSError: If a file cannot be opened.
    """
    if isinstance(source, pa.Table):
        return _select(source, columns)
    if not isinstance(source, list):
        raise TypeError(
            "ArrowTable reads a path, several paths or a pyarrow.Table, but the source is "
            f"{described_type(source)}"
        )
    tables: list[pa.Table] = []
    for path in source:
        try:
            table = _read_parquet(path, columns) if path.endswith(_PARQUET) else _map(path)
        except pa.ArrowInvalid as error:
            raise ValueError(
                f"{path} cannot be read as an Arrow or Parquet file: {error}"
            ) from error
        table = _select(table, columns)
        if tables and not table.schema.equals(tables[0].schema):
            raise ValueError(
                f"{path} has other columns or types than {source[0]}: give files with the same "
                "columns"
            )
        tables.append(table)
    return pa.concat_tables(tables)


def _select(table: pa.Table, columns: Sequence[str] | None) -> pa.Table:
    if columns is None:
        return table
    for name in columns:
        if name not in table.column_names:
            raise KeyError(f"there is no column {name!r}: the columns are {table.column_names}")
    return table.select(columns)


def _read_parquet(path: str, columns: Sequence[str] | None) -> pa.Table:
    from pyarrow import parquet  # noqa: PLC0415 - most tables are Arrow files

    # A name that is not there is found by _select().
    has_all = columns is not None and {*columns} <= {*parquet.read_schema(path).names}
    return parquet.read_table(path, columns=columns if has_all else None)


def _map(path: str) -> pa.Table:
    source = pa.memory_map(path)
    try:
        return pa.ipc.open_file(source).read_all()
    except pa.ArrowInvalid:
        source.seek(0)
        return pa.ipc.open_stream(source).read_all()
