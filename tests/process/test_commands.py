"""The command line, on real loaders."""

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import shmloader
from shmloader.cli import bench as benching
from shmloader.cli.main import main
from shmloader.cli.target import on_torch, without_workers
from tests.process.support import ROOT

pytestmark = pytest.mark.timeout(120)

LOADERS = """
import os, signal, threading, time
import torch, shmloader
from torch.utils.data import Dataset

class Slow(Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        time.sleep(0.002)
        return torch.full((8,), index)

make = lambda: shmloader.DataLoader(Slow(), batch_size=4, num_workers=2, shuffle=True)

class Loud(Slow):
    def __getitem__(self, index):
        print("a sample")
        os.write(1, b"of mine")
        return super().__getitem__(index)

def make_loud():
    print("a loader")
    return shmloader.DataLoader(Loud(), batch_size=4, num_workers=2)

class Bad(Slow):
    def __getitem__(self, index):
        raise ValueError("of mine")

make_bad = lambda: shmloader.DataLoader(Bad())
make_torch = lambda: torch.utils.data.DataLoader(Slow(), batch_size=4, num_workers=1)
make_in_process = lambda: torch.utils.data.DataLoader(Slow(), batch_size=4)

class Interrupted(Slow):
    def __getitem__(self, index):
        if index == 40:
            os.kill(os.getpid(), signal.SIGINT)
        return index

make_interrupted = lambda: shmloader.DataLoader(Interrupted(), batch_size=4)
make_nothing = lambda: 7
make_a_class = lambda: Slow
make_once = lambda: iter([torch.zeros(4)] * 3)

def make_and_raise():
    raise ValueError("of mine\\nand more")

number = 7
"""


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch) -> Path:
    (tmp_path / "loaders_of_mine.py").write_text(LOADERS)
    (tmp_path / "broken.py").write_text("def make(:")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    sys.modules.pop("loaders_of_mine", None)
    return tmp_path


def run(*arguments: str) -> int:
    try:
        return main(arguments)
    except SystemExit as left:
        return int(left.code or 0)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((), "the following arguments are required: COMMAND"),
        (("bench", "loaders_of_mine"), "is not of the form pkg.module:make_loader"),
        (("bench", "no_such_module:make"), "No module named 'no_such_module'"),
        (("bench", "loaders_of_mine:nobody"), "has no attribute 'nobody'"),
        (("bench", "loaders_of_mine:number"), "'int' object is not callable"),
        (("bench", "loaders_of_mine:make_nothing"), "returned an int, which is not a loader"),
        (
            ("bench", "loaders_of_mine:make_and_raise"),
            "loaders_of_mine:make_and_raise raised ValueError: of mine",
        ),
        (("bench", "broken:make"), "broken:make raised SyntaxError: "),
        (
            ("bench", "loaders_of_mine:make_in_process", "--vs", "torch"),
            "should return a shmloader.DataLoader, but returned a DataLoader",
        ),
        (("bench", "loaders_of_mine:make", "--step-ms", "-1"), "invalid duration value: '-1'"),
        (("report", "no.json"), "no.json"),
        (
            ("doctor", "loaders_of_mine:make_nothing"),
            "an int, which is neither a DataLoader nor a ",
        ),
        (
            ("doctor", "loaders_of_mine:make_a_class"),
            "a type, which is neither a DataLoader nor a ",
        ),
    ],
)
def test_bad_arguments_are_told_in_one_line(capsys, arguments, text) -> None:
    assert run(*arguments) == 2
    said = capsys.readouterr()
    assert text in said.err
    assert said.err.count("\n") == 1
    assert said.out == ""


def test_bench_prints_the_table_and_the_verdict(capsys) -> None:
    assert run("bench", "loaders_of_mine:make", "--batches", "20", "--step-ms", "1") == 0
    said = capsys.readouterr().out
    # 16 batches an epoch: it goes on with the next one.
    assert "all of 2 epochs" in said
    assert "20 batches, 80 samples" in said
    assert "Your loop waited" in said
    rows = [line.split() for line in said.splitlines()]
    (heads,) = (row for row in rows if row[:1] == ["worker"])
    assert heads[-1] == "memory"
    assert [row[-1] for row in rows if row[:1] in (["0"], ["1"])] == ["MB", "MB"]


@pytest.mark.parametrize(("make", "count"), [("make_in_process", "3"), ("make_once", "30")])
def test_bench_measures_loaders_of_others_and_what_ends(capsys, make, count) -> None:
    assert run("bench", f"loaders_of_mine:{make}", "--batches", count) == 0
    said = capsys.readouterr().out
    assert said.startswith("3 batches, 12 samples in ")


def test_a_terminal_without_these_letters_gets_others(monkeypatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, "ascii", write_through=True))
    assert run("bench", "loaders_of_mine:make", "--batches", "3") == 0
    assert b"3 batches, 12 samples" in written.getvalue()


