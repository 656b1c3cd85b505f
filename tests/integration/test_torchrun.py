"""ShardedDataLoader in the processes that torchrun starts."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import subprocess
import sys
import textwrap
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.utils.data import RandomSampler

from shmloader import ShardedDataLoader
from tests.integration.test_examples import assert_refused, run_example
from tests.process import one_dataset
from tests.process.host_loaders import Samples
from tests.process.support import ROOT, TOLD_S, wait_until

# A start takes some four seconds of processor time a rank, and the machine may be busy.
LIMIT_S = 150
pytestmark = pytest.mark.timeout(2 * LIMIT_S)

MARK = "SHMLOADER_TEST_RUN"

# 4 global batches of 24, and 14 samples: with 4 ranks of 6 samples a batch, two of them have a
# full batch of these, one has a batch of 2, and one has none.
SAMPLES = 110
GLOBAL_BATCH = 24
SEED = 5


class Run:
    """A command that starts processes, all of which carry a mark in their environment.

    As a context, it ends with none of them alive.
    """

    def __init__(self, command: list[str], folder: Path, **environment: str) -> None:
        self._mark = uuid.uuid4().hex
        self._words = " ".join(command)
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        variables = {
            "PYTHONPATH": os.pathsep.join(paths),
            "OMP_NUM_THREADS": "1",  # torchrun sets it otherwise, and says so
            MARK: self._mark,
        }
        self.process = subprocess.Popen(
            command,
            env={**os.environ, **variables, **environment},
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self._kill()
        self.process.communicate()

    def _processes(self) -> list[psutil.Process]:
        """Those that live. torchrun gives each rank a session of its own, so none would do."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                is_ours = process.environ().get(MARK) == self._mark
                if is_ours and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def _kill(self) -> None:
        while processes := self._processes():  # a killed one may just have started another
            for process in processes:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(processes, timeout=1)

    def finish(self) -> subprocess.CompletedProcess[str]:
        """Wait for its end, which leaves no process behind."""
        try:
            out, err = self.process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            self._kill()
            out, err = self.process.communicate()
            raise AssertionError(
                f"still running after {LIMIT_S} s: {self._words}\n{out}\n{err}"
            ) from None
        wait_until(lambda: not self._processes(), TOLD_S)
        return subprocess.CompletedProcess(self._words, self.process.returncode, out, err)

    def succeed(self) -> str:
        """Wait for its end, with code 0 and nothing on stderr; what it printed."""
        done = self.finish()
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stderr == ""
        return done.stdout


def torchrun(folder: Path, program: Path, *arguments: str, options: list[str]) -> list[str]:
    # Logs are not redirected; the folder for them is made nevertheless.
    start = [sys.executable, "-m", "torch.distributed.run", f"--log-dir={folder / 'logs'}"]
    return [*start, *options, str(program), *arguments]


def on_ranks(count: int, folder: Path, program: Path, *arguments: str) -> Run:
    options = ["--standalone", f"--nproc-per-node={count}"]
    return Run(torchrun(folder, program, *arguments, options=options), folder)


def write_program(folder: Path, source: str) -> Path:
    path = folder / "program.py"
    path.write_text(textwrap.dedent(source))
    return path


def read_ranks(folder: Path, world_size: int) -> list[Any]:
    assert len(list(folder.glob("rank*.json"))) == world_size
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(world_size)]


def union(ranks: list[list[list[int]]]) -> list[list[int]]:
    """The global batches of an epoch: what the ranks got at each step, one after the other."""
    return [[*itertools.chain(*step)] for step in itertools.zip_longest(*ranks, fillvalue=[])]


def orders_of_epochs(count: int = 2, *, is_drawn: bool = False) -> list[list[int]]:
    """The global order of the first epochs: that of a single batch, which nothing cuts."""
    data = torch.arange(SAMPLES)
    order: dict[str, Any] = {"sampler": RandomSampler(data)} if is_drawn else {"shuffle": True}
    loader = ShardedDataLoader(data, SAMPLES, **order, seed=SEED, rank=0, world_size=1)
    orders = [next(iter(loader)).tolist() for _ in range(count)]
    assert len(set(map(tuple, orders))) == count
    for one in orders:
        assert sorted(one) == [*range(SAMPLES)]
    return orders


