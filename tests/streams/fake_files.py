"""A file system of fsspec whose files are made up: ``fake://shards/40-a.tar`` has 40 bytes.

Tests change what it does by replacing ``FakeFiles.before_read``. Each read is written to the file
``FakeFiles.log``, by whichever process reads.
"""

import random
from pathlib import Path

import fsspec


def data_of(url):
    """Return the bytes of a file."""
    size = int(url.rpartition("/")[2].partition("-")[0])
    return random.Random(url.rpartition("/")[2]).randbytes(size)


class FakeFiles(fsspec.AbstractFileSystem):
    protocol = "fake"
    cachable = False

    log: Path
    knows_size = True

    @staticmethod
    def before_read(name, path):
        """Runs when a file is read, before its bytes are written to a path."""

    def info(self, path, **_):
        return {"name": path, "type": "file"} | (
            {"size": len(data_of(path))} if self.knows_size else {}
        )

    def get_file(self, rpath, lpath, **_):
        with self.log.open("a") as log:
            log.write(rpath.rpartition("/")[2] + "\n")
        FakeFiles.before_read(rpath.rpartition("/")[2], lpath)
        Path(lpath).write_bytes(data_of(rpath))


fsspec.register_implementation("fake", FakeFiles, clobber=True)
