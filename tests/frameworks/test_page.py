"""The blocks of the page about frameworks run as pasted, where the frameworks are."""

import pytest

from tests.docs.test_blocks import ROOT, blocks_of, run_pasted

PAGE = ROOT / "docs" / "howto" / "frameworks.md"
BLOCKS = [
    pytest.param(block, id=block.name)
    for block in blocks_of(PAGE)
    if "shmloader.integrations" in block.code
]


@pytest.mark.parametrize("block", BLOCKS)
def test_blocks_run_as_pasted(block, tmp_path, monkeypatch):
    run_pasted([block], tmp_path, monkeypatch)


def test_the_page_has_blocks_for_frameworks():
    assert len(BLOCKS) >= 3
