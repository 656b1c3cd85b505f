"""Files of shared memory, while they are written."""

import gc

import pytest

from shmloader.memory.segment import SegmentWriter
from tests.process.support import descriptor_count


def test_a_segment_whose_beginning_is_interrupted_leaves_no_file_open(monkeypatch) -> None:
    def interrupted(self: SegmentWriter, data: bytes) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(SegmentWriter, "append", interrupted)
    before = descriptor_count()
    with pytest.raises(KeyboardInterrupt) as caught:
        SegmentWriter()
    del caught
    gc.collect()
    assert descriptor_count() == before
