"""A SharedDict reads as the dict that it was made of."""

import enum
import pickle
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shmloader.shared.mappings as mappings_module
from shmloader.memory.segment import SegmentWriter
from shmloader.shared.mappings import SharedDict, stable_hash, write_index
from shmloader.shared.records import Records, RecordWriter

NUMBERS = st.integers() | st.booleans() | st.floats(allow_nan=False) | st.fractions()
SIMPLE = st.text(max_size=4) | st.binary(max_size=4) | NUMBERS | st.none()
STABLE = SIMPLE | st.tuples(SIMPLE, SIMPLE)
# For frozensets each process makes a dict of its own.
KEYS = st.one_of(STABLE, st.frozensets(st.integers(0, 5), max_size=2))


def shared(items: dict) -> SharedDict:
    with SegmentWriter() as writer:
        places = []
        for column in (items.keys(), items.values()):
            records = RecordWriter(writer, writable=False)
            for item in column:
                records.add(item)
            places.append(records.finish())
        hashes = [stable_hash(key) for key in items]
        index = None if None in hashes else write_index(hashes, writer)
        segment = writer.finish()
    keys, values = (Records(segment, place) for place in places)
    return SharedDict(segment, keys, values, index)


def check(items: dict, asked: list) -> None:
    twin = shared(items)
    missing = object()
    for key in [*items, *asked]:
        assert (key in twin) == (key in items)
        found, expected = twin.get(key, missing), items.get(key, missing)
        assert found is expected if expected is missing else found == expected
    assert list(twin) == list(items)
    assert list(twin.items()) == list(items.items())
    assert list(twin.values()) == list(items.values())
    assert list(reversed(twin)) == list(reversed(items))
    assert list(reversed(twin.keys())) == list(reversed(items.keys()))
    assert list(reversed(twin.values())) == list(reversed(items.values()))
    assert list(reversed(twin.items())) == list(reversed(items.items()))
    assert all(value in twin.values() for value in items.values())
    assert all(pair in twin.items() for pair in items.items())
    assert missing not in twin.values()
    more = {"a": 0, 1: "another"}
    for found, expected in ((twin | more, items | more), (more | twin, more | items)):
        assert type(found) is dict
        assert list(found.items()) == list(expected.items())
    assert len(twin) == len(items)
    assert twin == items
    assert items == twin
    assert twin != {**items, "one more": 1}
    if items:
        assert twin != dict.fromkeys(items, "another")
    assert pickle.loads(pickle.dumps(twin)) == items


@pytest.mark.slow
@settings(max_examples=100)
@given(st.dictionaries(STABLE, st.text(max_size=5), max_size=20), st.lists(STABLE, max_size=10))
def test_it_does_what_the_dict_does(items, asked):
    check(items, asked)


@settings(max_examples=50)
@given(st.dictionaries(KEYS, st.integers(), max_size=10), st.lists(KEYS, max_size=5))
def test_keys_of_any_kind_are_found(items, asked):
    check(items, asked)


@settings(max_examples=50)
@given(st.dictionaries(st.integers(), st.integers(), max_size=20), st.lists(st.integers()))
def test_keys_whose_hashes_are_equal_are_told_apart(items, asked):
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "stable_hash", lambda key: key & 3)
        patch.setattr(mappings_module, "stable_hash", lambda key: key & 3)
        check(items, asked)


class Color(enum.IntEnum):
    RED = 1


@pytest.mark.parametrize(
    "key", [1, 1.0, True, np.True_, np.int64(1), np.float32(1), Fraction(1), Color.RED]
)
def test_a_number_is_found_by_any_equal_number(key):
    assert shared({1: "one", 2: "two"})[key] == "one"
    assert shared({key: "one"})[1] == "one"


def test_a_nan_is_a_key_like_another():
    items = {float("nan"): "none", 1: "one"}
    twin = shared(items)
    assert list(twin.values()) == ["none", "one"]
    assert [value for _, value in twin.items()] == ["none", "one"]
    assert repr(dict(twin)) == repr(items)
    assert twin[float("nan")] == "none"
    with pytest.raises(KeyError):
        shared({1: "one"})[float("nan")]


def test_keys_that_cannot_be_compared_are_never_compared():
    # The truth of `() == np.int16(0)` is a ValueError.
    items = {(): "empty", np.int16(0): "zero", None: "none"}
    twin = shared(items)
    assert [twin[key] for key in (*items, 0)] == ["empty", "zero", "none", "zero"]


def test_a_text_is_found_by_numpy_s():
    assert shared({"a": 1})[np.str_("a")] == 1


def test_many_keys_in_one_index():
    items = {f"key {number}": number for number in range(3_000)}
    twin = shared(items)
    assert all(twin[key] == value for key, value in items.items())
    assert "key 3000" not in twin


@pytest.mark.parametrize("items", [{"a": 1}, {frozenset(): 1}])
def test_what_cannot_be_a_key_is_a_type_error(items):
    with pytest.raises(TypeError, match="unhashable"):
        shared(items)[["a", "list"]]
    with pytest.raises(KeyError, match="missing"):
        shared(items)["missing"]


def test_it_refuses_to_be_changed_and_says_what_to_do():
    twin = shared({"a": 1})
    with pytest.raises(TypeError, match=r"dict\(shared\)"):
        twin["a"] = 2
    with pytest.raises(TypeError, match=r"dict\(shared\)"):
        del twin["a"]


def test_a_repr_shows_the_first_items():
    assert repr(shared({"a": 1})) == "SharedDict({'a': 1})"
    long = repr(shared(dict.fromkeys(range(1000), "x")))
    assert long.startswith("SharedDict({0: 'x', 1: 'x', ")
    assert long.endswith(", ...}, 1000 items)")
