"""What a loader costs: few descriptors, none of which is left, and few calls for a batch."""

import gc
import sys

import pytest
import torch

from shmloader import DataLoader
from tests.process.support import Calls, descriptor_count, run_program

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("quick_spawn")]


@pytest.mark.parametrize(
    "method", ["fork", "forkserver", pytest.param("spawn", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("options", [{}, {"seed": 0}, {"in_order": False}], ids=repr)
def test_a_loader_with_two_workers_holds_eleven_descriptors_however_many_slots_it_has(
    method, options
) -> None:
    data = torch.arange(200 * 20_000, dtype=torch.float32).reshape(200, 20_000)

    def load() -> int:
        loader = DataLoader(
            data, num_workers=2, prefetch_factor=20, multiprocessing_context=method, **options
        )
        batches = iter(loader)
        kept = [next(batches) for _ in range(10)]
        count = descriptor_count()
        assert len({float(batch[0, 0]) // 20_000 for batch in kept}) == 10
        loader.close()
        return count

    load()  # multiprocessing's own processes run from here on
    assert load() - descriptor_count() <= 11


@pytest.mark.slow
def test_few_descriptors_are_a_clear_error_wherever_they_run_out(tmp_path) -> None:
    """The limit is raised one by one, so that each step of the start meets it once."""
    done = run_program(
        """
        import gc, os, psutil, resource, torch
        from shmloader import DataLoader, ShmloaderError, WorkerDiedError

        class Data:
            def __len__(self):
                return 12
            def __getitem__(self, index):
                return torch.full((20000,), float(index))

        def descriptors():
            return {n for n in os.listdir("/proc/self/fd")}

        def load():
            # Returns whether it worked, and what was not as it should be.
            try:
                kept = [float(batch.mean()) for batch in DataLoader(Data(), num_workers=2)]
                return True, "" if kept == list(range(12)) else f"OTHER {kept}"
            except WorkerDiedError as error:
                return False, f"DIED {error}"
            except (OSError, ShmloaderError) as error:
                return False, "" if "many open files" in str(error) else f"UNCLEAR {error}"
            except BaseException as error:
                return False, f"OTHER {error!r}"

        load()
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        gc.collect()
        before = descriptors()
        top = max(map(int, before))
        worked = 0
        for limit in range(top + 1, top + 60):
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
            works, wrong = load()
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            gc.collect()
            children = psutil.Process().children()
            paths = [f"/proc/self/fd/{n}" for n in descriptors() - before]
            left = [os.readlink(path) for path in paths if os.path.exists(path)]
            if wrong or children or left or worked and not works:
                print(limit - top, wrong, children, left)
            for child in children:
                child.wait(5)
            worked += works
        print("worked", worked > 5)
        """,
        tmp_path / "program.py",
        timeout_s=100,
    )
    assert done.out.splitlines() == ["worked True"]
    done.assert_quiet()


def test_very_many_slots_fit_the_address_space() -> None:
    loader = DataLoader(
        Calls(lambda n: torch.full((20_000,), float(n)), 300), num_workers=2, prefetch_factor=120
    )
    assert [float(batch.mean()) for batch in loader] == list(range(300))


IMAGES = Calls(lambda index: (torch.zeros(3, 32, 32), index), 64 * 60)
CASES = {"ints": (range(60), 1, 25), "images": (IMAGES, 64, 27)}


@pytest.mark.parametrize(("dataset", "batch_size", "most"), CASES.values(), ids=CASES)
def test_a_plain_batch_takes_few_calls(dataset, batch_size, most) -> None:
    count, counts = 0, []

    def note(_frame: object, event: str, _arg: object) -> None:
        nonlocal count
        count += event == "call"

    with DataLoader(dataset, batch_size=batch_size, num_workers=2) as loader:
        batches = iter(loader)
        for _ in range(10):
            next(batches)
        gc.disable()  # no finalizer of another test's objects counts
        sys.setprofile(note)
        try:
            for _ in range(40):
                count = 0
                next(batches)
                counts.append(count)
        finally:
            sys.setprofile(None)
            gc.enable()
    assert min(counts) <= most  # others had to wait
