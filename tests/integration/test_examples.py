"""The examples do what they say, from the command line."""

import os
import re
import runpy
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tests.commands import run_python
from tests.template import ROOT

EXAMPLES = ROOT / "examples"


def run_example(
    name: str, *arguments: str, code: int = 0, temporary: Path | None = None, limit_s: float = 150
) -> subprocess.CompletedProcess[str]:
    """Run an example, which must end with a code. Where it may leave files: ``temporary``."""
    environment = {} if temporary is None else {"TMPDIR": str(temporary)}
    done = run_python(EXAMPLES / name, *arguments, limit_s=limit_s, **environment)
    assert done.returncode == code, done.stdout + done.stderr
    return done


def assert_refused(capsys, monkeypatch, name: str, *arguments: str, words: Sequence[str]) -> None:
    """Status 2, and an error of one line after the usage. In this process, which has torch."""
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    monkeypatch.syspath_prepend(EXAMPLES)  # as for a script
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(EXAMPLES / name, run_name="__main__")
    assert ended.value.code == 2
    last_line = capsys.readouterr().err.splitlines()[-1]
    assert ": error: " in last_line
    for word in words:
        assert word in last_line


@pytest.mark.slow
def test_train_digits_reaches_95_percent_and_says_how_long_it_waited():
    result = run_example("train_digits.py", "--require-accuracy", "95")
    accuracy_line, verdict = result.stdout.splitlines()
    match = re.fullmatch(r"Test accuracy: ([\d.]+) % of 360 images", accuracy_line)
    assert match, accuracy_line
    assert float(match[1]) >= 95
    assert re.match(r"Your loop waited [\d.]+ m?s \(\d+%\) for data, ", verdict), verdict
    assert "epoch 20/20" in result.stderr
    assert re.search(r"acc=\d+\.\d%, loss=\d", result.stderr)


def test_train_digits_ends_with_status_1_below_the_required_accuracy():
    result = run_example("train_digits.py", "--epochs", "1", "--require-accuracy", "100.1", code=1)
    assert "Your loop waited" in result.stdout


def test_train_digits_learns_the_same_from_both_loaders():
    arguments = ["--epochs", "2", "--seed", "7"]
    ours = run_example("train_digits.py", *arguments)
    torchs = run_example("train_digits.py", *arguments, "--loader", "torch")
    figures = re.compile(r"acc=[\d.]+%, loss=[\d.]+")
    assert ours.stdout.splitlines()[0] == torchs.stdout.splitlines()[0]
    assert figures.findall(ours.stderr)[-1] == figures.findall(torchs.stderr)[-1]


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("train_digits.py --epochs 0", ["--epochs", "'0'", "from 1 up"]),
        ("train_digits.py --num-workers -1", ["--num-workers"]),
        ("train_digits.py --batch-size many", ["--batch-size", "'many'"]),
        ("train_digits.py --loader other", ["--loader", "other"]),
        (f"train_images.py {ROOT / 'docs'}", ["docs has no subfolders of .jpg files"]),
        ("jpeg_folder.py /missing", ["/missing is not a folder"]),
        ("resume.py --samples 0", ["--samples", "0"]),
        ("http_images.py --images 0", ["--images", "'0'", "from 1 up"]),
        ("text_corpus.py --lines 0", ["--lines", "from 1 up"]),
        ("pretrain.py --count 100", ["--count", "100 tokens are too few"]),
        ("finetune_text.py --layout none", ["--layout", "'none'", "'packed', 'padded'"]),
        ("shards.py --shards 0", ["--shards", "from 1 up"]),
    ],
)
def test_an_example_refuses_a_wrong_argument_in_one_line(command, words, capsys, monkeypatch):
    assert_refused(capsys, monkeypatch, *command.split(), words=words)


def test_jpeg_folder_reads_files_that_it_wrote_itself_and_removes_them(tmp_path):
    result = run_example("jpeg_folder.py", "--epochs", "1", temporary=tmp_path)
    assert result.stdout.splitlines()[0] == "Writing 400 sample files"
    assert re.fullmatch(
        r"Read 400 images in [\d.]+ s: \d+ images/s, with shmloader and 2 workers",
        result.stdout.splitlines()[-1],
    )
    assert not list(tmp_path.glob("jpeg_folder-*"))


