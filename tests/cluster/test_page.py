"""The blocks of the page about clusters run as pasted, where Dask and Ray are."""

import subprocess
import sys

import pytest

from tests.cluster.needed import needed
from tests.docs.test_blocks import ROOT, blocks_of, paste

PAGE = ROOT / "docs" / "howto" / "cluster.md"
BLOCKS = {
    package: [block for block in blocks_of(PAGE) if f"import {package}\n" in block.code]
    for package in ("distributed", "ray")
}


@pytest.mark.timeout(180)
@pytest.mark.parametrize("package", BLOCKS)
def test_the_block_runs_as_pasted(package, tmp_path):
    needed(package)
    (block,) = BLOCKS[package]
    path = paste([block], tmp_path)
    subprocess.run([sys.executable, str(path)], cwd=tmp_path, check=True, timeout=120)
