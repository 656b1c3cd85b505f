"""Makes a stream of shards from a streaming dataset of Hugging Face, which names its files.

No public attribute of such a dataset names them, so this module reads private ones of ``datasets``.
Where these are missing, it says what to give instead.
"""

from typing import Any

from shmloader.streams.columns import ParquetFormat
from shmloader.streams.formats import Format
from shmloader.streams.jsonl import JsonlFormat
from shmloader.streams.shards import Shards

# What a dataset went through, by the class of its iterable.
_STEPS = {
    "BufferShuffledExamplesIterable": "shuffle()",
    "CyclingMultiSourcesExamplesIterable": "interleave_datasets()",
    "FilteredExamplesIterable": "filter()",
    "HorizontallyConcatenatedMultiSourcesExamplesIterable": "concatenate_datasets()",
    "MappedExamplesIterable": "map() or the like",
    "RandomlyCyclingMultiSourcesExamplesIterable": "interleave_datasets()",
    "RepeatExamplesIterable": "repeat()",
    "SelectColumnsIterable": "select_columns()",
    "ShuffledDataSourcesArrowExamplesIterable": "shuffle()",
    "SkipExamplesIterable": "skip()",
    "TakeExamplesIterable": "take()",
    "VerticallyConcatenatedMultiSourcesExamplesIterable": "concatenate_datasets()",
}


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
        dataset: The dataset, without ``map()``, ``filter()``, ``shuffle()`` or the like.
        seed: Decides the order, as for :class:`Shards`.
        shuffle_shards: Whether each epoch has another order of files.
        readers: Number of readers, as for :class:`Shards`.
        cache: Keeps remote files on a disk of this machine, as for :class:`Shards`.
        store: The store that ranks share, as for :class:`Shards`.

    Raises:
        TypeError: If this is no ``IterableDataset``, or its files cannot be found.
        ValueError: If it was changed after loading, or its files have another format. The text says
            by what.
    """
    if type(dataset).__name__ != "IterableDataset" or not hasattr(dataset, "_ex_iterable"):
        raise TypeError(
            "from_hf takes what datasets.load_dataset(…, streaming=True, split=…) returns, but got "
            f"{_describe(dataset)}"
        )
    source = dataset._ex_iterable
    _check_plain(dataset, source)
    builder = getattr(getattr(source, "generate_tables_fn", None), "__self__", None)
    kwargs = getattr(source, "kwargs", {})
    _check_types(dataset, builder)
    # Of JSON, the files before decompression, which the format does itself.
    files = kwargs.get("original_files") or kwargs.get("files")
    form = _format_of(dataset.info.builder_name, getattr(builder, "config", None))
    if not isinstance(files, list) or not all(isinstance(file, str) for file in files):
        raise TypeError(
            "this release of datasets does not name the dataset's files: give them yourself, as in "
            "Shards(files, open_parquet, seed=0). "
            "datasets.load_dataset_builder(…).config.data_files['train'] lists them"
        )
    if any(groups is not None for groups in kwargs.get("row_groups_list") or ()):
        raise ValueError("the dataset went through reshard(), and a stream reads whole files")
    return Shards(
        files, form, seed=seed, shuffle_shards=shuffle_shards, readers=readers, cache=cache,
        store=store,
    )  # fmt: skip


def _describe(dataset: object) -> str:
    kind = type(dataset)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if kind.__name__ == "Dataset":
        return f"{name}, which a DataLoader takes as it is: it needs no stream"
    if kind.__name__ == "IterableDatasetDict":
        return f"{name}: choose a split, such as dataset['train']"
    return name


def _check_plain(dataset: Any, source: Any) -> None:
    """Raise ValueError if the dataset yields anything but the records of its files."""
    if (step := _STEPS.get(type(source).__name__)) is not None:
        raise ValueError(
            f"the dataset went through {step}, and from_hf cannot take that over. Give it the "
            "dataset as it was loaded, and call the methods of the stream."
        )
    if type(source).__name__ != "ArrowExamplesIterable" or dataset.info.builder_name is None:
        raise ValueError(
            "the dataset was not loaded from files of Parquet or JSON Lines by "
            f"load_dataset(): its source is {type(source).__name__}"
        )
    if getattr(dataset, "_distributed", None) is not None:
        raise ValueError(
            "the dataset is divided by split_dataset_by_node() already. Give from_hf the whole "
            "dataset: ShardedDataLoader divides it."
        )
    if getattr(dataset, "_formatting", None) is not None:
        raise ValueError("the dataset has with_format(): leave it out, and map() the stream")
    for name, feature in (dataset.features or {}).items():
        if (kind := _decoder(feature)) is not None:
            raise ValueError(
                f"column {name!r} is decoded by datasets, as {kind}: give from_hf "
                "dataset.decode(False), and decode it in a map() of the stream"
            )


def _decoder(feature: Any) -> str | None:
    """Return the name of what decodes a column, or a part of it; None if nothing does."""
    if isinstance(feature, dict):
        return next(filter(None, map(_decoder, feature.values())), None)
    if hasattr(feature, "decode_example") and getattr(feature, "decode", True):
        return type(feature).__name__
    return _decoder(feature.feature) if hasattr(feature, "feature") else None


def _check_types(dataset: Any, builder: Any) -> None:
    """Raise ValueError if the dataset casts the values of its files."""
    read = getattr(getattr(builder, "info", None), "features", None)
    is_cast = getattr(getattr(builder, "config", None), "features", None) is not None
    if read is not None and dataset.features is not None and not is_cast:
        types = [each.arrow_schema.remove_metadata() for each in (read, dataset.features)]
        is_cast = types[0] != types[1]
    if is_cast:
        raise ValueError(
            "the dataset casts its columns, by cast() or features=: leave that out, and do it in a "
            "map() of the stream"
        )


def _format_of(name: str | None, config: Any) -> Format:
    """Return the format of a builder's files, by its name and what it was told."""
    # Options that change the records.
    for option in ("filters", "field"):
        if getattr(config, option, None) is not None:
            raise ValueError(f"the dataset was loaded with {option}=, which a stream does not have")
    match name:
        case "parquet":
            return ParquetFormat(getattr(config, "columns", None))
        case "json":
            return JsonlFormat()
    instead = "give them to Shards(files, open_tar, seed=…)"
    if name != "webdataset":
        instead = "write them as Parquet first"
    raise ValueError(
        "from_hf takes files of Parquet and JSON Lines, but those of this dataset are "
        f"read by the builder {name!r} of datasets: {instead}"
    )
