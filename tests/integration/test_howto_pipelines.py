"""The code of docs/howto/pipelines.md runs as it stands."""

import re
from pathlib import Path

import pytest

from tests.process.support import Program

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "pipelines.md"


@pytest.mark.slow
def test_the_blocks_run_one_after_the_other(tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) >= 6
    done = Program("\n".join(blocks), tmp_path / "page.py").finish()
    assert done.code == 0, done.err
    assert "Traceback" not in done.err
    assert "no item within 0.1 seconds." in done.out
