"""The fork server has what a worker needs before it forks one, where that is the right thing."""

from __future__ import annotations

import pytest

from tests.process.support import Done, run_program

pytestmark = pytest.mark.timeout(90)

PROGRAM = """
import gc, multiprocessing, os, sys
from pathlib import Path
from shmloader import DataLoader

class Server:
    \"\"\"Says whether the process that forked the worker has torch, and more of the worker.\"\"\"
    def __len__(self):
        return 1
    def __getitem__(self, index):
        gc.collect()  # writes to the page of each object that is not frozen
        private = 0
        for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
            if line.startswith("Private_"):
                private += int(line.split()[1])
        has_torch = "libtorch" in Path(f"/proc/{{os.getppid()}}/maps").read_text()
        return has_torch, private // 1024, "colorsys" in sys.modules

def main():
    {before}
    loader = DataLoader(
        Server(), batch_size=None, num_workers=1, multiprocessing_context="forkserver"
    )
    for _ in range({epochs}):
        ((has_torch, private_mib, has_module),) = loader
        print(has_torch, private_mib < {most_mib}, has_module)
        assert private_mib < {most_mib} or not has_torch, private_mib

if __name__ == "__main__":
    main()
"""

# Measured: 9, and 28 where a collection writes to all objects; 159 with a torch of its own.
_MOST_MIB = 18


def run(tmp_path, before: str = "pass", *, epochs: int = 1) -> Done:
    source = PROGRAM.format(before=before, most_mib=_MOST_MIB, epochs=epochs)
    return run_program(source, tmp_path / "program.py")


def test_workers_have_torch_in_common_and_what_its_user_has_it_import(tmp_path) -> None:
    done = run(tmp_path, "multiprocessing.set_forkserver_preload(['colorsys'])", epochs=2)
    assert done.out.splitlines() == ["True True True"] * 2, done.err
    done.assert_quiet()


def test_a_server_that_runs_already_is_left_as_it_is(tmp_path) -> None:
    done = run(
        tmp_path,
        "first = multiprocessing.get_context('forkserver').Process(); first.start(); first.join()",
    )
    assert done.out.splitlines() == ["False False False"], done.err
    done.assert_quiet()


@pytest.mark.parametrize("name", ["inspect", "cloudpickle"])
def test_files_that_are_called_like_modules_are_not_imported(name, tmp_path) -> None:
    """The server looks in the working directory first, where the program does not look at all."""
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    (folder / f"{name}.py").write_text("raise RuntimeError('not what is wanted')")
    done = run(tmp_path, f"os.chdir({str(folder)!r})")
    assert done.out.splitlines() == ["False False False"], done.err
    done.assert_quiet()
