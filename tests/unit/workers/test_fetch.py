"""Loading by torch's fetchers, and a StopIteration that is no end."""

import pytest
from torch.utils.data import IterableDataset

from shmloader.workers.fetch import FetchPlan, map_style_stop


class Numbers(IterableDataset):
    def __iter__(self):
        return iter(range(5))


@pytest.mark.parametrize(
    ("dataset", "plan", "tasks", "batches"),
    [
        ("abcdef", FetchPlan(False, True, False), [[0, 2], [5]], [["a", "c"], ["f"]]),
        ("abcdef", FetchPlan(False, False, False), [0, 5], ["a", "f"]),
        (Numbers(), FetchPlan(True, True, False), [[0, 0]] * 3, [[0, 1], [2, 3], [4]]),
        (Numbers(), FetchPlan(True, True, True), [[0, 0]] * 2, [[0, 1], [2, 3]]),
        (Numbers(), FetchPlan(True, False, False), [None] * 5, [0, 1, 2, 3, 4]),
    ],
)
def test_batches_are_made_as_the_plan_says(dataset, plan, tasks, batches):
    fetcher = plan.make_fetcher(dataset, lambda samples: samples)
    assert [fetcher.fetch(task) for task in tasks] == batches
    if plan.is_iterable:
        with pytest.raises(StopIteration):
            fetcher.fetch(tasks[0])


def test_a_stop_out_of_a_map_style_dataset_is_told_apart_from_the_end():
    cause = StopIteration(3)
    error = map_style_stop(cause)
    assert type(error) is RuntimeError
    assert "raised StopIteration" in str(error)
    assert error.__cause__ is cause
