"""Costs of batches, and an order in which the ranks of a step get batches of similar cost.

Rank r of W gets batches r, r + W, and so on. Positions of an epoch are cut into groups of 64, and
the batches of a group are neighbours when they are sorted by cost. Within a group, halves, quarters
and so on are swapped at random, but stay together. So the batches of any step are neighbours, for
any number of ranks that divides 64. The order does not depend on the number of ranks.

A window rarely has a multiple of 64 batches. Its first and last ones share groups with those of the
windows before and after it. They are taken from the middle of all costs, which windows of one epoch
have in common::

    positions   ...│    group     │    group     │    group     │    group     │...
    windows     ──── window 3 ───┤├────────────── window 4 ──────────┤├── window 5
                      its tail    its head  whole groups    its tail   its head
"""

import heapq
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from shmloader.sampling.packing import Numbers, Packing

Costs = npt.NDArray[np.float64]
CostFunction = Callable[[Numbers], Costs]

#: Number of positions whose batches have similar costs.
GROUP = 64

# Of a transformer of this width, the linear layers of a token cost 6 x width times as much as the
# attention of a token to another one.
_WIDTH = 4096


def tokens(lengths: Numbers) -> Costs:
    """Return the number of tokens of each sample, over all measures."""
    sums: Costs = lengths.sum(axis=1).astype(np.float64)
    return sums


def attention(lengths: Numbers) -> Costs:
    """Return ``a * L + L**2`` for a sample of L tokens: its linear layers and its attention."""
    counts = tokens(lengths)
    return (6 * _WIDTH + counts) * counts


COSTS: dict[str, CostFunction] = {"tokens": tokens, "attention": attention}


def cost_function(balance: object) -> CostFunction | None:
    """Return the function for an argument ``balance``; None for None.

    Raises:
        ValueError: If it is another word.
        TypeError: If it is neither a word nor callable.
    """
    if balance is None:
        return None
    if isinstance(balance, str):
        if balance not in COSTS:
            raise ValueError(
                "balance should be None, 'tokens', 'attention' or a function, but got "
                f"balance={balance!r}"
            )
        return COSTS[balance]
    if not callable(balance):
        raise TypeError(
            f"balance should be None, a word or a function, but got balance={balance!r}"
        )

    def checked(lengths: Numbers) -> Costs:
        given = lengths[:, 0] if lengths.shape[1] == 1 else lengths
        costs = np.asarray(balance(given), np.float64)
        got = f"but returned {costs!r:.200}"
        if costs.shape != (len(lengths),):
            raise ValueError(f"balance should return an array of {len(lengths)} costs, {got}")
        if not (np.isfinite(costs) & (costs >= 0)).all():
            raise ValueError(f"balance should return finite costs, none of them negative, {got}")
        return costs

    return checked


def padded(packing: Packing, lengths: Numbers) -> Numbers:
    """Return the lengths with those of each batch raised to its longest, in each measure."""
    longest = np.maximum.reduceat(lengths[packing.order], packing.starts)
    result = np.empty_like(lengths)
    result[packing.order] = np.repeat(longest, packing.ends - packing.starts, axis=0)
    return result


def order_by_cost(costs: Costs, first: int, random: np.random.Generator | None) -> Numbers:
    """Return an order of a window's batches in which those of a step have similar costs.

    Args:
        costs: The cost of each batch.
        first: Position of the window's first batch in the epoch.
        random: Chooses the order of groups and within groups. None for high costs before low ones.
    """
    by_cost = np.argsort(-costs, kind="stable").astype(np.int64)
    head_count = min(-first % GROUP, len(costs))
    tail_count = (len(costs) - head_count) % GROUP
    group_count = (len(costs) - head_count - tail_count) // GROUP
    begin = group_count // 2 * GROUP
    middle = by_cost[begin : begin + head_count + tail_count]
    head, tail = middle[:head_count], middle[head_count:]
    groups = np.delete(by_cost, np.s_[begin : begin + len(middle)]).reshape(-1, GROUP)
    if random is not None:
        groups = random.permutation(groups)
    order = np.concatenate([head, groups.reshape(-1), tail])
    if random is not None:
        _swap(order, first, random)
    return order


def _swap(order: Numbers, first: int, random: np.random.Generator) -> None:
    """Swap the halves of 64, 32, ... items at random, where positions divide into these."""
    size = GROUP // 2
    while size:
        begin = -first % (2 * size)
        pair_count = max(0, len(order) - begin) // (2 * size)
        pairs = order[begin : begin + pair_count * 2 * size].reshape(pair_count, 2, size)
        chosen = random.integers(2, size=pair_count) > 0
        pairs[chosen] = pairs[chosen, ::-1]
        size //= 2


def divide(batches: Sequence[list[int]], costs: Mapping[int, float], count: int) -> list[list[int]]:
    """Return the batches with the most expensive ones cut in two until there are ``count``.

    Args:
        batches: At least one batch.
        costs: Cost of each of their samples.
        count: Number of parts, at least as many as there are batches. There are fewer parts if
            there are fewer samples.
    """
    # By cost, and of equal costs by number. Those of one sample are last, as they cannot be cut.
    heap = [_entry(costs, number, batch) for number, batch in enumerate(batches)]
    heapq.heapify(heap)
    while len(heap) < count and len(heap[0][2]) > 1:
        _, number, batch = heapq.heappop(heap)
        halves: tuple[list[int], list[int]] = [], []
        sums = [0.0, 0.0]
        for sample in sorted(batch, key=lambda sample: -costs[sample]):
            lighter = int((sums[1], len(halves[1])) < (sums[0], len(halves[0])))
            halves[lighter].append(sample)
            sums[lighter] += costs[sample]
        heapq.heappush(heap, _entry(costs, number, halves[0]))
        heapq.heappush(heap, _entry(costs, len(heap) + 1, halves[1]))
    return [batch for _, _, batch in sorted(heap, key=lambda entry: entry[1])]


def _entry(
    costs: Mapping[int, float], number: int, batch: list[int]
) -> tuple[float, int, list[int]]:
    is_whole = len(batch) > 1
    return (-sum(costs[sample] for sample in batch) if is_whole else np.inf), number, batch
