"""Batches of a token budget, as loaders draw them."""

import itertools
import json
import math
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shmloader import DataLoader, ShardedDataLoader
from shmloader.sampling import ShardedSampler, TokenBatches

BUDGET = 64
LENGTHS = np.random.default_rng(1).integers(1, BUDGET // 2, 700)
OPTIONS = {"window": 90, "balance": "attention", "seed": 3}


def plan(lengths=LENGTHS, max_tokens=BUDGET, **options):
    return TokenBatches(lengths, max_tokens, **{**OPTIONS, **options})


def flat(batches):
    return [number for batch in batches for number in batch]


def epoch_of(batches, epoch):
    batches.set_epoch(epoch)
    return list(batches)


# What an epoch has -------------------------------------------------------------------------


@given(
    st.lists(st.integers(1, 20), max_size=120),
    st.sampled_from(["packed", "padded"]),
    st.integers(1, 50),
    st.booleans(),
    st.sampled_from([None, "tokens", "attention"]),
    st.integers(0, 5),
)
@settings(derandomize=True, deadline=None)
def test_each_sample_comes_once_and_no_batch_is_over_the_budget(
    lengths, layout, window, shuffle, balance, epoch
):
    batches = TokenBatches(
        lengths, 20, layout=layout, window=window, shuffle=shuffle, balance=balance
    )
    drawn = epoch_of(batches, epoch)
    assert sorted(flat(drawn)) == list(range(len(lengths)))
    for batch in drawn:
        own = [lengths[number] for number in batch]
        assert (sum(own) if layout == "packed" else max(own) * len(own)) <= 20
    batches.set_epoch(epoch)
    assert len(batches) == len(drawn)


@pytest.mark.parametrize("balance", [None, "tokens"])
def test_an_epoch_depends_on_seed_and_epoch_alone(balance):
    epochs = [epoch_of(plan(balance=balance), epoch) for epoch in range(3)]
    counting = plan(balance=balance)
    np.random.seed(5)
    assert [list(counting) for _ in range(3)] == epochs
    assert epochs[0] != epochs[1]
    assert list(plan(balance=balance, seed=4)) != epochs[0]
    assert counting.epoch == 3


def test_without_shuffle_windows_follow_the_dataset_in_every_epoch():
    batches = plan(shuffle=False, balance=None)
    first = list(batches)
    assert list(batches) == first
    own = flat(first)
    for begin in range(0, 630, 90):  # 700 samples are 7 windows of 100
        part = own[begin // 90 * 100 :][:100]
        assert sorted(part) == list(range(begin // 90 * 100, begin // 90 * 100 + 100))
    firsts = [min(batch) for batch in first if max(batch) < 100]
    assert firsts == sorted(firsts)


def test_len_is_that_of_the_running_epoch_and_then_of_the_next():
    batches = plan(max_tokens=40)
    counts = [len(epoch_of(plan(max_tokens=40), epoch)) for epoch in range(6)]
    assert len(set(counts)) > 1, "the test needs epochs of different lengths"
    for count, following in zip(counts, [*counts[1:], None], strict=True):
        assert len(batches) == count
        for _ in batches:
            assert len(batches) == count
        if following is not None:
            assert len(batches) == following


class Costs(list):
    """Lengths as costs, and a list of the arrays that it was called with."""

    def __call__(self, lengths):
        self.append(lengths)
        return lengths


def test_a_plan_is_made_window_by_window():
    costs = Costs()
    batches = plan(balance=costs)
    costs.clear()
    next(iter(batches))
    assert len(costs) == 1


def test_a_pickled_plan_is_its_arguments_and_goes_on_with_the_next_epoch():
    batches = plan(LENGTHS.astype(np.uint8))
    size = len(pickle.dumps(batches))
    list(batches)
    len(batches)
    assert len(pickle.dumps(batches)) < size + 100
    assert size < 2000
    assert list(pickle.loads(pickle.dumps(batches))) == epoch_of(plan(), 1)


@pytest.mark.parametrize(
    "given", [LENGTHS.tolist(), torch.tensor(LENGTHS), LENGTHS.astype(np.uint16), LENGTHS * 1.0]
)
def test_lengths_may_be_any_numbers(given):
    assert list(plan(given)) == list(plan())


def test_lengths_may_be_a_memory_map(tmp_path):
    np.save(tmp_path / "lengths.npy", LENGTHS)
    assert list(plan(np.load(tmp_path / "lengths.npy", mmap_mode="r"))) == list(plan())


def test_each_measure_has_its_own_budget():
    lengths = np.stack([LENGTHS, LENGTHS[::-1] % 7 + 1], axis=1)
    batches = list(plan(lengths, (BUDGET, 9)))
    assert sorted(flat(batches)) == list(range(len(LENGTHS)))
    assert all((lengths[batch].sum(axis=0) <= (BUDGET, 9)).all() for batch in batches)


def test_padded_batches_count_what_the_collate_rounds_up():
    lengths = [7] * 16
    assert {len(batch) for batch in TokenBatches(lengths, 32, layout="padded")} == {4}
    rounded = TokenBatches(lengths, 32, layout="padded", multiple_of=16)
    assert {len(batch) for batch in rounded} == {2}


def test_nothing_is_an_epoch_without_batches():
    batches = TokenBatches([], 10, balance="tokens")
    assert (list(batches), len(batches)) == ([], 0)
    assert batches.report().fill == batches.report().padding == 0


# Costs -------------------------------------------------------------------------------------


def ratio(batches, world_size, cost):
    drawn = list(batches)
    costs = [sum(cost(LENGTHS_LONG[number]) for number in batch) for batch in drawn]
    whole = len(costs) // world_size * world_size
    steps = np.reshape(costs[:whole], (-1, world_size))
    return float((steps.max(axis=1) / steps.mean(axis=1)).mean())


LENGTHS_LONG = np.clip(np.random.default_rng(7).lognormal(5.7, 1, 20_000), 1, 16_384).astype(int)


def test_a_report_has_the_figures_that_the_documentation_promises_and_counts_what_is_drawn():
    batches = TokenBatches(LENGTHS_LONG, 16_384, balance="attention")
    report = batches.report(8)
    assert report.fill >= 0.99
    assert report.cost_ratio <= 1.02
    assert report.fill == pytest.approx(LENGTHS_LONG.sum() / (len(list(batches)) * 16_384))
    batches.set_epoch(0)
    assert report.cost_ratio == pytest.approx(ratio(batches, 8, _attention))
    assert f"fill {report.fill:.4f}, padding 0.0000, cost max" in str(report)
    mixed = TokenBatches(LENGTHS_LONG, 16_384).report(8, cost="attention")
    assert mixed.cost_ratio > 1.05


def _attention(length):
    return 6 * 4096 * length + length**2


def test_a_report_counts_padding():
    report = TokenBatches([4, 2], 8, layout="padded", balance="tokens").report()
    assert (report.fill, report.padding) == (0.75, 0.25)
    assert TokenBatches([4, 2], 8).report().padding == 0


def test_a_function_gives_the_costs_of_an_array_of_lengths():
    def cube(lengths):
        assert lengths.ndim == 1
        return lengths**3

    batches = TokenBatches(LENGTHS_LONG, 16_384, balance=cube)
    mixed = TokenBatches(LENGTHS_LONG, 16_384)
    assert ratio(batches, 8, lambda length: length**3) < ratio(mixed, 8, lambda length: length**3)


def test_of_padded_batches_the_costs_are_those_of_padded_samples():
    costs = Costs()
    list(TokenBatches([3, 9, 1, 8, 2], 32, layout="padded", multiple_of=4, balance=costs))
    assert sorted(costs[-1].tolist()) == [4, 4, 4, 12, 12]


# Ranks -------------------------------------------------------------------------------------

NUMBERS = range(len(LENGTHS))


def ranks_of(world_size, **options):
    return [
        ShardedDataLoader(
            NUMBERS, batch_sampler=plan(**options), rank=rank, world_size=world_size,
            collate_fn=list,
        )
        for rank in range(world_size)
    ]  # fmt: skip


def torch_ranks_of(world_size, **options):
    return [
        torch.utils.data.DataLoader(
            NUMBERS,
            batch_sampler=ShardedSampler(plan(**options), rank=rank, world_size=world_size),
            collate_fn=list,
        )
        for rank in range(world_size)
    ]


@pytest.mark.parametrize("make", [ranks_of, torch_ranks_of])
@pytest.mark.parametrize("world_size", [1, 2, 3, 7, 8, 64])
def test_ranks_share_one_order_with_equal_steps_and_each_sample_once(make, world_size):
    expected = list(plan())
    ranks = make(world_size)
    lengths = {len(rank) for rank in ranks}
    drawn = [list(rank) for rank in ranks]
    assert lengths == {len(own) for own in drawn} == {math.ceil(len(expected) / world_size)}
    steps = [batch for step in zip(*drawn, strict=True) for batch in step]
    whole = len(expected) // world_size * world_size
    assert steps[:whole] == expected[:whole]
    assert sorted(flat(steps)) == list(range(len(LENGTHS)))
    assert all(sum(LENGTHS[batch]) <= BUDGET for batch in steps)


@pytest.mark.parametrize("make", [ranks_of, torch_ranks_of])
def test_the_last_step_may_be_padded_or_left_out(make):
    expected = list(plan())
    whole = len(expected) // 8 * 8
    assert len(expected) - whole not in {0, 8}
    for last_batch, count in (("pad", whole + 8), ("discard", whole)):
        ranks = make(8, last_batch=last_batch)
        drawn = [list(rank) for rank in ranks]
        assert {len(rank) for rank in ranks} == {count // 8}
        steps = [batch for step in zip(*drawn, strict=True) for batch in step]
        assert steps == [*expected, *expected][:count]


def test_more_ranks_than_samples_repeat_the_first_batches():
    ranks = [
        ShardedDataLoader(
            [0, 1, 2], batch_sampler=TokenBatches([3, 3, 3], 9), rank=rank, world_size=5,
            collate_fn=list,
        )
        for rank in range(5)
    ]  # fmt: skip
    drawn = [list(rank) for rank in ranks]
    assert [len(own) for own in drawn] == [1] * 5
    first = next(iter(TokenBatches([3, 3, 3], 9)))
    assert sorted(flat(own[0] for own in drawn[:3])) == [0, 1, 2]
    assert drawn[3:] == [[first], [first]]
    assert [rank.padding for rank in ranks] == [0, 0, 0, 3, 3]


# States ------------------------------------------------------------------------------------


def test_a_state_is_small_and_of_another_plan_an_error():
    loader = DataLoader(NUMBERS, batch_sampler=plan(), collate_fn=list)
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    assert len(json.dumps(state)) < 1000
    others = {
        "max_tokens=65": plan(max_tokens=65),
        "seed=4": plan(seed=4),
        "window=91": plan(window=91),
        "padded": plan(layout="padded"),
        "balance=None": plan(balance=None),
        "checksum": plan(LENGTHS % 30 + 1),
    }
    for text, other in others.items():
        loader = DataLoader(NUMBERS, batch_sampler=other, collate_fn=list)
        with pytest.raises(ValueError, match=f"does not fit this loader(.|\n)*{text}"):
            loader.load_state_dict(state)
    for budget in (np.int64(BUDGET), (BUDGET,)):
        loader = DataLoader(NUMBERS, batch_sampler=plan(max_tokens=budget), collate_fn=list)
        loader.load_state_dict(state)


@pytest.mark.parametrize("seed", [None, 5])
def test_a_position_after_the_end_is_an_error_with_the_count(seed):
    loader = DataLoader(NUMBERS, batch_sampler=plan(), collate_fn=list, seed=seed)
    list(itertools.islice(iter(loader), 3))
    state = loader.state_dict()
    loader.load_state_dict({**state, "position": 200})
    with pytest.raises(ValueError, match=r"saved after 200 batches .* yields only 178"):
        next(iter(loader))


# Samples over the budget -------------------------------------------------------------------

LONG = [3, 25, 10, 11, 1]


def test_a_sample_over_the_budget_is_refused_by_its_index():
    with pytest.raises(ValueError, match=r"2 of 5 samples are too long.*: sample 1 has 25 tokens"):
        TokenBatches(LONG, 10)
    with pytest.raises(ValueError, match=r"sample 1 has \(2, 9\) tokens.*allows \(5, 8\)"):
        TokenBatches([[5, 8], [2, 9]], (5, 8))
    # As padded, 11 tokens take 12.
    with pytest.raises(ValueError, match="sample 0 has 11 tokens, and max_tokens allows 8"):
        TokenBatches([11], 11, layout="padded", multiple_of=4)


def test_samples_over_the_budget_are_left_out_and_counted():
    with pytest.warns(UserWarning, match="leaves out 2 of 5 samples"):
        batches = TokenBatches(LONG, 10, too_long="drop", window=2, balance="tokens")
    assert sorted(flat(batches)) == [0, 2, 4]
    assert batches.dropped_count == 2
    assert batches.pieces_of(LONG) is LONG


def test_all_samples_of_a_window_may_be_left_out():
    with pytest.warns(UserWarning, match="leaves out 4 of 5"):
        batches = TokenBatches([20, 20, 20, 20, 1], 10, too_long="drop", window=1, shuffle=False)
    assert list(batches) == [[4]]
    assert len(batches) == 1


class Texts(torch.utils.data.Dataset):
    """Samples of several fields, of which two are as long as the text."""

    def __len__(self):
        return len(LONG)

    def __getitem__(self, index):
        ids = torch.arange(LONG[index]) + 100 * index
        return {"input_ids": ids, "mask": ids.tolist(), "pair": (ids.numpy(), "x"), "id": index}


def test_truncated_samples_are_cut():
    batches = TokenBatches(LONG, 10, too_long="truncate")
    texts = batches.pieces_of(Texts())
    assert sorted(flat(batches)) == [0, 1, 2, 3, 4]
    assert [len(texts[index]["input_ids"]) for index in range(5)] == [3, 10, 10, 10, 1]
    assert len(texts) == 5


@pytest.mark.parametrize("workers", [0, 2])
def test_split_samples_come_in_pieces_that_know_their_offsets(workers):
    batches = TokenBatches(LONG, 10, too_long="split", balance="tokens")
    pieces = [batches.piece(number) for number in range(batches.number_count)]
    assert pieces == [
        (0, 0, 3), (1, 0, 10), (2, 0, 10), (3, 0, 10), (4, 0, 1),
        (1, 10, 20), (1, 20, 25), (3, 10, 11),
    ]  # fmt: skip
    texts = batches.pieces_of(Texts())
    assert len(texts) == 8
    seen = []
    with DataLoader(texts, batch_sampler=batches, collate_fn=list, num_workers=workers) as loader:
        for numbers, batch in zip(list(plan_again(batches)), loader, strict=True):
            assert sum(len(sample["input_ids"]) for sample in batch) <= 10
            for number, sample in zip(numbers, batch, strict=True):
                index, start, stop = pieces[number]
                expected = list(range(100 * index + start, 100 * index + stop))
                assert sample["input_ids"].tolist() == sample["mask"] == expected
                assert sample["pair"][0].tolist() == expected
                assert (sample["pair"][1], sample["id"]) == ("x", index)
                seen += expected
    assert sorted(seen) == sorted(flat(sample["input_ids"].tolist() for sample in Texts()))


def plan_again(batches):
    return pickle.loads(pickle.dumps(batches))


class TextsInLists(Texts):
    """Texts that are loaded by lists, and what was asked for."""

    def __init__(self):
        self.asked = []

    def __getitems__(self, indices):
        self.asked.append(indices)
        return [self[index] for index in indices]


def test_pieces_are_loaded_by_one_call_if_samples_are():
    plan_of_pieces = TokenBatches(LONG, 10, too_long="split")
    alone, together = Texts(), TextsInLists()
    pieces = plan_of_pieces.pieces_of(together)
    with DataLoader(pieces, batch_size=8, collate_fn=list) as loader:
        (batch,) = loader
    assert together.asked == [[0, 1, 2, 3, 4, 1, 1, 3]]
    expected = plan_of_pieces.pieces_of(alone)
    for loaded in (batch, expected.__getitems__(range(8))):
        assert [one["mask"] for one in loaded] == [expected[n]["mask"] for n in range(8)]
    with pytest.raises(IndexError):
        pieces.__getitems__([0, 8])


def test_an_error_of_one_of_several_pieces_names_the_piece():
    """Where samples are loaded one by one, so are pieces."""

    class Broken(Texts):
        def __getitem__(self, index):
            if index == 3:
                raise OSError("no such text")
            return super().__getitem__(index)

    pieces = TokenBatches(LONG, 10, too_long="split").pieces_of(Broken())
    loader = DataLoader(pieces, batch_size=8, collate_fn=list, on_error="skip")
    assert [len(batch) for batch in loader] == [6]
    assert [failure.index for failure in loader.failures] == [3, 7]


def test_after_an_epoch_that_was_left_the_length_is_that_of_the_next_one():
    lengths = LENGTHS[:300]
    counts = [len(epoch_of(plan(lengths, window=30, balance=None), n)) for n in range(6)]
    batches = plan(lengths, window=30, balance=None)
    loader = DataLoader(range(300), batch_sampler=batches)
    seen = []
    for _ in range(6):
        for _ in loader:
            seen.append(len(loader))
            break
        seen.append(len(loader))
    assert len({*counts}) > 1
    assert seen[0::2] == counts
    assert seen[1:-1:2] == counts[1:]


def test_a_sample_of_a_tokenizer_is_cut():
    from transformers import BatchEncoding

    whole = BatchEncoding({"input_ids": list(range(12)), "attention_mask": [1] * 12, "id": 3})
    texts = TokenBatches([12], 10, too_long="split").pieces_of([whole])
    assert texts[1] == {"input_ids": [10, 11], "attention_mask": [1, 1], "id": 3}
    assert len(whole["input_ids"]) == 12
    with pytest.raises(
        ValueError, match=r"sample 0 should have .* 13 tokens.*: input_ids: 12, att"
    ):
        TokenBatches([13], 10, too_long="truncate").pieces_of([whole])[0]


def test_a_sample_without_a_sequence_of_its_length_is_no_piece():
    texts = TokenBatches([12], 10, too_long="split").pieces_of([torch.arange(7)])
    with pytest.raises(ValueError, match=r"sample 0 should have a sequence of 12 tokens.*: 7"):
        texts[1]
    with pytest.raises(IndexError):
        texts[2]


# Wrong arguments ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"lengths": [3, 0]}, ValueError, r"lengths\[1\]=0"),
        ({"lengths": [3, 1, -4]}, ValueError, r"lengths\[2\]=-4"),
        ({"lengths": [1.0, 2.5]}, ValueError, r"lengths\[1\]=2.5"),
        ({"lengths": [1.0, math.nan]}, ValueError, r"lengths\[1\]=nan"),
        ({"lengths": [1.0, math.inf]}, ValueError, r"lengths\[1\]=inf"),
        ({"lengths": [1.0, 1e300]}, ValueError, r"lengths\[1\]=1e\+300"),
        (
            {"lengths": np.array([1, 2**63], np.uint64)},
            ValueError,
            r"be whole numbers from 1 to 2\*\*63 - 1, but got lengths\[1\]=9223372036854775808",
        ),
        ({"lengths": [[1, 2]]}, ValueError, r"shape \(1, 2\)"),
        ({"lengths": np.ones((2, 2, 2), int)}, ValueError, r"shape \(2, 2, 2\)"),
        ({"lengths": [[1, 1], [0, 1]], "max_tokens": (4, 4)}, ValueError, r"lengths\[1, 0\]=0"),
        *(
            ({"lengths": lengths}, TypeError, "lengths should")
            for lengths in (None, ["a"], [[1], [1, 2]])
        ),
        ({"lengths": 5}, ValueError, r"lengths should .* shape \(\)"),
        (
            {"lengths": [[1, 2]], "max_tokens": (5, 5), "too_long": "split"},
            ValueError,
            "one measure",
        ),
        ({"max_tokens": 0}, ValueError, "max_tokens should be 1 or more"),
        ({"max_tokens": 1.5}, TypeError, "max_tokens should be an int"),
        ({"max_tokens": (5, 0)}, ValueError, r"max_tokens\[1\] should be 1 or more"),
        ({"max_tokens": ()}, ValueError, "is empty"),
        ({"layout": "jagged"}, ValueError, "layout should be 'packed' or 'padded'"),
        ({"too_long": "cut"}, ValueError, "too_long should be"),
        ({"last_batch": "keep"}, ValueError, "last_batch should be"),
        ({"balance": "flops"}, ValueError, "balance should be"),
        ({"balance": 3}, TypeError, "balance should be"),
        ({"balance": lambda _: 1.0}, ValueError, r"an array of 2 costs, but returned array\(1.\)"),
        ({"balance": lambda lengths: -lengths}, ValueError, "none of them negative"),
        ({"balance": lambda lengths: lengths * math.inf}, ValueError, "return finite costs"),
        ({"window": 0}, ValueError, "window should be 1 or more"),
        ({"shuffle": 1}, TypeError, "shuffle should be True or False"),
        ({"seed": -1}, ValueError, "seed should be 0 or more"),
        ({"multiple_of": 8}, ValueError, "layout='packed' has none"),
        ({"max_tokens": 4, "layout": "padded", "multiple_of": 8}, ValueError, "should be 8 or"),
    ],
)
def test_wrong_arguments_are_named(options, error, text):
    with pytest.raises(error, match=text):
        TokenBatches(**{"lengths": [2, 3], "max_tokens": 10, **options})


@pytest.mark.parametrize("wrap", [lambda each: each, ShardedSampler])
def test_a_dataset_of_another_length_is_refused_by_the_loader(wrap):
    with pytest.raises(ValueError, match="lengths of 700 samples, but the dataset has 3"):
        DataLoader([1, 2, 3], batch_sampler=wrap(plan()))
    with pytest.raises(ValueError, match=r"give the loader plan\.pieces_of"):
        DataLoader(LONG, batch_sampler=wrap(TokenBatches(LONG, 10, too_long="split")))

    class Endless:
        def __getitem__(self, index):
            return index

    DataLoader(Endless(), batch_sampler=wrap(plan()))
    with pytest.raises(ValueError, match="but the dataset has 3"):
        ShardedDataLoader([1, 2, 3], batch_sampler=plan())


def test_a_plan_is_no_sampler_of_indices():
    plan = TokenBatches([1, 2], 4)
    for sampler in (plan, ShardedSampler(plan, rank=0, world_size=1)):
        with pytest.raises(ValueError, match="give it as batch_sampler, not as sampler"):
            DataLoader(range(2), sampler=sampler)
        assert list(DataLoader(torch.arange(2), sampler=sampler, batch_size=None))