def test_jpeg_folder_reads_a_given_folder_with_its_subfolders(tmp_path):
    image = pytest.importorskip("PIL.Image")
    (tmp_path / "sub").mkdir()
    image.new("RGB", (300, 200), (200, 100, 50)).save(tmp_path / "wide.JPG")
    image.new("L", (10, 400), 30).save(tmp_path / "sub" / "narrow_and_grey.jpeg")
    result = run_example("jpeg_folder.py", str(tmp_path), "--epochs", "2", "--crop", "64")
    assert "Read 4 images" in result.stdout
    assert "red 115, green 65, blue 40" in result.stdout


def test_jpeg_folder_names_a_file_that_it_cannot_decode(tmp_path):
    (tmp_path / "broken.jpg").write_bytes(b"not a JPEG")
    result = run_example("jpeg_folder.py", str(tmp_path), code=1)
    assert f"ValueError: {tmp_path / 'broken.jpg'} cannot be decoded" in result.stderr


def test_jpeg_folder_refuses_a_folder_without_jpegs_in_one_line(tmp_path, capsys, monkeypatch):
    (tmp_path / "notes.txt").write_text("no image")
    words = [str(tmp_path), "no .jpg"]
    assert_refused(capsys, monkeypatch, "jpeg_folder.py", str(tmp_path), words=words)


@pytest.mark.slow
def test_resume_gives_the_same_hash_after_a_kill():
    result = run_example("resume.py", "--samples", "320")
    lines = result.stdout.splitlines()
    hashes = [line for line in lines if "hash over all batches" in line]
    assert len(hashes) == 2
    assert hashes[0] == hashes[1]
    assert hashes[0].startswith("  20 steps, ")
    assert any("kills itself after step 16" in line for line in lines)
    assert any("goes on in epoch 1 at batch 5, step 15" in line for line in lines)
    assert lines[-1] == "The hashes are equal."


