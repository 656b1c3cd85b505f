"""The wheel and the source archive, each installed into a fresh environment, and used there."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import textwrap
import venv
import zipfile
from pathlib import Path

import pytest

import shmloader

ROOT = Path(__file__).parents[2]
LIMIT_S = 300  # a build takes some seconds, and each program imports torch
pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * LIMIT_S)]

PROGRAM = """
    import shmloader, torch

    if __name__ == "__main__":
        dataset = shmloader.TensorDataset(torch.arange(64.0).reshape(64, 1).repeat(1, 40_000))
        plain = [dataset[index] for index in range(64)]
        with shmloader.DataLoader(plain, batch_size=16, num_workers=2) as loader:
            total = sum(rows[:, 0].sum().item() for rows, in loader)
        print(shmloader.__file__, shmloader.__version__, total)
"""


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    """Run a program that knows nothing of this checkout; returns what it printed."""
    known = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env={**known, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> Path:
    """The files of this checkout that git knows or would add, and nothing that was built."""
    folder = tmp_path_factory.mktemp("sources")
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("this is not a checkout of git")
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    found = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True)
    for name in filter(None, found.stdout.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes((ROOT / name).read_bytes())
    return folder


def build(what: str, sources: Path, out: Path, **environment: str) -> Path:
    """Build a wheel or a source archive, as pip does, with the setuptools that is here."""
    code = f"import sys; from setuptools import build_meta; build_meta.build_{what}(sys.argv[1])"
    run(sys.executable, "-c", code, out, cwd=sources, **environment)
    (built,) = out.iterdir()
    return built


@pytest.fixture(scope="module")
def sdist(sources, tmp_path_factory) -> Path:
    return build("sdist", sources, tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def wheel(sources, tmp_path_factory) -> Path:
    return build("wheel", sources, tmp_path_factory.mktemp("wheel"))


@pytest.fixture
def fresh(tmp_path) -> Path:
    """A new environment's Python. It finds torch and NumPy here, since they are large."""
    folder = tmp_path / "fresh"
    venv.create(folder, with_pip=False, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    here = sysconfig.get_path("purelib")
    # A path that a .pth file names is searched, but its own .pth files, such as the one of this
    # checkout, are not read.
    (site / "torch_of_the_tests.pth").write_text(f"{here}\n")
    return folder / "bin" / "python"


def install(python: Path, archive: Path, folder: Path, **environment: str) -> None:
    run(
        sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps",
        "--no-index", "--no-build-isolation", "--ignore-installed", archive,
        cwd=folder, **environment,
    )  # fmt: skip


def use(python: Path, folder: Path) -> None:
    program = folder / "program.py"
    program.write_text(textwrap.dedent(PROGRAM))
    path, version, total = run(python, program, cwd=folder).splitlines()[-1].split()
    assert Path(path).is_relative_to(python.parents[1])
    assert version == shmloader.__version__
    assert float(total) == sum(range(64))
    told = run(python.with_name("shmloader"), "--version", cwd=folder)
    assert shmloader.__version__ in told
    found = run(
        python, "-c", "from importlib.metadata import version; print(version('shmloader'))",
        cwd=folder,
    )  # fmt: skip
    assert found.strip() == shmloader.__version__


def test_the_wheel_works_in_a_fresh_environment(wheel, fresh, tmp_path):
    install(fresh, wheel, tmp_path)
    use(fresh, tmp_path)


def test_the_wheel_has_the_package_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {
        "shmloader",
        f"shmloader-{shmloader.__version__}.dist-info",
    }
    for name in ("shmloader/py.typed", "shmloader/loader/dataloader.py"):
        assert name in names
    assert [name for name in names if name.endswith(".html")]  # the page of the report


@pytest.mark.skipif(
    importlib.util.find_spec("shmloader.memory._streaming") is None,
    reason="there is no compiler here: the compiled function was not built",
)
@pytest.mark.skipif(
    bool(sysconfig.get_config_var("Py_GIL_DISABLED")), reason="this Python has no stable ABI"
)
def test_one_wheel_serves_all_versions_of_python(wheel):
    assert re.fullmatch(rf"shmloader-{shmloader.__version__}-cp311-abi3-\w+\.whl", wheel.name)
    assert "shmloader/memory/_streaming.abi3.so" in zipfile.ZipFile(wheel).namelist()


def test_the_source_archive_installs_without_a_compiler(sdist, fresh, tmp_path):
    install(fresh, sdist, tmp_path, CC="/bin/false")
    use(fresh, tmp_path)
    (site,) = fresh.parents[1].glob("lib/python*/site-packages")
    assert not list(site.rglob("_streaming*.so"))


def test_the_source_archive_has_tests_documentation_and_examples(sdist, sources):
    prefix = f"shmloader-{shmloader.__version__}/"
    with tarfile.open(sdist) as archive:
        names = {name.removeprefix(prefix) for name in archive.getnames()}
    of_git = {str(path.relative_to(sources)) for path in sources.rglob("*") if path.is_file()}
    # What was built meanwhile lies beside the sources.
    missing = {name for name in of_git - names if "egg-info" not in name and "build/" not in name}
    assert not missing


def test_tests_run_from_the_unpacked_source_archive(sdist, fresh, tmp_path):
    install(fresh, sdist, tmp_path)
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    folder = tmp_path / f"shmloader-{shmloader.__version__}"
    told = run(
        fresh, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/unit/test_errors.py",
        "tests/unit/sampling/test_checks.py", cwd=folder,
    )  # fmt: skip
    assert re.search(r"\d+ passed", told), told


def test_the_version_is_written_once():
    text = (ROOT / "pyproject.toml").read_text()
    assert not re.search(r'^version = "', text, re.MULTILINE)
    cited = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {shmloader.__version__}\n" in cited
