"""The package's metadata name the repository that builds it, and README's links lead there."""

import email
import os
import re
import shutil
import subprocess
import sys
from email.message import Message
from pathlib import Path

import pytest

from tests.docs.test_blocks import README, ROOT, links_of

FILES = ("setup.py", "pyproject.toml", "README.md", "LICENSE", "shmloader/__init__.py")


def metadata(folder: Path, **workflow: str) -> Message:
    (folder / "shmloader").mkdir()
    for name in FILES:
        shutil.copy(ROOT / name, folder / name)
    known = {name: value for name, value in os.environ.items() if not name.startswith("GITHUB_")}
    command = [sys.executable, "setup.py", "--quiet", "egg_info"]
    subprocess.run(command, cwd=folder, env={**known, **workflow}, check=True, capture_output=True)
    return email.message_from_string((folder / "shmloader.egg-info" / "PKG-INFO").read_text())


@pytest.mark.timeout(60)
def test_a_workflow_gives_addresses_that_work_on_an_index_page(tmp_path):
    workflow = {"GITHUB_SERVER_URL": "https://example.org", "GITHUB_REPOSITORY": "us/loader"}
    built = metadata(tmp_path, **workflow)
    urls = dict(line.split(", ") for line in built.get_all("Project-URL"))
    assert urls["Repository"] == "https://example.org/us/loader"
    assert set(urls) == {"Repository", "Documentation", "Changelog", "Issues"}
    links = links_of(built.get_payload())
    assert len(links) > 20
    prefix = r"https://example\.org/us/loader/(blob|raw)/HEAD/"
    for link in links:
        assert re.match(prefix, link), link
        path = re.sub(prefix, "", link)
        assert (ROOT / path).exists(), link
        assert ("/raw/" in link) == link.endswith((".svg", ".png")), link


@pytest.mark.timeout(60)
def test_a_build_elsewhere_invents_no_address(tmp_path):
    built = metadata(tmp_path)
    assert built.get_all("Project-URL") is None
    assert built.get_payload().strip() == README.read_text().strip()
