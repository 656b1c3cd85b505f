"""Loading a batch: torch's fetchers, and what we say differently of StopIteration."""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch.utils.data.dataloader import _DatasetKind


class FetchPlan(NamedTuple):
    """How batches are made of a dataset: the part that crosses to the workers.

    Attributes:
        is_iterable: Whether the dataset is an IterableDataset.
        auto_collation: Whether an index is a list of keys, or one key.
        drop_last: Whether an iterable's last batch is left out when it is short.
    """

    is_iterable: bool
    auto_collation: bool
    drop_last: bool

    def make_fetcher(self, dataset: object, collate_fn: Callable[[Any], Any]) -> Any:
        """A fetcher of torch's; calls ``iter(dataset)`` for an iterable one."""
        kind = _DatasetKind.Iterable if self.is_iterable else _DatasetKind.Map
        return _DatasetKind.create_fetcher(
            kind, dataset, self.auto_collation, collate_fn, self.drop_last
        )


def map_style_stop(error: StopIteration) -> RuntimeError:
    """What a StopIteration out of a map-style dataset becomes.

    torch's loader takes it for the end of the epoch and says nothing of the batches that are
    missing.
    """
    stop = RuntimeError(
        "a map-style dataset (or its collate_fn) raised StopIteration, which would have ended the "
        "epoch in silence"
    )
    stop.__cause__ = error
    return stop
