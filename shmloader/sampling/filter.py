"""The indices of those samples that are wanted."""

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import IterableDataset, Sampler


class FilterSampler(Sampler[int]):
    """The indices, ascending, of the samples that satisfy a function.

    A sample is loaded and looked at when the search for the next index comes to it, in the process
    and on the thread that draws the indices; for a loader's workers it is loaded again. All of it
    is done anew in each epoch. So this is for datasets whose samples are cheap to have, or where a
    few are wanted from the beginning of many.

    Attributes:
        fn, dataset: As given.

    Args:
        fn: Called with a sample; its answer is taken as true or false. What it raises goes to
            whoever draws, and so does what the dataset raises.
        dataset: Map-style, indexed from 0 to ``len(dataset) - 1``; its length is asked for at
            the beginning of each epoch.

    Raises:
        TypeError: If ``fn`` is not callable, or the dataset is iterable-style or has no length.
    """

    def __init__(self, fn: Callable[[Any], object], dataset: Any) -> None:
        if not callable(fn):
            raise TypeError(f"fn option should be callable, but got fn={fn!r}")
        has_both = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
        if isinstance(dataset, IterableDataset) or not has_both:
            raise TypeError(
                "dataset option should be map-style, with __getitem__ and __len__, "
                f"but got dataset={dataset!r}"
            )
        self.fn = fn
        self.dataset = dataset
        self._found_count: int | None = None

    def __iter__(self) -> Iterator[int]:
        """Give an epoch."""
        found_count = 0
        for index in range(len(self.dataset)):
            if self.fn(self.dataset[index]):
                found_count += 1
                yield index
        self._found_count = found_count

    def __len__(self) -> int:
        """How many indices the last full pass has found.

        Raises:
            TypeError: If no epoch was drawn to its end yet.
        """
        if self._found_count is None:
            raise TypeError(
                "the length of a FilterSampler is known only after a first full pass: fn has to "
                f"look at each of the {len(self.dataset)} samples"
            )
        return self._found_count
