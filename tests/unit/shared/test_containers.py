"""A SharedList or SharedDict reads as the list or dict that it was made of."""

import enum
import pickle
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shmloader.memory.segment import SegmentWriter
from shmloader.shared import containers
from shmloader.shared.containers import SharedDict, SharedList, write_index, write_records

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


def shared_list(items, *, writable=False) -> SharedList:
    with SegmentWriter() as writer:
        table = write_records(items, writer, writable=writable)
        return SharedList(writer.finish(), table)


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
    st.just(lambda items: items["a"]),
)


@pytest.mark.slow
@settings(max_examples=150)
@given(st.lists(ITEMS, max_size=20), st.lists(OPERATIONS, min_size=1, max_size=6))
def test_it_does_what_the_list_does(items, operations):
    copied = shared_list(items)
    for operate in operations:
        assert outcome(operate, copied) == outcome(operate, items)
    assert copied == items
    assert items == copied
    assert copied == tuple(items)
    assert copied != [*items, 0]
    assert (copied == {"not": "a list"}) is False


@pytest.mark.slow
@example(["half a pair: \ud800", "\0", "", b"", -(2**200), 1e-300, float("inf")])
@given(st.lists(SIMPLE, min_size=1, max_size=8))
def test_types_are_kept_to_the_bit(items):
    assert [(type(item), repr(item)) for item in shared_list(items)] == [
        (type(item), repr(item)) for item in items
    ]


def test_subclasses_of_simple_types_stay_what_they_are():
    items = [np.float64(1.5), np.str_("a"), np.int64(3), True, (1, (2, "b"))]
    assert [type(item) for item in shared_list(items)] == [type(item) for item in items]
    assert shared_list(items) == items


def test_arrays_and_tensors_in_items_are_views_and_equal():
    big = np.arange(3_000, dtype=np.float32).reshape(30, 100)
    items = [
        {"image": big, "turned": big.T, "every": big[::2, ::3], "label": np.arange(3)},
        (torch.arange(2_000), torch.arange(2)),
        "text between",
        [np.array(["text", None], dtype=object), np.asfortranarray(big)],
    ]
    copied = shared_list(items)
    found = copied[0]
    for name, array in items[0].items():
        np.testing.assert_array_equal(found[name], array)
        assert found[name].dtype == array.dtype
    assert not found["image"].flags.owndata
    assert not found["image"].flags.writeable
    assert found["image"].ctypes.data == copied[0]["image"].ctypes.data
    assert all(map(torch.equal, copied[1], items[1]))
    assert copied[2] == "text between"
    assert copied[3][0].tolist() == ["text", None]
    assert copied[3][1].flags.f_contiguous
    assert shared_list(items, writable=True)[0]["image"].flags.writeable


def test_what_an_item_is_changed_to_is_not_seen_by_the_next_reader():
    copied = shared_list([{"a": [1]}, [2]])
    copied[0]["a"].append(5)
    copied[1].clear()
    assert copied == [{"a": [1]}, [2]]


def test_a_pickle_is_a_handle_whatever_is_selected():
    copied = shared_list([f"text {number}" * 10 for number in range(5_000)])
    data = pickle.dumps(copied)
    assert len(data) < 500
    assert pickle.loads(data) == copied
    assert pickle.loads(pickle.dumps(copied[10:20:3])) == copied[10:20:3]


def test_a_repr_says_how_many_items_there_are():
    assert repr(shared_list(["a", 1])) == "<SharedList of 2 items>"


NUMBERS = st.integers() | st.booleans() | st.floats(allow_nan=False) | st.fractions()
SIMPLE_KEYS = st.text(max_size=4) | st.binary(max_size=4) | NUMBERS | st.none()
# For frozensets each process makes a dict of its own.
OTHER_KEYS = st.frozensets(st.integers(0, 5), max_size=2)
KEYS = st.one_of(SIMPLE_KEYS, st.tuples(SIMPLE_KEYS, SIMPLE_KEYS), OTHER_KEYS)


def shared_dict(items: dict) -> SharedDict:
    with SegmentWriter() as writer:
        columns = (items.keys(), items.values())
        tables = [write_records(column, writer, writable=False) for column in columns]
        index = write_index(items, writer)
        return SharedDict(writer.finish(), *tables, index)


def check_dict(items: dict, asked: list) -> None:
    copied = shared_dict(items)
    missing = object()
    for key in [*items, *asked]:
        assert (key in copied) == (key in items)
        found, expected = copied.get(key, missing), items.get(key, missing)
        assert found is expected if expected is missing else found == expected
    assert list(copied) == list(items)
    assert list(copied.items()) == list(items.items())
    assert list(copied.values()) == list(items.values())
    assert list(reversed(copied)) == list(reversed(items))
    assert all(value in copied.values() for value in items.values())
    assert all(pair in copied.items() for pair in items.items())
    assert missing not in copied.values()
    assert len(copied) == len(items)
    assert copied == items
    assert items == copied
    assert copied != {**items, "one more": 1}
    if items:
        assert copied != dict.fromkeys(items, "another")
    assert pickle.loads(pickle.dumps(copied)) == items


@pytest.mark.slow
@settings(max_examples=200)
@given(st.dictionaries(KEYS, st.text(max_size=5), max_size=20), st.lists(KEYS, max_size=10))
def test_it_does_what_the_dict_does_and_finds_keys_of_any_kind(items, asked):
    check_dict(items, asked)


@settings(max_examples=50)
@given(st.dictionaries(st.integers(), st.integers(), max_size=20), st.lists(st.integers()))
def test_keys_whose_hashes_are_equal_are_told_apart(items, asked):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(containers, "code_of", lambda key: key & 3)
        check_dict(items, asked)


class Color(enum.IntEnum):
    RED = 1


@pytest.mark.parametrize(
    "key", [1, 1.0, True, np.True_, np.int64(1), np.float32(1), Fraction(1), Color.RED]
)
def test_a_number_is_found_by_any_equal_number_and_a_text_by_numpy_s(key):
    assert shared_dict({1: "one", 2: "two"})[key] == "one"
    assert shared_dict({key: "one"})[1] == "one"
    assert shared_dict({"a": key})[np.str_("a")] == 1


def test_a_dict_with_a_nan_as_key_is_read_in_order():
    items = {float("nan"): "none", 1: "one"}
    copied = shared_dict(items)
    assert list(copied.values()) == ["none", "one"]
    assert [value for _, value in copied.items()] == ["none", "one"]


def test_keys_that_cannot_be_compared_are_never_compared():
    # The truth of `() == np.int16(0)` is a ValueError.
    items = {(): "empty", np.int16(0): "zero", None: "none"}
    copied = shared_dict(items)
    assert [copied[key] for key in (*items, 0)] == ["empty", "zero", "none", "zero"]


@pytest.mark.parametrize("items", [{"a": 1}, {frozenset(): 1}])
def test_what_cannot_be_a_key_is_a_type_error(items):
    with pytest.raises(TypeError, match="unhashable"):
        shared_dict(items)[["a", "list"]]
    with pytest.raises(KeyError, match="missing"):
        shared_dict(items)["missing"]
