"""What ``make gpu`` makes of its steps: verdicts, the check of batches, limits of time."""

import argparse
import importlib
import json
import sys
from pathlib import Path

import pytest
import torch

from tests.process.support import wait_for_end

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture
def modules(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    before = set(sys.modules)
    yield {name: importlib.import_module(name) for name in ("gpu", "device", "_accelerator")}
    for name in set(sys.modules) - before:
        if (getattr(sys.modules[name], "__file__", None) or "").startswith(str(BENCHMARKS)):
            del sys.modules[name]


@pytest.fixture
def device(modules):
    return modules["device"]


@pytest.fixture
def gpu(modules):
    return modules["gpu"]


def found_with(device, *, ours=100.0, ceiling=100.0, torchs=20.0, idle=0.01, wrong=0):
    """What a benchmark found, with the same figures for all workloads."""
    rates = {"shmloader": ours, "ceiling": ceiling, "torch": torchs}
    # The first epoch, in which workers start, is not to count.
    return {
        "runs": [
            {
                **run._asdict(),
                "wrong": wrong,
                "epochs": [
                    {"batches/s": 1.0, "idle": 1.0},
                    {"batches/s": rates[run.loader], "idle": idle},
                ],
            }
            for run in device.runs_of(smallest=False)
        ]
    }


def probed_with(ratio):
    row = {"KiB": 39_424, "registered": 50.0 * ratio, "pinned": 50.0, "pageable": 9.0}
    small = {"KiB": 64, "registered": 1.0, "pinned": 50.0, "pageable": 9.0}
    return {"bandwidth, GB/s": [small, row]}


CONTENT, COPIES, LOADER, IDLE, SPEED = 0, 1, 2, 3, 6


@pytest.mark.sampled(10)
@pytest.mark.parametrize(
    ("goal", "change", "ratio", "verdict"),
    [
        (CONTENT, {}, 1.0, "reached"),
        (CONTENT, {"wrong": 1}, 1.0, "missed"),
        (COPIES, {}, 0.95, "reached"),
        (COPIES, {}, 0.94, "missed"),
        (LOADER, {"ours": 95.0}, 1.0, "reached"),
        (LOADER, {"ours": 94.0}, 1.0, "missed"),
        (IDLE, {"idle": 0.02}, 1.0, "reached"),
        (IDLE, {"idle": 0.021}, 1.0, "missed"),
        (IDLE, {"idle": None}, 1.0, "not measured"),
        (SPEED, {"ours": 60.0}, 1.0, "reached"),
        (SPEED, {"ours": 59.0}, 1.0, "missed"),
        (SPEED, {"ours": 59.0, "ceiling": 59.0}, 1.0, "does not apply"),
    ],
)
def test_a_goal_is_judged_by_the_epochs_after_the_first(device, goal, change, ratio, verdict):
    goals = device.judge(found_with(device, **change), probed_with(ratio))
    assert goals[goal].verdict == verdict


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        (lambda batches: batches, 0),
        (lambda batches: [*batches[:2], batches[2] + 1, *batches[3:]], 1),
        (lambda batches: [batches[1], batches[0], *batches[2:]], 2),
        (lambda batches: batches[:-1], 1),
        (lambda batches: [*batches, batches[0]], 1),
    ],
)
@pytest.mark.usefixtures("late")
def test_each_batch_that_is_wrong_or_missing_or_too_much_is_counted(modules, change, wrong):
    device, accelerator = (
        modules["device"],
        modules["_accelerator"].Accelerator(torch.device("late:0")),
    )
    data = device.Resident("image", device.Shape((3, 4, 4), 8, 6, 1, 8), 1.0)
    steps = device.Steps(accelerator, 0, 8, data.checksums())
    for batch in change([data.batch(number) for number in range(data.batches)]):
        steps.run(batch.to("late"))
    assert steps.wrong_count() == wrong


@pytest.mark.slow
def test_a_step_that_takes_too_long_is_ended_whole_and_what_it_found_is_kept(
    gpu, tmp_path, monkeypatch
):
    (tmp_path / "benchmarks").mkdir()
    program = """
        import subprocess, sys, time
        path = next(one for one in sys.argv if one.startswith("--json=")).partition("=")[2]
        apart = subprocess.Popen(["sleep", "60"], start_new_session=True)
        open(path, "w").write('{"device": %d}' % apart.pid)
        time.sleep(60)
    """
    text = "\n".join(line.strip() for line in program.splitlines())
    (tmp_path / "benchmarks" / "probe.py").write_text(text)
    monkeypatch.setattr(gpu, "ROOT", tmp_path)
    monkeypatch.setattr(gpu, "PROBE_S", 3.0)
    options = argparse.Namespace(device=None, smallest=False)
    found = gpu.run_probe(options, tmp_path)
    wait_for_end(found["device"])
    assert found["failure"].startswith("it was ended after 3 s")


def test_a_step_that_fails_is_on_the_page_with_its_last_line(gpu, tmp_path):
    failure = gpu.run_step(
        [sys.executable, "-c", "raise SystemExit('no memory')"], 20, tmp_path / "log"
    )
    assert failure == "exit code 1: no memory"
    steps = {name: {"failure": failure} for name in ("probe", "tests", "benchmark")}
    page = gpu.page_of(json.loads(json.dumps({"machine": {}, **steps})))
    assert page.count("**Failed**: exit code 1: no memory") == 3
    assert "device: unknown" in page


class Clock:
    """An accelerator whose events are at given times, in ms; its work is done on the CPU."""

    device = torch.device("cpu")
    can_time = True

    def __init__(self, times_ms):
        self._times_ms = iter(times_ms)

    def event(self):
        return Moment(next(self._times_ms))


class Moment:
    def __init__(self, time_ms):
        self.time_ms = time_ms

    def elapsed_time(self, later):
        return later.time_ms - self.time_ms

    def synchronize(self):
        pass


def test_idle_time_is_between_the_end_of_a_step_and_the_start_of_the_next(device):
    # Steps of 10, 10 and 20 ms; idle for 5 and 15 ms; 60 ms in all.
    steps = device.Steps(Clock([0, 10, 15, 25, 40, 60]), 0, 8, [3, 3, 3])
    for _ in range(3):
        steps.run(torch.ones(3, dtype=torch.int64))
    assert steps.wrong_count() == 0
    assert steps.idle_share() == pytest.approx(20 / 60)
    assert steps.step_ms() == 10
    assert steps.late_ms() == 35  # from the second step's end to the third one's
