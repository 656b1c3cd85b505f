"""The parts of the fault campaign. ``make sample`` and ``make faults`` run its cells."""

import functools
import os
from collections import Counter

import pytest

from tests.commands import output_of, run_python
from tests.faults.campaign import COST, run_cells
from tests.faults.cells import all_cells, cell_of, effect_of, pairs_of, pairwise
from tests.faults.chaos import Chaos
from tests.faults.environments import Environment, Outcome, run_trial
from tests.faults.soak import ALLOWED, Measured, too_steep

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def nothing_remains() -> None:
    """Replaces the check after each test, since trials are processes of their own."""


@pytest.mark.slow
def test_the_sample_covers_all_pairs() -> None:
    every = {pair for cell in all_cells() for pair in pairs_of(cell)}
    sample = list(pairwise(all_cells(), COST))
    assert {pair for cell in sample for pair in pairs_of(cell)} == every
    assert {cell.method for cell in sample} == {"fork", "spawn", "forkserver"}


@pytest.mark.slow
def test_cells_run_and_are_judged() -> None:
    names = [
        "sigkill@task-fork-plain",
        "plain@getitem-fork-restarts",
        "sigint@main-next-fork-device",
    ]
    verdicts = list(run_cells([cell_of(name) for name in names], jobs=2, is_fresh=False))
    assert sorted(verdict.cell.id for verdict in verdicts) == sorted(names)
    assert [verdict.problems for verdict in verdicts] == [[], [], []]


@pytest.mark.slow
def test_after_a_few_kills_at_random_times_nothing_is_amiss() -> None:
    chaos = Chaos(seed=5, kills=12)
    chaos.run(jobs=2)
    assert chaos.done >= 12
    assert not chaos.problems, "\n".join(text for _, text in chaos.problems)


@pytest.mark.slow
def test_after_a_kill_of_each_victim_among_ranks_nothing_is_amiss() -> None:
    told = output_of("-m", "tests.faults.host", "--times=8", "--jobs=2", "--seed=6", limit_s=100)
    assert told.count(": right\n") == 8
    assert "\nbuilder: 1 kills, 0 hangs, 0 wrong batches, 0 leaks, 0 other problems" in told


def test_chaos_tells_problems_by_their_sort() -> None:
    chaos = Chaos(seed=5, kills=0)
    chaos.tell(3, Counter(), ["hang:\na stack", "leak: a process"])
    chaos.tell(4, Counter(), ["leak: a file", "wrong batch: leak: none", "other problem: x"])
    assert chaos.verdict == "1 hangs, 1 wrong batches, 2 leaks, 1 other problems"


def soaked(grow: Measured, *, at_first: int = 0) -> list[str]:
    """Judge 1,000 measurements that oscillate, and grow by so much over the second half."""
    times = [float(second) for second in range(1000)]
    measured = []
    for second in range(1000):
        share = max(0.0, second - 500) / 500
        measured.append(
            Measured(
                *(
                    100 + second % 7 + grown * share + at_first * min(1.0, second / 200)
                    for grown in grow
                )
            )
        )
    return too_steep(times, measured)


def test_a_soak_fails_on_a_slope_and_on_nothing_else() -> None:
    still = Measured(0, 0, 0, 0)
    assert soaked(still) == []
    assert soaked(still, at_first=500) == []  # while all warms up
    for place, name in enumerate(Measured._fields):
        (told,) = soaked(still._replace(**{name: 3 * ALLOWED[place]}))
        assert name in told
    # What goes away again is no slope, however high; neither is a single step.
    times = [float(second) for second in range(1000)]
    spikes = [Measured(100 + 400 * (second % 3), 9, 3, 400) for second in range(1000)]
    assert too_steep(times, spikes) == []
    steps = [Measured(100, 9 + (second > 900), 3, 400) for second in range(1000)]
    assert too_steep(times, steps) == []


@pytest.mark.slow
def test_a_short_soak_finds_nothing() -> None:
    done = run_python("-m", "tests.faults.soak", "--minutes=0.05", "--seed=4", limit_s=100)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "descriptors" in done.stdout
    assert done.stdout.endswith("\n0 problems\n")
    assert done.stderr == ""


def test_an_id_names_its_cell() -> None:
    for cell in all_cells():
        assert cell_of(cell.id) == cell
        assert effect_of(cell.fault, cell.point, cell.mode) is cell.effect
    for name in ("", "sigkill@task-fork", "plain@task-fork-plain", "sigkill@task-thread-plain"):
        with pytest.raises(ValueError, match="no cell"):
            cell_of(name)


@pytest.mark.slow
def test_where_the_system_gives_less_a_loader_works_falls_back_or_says_why() -> None:
    works = [
        *("no limit, seed", "RLIMIT_AS +300MiB, plain", "madvise EACCES, plain"),
        *("sched_yield ENOSYS, plain", "sched_yield EPERM, plain", "sigaltstack ENOSYS, plain"),
        *("prlimit64 EPERM, plain", "fcntl(F_SETSIG) EPERM, plain", "wait4 EPERM, plain"),
        *("getsockname EPERM, seed", "clone3 EPERM, plain"),
        "user namespace, 1 MB /dev/shm, no /proc, plain",
    ]
    expected = dict.fromkeys(works, "works") | {
        "RLIMIT_NOFILE 12, plain": "says why",
        "RLIMIT_FSIZE 4096, plain": "says why",
        "RLIMIT_NPROC 1, plain": "says why",
        "memfd_create EACCES, plain": "falls back",
        "fcntl(F_ADD_SEALS) EPERM, seed": "says why",
        "recvfrom EPERM, plain": "says why",
    }
    # In a new interpreter, since one that has computed with torch must not be forked.
    told = output_of("-m", "tests.faults.environments", *expected)
    for name, outcome in expected.items():
        (said,) = (line for line in told.splitlines() if line.startswith(f"{name}: "))
        assert said.startswith((f"{name}: {outcome}", f"{name}: could not be tried")), said
    assert "memfd_create, pidfd_open or eventfd fails ([Errno 13] Permission" in told


def test_what_is_not_right_in_an_environment_is_told() -> None:
    def stumble() -> None:
        raise ValueError("no reason is asked for")

    end = functools.partial(os._exit, 3)
    for enter, outcome in ((stumble, Outcome.UNCLEAR), (end, Outcome.DIES)):
        assert run_trial(Environment("bad", enter, ()), "plain")[0] is outcome
