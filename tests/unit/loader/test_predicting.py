"""Lightning predicts with a loader that it makes from the attributes of a sharded one."""

from collections.abc import Iterator

import pytest
from torch.utils.data import BatchSampler

from shmloader import ShardedDataLoader


class Noting:
    """As Lightning's to predict, which has the attributes of a batch sampler that it wraps."""

    __module__ = "lightning.overrides"

    def __init__(self, batches: BatchSampler, *, keeps: bool) -> None:
        self.__dict__.update(vars(batches))
        self.wrapped = batches if keeps else batches.__iter__

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.wrapped if isinstance(self.wrapped, BatchSampler) else self.wrapped())


def test_to_predict_a_sharded_loader_leaves_out_what_it_is_padded_with_or_says_that_it_does_not():
    def predicted(*, keeps: bool) -> list[int]:
        found = []
        for rank in range(2):
            loader = ShardedDataLoader(range(5), 2, rank=rank, world_size=2)
            batches = BatchSampler(loader.sampler, 2, drop_last=False)
            noting = Noting(batches, keeps=keeps)
            remade = ShardedDataLoader(range(5), batch_sampler=noting, rank=rank, world_size=2)
            found += [int(row) for batch in remade for row in batch]
        return sorted(found)

    assert predicted(keeps=True) == [0, 1, 2, 3, 4]
    with pytest.warns(UserWarning, match="this release of Lightning is not known"):
        assert len(predicted(keeps=False)) > 5