def test_bench_against_torch_takes_turns_and_prints_medians(capsys, monkeypatch) -> None:
    runs = []
    run_one = benching._run

    def note(loader, options):
        runs.append(type(loader))
        return run_one(loader, options)

    monkeypatch.setattr(benching, "_run", note)
    arguments = ("--batches", "8", "--vs", "torch", "--rounds", "3")
    assert run("bench", "loaders_of_mine:make", *arguments) == 0
    ours, torchs = shmloader.DataLoader, torch.utils.data.DataLoader
    assert runs == [ours, torchs, torchs, ours, ours, torchs]
    said = capsys.readouterr().out
    assert "batches/s: median (range) of 3 rounds in turns" in said
    assert "8 batches, 32 samples" in said, "one round's table"
    for name in ("shmloader ", "torch ", "ratio "):
        (line,) = (line for line in said.splitlines() if line.strip().startswith(name))
        median, least, most = (
            float(one.replace(",", "")) for one in re.findall(r"[\d.,]*\d", line)
        )
        assert least <= median <= most


def test_the_version_is_told(capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert said.startswith(f"shmloader {shmloader.__version__}, torch {torch.__version__}, Python ")


@pytest.mark.parametrize("arguments", [(), ("--vs", "torch")])
def test_after_ctrl_c_bench_tells_what_was_measured(capsys, arguments) -> None:
    made = "loaders_of_mine:make_interrupted"
    assert run("bench", made, "--batches", "16", *arguments) == 130
    said = capsys.readouterr().out
    assert "interrupted after 10 of 16 batches" in said
    assert "10 batches, 40 samples" in said
    assert "rounds" not in said


def test_doctor_tells_of_each_thing(capsys) -> None:
    assert run("doctor") == 0
    said = capsys.readouterr().out
    for name in (
        "cores",
        "memory",
        "shared memory",
        "address space",
        "start method",
        "devices",
        "C function",
    ):
        assert f"  {name}" in said
    assert "unknown" not in said
    assert f"{len(os.sched_getaffinity(0))} by affinity" in said


@pytest.mark.parametrize("options", [{"shuffle": True, "seed": 3}, {"drop_last": True}])
def test_a_copy_of_a_loader_has_its_samples_and_arguments(options) -> None:
    loader = shmloader.DataLoader(
        range(22), 4, num_workers=1, sample_timeout=30, worker_restarts=2, **options
    )
    batches = [batch.tolist() for batch in without_workers(loader)]
    torchs = on_torch(loader)
    assert type(torchs) is torch.utils.data.DataLoader
    assert [batch.tolist() for batch in torchs] == batches
    assert [batch.tolist() for batch in loader] == batches
    assert loader.num_workers == torchs.num_workers == 1


@pytest.mark.slow
def test_the_command_line_runs_as_a_module_on_the_example_of_the_readme() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "shmloader", "bench", "examples.loaders:make_loader", "--batches=4"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    assert "4 batches, 64 samples" in done.stdout


def json_of(capfd: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    """The exit code and the JSON object of a command, while the user's code prints, too."""
    code = run(*arguments, "--json")
    return code, json.loads(capfd.readouterr().out)


def test_bench_gives_json_alone_on_stdout(capfd) -> None:
    code, found = json_of(capfd, "bench", "loaders_of_mine:make_loud", "--batches", "20")
    assert (code, found["batches"], found["samples"]) == (0, 20, 80)
    assert found["target"] == "loaders_of_mine:make_loud"
    assert (found["is_interrupted"], found["vs"]) == (False, None)
    assert found["stats"]["batches"] == 20
    assert found["batches_per_s"] > 0
    code, found = json_of(capfd, "bench", "loaders_of_mine:make_torch", "--batches", "4")
    assert (code, found["batches"], found["stats"]) == (0, 4, None)
    rounds = ("--vs", "torch", "--rounds", "2", "--batches", "3")
    code, found = json_of(capfd, "bench", "loaders_of_mine:make_loud", *rounds)
    assert code == 0
    ours, torchs = found["vs"]["batches_per_s"].values()
    assert found["vs"]["ratios"] == [one / other for one, other in zip(ours, torchs, strict=True)]
    assert (found["stats"]["batches"], len(ours)) == (3, 2)


def test_json_of_a_bench_that_is_interrupted_or_wrong(capfd) -> None:
    code, found = json_of(capfd, "bench", "loaders_of_mine:make_interrupted")
    assert (code, found["is_interrupted"], found["batches"]) == (130, True, 10)
    assert run("bench", "loaders_of_mine:make_nothing", "--json") == 2
    assert capfd.readouterr().out == ""


def test_doctor_names_its_checks(capfd) -> None:
    code, found = json_of(capfd, "doctor")
    assert code == 0
    assert found["checks"]["shared_memory"] == "ok"
    assert set(found["checks"]) == {"shared_memory", "accelerator", "c_function"}
    assert set(found["rows"]) >= {"cores", "memory", "start method"}
    code, found = json_of(capfd, "doctor", "loaders_of_mine:make_loud")
    checks = {"fork": "ok", "cuda": "ok", "pickle": "skipped", "batch": "ok"}
    assert (code, found["checks"], found["problems"]) == (0, checks, [])
    code, found = json_of(capfd, "doctor", "loaders_of_mine:make_bad")
    assert (code, found["checks"]) == (1, {**checks, "batch": "problem"})
    assert [each["check"] for each in found["problems"]] == ["batch"]
