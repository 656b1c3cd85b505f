"""A SharedList reads as the list that it was made of."""

import pickle

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shmloader.memory.segment import SegmentWriter
from shmloader.shared.records import Records, RecordWriter
from shmloader.shared.sequences import SharedList

SIMPLE = (
    st.text(st.characters(exclude_categories=()), max_size=20)  # lone surrogates, too
    | st.binary(max_size=20)
    | st.integers()
    | st.floats(allow_nan=False)
    | st.booleans()
    | st.none()
)
ITEMS = st.recursive(
    SIMPLE,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=6,
)
INDICES = st.integers(-30, 30)
BOUNDS = st.none() | INDICES
STEPS = st.none() | st.integers(-4, 4).filter(bool)


def shared(items, *, writable=False) -> SharedList:
    with SegmentWriter() as writer:
        records = RecordWriter(writer, writable=writable)
        for item in items:
            records.add(item)
        place = records.finish()
        return SharedList(Records(writer.finish(), place))


def outcome(operate, items):
    """What an operation gives, types included, or the type of what it raises."""
    try:
        found = operate(items)
    except (IndexError, ValueError, TypeError) as error:
        return type(error)
    if isinstance(found, SharedList):
        found = list(found)
    return repr(found) if isinstance(found, list) else (type(found), repr(found))


OPERATIONS = st.one_of(
    INDICES.map(lambda index: lambda items: items[index]),
    st.builds(slice, BOUNDS, BOUNDS, STEPS).map(lambda part: lambda items: items[part]),
    st.tuples(st.builds(slice, BOUNDS, BOUNDS, STEPS), INDICES).map(
        lambda both: lambda items: items[both[0]][both[1]]
    ),
    ITEMS.map(lambda item: lambda items: (item in items, items.count(item))),
    ITEMS.map(lambda item: lambda items: items.index(item)),
    st.just(len),
    st.just(list),
    st.just(lambda items: list(reversed(items))),
    st.just(lambda items: [*items, 1] == [*items, 1]),
    st.lists(SIMPLE, max_size=2).map(lambda more: lambda items: [*(items + more), *(more + items)]),
    st.just(lambda items: items["a"]),
)


@pytest.mark.slow
@settings(max_examples=150)
@given(st.lists(ITEMS, max_size=20), st.lists(OPERATIONS, min_size=1, max_size=6))
def test_it_does_what_the_list_does(items, operations):
    twin = shared(items)
    for operate in operations:
        assert outcome(operate, twin) == outcome(operate, items)
    assert twin == items
    assert items == twin
    assert twin == tuple(items)
    assert twin != [*items, 0]
    assert (twin == {"not": "a list"}) is False


@pytest.mark.slow
@example(["half a pair: \ud800", "\0", "", b"", -(2**200), 1e-300, float("inf")])
@given(st.lists(SIMPLE, min_size=1, max_size=8))
def test_types_are_kept_to_the_bit(items):
    assert [(type(item), repr(item)) for item in shared(items)] == [
        (type(item), repr(item)) for item in items
    ]


def test_subclasses_of_simple_types_stay_what_they_are():
    items = [np.float64(1.5), np.str_("a"), np.int64(3), True, (1, (2, "b"))]
    assert [type(item) for item in shared(items)] == [type(item) for item in items]
    assert shared(items) == items


def test_arrays_and_tensors_in_items_are_views_and_equal():
    big = np.arange(3_000, dtype=np.float32).reshape(30, 100)
    items = [
        {"image": big, "turned": big.T, "every": big[::2, ::3], "label": np.arange(3)},
        (torch.arange(2_000), torch.arange(2)),
        "text between",
        [np.array(["text", None], dtype=object), np.asfortranarray(big)],
    ]
    twin = shared(items)
    found = twin[0]
    for name, array in items[0].items():
        np.testing.assert_array_equal(found[name], array)
        assert found[name].dtype == array.dtype
    assert not found["image"].flags.owndata
    assert not found["image"].flags.writeable
    assert found["image"].ctypes.data == twin[0]["image"].ctypes.data
    assert all(map(torch.equal, twin[1], items[1]))
    assert twin[2] == "text between"
    assert twin[3][0].tolist() == ["text", None]
    assert twin[3][1].flags.f_contiguous
    assert shared(items, writable=True)[0]["image"].flags.writeable


def test_what_an_item_is_changed_to_is_not_seen_by_the_next_reader():
    twin = shared([{"a": [1]}, [2]])
    twin[0]["a"].append(5)
    twin[1].clear()
    assert twin == [{"a": [1]}, [2]]


def test_it_refuses_to_be_changed_and_says_what_to_do():
    twin = shared(["a"])
    with pytest.raises(TypeError, match=r"list\(shared\)"):
        twin[0] = "b"
    with pytest.raises(TypeError, match=r"list\(shared\)"):
        del twin[0]
    with pytest.raises(TypeError, match="unhashable"):
        hash(twin)


def test_a_pickle_is_a_handle_whatever_is_selected():
    twin = shared([f"text {number}" * 10 for number in range(5_000)])
    data = pickle.dumps(twin)
    assert len(data) < 500
    assert pickle.loads(data) == twin
    assert pickle.loads(pickle.dumps(twin[10:20:3])) == twin[10:20:3]


def test_a_repr_shows_both_ends():
    assert repr(shared(["a", 1])) == "SharedList(['a', 1])"
    assert repr(shared(range(1_000))) == "SharedList([0, 1, 2, ..., 997, 998, 999], 1000 items)"
