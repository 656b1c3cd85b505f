"""What a rank checks when it meets the owner of the workers of its host."""

from __future__ import annotations

import pytest

from shmloader.pools.host_messages import Welcome
from shmloader.pools.host_pool import _check
from shmloader.pools.host_service import ServiceStart

OURS = ServiceStart(4, None, 0, "Samples of 45 samples")
AUTO = ServiceStart(8, 2, 0, "Samples of 45 samples")


@pytest.mark.parametrize(
    ("worker_count", "wanted", "start"), [(4, None, OURS), (8, 2, AUTO), (8, 5, AUTO), (6, 2, AUTO)]
)
def test_ranks_that_want_the_same_share_a_pool(worker_count, wanted, start) -> None:
    _check(Welcome(1, worker_count, wanted, start.dataset, 0), start)


@pytest.mark.parametrize(
    ("worker_count", "wanted", "dataset", "start", "text"),
    [
        (3, None, OURS.dataset, OURS, "got num_workers=4, and another rank has 3"),
        (4, 2, OURS.dataset, OURS, "got num_workers=4, and another rank has 'auto'"),
        (8, None, AUTO.dataset, AUTO, "got num_workers='auto', and another rank has 8"),
        (
            4,
            None,
            "Samples of 46 samples",
            OURS,
            "same dataset.* has Samples of 45 .* has Samples of 46",
        ),
    ],
)
def test_ranks_that_want_something_else_are_refused(
    worker_count, wanted, dataset, start, text
) -> None:
    with pytest.raises(ValueError, match=text):
        _check(Welcome(1, worker_count, wanted, dataset, 0), start)
