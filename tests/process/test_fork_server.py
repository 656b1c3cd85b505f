"""The fork server has what a worker needs before it forks one, where that is the right thing."""

from __future__ import annotations

import os
import subprocess
import venv
from pathlib import Path

import pytest
import torch

from tests.process.support import ROOT, Done, run_program

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


@pytest.mark.slow
def test_workers_have_torch_in_common_and_what_its_user_has_it_import(tmp_path) -> None:
    done = run(tmp_path, "multiprocessing.set_forkserver_preload(['colorsys'])", epochs=2)
    assert done.out.splitlines() == ["True True True"] * 2, done.err
    done.assert_quiet()


@pytest.mark.slow
def test_a_server_that_runs_already_is_left_as_it_is(tmp_path) -> None:
    done = run(
        tmp_path,
        "first = multiprocessing.get_context('forkserver').Process(); first.start(); first.join()",
    )
    assert done.out.splitlines() == ["False False False"], done.err
    done.assert_quiet()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["inspect", "cloudpickle", "cuda", "typing_extensions"])
def test_files_that_are_called_like_modules_are_not_imported(name, tmp_path) -> None:
    """The server looks in the working directory first, where the program does not look at all."""
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    (folder / f"{name}.py").write_text("raise RuntimeError('not what is wanted')")
    done = run(tmp_path, f"os.chdir({str(folder)!r})")
    assert done.out.splitlines() == ["False False False"], done.err
    done.assert_quiet()


@pytest.mark.slow
@pytest.mark.parametrize("where", ["beside", "above"])
def test_files_of_the_program_s_own_are_no_hindrance(where, tmp_path) -> None:
    folder, program = tmp_path, tmp_path if where == "beside" else tmp_path / "scripts"
    program.mkdir(exist_ok=True)
    if where == "beside":
        # Looked at first, by the program as by the server.
        (folder / "cuda.py").write_text("raise ImportError('not what is wanted')")
    (folder / "setup.py").write_text("raise RuntimeError('not what is wanted')")
    done = run(program, f"os.chdir({str(folder)!r})")
    assert done.out.splitlines() == ["True True False"], done.err
    done.assert_quiet()


# What an editable install by setuptools leaves in site-packages, in short.
FINDER = """
import sys
from importlib.util import spec_from_file_location

class Finder:
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return spec_from_file_location(name, {init!r}) if name == "shmloader" else None

def install():
    sys.meta_path.append(Finder)
"""


@pytest.mark.slow
def test_an_editable_install_is_no_hindrance(tmp_path) -> None:
    """Neither one by a finder, as of ours here, nor one by a path, as of all the rest."""
    venv.create(tmp_path / "venv", symlinks=True)
    (site_packages,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    (site_packages / "editable_finder.py").write_text(
        FINDER.format(init=str(ROOT / "shmloader/__init__.py"))
    )
    (site_packages / "a.pth").write_text("import editable_finder; editable_finder.install()\n")
    (site_packages / "b.pth").write_text(f"# all the rest\n{Path(torch.__file__).parents[1]}\n")
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(before="pass", most_mib=_MOST_MIB, epochs=1))
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [tmp_path / "venv/bin/python", program],
        env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.stdout == "True True False\n", done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", ["calendar", "tqdm"])
def test_what_the_program_finds_elsewhere_its_workers_do(name, tmp_path) -> None:
    folder = tmp_path / "vendored"
    folder.mkdir()
    (folder / f"{name}.py").write_text("is_vendored = True\ndef __getattr__(name): return print")
    done = run_program(
        f"""
        import sys
        sys.path.insert(0, {str(folder)!r})
        import {name}
        from shmloader import DataLoader

        class Vendored:
            def __len__(self):
                return 1
            def __getitem__(self, index):
                import {name}
                return {name}.is_vendored is True

        if __name__ == "__main__":
            assert {name}.is_vendored is True
            print(list(DataLoader(
                Vendored(), batch_size=None, num_workers=1, multiprocessing_context="forkserver"
            )))
        """,
        tmp_path / "program.py",
        is_fresh=True,  # nothing of that name is imported yet
    )
    assert done.out == "[True]\n", done.err


@pytest.mark.slow
@pytest.mark.parametrize("is_like_here", [True, False])
def test_other_processes_that_the_server_forks_hear_ctrl_c(is_like_here, tmp_path) -> None:
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    if not is_like_here:
        (folder / "cuda.py").write_text("raise RuntimeError('not what is wanted')")
    done = run_program(
        f"""
        import multiprocessing, os, signal
        from shmloader import DataLoader

        def wait(pipe):
            pipe.send(signal.pthread_sigmask(signal.SIG_BLOCK, []))
            try:
                os.kill(os.getpid(), signal.SIGINT)
                pipe.send("deaf")
            except KeyboardInterrupt:
                pipe.send("heard")

        if __name__ == "__main__":
            os.chdir({str(folder)!r})
            context = multiprocessing.get_context("forkserver")
            print(len(list(DataLoader(range(4), num_workers=1, multiprocessing_context=context))))
            here, there = context.Pipe()
            process = context.Process(target=wait, args=(there,))
            process.start()
            print(here.recv(), here.recv())
            process.join()
        """,
        tmp_path / "program.py",
    )
    assert done.out.splitlines() == ["4", "set() heard"], done.err
    done.assert_quiet()


@pytest.mark.slow
def test_a_server_that_is_started_again_is_looked_at_again(tmp_path) -> None:
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    (folder / "cuda.py").write_text("raise RuntimeError('not what is wanted')")
    done = run_program(
        f"""
        import multiprocessing.forkserver, os, signal
        from shmloader import DataLoader

        if __name__ == "__main__":
            def count():
                return len(list(
                    DataLoader(range(4), num_workers=1, multiprocessing_context="forkserver")
                ))
            print(count())
            pid = multiprocessing.forkserver._forkserver._forkserver_pid
            os.kill(pid, signal.SIGKILL)
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
            os.chdir({str(folder)!r})
            print(count())
        """,
        tmp_path / "program.py",
    )
    assert done.out.splitlines() == ["4", "4"], done.err
