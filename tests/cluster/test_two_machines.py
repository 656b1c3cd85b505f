"""The two machines of examples/cluster/compose.yaml, by the commands of its services.

Each service runs in a folder of its own, which has what its volumes name, and where this is allowed
with process ids of its own: as in a container, neither finds the other's processes in /proc.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.needed import needed
from tests.process.support import ROOT

yaml = needed("yaml")
needed("distributed")

pytestmark = pytest.mark.timeout(180)

FOLDER = ROOT / "examples" / "cluster"
LIMIT_S = 120
APART = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")


def services() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((FOLDER / "compose.yaml").read_text())["services"]
    return found


class Machine:
    """What stands for the machine of a service.

    Args:
        service: The service.
        folder: Its working directory, which is made.
        port: The port to use in place of 8786.
    """

    def __init__(self, service: dict[str, Any], folder: Path, port: int) -> None:
        self.service = service
        self.folder = folder
        self.port = port
        folder.mkdir()
        for volume in service["volumes"]:
            source, target, mode = volume.split(":")
            assert (Path(target).parent, mode) == (Path("/work"), "ro")
            shutil.copy(FOLDER / source, folder / Path(target).name)

    def start(self, command: list[str], **options: Any) -> subprocess.Popen[str]:
        words = [
            word.replace("8786", str(self.port))
            .replace("//batches:", "//127.0.0.1:")
            .replace("--host batches", "--host 127.0.0.1")
            .replace("'batches'", "'127.0.0.1'")
            for word in command
        ]
        assert not any("batches" in word for word in words), words
        scripts = Path(sys.executable).parent
        return subprocess.Popen(
            [*(APART if _may_be_apart() else ()), *words],
            cwd=self.folder,
            env={
                **os.environ,
                "PATH": os.pathsep.join([str(scripts), os.environ["PATH"]]),
                "PYTHONPATH": os.pathsep.join([str(self.folder), str(ROOT)]),
            },
            text=True,
            start_new_session=True,
            **options,
        )


def _may_be_apart() -> bool:
    done = subprocess.run([*APART, "true"], capture_output=True, check=False)
    return done.returncode == 0


@contextmanager
def ended(process: subprocess.Popen[str]) -> Iterator[subprocess.Popen[str]]:
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(LIMIT_S)


def test_the_file_is_a_compose_file_of_two_machines_of_one_image() -> None:
    found = services()
    assert set(found) == {"batches", "training"}
    for service in found.values():
        assert (FOLDER / service["build"]["context"]).resolve() == ROOT
        assert (ROOT / service["build"]["dockerfile"]).is_file()
    copied = [
        line.split()[1:-1]
        for line in (FOLDER / "Dockerfile").read_text().splitlines()
        if line.startswith("COPY ")
    ]
    assert all((ROOT / name).exists() for names in copied for name in names)


def test_one_machine_trains_on_batches_that_the_other_one_makes(tmp_path) -> None:
    found = services()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    batches = Machine(found["batches"], tmp_path / "batches", port)
    training = Machine(found["training"], tmp_path / "training", port)
    assert found["training"]["depends_on"]["batches"]["condition"] == "service_healthy"
    kind, *check = found["batches"]["healthcheck"]["test"]
    assert kind == "CMD"
    nothing = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with (
        (tmp_path / "log").open("w") as log,
        ended(batches.start(found["batches"]["command"], stdout=log, stderr=log)) as server,
    ):
        deadline_s = time.monotonic() + LIMIT_S
        while batches.start(check, **nothing).wait(LIMIT_S):
            assert server.poll() is None, (tmp_path / "log").read_text()
            assert time.monotonic() < deadline_s, (tmp_path / "log").read_text()

        module = batches.folder / "points.py"
        module.rename(module.with_suffix(".away"))
        code, text = run_to_its_end(training, found["training"]["command"])
        assert code == 1, text
        assert "No module named 'points'" in text
        assert "this has to exist on each machine" in text

        module.with_suffix(".away").rename(module)
        code, text = run_to_its_end(training, found["training"]["command"])
    assert code == 0, text + (tmp_path / "log").read_text()
    assert "has none of the 1000 files, and has trained on them" in text
    assert not (training.folder / "data").exists()
    assert len(list((batches.folder / "data").iterdir())) == 1000


def run_to_its_end(machine: Machine, command: list[str]) -> tuple[int, str]:
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with ended(machine.start(command, **output)) as process:
        text, _ = process.communicate(timeout=LIMIT_S)
        return process.returncode, text