def in_global_batches(order: list[int], last_batch: str) -> list[list[int]]:
    there = len(order) - len(order) % GLOBAL_BATCH if last_batch == "discard" else len(order)
    whole = [*order[:there]]
    if last_batch == "pad":
        whole += order[: -len(order) % GLOBAL_BATCH]
    return [whole[at : at + GLOBAL_BATCH] for at in range(0, len(whole), GLOBAL_BATCH)]


# The random streams of the ranks differ, and so does what they have drawn from them.
SHARES = f"""
    import json, os, random, sys
    from pathlib import Path

    import numpy as np
    import torch
    from torch.utils.data import RandomSampler
    from shmloader import ShardedDataLoader

    own = int(os.environ["RANK"])
    random.seed(own)
    np.random.seed(own)
    torch.manual_seed(own)
    torch.rand(own)

    # Batches that are lent, not copied out.
    data = torch.arange({SAMPLES})[:, None].expand({SAMPLES}, 4096)
    cases = json.loads(sys.argv[1])
    found = []
    for last_batch, workers, is_drawn in cases:
        loader = ShardedDataLoader(
            data,
            {GLOBAL_BATCH} // int(os.environ["WORLD_SIZE"]),
            shuffle=not is_drawn,
            sampler=RandomSampler(data) if is_drawn else None,
            seed={SEED},
            last_batch=last_batch,
            num_workers=workers,
        )
        epochs = []
        for _ in range(2):
            epochs.append([])
            for batch in loader:
                assert bool((batch == batch[:, :1]).all())
                epochs[-1].append((batch[:, 0].tolist(), loader.padding))
            assert len(epochs[-1]) == len(loader)
        found.append(epochs)
    Path(f"rank{{loader.rank}}.json").write_text(json.dumps(found))
"""

# last_batch, num_workers, whether a sampler draws the order from torch's random stream
CASES = [
    ("pad", 0, False),
    ("pad", 1, False),
    ("discard", 1, False),
    ("keep", 0, False),
    ("keep", 1, False),
    ("pad", 1, True),
]


def assert_one_order(ranks: list[Any], cases: list[tuple[str, int, bool]]) -> None:
    """All ranks together have the global batches of one rank, and know what is repeated."""
    for number, (last_batch, _, is_drawn) in enumerate(cases):
        for epoch, order in enumerate(orders_of_epochs(is_drawn=is_drawn)):
            of_ranks = [found[number][epoch] for found in ranks]
            batches = [[batch for batch, _ in steps] for steps in of_ranks]
            assert union(batches) == in_global_batches(order, last_batch), cases[number]
            if last_batch == "pad":
                assert len(set(map(len, itertools.chain(*batches)))) == 1
                assert len(set(map(len, batches))) == 1
            if last_batch != "discard":
                counted = [
                    batch[: len(batch) - padding]
                    for batch, padding in itertools.chain(*of_ranks)
                ]  # fmt: skip
                assert sorted(itertools.chain(*counted)) == [*range(SAMPLES)]


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_the_union_of_batches_is_the_same_on_any_number_of_ranks(world_size, tmp_path) -> None:
    program = write_program(tmp_path, SHARES)
    with on_ranks(world_size, tmp_path, program, json.dumps(CASES)) as run:
        run.succeed()
    assert_one_order(read_ranks(tmp_path, world_size), CASES)


# An event is a pipe with a name, which the test holds open: it has happened once it has a byte.
PACES = f"""
    import json, os, select
    from pathlib import Path

    import torch
    from shmloader import ShardedDataLoader

    def happens(event):
        os.write(os.open(event, os.O_RDWR), b"x")

    def wait_until(event):
        ready, _, _ = select.select([os.open(event, os.O_RDWR)], [], [], 60)
        assert ready, f"rank {{rank}}: not in 60 s: {{event}}"

    def make_loader():
        return ShardedDataLoader(
            torch.arange({SAMPLES}), {GLOBAL_BATCH} // 3, shuffle=True, seed={SEED}, num_workers=1
        )

    def start_at_different_times():
        if rank == 1:
            wait_until("rank 0 has a batch")
        if rank == 2:
            wait_until("rank 1 has all batches")
        got = []
        for batch in make_loader():
            got.append(batch.tolist())
            if rank == 0 and len(got) == 1:
                happens("rank 0 has a batch")
                wait_until("rank 2 has a batch")
            if rank == 2 and len(got) == 1:
                happens("rank 2 has a batch")
        if rank == 1:
            happens("rank 1 has all batches")
        return [got]

    def one_is_slow():
        got = []
        for batch in make_loader():
            got.append(batch.tolist())
            if rank == 1 and len(got) == 1:
                wait_until("rank 0 has ended its epoch")
                wait_until("rank 2 has ended its epoch")
        if rank != 1:
            happens(f"rank {{rank}} has ended its epoch")
        return [got]

    def one_stops_early():
        loader = make_loader()
        epochs = [[], []]
        for got in epochs:
            for batch in loader:
                got.append(batch.tolist())
                if got is epochs[0] and len(got) == 2:
                    if rank == 2:
                        break
                    wait_until("rank 2 has left")
            if rank == 2 and got is epochs[0]:
                happens("rank 2 has left")
        return epochs

    rank = int(os.environ["RANK"])
    found = [start_at_different_times(), one_is_slow(), one_stops_early()]
    Path(f"rank{{rank}}.json").write_text(json.dumps(found))
"""

