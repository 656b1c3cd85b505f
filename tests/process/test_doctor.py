"""``shmloader doctor MODULE:FUNCTION``, on loaders with real connections, files and locks."""

import concurrent.futures
import functools
import json
import socket
import sqlite3
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

import shmloader
from shmloader.cli.doctor import is_forkable, walk
from shmloader.cli.main import main
from shmloader.grammar import size
from tests.process.support import Streams

pytestmark = pytest.mark.timeout(120)


class Holding(Dataset[Any]):
    def __init__(self, held: object = None) -> None:
        self.held = held

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((16,), index)


class Doctor:
    """Runs the command on a function of a module that exists for the test only."""

    def __init__(self, module: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
        self._module = module
        self._capsys = capsys

    def run(self, make: object, *arguments: str) -> tuple[int, str, str]:
        self._module.make = make  # type: ignore[attr-defined]
        code = main(["doctor", f"{self._module.__name__}:make", *arguments])
        return code, *self._capsys.readouterr()

    def examine(self, value: object) -> dict[str, Any]:
        """Return what is found out about an object that the function returns, started by fork."""
        code, out, _ = self.run(lambda: value, "--json")
        found = json.loads(out)
        assert code == bool(found["problems"])
        return found


@pytest.fixture
def doctor(capsys, monkeypatch) -> Doctor:
    module = ModuleType("module_to_examine")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return Doctor(module, capsys)


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[dict[str, Any]]:
    """What is open, by the name of its type."""
    ours, other = socket.socketpair()
    with ours, other, Path(__file__).open("rb") as file:
        database = sqlite3.connect(tmp_path / "data.db")
        yield {"sqlite3.Connection": database, "_io.BufferedReader": file, "socket.socket": ours}
        database.close()


@pytest.mark.parametrize("kind", ["sqlite3.Connection", "_io.BufferedReader", "socket.socket"])
def test_what_is_open_is_found_with_its_path_until_it_is_closed(kind, opened, doctor) -> None:
    dataset = Holding([None, {"at": opened[kind]}])
    (fork,) = doctor.examine(dataset)["problems"]
    assert fork["path"] == "dataset.held[1]['at']"
    assert fork["kind"] == kind
    assert "open or create it in the worker" in fork["remedy"]
    opened[kind].close()
    assert doctor.examine(dataset)["problems"] == []


def test_threads_that_a_dataset_has_started_are_a_problem(doctor) -> None:
    event = threading.Event()
    with concurrent.futures.ThreadPoolExecutor(1) as executor:
        assert doctor.examine(Holding(executor))["problems"] == []  # it has started none
        executor.submit(event.wait)
        try:
            problems = doctor.examine(Holding(executor))["problems"]
        finally:
            event.set()
    assert "dataset.held" in [each["path"] for each in problems]


def named(module: str, name: str, **attributes: object) -> Any:
    """Return an object of a class that is named like one of a package that is not installed."""
    return type(name, (), {"__module__": module, "__qualname__": name, **attributes})()


@pytest.mark.parametrize(
    "value",
    [
        named("builtins", "Environment"),  # as lmdb's extension module names it
        named("lmdb.cffi", "Transaction"),
        named("h5py._hl.base", "HLObject"),
        named("psycopg2.extensions", "connection", closed=0),
        named("requests.sessions", "Session"),
    ],
)
def test_objects_of_other_packages_are_known_by_the_names_of_their_types(value) -> None:
    """With classes of the same names: these packages are not installed for the tests."""
    assert not is_forkable(value)


def test_what_goes_wrong_depends_on_how_the_workers_start(opened, doctor) -> None:
    dataset = Holding(opened["sqlite3.Connection"])

    def problems(**options: Any) -> list[str]:
        loader = shmloader.DataLoader(dataset, 4, num_workers=2, **options)
        return [each["what"] for each in doctor.examine(loader)["problems"]]

    (forked,) = problems(multiprocessing_context="fork")
    assert "forked workers share it" in forked
    (spawned,) = problems(multiprocessing_context="spawn")
    assert "cannot be pickled" in spawned
    assert problems(thread_pool=True) == []


def spawned(dataset: Dataset[Any], **options: Any) -> shmloader.DataLoader[Any]:
    options = {"multiprocessing_context": "spawn", **options}
    return shmloader.DataLoader(dataset, 4, num_workers=2, **options)


class OwnState(Holding):
    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "held": None}


def test_the_part_that_cannot_be_pickled_is_named_and_why(doctor) -> None:
    (problem,) = doctor.examine(spawned(Holding(i for i in ())))["problems"]
    assert problem["path"] == "dataset.held"
    assert problem["kind"] == "builtins.generator"
    assert "cannot pickle 'generator' object" in problem["what"]
    assert doctor.examine(spawned(OwnState(threading.Lock())))["problems"] == []


def test_a_lambda_crosses_unless_it_refers_to_what_cannot_be_pickled(doctor) -> None:
    lock = threading.Lock()
    loader = spawned(Holding(), collate_fn=lambda samples: (lock, samples)[1])
    (problem,) = doctor.examine(loader)["problems"]
    assert problem["path"] == "collate_fn"
    loader = spawned(Holding(), collate_fn=lambda samples: samples)
    assert doctor.examine(loader)["problems"] == []


def test_a_walk_runs_no_code_of_the_user_s() -> None:
    class Hostile:
        def __repr__(self) -> str:
            raise AssertionError

        def __getattr__(self, name: str) -> Any:
            raise AssertionError

        __eq__ = __iter__ = __len__ = __getitem__ = __repr__  # type: ignore[assignment]
        __hash__ = object.__hash__

    value = {Hostile(): [Hostile()], 1.5: range(9), "long" * 99: None}
    paths = [path for path, _ in walk({"x": value})]
    assert paths == ["x", "x[…]", "x[1.5]", "x[…][0]"]


def stream() -> Streams:
    return Streams(lambda: iter(torch.arange(8.0)))


@pytest.mark.parametrize(
    ("target", "kind"),
    [
        (lambda: torch.utils.data.DataLoader(Holding(), 4, num_workers=2), "DataLoader"),
        (lambda: shmloader.ShardedDataLoader(Holding(), 4), "ShardedDataLoader"),
        (lambda: shmloader.DataLoader(stream(), 4), "DataLoader"),
        (Holding, "Holding"),
        (stream, "Streams"),
        (lambda: torch.arange(9), "Tensor"),
        (lambda: [1, 2, 3], "list"),
    ],
)
def test_loaders_of_torch_and_datasets_are_examined_too(target, kind, doctor) -> None:
    found = doctor.examine(target())
    assert f": {kind}; " in found["title"]
    assert found["problems"] == []
    assert found["rows"]["batch"].endswith(" B")


def test_a_dataset_that_raises_is_a_problem(doctor) -> None:
    class Broken(Holding):
        def __getitem__(self, index: int) -> Any:
            raise FileNotFoundError("no such image")

    code, out, _ = doctor.run(Broken)
    assert code == 1
    assert "making it raises FileNotFoundError: no such image" in out


def test_the_report_of_a_healthy_loader_has_all_rows_and_says_so(doctor) -> None:
    make = functools.partial(shmloader.DataLoader, Holding(), 4, num_workers=2)
    code, out, _ = doctor.run(make)
    assert code == 0
    assert f"\n  batch           {size(4 * 16 * 8)}\n" in out
    assert "No problem was found." in out
    assert "problem   " not in out
