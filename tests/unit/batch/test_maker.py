"""The batch maker: the same batches for the same ticket, wherever it is."""

from shmloader import sample_rng
from shmloader.batch.collator import Timer
from shmloader.batch.fetch import FetchConfig
from shmloader.batch.maker import BatchMaker
from shmloader.sampling.indices import PositionedIndices


class OwnList(list):
    """A list that may run code of the user's."""


def test_a_bad_sample_of_plain_data_does_not_shift_the_random_numbers_of_collate():
    def collate(samples):
        return samples, int(sample_rng().integers(1 << 30))

    def batches(dataset):
        plan = FetchConfig(
            is_iterable=False, auto_collation=True, drop_last=False, seed=1, may_shard=True
        )
        maker = BatchMaker(
            plan, dataset, collate, "skip", where="here", timer=Timer(), restores_rngs=True
        )
        return maker.make(PositionedIndices([[0, 99, 1], [2, 3]], 0, 0))

    plain = batches(list(range(9)))
    assert [samples for samples, _ in plain] == [[0, 1], [2, 3]]
    assert plain == batches(OwnList(range(9)))