EVENTS = [
    *("rank 0 has a batch", "rank 1 has all batches", "rank 2 has a batch"),
    *("rank 0 has ended its epoch", "rank 2 has ended its epoch", "rank 2 has left"),
]


@pytest.fixture
def _events(tmp_path) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for event in EVENTS:
            os.mkfifo(tmp_path / event)
            held = os.open(tmp_path / event, os.O_RDWR)
            stack.callback(os.close, held)
        yield


@pytest.mark.slow
@pytest.mark.usefixtures("_events")
def test_ranks_that_start_late_are_slow_or_stop_early_hold_nobody_up(tmp_path) -> None:
    with on_ranks(3, tmp_path, write_program(tmp_path, PACES)) as run:
        run.succeed()
    starting, slow, early = zip(*read_ranks(tmp_path, 3), strict=True)
    first, second = (in_global_batches(order, "pad") for order in orders_of_epochs())
    for epochs in (starting, slow):
        assert union([of_rank[0] for of_rank in epochs]) == first
    *others, left = [of_rank[0] for of_rank in early]
    assert left == [batch[16:] for batch in first[:2]]
    assert union(others) == [batch[:16] for batch in first]
    assert union([of_rank[1] for of_rank in early]) == second


def test_ranks_that_nothing_joins_agree_nevertheless(tmp_path) -> None:
    """Each has ended before the next one begins: on whichever host, there is no other to ask."""
    program = write_program(tmp_path, SHARES)
    cases = [("pad", 1, False), ("keep", 1, False)]
    for rank in range(2):
        command = [sys.executable, str(program), json.dumps(cases)]
        with Run(command, tmp_path, RANK=str(rank), WORLD_SIZE="2") as run:
            run.succeed()
    assert_one_order(read_ranks(tmp_path, 2), cases)


def assert_trained(printed: str, *, epoch_count: int, world_size: int) -> None:
    *epochs, accuracy, waiting = printed.splitlines()
    assert len(epochs) == epoch_count
    # Each image once, though the last batch is filled up.
    pattern = rf"Epoch {epoch_count}/{epoch_count}: loss \d\.\d+, accuracy \d\d\.\d% of 1437 images"
    assert re.fullmatch(pattern, epochs[-1]), epochs[-1]
    match = re.fullmatch(r"Test accuracy: ([\d.]+) % of 360 images", accuracy)
    assert match, accuracy
    assert float(match[1]) >= 95
    assert re.fullmatch(
        r"Waited for data: [\d.]+ s of [\d.]+ s of training \(\d+%\) on the rank that waited "
        rf"longest; ranks: {world_size}, workers of each: 1",
        waiting,
    )


@pytest.mark.slow
def test_train_ddp_reaches_the_same_accuracy_on_one_rank_and_on_two(tmp_path) -> None:
    # 24 of the test images do not fill a batch of 56, so the second of two ranks has a step less.
    arguments = ["--epochs", "10", "--batch-size", "56", "--require-accuracy", "95"]
    alone = run_example("train_ddp.py", *arguments)
    assert alone.stderr == ""
    assert_trained(alone.stdout, epoch_count=10, world_size=1)
    with on_ranks(2, tmp_path, ROOT / "examples" / "train_ddp.py", *arguments) as run:
        assert_trained(run.succeed(), epoch_count=10, world_size=2)


