"""What cannot be pickled for workers is found, by its path, and the error says it."""

import functools
import itertools
import pickle
import threading
import time

import pytest
from torch.utils.data import ConcatDataset, Subset

from shmloader.batch.unpicklable import Unpicklable, explain, find_unpicklable

LOCK = threading.Lock()


class Holder:
    """A dataset or a transform with some attributes."""

    def __init__(self, **attributes):
        self.__dict__.update(attributes)

    def __call__(self, value):
        return value

    def __len__(self):
        return 2


class Slotted:
    __slots__ = ("connection", "name")

    def __init__(self, connection):
        self.name = "a name"
        self.connection = connection


class OwnState:
    """Leaves out its lock, but puts a list of its own into the pickle."""

    def __init__(self, parts):
        self.lock = LOCK
        self.parts = parts

    def __getstate__(self):
        return [1, *self.parts]

    def __setstate__(self, state):
        self.parts = state[1:]


class OwnReduce:
    def __reduce__(self):
        return Holder, (LOCK,)


class Refusing:
    def __reduce__(self):
        raise TypeError("I stay here")

    def __repr__(self):
        return "I"


class Numbers(list):
    """A list with attributes."""


def with_numbers(*numbers, **attributes):
    made = Numbers(numbers)
    made.__dict__.update(attributes)
    return made


def function_with(lock):
    def collate(samples):
        return lock, samples

    return collate


@pytest.mark.parametrize(
    ("dataset", "path"),
    [
        (LOCK, "dataset"),
        (Refusing(), "dataset"),
        (Holder(a=1, connection=LOCK), "dataset.connection"),
        (Holder(transforms=[Holder(), 3, Holder(client=LOCK)]), "dataset.transforms[2].client"),
        (Holder(by_name={"x": 1, "train": (0, LOCK)}), "dataset.by_name['train'][1]"),
        (Holder(by_key={(1, 2): LOCK}), "dataset.by_key[(1, 2)]"),
        (Holder(keys={(1, Refusing()): 1}), "(key (1, I) of dataset.keys)[1]"),
        (Holder(locks={LOCK}), "an element of dataset.locks"),
        (Holder(part=Slotted(LOCK)), "dataset.part.connection"),
        (Subset(Holder(connection=LOCK), [0]), "dataset.dataset.connection"),
        (ConcatDataset([Holder(), Holder(file=LOCK)]), "dataset.datasets[1].file"),
        (OwnState([2, LOCK]), "dataset.__getstate__()[2]"),
        (OwnReduce(), "dataset.__reduce__()[1][0]"),
        (Holder(numbers=with_numbers(1, LOCK)), "dataset.numbers[1]"),
        (Holder(numbers=with_numbers(1, lock=LOCK)), "dataset.numbers.lock"),
        (Holder(call=Holder(lock=LOCK).__call__), "dataset.call.__self__.lock"),
        (Holder(call=functools.partial(max, 1, key=LOCK)), "dataset.call.keywords['key']"),
        (Holder(call=functools.partial(max, LOCK)), "dataset.call.args[0]"),
        (Holder(call=function_with(LOCK)), "variable 'lock' of dataset.call"),
        (
            Holder(call=function_with(Holder(lock=LOCK))),
            "(variable 'lock' of dataset.call).lock",
        ),
        (Holder(call=lambda lock=LOCK: lock), "dataset.call.__defaults__[0]"),
        (Holder(call=lambda: LOCK), "variable 'LOCK' of dataset.call"),
    ],
    ids=itertools.count(),
)  # fmt: skip
def test_the_path_to_what_cannot_be_pickled(dataset, path):
    found = find_unpicklable((dataset, None), ("dataset", "collate_fn"))
    assert found is not None
    assert found.path == path
    assert type(found.value) in {type(LOCK), Refusing}


def test_the_object_is_named_as_the_user_calls_it():
    found = find_unpicklable((Holder(), function_with(LOCK)), ("dataset", "collate_fn"))
    assert found == ("variable 'lock' of collate_fn", LOCK)


def test_nothing_is_found_where_all_can_be_pickled():
    objects = (Holder(a=1), function_with(3), None)
    assert find_unpicklable(objects, ("dataset", "collate_fn", "worker_init_fn")) is None


def test_an_object_that_contains_itself_ends_the_search():
    inner = Holder(lock=LOCK)
    outer = Holder(inner=inner)
    inner.outer = outer
    found = find_unpicklable((outer,), ("dataset",))
    assert found is not None
    assert found.path.endswith("inner.lock")


def test_the_search_ends_in_time_with_what_it_has_found():
    # Pickling all of this takes longer than the search may.
    many = [{"name": str(number)} for number in range(200_000)]
    dataset = Holder(lock=LOCK, many=[many, many.copy(), LOCK])
    began = time.monotonic()
    assert find_unpicklable((many,), ("dataset",), search_s=0.0) is None
    found = find_unpicklable((dataset,), ("dataset",), search_s=0.0)
    assert found is None or found.path.startswith("dataset")
    assert time.monotonic() - began < 20


def test_an_object_whose_parts_cannot_be_asked_for_is_the_one_that_is_named():
    class Moody:
        """Fails in another way whenever it is pickled."""

        def __reduce_ex__(self, protocol):
            raise ZeroDivisionError(f"protocol {protocol}")

    moody = Moody()
    assert find_unpicklable((Holder(part=moody),), ("dataset",)) == ("dataset.part", moody)


def test_the_text_begins_with_pickle_s_own_and_says_what_to_do():
    with pytest.raises(TypeError) as caught:
        pickle.dumps(LOCK)
    error = caught.value
    found = Unpicklable("dataset.connection", LOCK)
    explained = explain(error, found, "worker processes", "Open it in the worker.")
    assert type(explained) is TypeError
    assert str(explained) == (
        "cannot pickle '_thread.lock' object\n"
        "dataset.connection (of type _thread.lock) cannot be pickled, so it cannot be sent to "
        "worker processes. Open it in the worker."
    )


def test_the_class_is_one_of_pickle_s_three_and_another_error_gets_a_note():
    class OwnError(pickle.PicklingError):
        def __init__(self, first, second):
            super().__init__(first, second)

    explained = explain(OwnError(1, 2), None, "worker processes", "Open it there.")
    assert type(explained) is pickle.PicklingError
    assert str(explained).startswith("(1, 2)\nA part of the dataset, or of a function given to the")
    other = ZeroDivisionError("mine")
    assert explain(other, Unpicklable("dataset", 3), "others", "Open it there.") is other
    assert other.__notes__[0].startswith("dataset (of type int) cannot be pickled")
