"""Loaders over datasets in Arrow tables: workers, threads, seeds, and collate functions."""

import numpy as np
import psutil
import pyarrow as pa
import pytest
import torch

import shmloader
from shmloader import collate
from shmloader.arrow import ArrowTable
from tests import hugging_face as datasets
from tests.hugging_face import Features, List, Value
from tests.parity.compare import TorchLoader, assert_same

WHERE = {
    "in-process": {},
    "threads": {"num_workers": 2, "thread_pool": True},
    "fork": {"num_workers": 2, "multiprocessing_context": "fork"},
    "spawn": {"num_workers": 2, "multiprocessing_context": "spawn"},
}
LENGTH = 40


def make_dataset(folder=None, form="torch"):
    """Lists of one length and of several, numbers and texts; shuffled, in a folder or in memory."""
    rng = np.random.default_rng(0)
    dataset = datasets.Dataset.from_dict(
        {
            "ids": [rng.integers(0, 50_000, n % 7 + 1).tolist() for n in range(LENGTH)],
            "mask": [[1, 0, n % 2] for n in range(LENGTH)],
            "number": [n / 3 for n in range(LENGTH)],
            "text": [f"row {n}" for n in range(LENGTH)],
        },
        Features(
            ids=List(Value("int32")), mask=List(Value("int8")), number=Value("float64"),
            text=Value("string"),
        ),
    )  # fmt: skip
    if folder is not None:
        dataset.save_to_disk(folder)
        dataset = datasets.load_from_disk(str(folder))
    columns = dataset.column_names[:3] if form else None  # texts are read without a format
    dataset = dataset.with_format(form, columns, output_all_columns=form is not None)
    return dataset.shuffle(seed=1)


def columns_of(samples):
    """A collate function of the user's, which needs a list."""
    samples.sort(key=lambda sample: len(sample["ids"]))
    return {key: [sample[key] for sample in samples] for key in samples[0]}


@pytest.fixture
def is_never_asked(monkeypatch):
    """Whoever asks ``datasets`` for samples, fails."""

    def fail(*_):
        raise AssertionError("datasets was asked")

    monkeypatch.setattr(datasets.arrow_dataset, "query_table", fail)


@pytest.mark.parametrize(
    ("where", "is_on_disk"),
    [
        ("in-process", False),
        ("threads", True),
        ("fork", True),
        pytest.param("spawn", False, marks=pytest.mark.slow),
        pytest.param("spawn", True, marks=pytest.mark.slow),
    ],
)
def test_batches_are_those_of_torch(where, is_on_disk, tmp_path):
    dataset = make_dataset(tmp_path if is_on_disk else None)
    alike = dataset.remove_columns("ids")
    for options in ({"dataset": alike}, {"dataset": dataset, "collate_fn": columns_of}):
        torch.manual_seed(3)
        theirs = list(TorchLoader(batch_size=6, shuffle=True, **options))
        torch.manual_seed(3)
        with shmloader.DataLoader(batch_size=6, shuffle=True, **options, **WHERE[where]) as loader:
            ours = list(loader)
        for one, other in zip(ours, theirs, strict=True):
            if "collate_fn" not in options:
                assert_same(one, other)
            assert str(one) == str(other)


@pytest.mark.parametrize("where", ["in-process", "threads", "fork"])
def test_datasets_is_asked_for_nothing(where, is_never_asked):
    dataset = make_dataset()
    collates = [columns_of, collate.Fields(ids=collate.Pad(), text=collate.AsList())]
    for collate_fn in collates:
        with shmloader.DataLoader(dataset, 6, collate_fn=collate_fn, **WHERE[where]) as loader:
            assert len(list(loader)) == 7
    alike = dataset.remove_columns("ids")
    seeded = {"dataset": alike, "batch_size": 6, "seed": 0, "shuffle": True}
    with shmloader.DataLoader(**seeded, **WHERE[where]) as loader:
        assert_same(list(loader), list(shmloader.DataLoader(**seeded)))


OURS = {
    "fields": lambda: collate.Fields(
        ids=collate.Pad(-1, with_mask=True),
        mask=collate.Pad(),
        number=collate.Stack(),
        text=collate.AsList(),
    ),
    "nested": lambda: collate.Fields(ids=collate.Jagged()),
    "packed": collate.Pack,
}


@pytest.mark.parametrize("form", ["torch", "numpy", None])
@pytest.mark.parametrize("where", ["in-process", "fork"])
@pytest.mark.parametrize("name", OURS)
def test_fields_are_collated_without_samples(name, where, form, monkeypatch):
    dataset, collate_fn = make_dataset(form=form), OURS[name]()
    if name == "packed":
        dataset = dataset.remove_columns(["mask", "text"]).rename_column("ids", "input_ids")
    theirs = list(TorchLoader(dataset, 6, collate_fn=collate_fn))
    monkeypatch.setattr(collate.Ragged, "__getitem__", None)  # it would make a sample
    with shmloader.DataLoader(dataset, 6, collate_fn=collate_fn, **WHERE[where]) as loader:
        for one, other in zip(loader, theirs, strict=True):
            assert_same(one, other)


def test_a_bad_batch_is_reported_as_by_torch():
    """Lists of several lengths, which default_collate does not stack."""
    dataset = make_dataset()
    for options in WHERE["in-process"], WHERE["fork"]:
        with (
            shmloader.DataLoader(dataset, 6, **options) as loader,
            pytest.raises(RuntimeError, match="stack expects each tensor to be equal size"),
        ):
            next(iter(loader))


@pytest.mark.slow
def test_workers_map_a_table_of_files_and_read_only_their_rows(tmp_path):
    rows = pa.table({"row": pa.FixedSizeListArray.from_arrays(np.zeros(16 << 18, np.int32), 1_024)})
    with pa.ipc.new_file(tmp_path / "rows.arrow", rows.schema) as file:
        file.write_table(rows, max_chunksize=1_000)
    dataset = ArrowTable(tmp_path / "rows.arrow")
    options = {"num_workers": 1, "multiprocessing_context": "spawn", "shuffle": True}
    with shmloader.DataLoader(dataset, 256, **options) as loader:
        batches = iter(loader)
        process = psutil.Process(batches._workers[0].pid)
        for number, batch in enumerate(batches):
            assert batch["row"].shape == (256, 1_024)
            if number == len(loader) - 2:
                maps = [one for one in process.memory_maps() if one.path.endswith("rows.arrow")]
    assert [one.anonymous for one in maps] == [0]
