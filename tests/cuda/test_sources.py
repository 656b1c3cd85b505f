"""Batches on a real device wherever they are made: threads, processes, executors, other ranks.

As in `test_device.py`, the loader's stream sleeps before each copy and the consumer's before it
reads, so that memory which is given back too early would be seen; ``--accelerator=late`` is for
trials.
"""

import concurrent.futures
import contextlib
import multiprocessing
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from shmloader import DataLoader, PipelineBuilder
from tests.cuda.accelerators import kind, make, sample, whole
from tests.process.support import Program

SPAWN = multiprocessing.get_context("spawn")


@contextlib.contextmanager
def processes() -> Iterator[dict[str, Any]]:
    """A pool of processes, as the options of a loader."""
    with concurrent.futures.ProcessPoolExecutor(2, SPAWN) as executor:
        yield {"num_workers": 4, "executor": executor, "seed": 3}


def options(**given: Any) -> contextlib.AbstractContextManager[dict[str, Any]]:
    return contextlib.nullcontext(given)


@pytest.mark.usefixtures("copies_are_late")
@pytest.mark.parametrize(
    "source",
    [
        pytest.param(lambda: options(num_workers=0), id="main process"),
        pytest.param(lambda: options(thread_pool=True), id="threads"),
        pytest.param(lambda: options(multiprocessing_context="spawn"), id="spawned"),
        pytest.param(lambda: options(multiprocessing_context="forkserver"), id="fork server"),
        pytest.param(lambda: options(persistent_workers=True, seed=3), id="persistent, seed"),
        pytest.param(lambda: options(in_order=False, num_workers=1), id="any order"),
        pytest.param(processes, id="executor"),
    ],
)
def test_batches_arrive_whole_wherever_they_are_made(source, ends_of) -> None:
    with source() as given, make(200, **given) as loader:
        for _ in range(2):
            assert ends_of(loader, 200, sleep_ms=1, slow_every=1) == whole(200)


@pytest.mark.usefixtures("copies_are_late")
def test_a_pipeline_s_batches_arrive_whole(ends_of) -> None:
    builder = PipelineBuilder().add_source(range(200))
    builder.pipe(sample, executor="process", concurrency=2, output_order="input")
    pipeline = builder.transfer(kind()).add_sink(2).build()
    with pipeline.auto_stop():
        assert ends_of(pipeline, 200, sleep_ms=1, slow_every=1) == whole(200)


@pytest.mark.usefixtures("copies_are_late")
def test_an_epoch_that_was_left_goes_on_with_the_next_batch(ends_of) -> None:
    given: dict[str, Any] = {"seed": 5, "shuffle": True, "persistent_workers": True}
    with make(100, **given) as loader:
        uninterrupted = ends_of(loader, 100)
        loader.set_epoch(0)
        batches = iter(loader)
        before = ends_of([next(batches) for _ in range(37)], 37)
        state = loader.state_dict()
        del batches
    with make(100, **given) as again:
        again.load_state_dict(state)
        assert before + ends_of(again, 63) == uninterrupted
    assert sorted(uninterrupted) == whole(100)


_RANK = """
    import contextlib
    import os
    import psutil
    import torch
    from pathlib import Path
    from shmloader import ShardedDataLoader
    from tests.cuda.accelerators import open_accelerator, sample
    from tests.process.ranks import join
    from tests.process.support import Calls, only

    if __name__ == "__main__":
        join("{store}", {rank}, 2)
        accelerator = open_accelerator("{kind}")
        loader = ShardedDataLoader(
            Calls(sample, 200), 1, collate_fn=only, num_workers=2, worker_scope="host",
            device="{kind}", shuffle=False, seed=1,
        )
        found = []
        for batch in loader:
            accelerator.sleep(1)
            copied = batch.clone()
            del batch
            found.append(torch.stack((copied.amin(), copied.amax())))
            if len(found) == 50:
                owner = psutil.Process(loader._parts.host_pool.nursery.pid)
                for process in (psutil.Process(), owner, *owner.children()):
                    opened = []
                    for file in Path(f"/proc/{{process.pid}}/fd").iterdir():
                        with contextlib.suppress(FileNotFoundError):
                            opened.append(str(file.readlink()))
                    print(any(name.startswith("/dev/nvidia") for name in opened), flush=True)
        print([first for first, last in torch.stack(found).tolist() if first == last], flush=True)
        loader.close()
"""


@pytest.mark.usefixtures("accelerator")
def test_ranks_that_share_workers_have_the_device_and_the_workers_have_not(tmp_path) -> None:
    store = tmp_path / "store"
    ranks = [Program(_RANK.format(store=store, rank=rank, kind=kind())) for rank in range(2)]
    ended = [program.finish(60) for program in ranks]
    for rank, done in enumerate(ended):
        assert (done.code, done.err, done.left) == (0, "", [])
        *has_it, numbers = done.out.splitlines()
        assert has_it == [str(kind() == "cuda"), "False", "False", "False"]
        assert numbers == str([*range(rank, 200, 2)])


@pytest.mark.usefixtures("for_cuda_alone", "copies_are_late")
def test_a_model_learns_the_same_as_from_torch_s_loader() -> None:
    """To the bit: a batch that is read before it is there would change all that follows."""
    drawn = torch.Generator().manual_seed(1)
    images = torch.randint(0, 256, (4096, 3072), dtype=torch.uint8, generator=drawn)
    labels = torch.randint(0, 10, (4096,), generator=drawn)
    dataset = torch.utils.data.TensorDataset(images, labels)

    def train(loader: Any) -> list[torch.Tensor]:
        torch.manual_seed(2)
        model = torch.nn.Linear(3072, 10).cuda()
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        for _ in range(3):
            for batch, wanted in loader:
                given, target = (one.cuda(non_blocking=True) for one in (batch, wanted))
                loss = torch.nn.functional.cross_entropy(model(given / 255), target)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        return [parameter.detach().cpu() for parameter in model.parameters()]

    given: dict[str, Any] = {"batch_size": 64, "num_workers": 2, "drop_last": True}
    theirs = train(torch.utils.data.DataLoader(dataset, pin_memory=True, **given))
    with DataLoader(dataset, device="cuda", **given) as loader:
        ours = train(loader)
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one, other)
