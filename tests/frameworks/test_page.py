"""The blocks of the page about frameworks run as they stand, where the frameworks are."""

import pytest

from tests.docs.test_blocks import ROOT, blocks_of

PAGE = ROOT / "docs" / "howto" / "frameworks.md"
BLOCKS = [
    pytest.param(block, id=block.name)
    for block in blocks_of(PAGE)
    if "shmloader.integrations" in block.code
]


@pytest.mark.parametrize("block", BLOCKS)
def test_blocks_run_as_they_stand(block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(block.code, block.name, "exec"), {"__name__": "page"})


def test_the_page_has_blocks_for_frameworks():
    assert len(BLOCKS) >= 5
