"""Which datasets are known to draw no random numbers."""

import abc
import dataclasses
import functools
import random
import sys
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, StackDataset, Subset, TensorDataset

from shmloader import share
from shmloader.batch.drawing import prove


class Base(Dataset):
    kinds = "abc"
    table: ClassVar = {0: "a"}

    def __init__(self):
        self.items = ["a", "b", "c"]
        self.pairs = [(1, [2]), (3, [4])] * 2
        self.x = torch.arange(12.0).reshape(3, 4)
        self.y = np.arange(3)
        self.objects = np.array([object(), None, 1], dtype=object)
        self.columns = {"ids": [1, 2, 3], "nested": {"labels": (4, 5, 6)}}
        self.size = 2
        self.transform = None
        self.is_training = False

    def __len__(self):
        return 3


class Item(Base):
    def __getitem__(self, index):
        return self.items[index]


class Pair(Base):
    def __getitem__(self, index):
        return self.x[index], self.y[index]


class Dict(Base):
    def __getitem__(self, index):
        return {"ids": self.items[index], "label": self.y[index], "kind": "train", "n": [index]}


class MoreKeys(Base):
    def __getitem__(self, index):
        item, pair, kind = self.items[index], self.pairs[index], self.kinds[index]
        return {"item": item, 1: (pair, kind)}


class Columns(Base):
    def __getitem__(self, index):
        return self.columns["ids"][index], self.columns["nested"]["labels"][index]


class Shared(Base):
    def __init__(self, item="a"):
        super().__init__()
        self.shared = share([item] * 2000)
        self.shared_dict = share(dict.fromkeys(map(str, range(2000)), item) | {"a": item})

    def __getitem__(self, index):
        return self.shared[index], self.shared_dict[self.shared[index]]


class Keyed(Base):
    def __getitem__(self, index):
        return self.table[self.y[index]], self.objects[index]


class Windows(Base):
    def __getitem__(self, index):
        tokens = self.y[index * self.size : (index + 1) * self.size]
        return tokens[:-1], tokens[1:], self.x[index, 1:], self.x[index % len(self.items)] / 255


class Converted(Base):
    def __getitem__(self, index):
        row = torch.from_numpy(self.y[index : index + self.size].astype(np.int64))
        label = torch.tensor(self.y[index], dtype=torch.long)
        return row, label, self.x[index].float().unsqueeze(0), int(self.y[index]), float(index)


class WithoutTransform(Base):
    def __getitem__(self, index):
        item = self.items[index]
        if self.transform is not None:
            item = self.transform(item)
        if self.is_training:
            item, more = random.choice(item), 1
        else:
            more = 2
        return item, more


class Inner(Base):
    def __init__(self):
        super().__init__()
        self.inner = Subset(Item(), [2, 1, 0])

    def __getitem__(self, index):
        return self.inner[index], index


class Inherited(Item):
    pass


class Abstract(abc.ABC):  # noqa: B024 - only its metaclass matters
    def __init__(self):
        self.items = [1, 2]

    def __getitem__(self, index):
        return self.items[index]


class Slots:
    __slots__ = ("items",)

    def __init__(self):
        self.items = [1, 2]

    def __getitem__(self, index):
        return self.items[index]


@dataclasses.dataclass
class Data:
    items: list[str]
    size: int = 3

    def __getitem__(self, index):
        return self.items[index], self.size


@dataclasses.dataclass(slots=True)
class SlottedData(Data):
    def __getitem__(self, index):
        return self.items[index]


class OfModule(Base):
    def __getitem__(self, index):
        return TABLE[index]


TABLE = ["a", "b", "c"]

LOOK_UPS = [
    *(Item, Pair, Dict, MoreKeys, Columns, Shared, Keyed, Windows, Converted, WithoutTransform),
    *(Inner, Inherited, Abstract, Slots, OfModule),
    functools.partial(Data, ["a", "b"]),
    functools.partial(SlottedData, ["a", "b"]),
]


@pytest.mark.parametrize("make", LOOK_UPS)
def test_a_look_up_draws_nothing(make) -> None:
    dataset = make()
    before = random.getstate(), torch.get_rng_state(), np.random.get_state()[1].tolist()
    proof = prove(dataset)
    assert proof is not None
    assert proof.holds()
    dataset[0]
    assert random.getstate() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])
    assert np.random.get_state()[1].tolist() == before[2]


@pytest.mark.parametrize(
    "dataset",
    [
        [1, 2],
        TensorDataset(torch.arange(3)),
        Subset(Item(), [0, 2]),
        ConcatDataset([Item(), Subset(Pair(), range(2)), [1, 2]]),
        StackDataset(a=Item(), b=Pair()),
        Subset(Subset(Dict(), np.arange(2)), torch.arange(1)),
    ],
)
def test_torch_s_datasets_of_look_ups_draw_nothing(dataset) -> None:
    proof = prove(dataset)
    assert proof is not None
    assert proof.holds()


