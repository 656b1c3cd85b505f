"""The order of a loader without a seed: where an epoch continues, and what its state says."""

from shmloader.sampling.progress import Progress
from shmloader.sampling.sampler_order import SamplerOrder


def drawn(progress, count):
    """An order whose epoch continues there, of which so many batches were drawn and delivered."""
    batches = [[number] for number in range(8)]
    order = SamplerOrder(batches)
    order.begin(0, progress, {"is_begun": True} if progress.position else None)
    epoch = order.draw(iter(batches), None, as_arrays=False)
    found = []
    for seq in range(count):
        found += next(epoch)
        progress.done(seq)
    return order, found


def test_a_state_names_the_last_batch_though_some_were_delivered_ahead_of_their_turn():
    order, found = drawn(Progress(1, frozenset({2, 3})), 2)
    assert found == [1, 4]
    whole, _ = drawn(Progress(), 5)
    last = order.dump()["last_checksum"]
    assert last is not None
    assert last == whole.dump()["last_checksum"]
