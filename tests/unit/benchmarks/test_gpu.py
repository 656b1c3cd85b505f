"""What ``make gpu`` makes of its steps: verdicts, the check of batches, limits of time."""

import json
import sys

import pytest
import torch


@pytest.fixture
def device(program):
    return program("device")


@pytest.fixture
def gpu(program):
    return program("gpu")


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
def test_each_batch_that_is_wrong_or_missing_or_too_much_is_counted(program, device, change, wrong):
    accelerator = program("_accelerator").Accelerator(torch.device("late:0"))
    data = device.Resident("image", device.Shape((3, 4, 4), 8, 6, 1, 8), 1.0)
    steps = device.Steps(accelerator, 0, 8, data.checksums())
    for batch in change([data.batch(number) for number in range(data.batches)]):
        steps.run(batch.to("late"))
    assert steps.wrong_count() == wrong


def test_a_step_that_fails_is_on_the_page_with_its_last_line(gpu, tmp_path):
    failure = gpu.run_step(
        [sys.executable, "-c", "raise SystemExit('no memory')"], 20, tmp_path / "log"
    )
    assert failure == "exit code 1: no memory"
    steps = {name: {"failure": failure} for name in ("probe", "tests", "benchmark")}
    page = gpu.page_of(json.loads(json.dumps({"machine": {}, **steps})))
    assert page.count("**Failed**: exit code 1: no memory") == 3
    assert "device: unknown" in page