def test_what_lies_in_shared_memory_may_draw_if_reading_it_unpickles() -> None:
    plain, pickled = Shared(), Shared(("a", 1))
    assert type(plain.shared).__name__ == type(pickled.shared).__name__ == "SharedList"
    assert type(plain.shared_dict).__name__ == "SharedDict"
    assert prove(plain) is not None
    assert prove(pickled) is None
    pickled.shared = plain.shared
    assert prove(pickled) is None
    pickled.shared_dict = plain.shared_dict
    assert prove(pickled) is not None


def test_nothing_is_read_of_what_runs_no_code_of_the_user_s() -> None:
    assert prove([1, 2]).is_lasting
    assert not prove(Item()).is_lasting


# ---------------------------------------------------------------- what may draw


class OwnList(list):
    pass


class OwnDict(dict):
    def __missing__(self, key):
        return random.random()


class OwnTensor(torch.Tensor):
    pass


def with_items(items, method=Item.__getitem__):
    class Dataset(Base):
        __getitem__ = method

    dataset = Dataset()
    dataset.items = items
    return dataset


def of(method, **attributes):
    return type("Made", (Base,), {"__getitem__": method, **attributes})()


def decorated(function):
    @functools.wraps(function)
    def wrapper(self, index):
        random.random()
        return function(self, index)

    return wrapper


class Asynchronous(Base):
    async def __getitem__(self, index):
        return self.items[index]


class Generator(Base):
    def __getitem__(self, index):
        yield self.items[index]


class Closure(Item):
    def __getitem__(self, index):
        return super().__getitem__(index)


class Tried(Base):
    def __getitem__(self, index):
        try:
            return self.items[index]
        except IndexError:
            return random.random()


class Looped(Base):
    def __getitem__(self, index):
        return [self.items[each] for each in index]


class Iterated(Base):
    def __getitem__(self, index):
        one, two = self.pairs[index]
        return one, two


class While(Base):
    def __getitem__(self, index):
        while self.size:
            pass
        return index


class Property(Item):
    @property
    def items(self):
        return [random.random()]

    @items.setter
    def items(self, value):
        pass


class Cached(Base):
    @functools.cached_property
    def drawn(self):
        return [random.random()] * 3

    def __getitem__(self, index):
        return self.drawn[index]


class Getattr(Item):
    def __getattr__(self, name):
        random.random()
        raise AttributeError(name)


class Getattribute(Item):
    def __getattribute__(self, name):
        random.random()
        return super().__getattribute__(name)


class Getitems(Item):
    def __getitems__(self, indices):
        return [random.random() for _ in indices]


class OwnMeta(type):
    def __getattribute__(cls, name):
        return super().__getattribute__(name)


class OfOwnMeta(metaclass=OwnMeta):
    def __init__(self):
        self.items = [1]

    def __getitem__(self, index):
        return self.items[index]


class Optional(Base):
    def __getitem__(self, index, scale=random.random):
        return self.items[index]


MAY_DRAW = {
    "async": Asynchronous(),
    "generator": Generator(),
    "closure": Closure(),
    "decorated": of(decorated(Item.__getitem__)),
    "static": of(staticmethod(lambda index: index)),
    "no function": of(functools.partial(lambda index: index)),
    "lambda with a default": of(lambda self, index, more=1: index),
    "variable arguments": of(lambda self, *index: index),
    "an argument more": Optional(),
    "try": Tried(),
    "comprehension": Looped(),
    "unpacked": Iterated(),
    "endless": While(),
    "property": Property(),
    "cached property": Cached(),
    "getattr": Getattr(),
    "getattribute": Getattribute(),
    "getitems": Getitems(),
    "metaclass": OfOwnMeta(),
    "none": Base(),
    "call": of(lambda self, index: random.random()),
    "call of a method": of(lambda self, index: self.items.pop(index)),
    "call of an item": of(lambda self, index: self.items[index]()),
    "convert an item": of(lambda self, index: torch.tensor(self.pairs[index])),
    "int of an item": of(lambda self, index: int(self.items[index])),
    "length of an item": of(lambda self, index: len(self.items[index])),
    "length of the dataset": of(lambda self, index: len(self)),
    "method of a tensor": of(lambda self, index: self.x[index].normal_()),
    "dropout": of(lambda self, index: torch.nn.functional.dropout(self.x[index])),
    "attribute of an item": of(lambda self, index: self.items[index].name),
    "attribute of the index": of(lambda self, index: index.name),
    "item of an item": of(lambda self, index: self.items[index][0]),
    "item of an object array": of(lambda self, index: self.objects[index][0]),
    "item of the index": of(lambda self, index: index[0]),
    "item of itself": of(lambda self, index: self[index]),
    "sum of items": of(lambda self, index: self.items[index] + 1),
    "sum with an object": of(lambda self, index: index + self.items),
    "comparison": of(lambda self, index: self.items[index] == 1),
    "condition of an item": of(lambda self, index: 1 if self.items[index] else 2),
    "condition of the index": of(lambda self, index: 1 if index else 2),
    "not": of(lambda self, index: not self.items[index]),
    "text": of(lambda self, index: f"{self.items[index]}"),
    "text by %": of(lambda self, index: "%s" % index),  # noqa: UP031
    "key of a dict": of(lambda self, index: {self.items[index]: 1}),
    "array by an item": of(lambda self, index: self.y[self.pairs[index]]),
    "missing attribute": of(lambda self, index: self.missing[index]),
    "missing key": of(lambda self, index: self.columns["missing"][index]),
    "missing global": of(lambda self, index: missing),  # noqa: F821
    "own list": with_items(OwnList("ab")),
    "own dict": with_items(OwnDict()),
    "own tensor": with_items(torch.ones(3).as_subclass(OwnTensor)),
    "own dataset": with_items(of(lambda self, index: random.random())),
    "subset": Subset(of(lambda self, index: random.random()), [0]),
    "one of several": ConcatDataset([Item(), of(lambda self, index: torch.rand(()))]),
}