@pytest.mark.slow
def test_train_ddp_ends_with_status_1_below_the_required_accuracy() -> None:
    result = run_example("train_ddp.py", "--epochs", "1", "--require-accuracy", "100.1", code=1)
    assert "Waited for data" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--epochs", "0"], ["--epochs", "'0'", "from 1 up"]),
        (["--batch-size", "16"], ["--batch-size", "16 images", "among 3 ranks"]),
    ],
)
def test_train_ddp_refuses_a_wrong_argument_in_one_line(
    arguments, words, capsys, monkeypatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("RANK", "0")
    assert_refused(capsys, monkeypatch, "train_ddp.py", *arguments, words=words)


ONE_POOL = """
    import json, os, sys, time
    from pathlib import Path

    import psutil
    from shmloader import ShardedDataLoader

    from tests.process.host_loaders import Samples
    from tests.process.ranks import join_launched

    rank, restarts = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    what = sys.argv[1]


    if __name__ == "__main__":
        join_launched()
        with ShardedDataLoader(
            Samples(120), int(sys.argv[2]), True, num_workers=2, worker_scope="host", seed=1
        ) as loader:
            state = Path("state.json")
            if what == "resumed":
                loader.load_state_dict(json.loads(state.read_text()))
            batches = []
            for indices, drawn, _ in loader:
                batches.append([indices.tolist(), drawn.tolist()])
                if what == "killed" and restarts + rank == 0 and len(batches) == 1:
                    owner = psutil.Process(loader._parts.host_pool.nursery.pid)
                    workers = owner.children()
                    owner.kill()
                    psutil.wait_procs(workers, timeout=60)  # else they may make the whole epoch
                if what == "interrupted" and len(batches) == 2:
                    if rank == 0:
                        state.write_text(json.dumps(loader.state_dict()))
                    break
            Path(f"rank{rank}.json").write_text(json.dumps(batches))
            # A rank that came after all others had left would begin a pool of its own.
            deadline = time.monotonic() + 60
            while len(list(Path().glob("rank*.json"))) < int(os.environ["WORLD_SIZE"]):
                assert time.monotonic() < deadline
                time.sleep(0.01)
"""


def _of_one_pool(batches: list[list[list[list[float]]]]) -> list[tuple[int, list[float]]]:
    """The samples of all ranks in the global order, each with what was drawn for it."""
    found = []
    for step in zip(*batches, strict=True):
        for indices, drawn in step:
            found += zip(indices, drawn, strict=True)
    return found


def _expected_of_one_pool() -> list[tuple[int, list[float]]]:
    """The samples in the global order, as one process without workers makes them."""
    with ShardedDataLoader(Samples(120), 1, True, seed=1, rank=0, world_size=1) as loader:
        return [(int(index), drawn[0].tolist()) for index, drawn, _ in loader]


def test_after_the_owner_of_the_workers_was_killed_a_restart_finds_a_clean_host(tmp_path) -> None:
    program = write_program(tmp_path, ONE_POOL)
    options = ["--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    with Run(torchrun(tmp_path, program, "killed", "12", options=options), tmp_path) as run:
        done = run.finish()
    assert done.returncode == 0, done.stderr
    assert "owns the workers of this host" in done.stderr
    samples = _of_one_pool(read_ranks(tmp_path, 2))
    assert samples == _expected_of_one_pool()


def test_a_run_with_one_pool_is_resumed_on_half_as_many_ranks(tmp_path) -> None:
    program = write_program(tmp_path, ONE_POOL)
    with on_ranks(4, tmp_path, program, "interrupted", "6") as run:
        run.succeed()
    before = _of_one_pool(read_ranks(tmp_path, 4))
    for rank in range(4):
        (tmp_path / f"rank{rank}.json").unlink()
    with on_ranks(2, tmp_path, program, "resumed", "12") as run:
        run.succeed()
    after = _of_one_pool(read_ranks(tmp_path, 2))
    assert before + after == _expected_of_one_pool()


ONE_DATASET = """
    import os, signal
    from pathlib import Path

    from tests.process import one_dataset
    from tests.process.ranks import join_launched


    class Texts(one_dataset.Texts):
        def __init__(self):
            if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
                os.kill(os.getpid(), signal.SIGKILL)
            super().__init__()


    if __name__ == "__main__":
        join_launched()
        one_dataset.Texts = Texts
        one_dataset.run_rank(Path(), int(os.environ["RANK"]), 2)
"""


def test_a_restart_after_the_rank_that_builds_was_killed_builds_anew(tmp_path) -> None:
    program = write_program(tmp_path, ONE_DATASET)
    options = ["--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    with Run(torchrun(tmp_path, program, options=options), tmp_path) as run:
        done = run.finish()
    assert done.returncode == 0, done.stderr
    one_dataset.check(tmp_path, 2)
