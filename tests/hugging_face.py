"""The package ``datasets``, imported when a test first uses something of it.

Each process that runs tests imports the modules of all tests. With ``datasets`` it would hold 50 MB
more, and each of its forks copies their page tables.
"""

import functools
from typing import Any


def __getattr__(name: str) -> Any:
    if name.startswith("_"):  # pytest looks for its own
        raise AttributeError(name)
    import datasets

    datasets.utils.tqdm.monitor_interval = 0  # else a thread watches progress bars, and stays
    return getattr(datasets, name)


def _make(name: str, *arguments: Any, **options: Any) -> Any:
    return __getattr__(name)(*arguments, **options)


Array2D, ClassLabel, Features, LargeList, List, Value = (
    functools.partial(_make, name)
    for name in ("Array2D", "ClassLabel", "Features", "LargeList", "List", "Value")
)
