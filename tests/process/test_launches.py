"""Ranks of one launch find each other, and none of those that an earlier launch has left behind."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed

from shmloader import host, share_on_host
from tests.process.host_loaders import Samples, loader
from tests.process.ranks import FORK, LONG_S, meet

pytestmark = pytest.mark.usefixtures("quick_spawn")


@pytest.fixture
def earlier(monkeypatch) -> set[int]:
    """Processes that count as started by an earlier launch of the same launcher."""
    pids, found = set[int](), host._started_s
    monkeypatch.setattr(host, "_started_s", lambda pid: found(pid) - 2000 * (pid in pids))
    return pids


@contextlib.contextmanager
def warnings_noted() -> Iterator[list[str]]:
    noted: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            noted.append(record.getMessage())

    log, handler = logging.getLogger("shmloader"), Handler(logging.WARNING)
    log.addHandler(handler)
    try:
        yield noted
    finally:
        log.removeHandler(handler)


def built_by() -> tuple[int, str]:
    """Who has built what this rank gets, and what it was told."""
    with warnings_noted() as noted:
        return share_on_host(lambda: [os.getpid()] * 1000)[0], " ".join(noted)


@pytest.mark.parametrize("is_built", [True, False], ids=["built", "building"])
def test_a_rank_left_behind_does_not_share_its_object(run, earlier, is_built) -> None:
    begun = FORK.Event()

    def build() -> list[int]:
        begun.set()
        while not is_built:
            signal.pause()
        return [os.getpid()] * 1000

    old = run.start(lambda: share_on_host(build)[0], 1)
    earlier.add(old.process.pid)
    assert begun.wait(LONG_S)
    if is_built:
        assert old.result() == old.process.pid
    new = [run.start(built_by, rank) for rank in range(2)]
    found = [one.result() for one in new]
    if not is_built:
        old.process.kill()
    assert found[0][0] == found[1][0]
    assert found[0][0] in {one.process.pid for one in new}
    assert all(f"Process {old.process.pid}" in told for _, told in found)


def test_a_rank_that_is_stopped_while_it_builds_is_told_by_its_pid(run) -> None:
    begun = FORK.Event()

    def build() -> None:
        begun.set()
        signal.pause()

    old = run.start(lambda: share_on_host(build), 1)
    assert begun.wait(LONG_S)
    os.kill(old.process.pid, signal.SIGSTOP)
    new = [run.start(built_by, rank) for rank in range(2)]
    try:
        found = [one.result() for one in new]
    finally:
        old.process.kill()
    assert found[0][0] == found[1][0]
    assert found[0][0] in {one.process.pid for one in new}
    assert all(f"kill -9 {old.process.pid}" in told for _, told in found)


class Run(Samples):
    """Samples that tell the run which made them, though its contents are pickled alike."""

    def __init__(self, run: int) -> None:
        super().__init__()
        self.run = run

    def __getstate__(self) -> dict[str, Any]:
        os.environ["RUN_OF_SAMPLES"] = str(self.run)  # the owner of the workers inherits it
        return {"count": self.count}

    def __getitem__(self, index: int) -> int:
        return int(os.environ["RUN_OF_SAMPLES"])


def runs_of(dataset: Run, kept: list[Any]) -> set[int]:
    one = loader(dataset, persistent_workers=True)
    kept.append(one)  # it stays until the rank ends
    return {number for batch in one for number in batch.tolist()}


def test_a_pool_of_a_rank_left_behind_does_not_serve_the_next_launch(run, earlier) -> None:
    kept: list[Any] = []

    old = [run.start(lambda: runs_of(Run(1), kept), rank) for rank in range(2)]
    earlier.update(one.process.pid for one in old)
    assert [one.result() for one in old] == [{1}, {1}]
    old[0].process.kill()
    old[0].process.join()

    def next_launch() -> Any:
        with warnings_noted() as noted:
            return runs_of(Run(2), kept), " ".join(noted)

    found = [one.result() for one in [run.start(next_launch, rank) for rank in range(2)]]
    assert [samples for samples, _ in found] == [{2}, {2}]
    assert all("belongs to another launch" in told for _, told in found)


def test_a_launch_whose_launcher_has_just_launched_another_gets_no_data_of_that(run) -> None:
    kept: list[Any] = []
    old = [run.start(lambda: runs_of(Run(1), kept), rank) for rank in range(2)]
    assert [one.result() for one in old] == [{1}, {1}]
    old[0].process.kill()
    old[0].process.join()
    new = [run.start(lambda: runs_of(Run(2), kept), rank) for rank in range(2)]
    assert [one.result() for one in new] == [{2}, {2}]


def test_a_launch_whose_launcher_has_just_launched_another_gets_no_object_of_that(run) -> None:
    old = run.start(built_by, 1)
    assert old.result()[0] == old.process.pid
    new = [run.start(built_by, rank) for rank in (1, 0)]
    found = new[0].result()[0]
    assert found == new[0].process.pid


def test_ranks_of_a_process_group_meet_whoever_has_launched_them(run, tmp_path) -> None:
    def in_group(launch: str, rank: int) -> tuple[int, str]:
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{tmp_path / launch}", rank=rank, world_size=2
        )
        return built_by()

    started = [
        [
            run.start(lambda launch=launch, rank=rank: in_group(launch, rank), rank)
            for rank in (0, 1)
        ]
        for launch in ("one", "two")
    ]
    found = [{one.result() for one in ranks} for ranks in started]
    assert [len(each) for each in found] == [1, 1]
    assert found[0] != found[1]


PROGRAM = """
import os, sys, json
from shmloader import share_on_host
print(os.getpid(), share_on_host(lambda: [os.getpid()] * 1000)[0], flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
def test_of_ranks_that_several_shells_start_each_builds(tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text(PROGRAM)
    variables = dict(os.environ, WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT=tmp_path.name)
    shells = [
        subprocess.Popen(
            ["sh", "-c", f"RANK={rank} {sys.executable} rank.py; true"],
            cwd=tmp_path,
            env=variables,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        found = [[*map(int, shell.stdout.readline().split())] for shell in shells]
    finally:
        for shell in shells:
            shell.communicate("")
    assert all(builder == pid for pid, builder in found)


class Holder(Samples):
    def __init__(self, **parts: Any) -> None:
        super().__init__()
        self.parts = parts


def differences(make: Any, folder: Path) -> Any:
    """Begin an epoch of a dataset; return the error, or None."""
    with loader(make()) as one:
        try:
            next(iter(one))
        except ValueError as error:
            return str(error)
        finally:
            meet(folder)  # a rank that comes when the others have left has a pool of its own
        return None


class TorchHolder(Holder, torch.utils.data.Dataset[int]):
    pass


@pytest.mark.sampled(7)
@pytest.mark.parametrize("kind", [Holder, TorchHolder])
@pytest.mark.parametrize(
    "of_rank",
    [
        lambda rank: rank,
        lambda rank: [{"images": np.arange(9_000) + rank}],
        lambda rank: torch.arange(9_000) + rank,
        lambda rank: [np.min, max][rank],
    ],
    ids=["number", "array", "tensor", "function"],
)
def test_ranks_whose_datasets_have_other_contents_are_told_what_differs(
    run, of_rank, kind, tmp_path
) -> None:
    def make() -> Holder:
        found = kind(same=lambda x: x)
        found.seed = of_rank(int(os.environ["RANK"]))
        return found

    ranks = [run.start(lambda: differences(make, tmp_path), rank) for rank in range(2)]
    (told,) = filter(None, [one.result() for one in ranks])
    assert "in dataset.seed." in told
    assert all(f"(process {one.process.pid})" in told for one in ranks)
    assert "dataset.parts" not in told
    assert "worker_scope='rank'" in told


def test_a_dataset_that_one_rank_has_built_is_the_same_in_all(run, tmp_path) -> None:
    def make() -> Holder:
        return share_on_host(lambda: Holder(name="parts", texts=[str(n) for n in range(1000)]))

    assert run.results(lambda: differences(make, tmp_path), 2) == [None, None]


FINGERPRINTS = """
import torch
from shmloader.batch.fingerprint import fingerprints_of
class Data:
    def __init__(self):
        self.words = {"some", "words", "of", "a", "set", ("and", frozenset("others"))}
        self.scale = lambda value: value * self.factor
        self.factor = 3
        self.tensor = torch.arange(1000).share_memory_()
print(fingerprints_of(Data()))
"""


@pytest.mark.slow
def test_hash_randomisation_makes_no_difference() -> None:
    found = [
        subprocess.run(
            [sys.executable, "-c", FINGERPRINTS],
            env=dict(os.environ, PYTHONHASHSEED=seed),
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in "12"
    ]
    assert found[0] == found[1]
    assert "dataset.words" in found[0]