@pytest.mark.parametrize("kind", MAY_DRAW)
def test_whatever_is_not_known_to_draw_nothing_may_draw(kind) -> None:
    assert prove(MAY_DRAW[kind]) is None


def test_getitems_of_the_object_s_own_may_draw() -> None:
    dataset = Item()
    dataset.__getitems__ = lambda indices: [random.random() for _ in indices]
    assert prove(dataset) is None


def test_nothing_of_the_user_s_runs_when_a_proof_is_sought() -> None:
    class Watched(Item):
        def __getattribute__(self, name):
            raise AssertionError(name)

        def __len__(self):
            raise AssertionError

    class Holder(Base):
        def __getitem__(self, index):
            return self.watched[index], len(self.watched), self.watched.items

    dataset = Holder()
    dataset.watched = Watched()
    assert prove(dataset) is None


def test_too_many_datasets_to_compare_may_draw() -> None:
    assert prove(ConcatDataset([Item() for _ in range(5)])) is not None
    assert prove(ConcatDataset([Item() for _ in range(50)])) is None
    assert prove(ConcatDataset([TensorDataset(torch.ones(2)) for _ in range(50)])) is not None


# ---------------------------------------------------------------- what changes later


def set_transform(dataset):
    dataset.transform = random.choice


def replace_items(dataset):
    dataset.items = OwnList("ab")


def delete_items(dataset):
    del dataset.items


def replace_attributes(dataset):
    dataset.__dict__ = dict(vars(dataset))


def add_getitems(dataset):
    dataset.__getitems__ = list


def replace_class(dataset):
    dataset.__class__ = Item


def replace_method(dataset):
    type(dataset).__getitem__ = Item.__getitem__


def replace_code(dataset):
    type(dataset).__getitem__.__code__ = (lambda self, index: random.random()).__code__


def replace_table(dataset):
    TABLE_OF["table"] = OwnList("ab")


TABLE_OF = {"table": ["a", "b"]}


@pytest.mark.parametrize(
    "change",
    [
        *(set_transform, replace_items, delete_items, replace_attributes, add_getitems),
        *(replace_class, replace_method, replace_code, replace_table),
    ],
)
def test_a_change_of_what_was_read_is_noticed(change) -> None:
    class Changed(Base):
        def __getitem__(self, index):
            if self.transform is not None:
                return self.transform(self.items[index])
            return self.items[index], TABLE_OF["table"][index]

    dataset = Changed()
    TABLE_OF["table"] = ["a", "b"]
    proof = prove(dataset)
    assert proof.holds()
    dataset.size, dataset.items[0] = 5, "other"
    assert proof.holds()
    change(dataset)
    assert not proof.holds()


def test_an_attribute_that_comes_before_that_of_the_class_is_noticed() -> None:
    class OfClass(Base):
        def __getitem__(self, index):
            return self.kinds[index]

    dataset = OfClass()
    proof = prove(dataset)
    dataset.kinds = OwnList("ab")
    assert not proof.holds()
    del dataset.kinds
    assert proof.holds()
    OfClass.kinds = OwnList("ab")
    assert not proof.holds()


def test_a_tracer_leaves_the_proof_as_it_is() -> None:
    dataset = Pair()
    before = sys.gettrace()

    def trace(frame, event, argument):
        frame.f_trace_opcodes = True
        return trace

    sys.settrace(trace)
    try:
        dataset[0]
        proof = prove(dataset)
    finally:
        sys.settrace(before)
    assert proof is not None
    assert proof.holds()


def test_code_that_python_has_specialized_is_read_as_it_was_compiled() -> None:
    dataset = Pair()
    for _ in range(100):
        dataset[1]
    assert prove(dataset) is not None
