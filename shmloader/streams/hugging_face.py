"""Makes a stream of shards from a streaming dataset of Hugging Face, which names its files.

No public attribute of such a dataset names them, so this module reads private ones of ``datasets``.
"""

from typing import Any

from shmloader.streams.formats import Format
from shmloader.streams.jsonl import open_jsonl
from shmloader.streams.parquet import ParquetFormat
from shmloader.streams.shards import Shards


def from_hf(
    dataset: Any,
    *,
    seed: int,
    shuffle_shards: bool = True,
    readers: int | None = None,
    cache: Any = None,
    store: Any = None,
) -> Shards:
    """Return a stream of the files of a Hugging Face ``IterableDataset``.

    It takes what ``load_dataset(…, streaming=True, split=…)`` returns, if the files are Parquet or
    JSON Lines. Records are those of :data:`open_parquet` and :data:`open_jsonl`: lists of numbers
    are arrays. What is done to the records comes after it, by the methods of the stream.
    ``datasets`` has no public name for the files, so this depends on its release.

    Args:
        dataset: The dataset, without ``map()``, ``filter()``, ``shuffle()`` or the like. Give
            ``dataset.decode(False)`` if it has images or sounds, and decode them in a ``map()`` of
            the stream.
        seed: Decides the order, as for :class:`Shards`.
        shuffle_shards: Whether each epoch has another order of files.
        readers: Number of readers, as for :class:`Shards`.
        cache: Keeps remote files on a disk of this machine, as for :class:`Shards`.
        store: The store that ranks share, as for :class:`Shards`.

    Raises:
        TypeError: If its files cannot be found, have another format, or anything else is done to
            their records.
    """
    found = _files_of(dataset)
    if found is None:
        raise TypeError(
            "from_hf takes a streaming dataset of Parquet or JSON Lines files as load_dataset() "
            "returns it, without other methods or options, and not decoded. Give its files to "
            "Shards instead: load_dataset_builder(…).config.data_files['train'] lists them."
        )
    files, form = found
    return Shards(
        files, form, seed=seed, shuffle_shards=shuffle_shards, readers=readers, cache=cache,
        store=store,
    )  # fmt: skip


def _files_of(dataset: Any) -> tuple[list[str], Format] | None:
    """Return the files of a dataset and their format; None if its records are not those of these.

    It is a dataset that has its files from a builder, and does nothing else to their records.
    """
    source: Any = getattr(dataset, "_ex_iterable", None)
    builder = getattr(getattr(source, "generate_tables_fn", None), "__self__", None)
    if builder is None or type(source).__name__ != "ArrowExamplesIterable":
        return None
    kwargs, config, features = source.kwargs, builder.config, dataset.features
    schemas = [
        one and one.arrow_schema.remove_metadata() for one in (builder.info.features, features)
    ]
    forms: dict[str, Format] = {
        "parquet": ParquetFormat(getattr(config, "columns", None)),
        "json": open_jsonl,
    }
    form = forms.get(dataset.info.builder_name)
    # Of JSON, the files before decompression, which the format does itself.
    files = kwargs.get("original_files") or kwargs.get("files")
    changes = [
        *(getattr(config, name, None) for name in ("filters", "field", "features")),
        *(getattr(dataset, name, None) for name in ("_formatting", "_distributed")),
        *(kwargs.get("row_groups_list") or ()),
    ]
    if (
        form is None
        or any(change is not None for change in changes)
        or (None not in schemas and schemas[0] != schemas[1])
        or "decode=True" in str(features)  # of images and sounds, at any depth
        or not isinstance(files, list)
        or not all(isinstance(file, str) for file in files)
    ):
        return None
    return files, form