@pytest.mark.slow
def test_train_images_ends_with_the_same_weights_after_a_kill(tmp_path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    result = run_example("train_images.py", str(whole))
    *_, accuracy_line, _ = result.stdout.splitlines()
    match = re.fullmatch(r"epoch 2: ([\d.]+)% right", accuracy_line)
    assert match, accuracy_line
    assert float(match[1]) > 95

    program = str(EXAMPLES / "train_images.py")
    with subprocess.Popen(
        [sys.executable, program, str(broken)], stdout=subprocess.PIPE, text=True
    ) as killed:
        for line in killed.stdout:
            if line.startswith("epoch 0: checkpoint"):
                break
        killed.kill()
    assert killed.wait() == -signal.SIGKILL
    result = run_example("train_images.py", str(broken), "--num-workers", "1")
    assert re.match(r"resumes in epoch [012]\n", result.stdout)

    states = [torch.load(folder / "checkpoint.pt", weights_only=True) for folder in (whole, broken)]
    assert states[0]["training"] == states[1]["training"]
    for name, weights in states[0]["network"].items():
        assert torch.equal(weights, states[1]["network"][name]), name


def test_http_images_loads_the_same_images_in_both_ways(tmp_path):
    arguments = ["--images", "64", "--latency-ms", "20", "--batch-size", "10"]
    result = run_example("http_images.py", *arguments, temporary=tmp_path)
    first, colour, last = result.stdout.splitlines()
    assert first == "Writing 64 sample files"
    assert re.fullmatch(r"Mean colour: red \d+, green \d+, blue \d+", colour)
    assert re.fullmatch(
        r"One after the other: \d+ images/s; pipeline: \d+ images/s, [\d.]+ times as fast, "
        r"at 20 ms of latency",
        last,
    )
    assert "64/64" in result.stderr  # of the progress bar
    assert list(tmp_path.iterdir()) == []


def test_text_corpus_shows_memory_with_and_without_share_and_loads_the_same():
    result = run_example("text_corpus.py", "--lines", "5000", "--epochs", "1", "--num-workers", "1")
    lines = result.stdout.splitlines()
    assert lines[0].startswith("5,000 lines, ")
    for name in ("plain list", "shared list"):
        assert any(re.fullmatch(rf"{name}: epoch 0, batch 5/5: [\d,]+ MB", line) for line in lines)
    assert re.fullmatch(
        r"Grown by -?[\d,]+ MB with the plain list, by -?[\d,]+ MB with the shared one\.", lines[-1]
    )


def test_text_corpus_counts_workers_that_a_server_started_too():
    held_mb = runpy.run_path(str(EXAMPLES / "text_corpus.py"))["held_mb"]
    before = held_mb()
    ready, done = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:  # as forkserver does, it starts another one
        os.close(done[1])
        if (grandchild := os.fork()) == 0:
            held = b"x" * (64 << 20)
            os.write(ready[1], held[:1])
            os.read(done[0], 1)
            os._exit(0)
        os.waitpid(grandchild, 0)
        os._exit(0)
    os.close(done[0])
    os.read(ready[0], 1)
    grown = held_mb() - before
    for fd in (done[1], *ready):
        os.close(fd)
    os.waitpid(child, 0)
    assert grown > 60


def test_a_hugging_face_dataset_is_loaded_by_whole_batches():
    pytest.importorskip("datasets")
    result = run_example("hugging_face.py")
    assert result.stdout.splitlines()[-1] == "40 batches, 10,000 of 10,000 rows seen"


@pytest.mark.slow
def test_pretrain_reads_the_same_tokens_after_all_ranks_were_killed(tmp_path):
    result = run_example("pretrain.py", temporary=tmp_path)
    lines = result.stdout.splitlines()
    assert lines[0] == "20,000 tokens, 40,000 bytes"
    assert "  is killed after step 26" in lines
    assert "  resumes after step 25, in epoch 1" in lines
    ends = [line for line in lines if "hash over all tokens" in line]
    assert len(ends) == 2
    assert ends[0] == ends[1]
    assert re.fullmatch(r"  38 steps, loss \d\.\d{4}, hash over all tokens [0-9a-f]{16}", ends[0])
    assert lines[-1] == "The trainings are equal."
    assert not list(tmp_path.glob("pretrain-*"))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_finetune_text_learns_the_same_packed_padded_and_resumed(tmp_path):
    result = run_example("finetune_text.py", temporary=tmp_path, limit_s=500)
    assert result.stdout.count("max/mean over ranks") == 2
    assert re.search(r"is killed after step \d+\n", result.stdout)
    assert "resumes on 1 rank after step" in result.stdout
    ends = re.findall(r"(\d+) steps, loss ([\d.]+) at first, ([\d.]+) at last", result.stdout)
    assert len(ends) == 3
    assert len({steps for steps, _, _ in ends}) == 1
    assert all(float(last) < float(first) - 1 for _, first, last in ends)
    assert result.stdout.splitlines()[-1] == "The trainings are equal."
    assert not list(tmp_path.glob("finetune-*"))


def test_shards_deliver_the_same_records_after_a_stop(tmp_path):
    result = run_example("shards.py", temporary=tmp_path)
    stopped, counts, last = result.stdout.splitlines()
    assert re.fullmatch(r"Stopped after 166 batches; the state has [\d,]+ bytes", stopped)
    assert re.fullmatch(r"[\d,]+ records before the stop, [\d,]+ after it", counts)
    assert last == "They are the 8,000 records of a run without a stop, in the same order."
    assert not list(tmp_path.glob("shards-*"))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_stream_shards_learns_the_same_on_other_ranks_after_two_kills(tmp_path):
    result = run_example("stream_shards.py", temporary=tmp_path, limit_s=500)
    lines = result.stdout.splitlines()
    assert "  is killed after step 22" in lines
    assert "  resumes on 1 rank after step 20" in lines
    assert "  resumes on 2 ranks after step 40" in lines
    ends = [line for line in lines if line.startswith("  60 steps, loss ")]
    first, last = map(float, re.findall(r"[\d.]+(?= at)", ends[0]))
    assert last < first / 3
    # All trainings and ranks share the shards on this machine.
    assert "16 shards were sent, none more than 1 time(s)." in lines
    assert lines[-1] == "The trainings are equal."
    assert not list(tmp_path.glob("stream-shards-*"))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_titan_loader_reads_the_same_packs_on_half_the_ranks(tmp_path):
    result = run_example("titan_loader.py", temporary=tmp_path, limit_s=500)
    steps = re.findall(r"  (\d) ranks, (\d+) steps each", result.stdout)
    (_, whole), (_, stopped), (_, resumed) = [map(int, each) for each in steps]
    assert [ranks for ranks, _ in steps] == ["4", "4", "2"]
    assert abs(resumed - 2 * (whole - stopped)) <= 1
    full, web = map(float, re.findall(r"([\d.]+)%", result.stdout)[:2])
    assert full > 95
    assert abs(web - 70) < 2
    assert result.stdout.splitlines()[-1] == "The packs are the same."
    assert not list(tmp_path.glob("titan-*"))


def test_titan_loader_has_at_most_150_lines():
    assert len((EXAMPLES / "titan_loader.py").read_text().splitlines()) <= 150
