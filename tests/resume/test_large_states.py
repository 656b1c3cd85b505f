"""States of several megabytes: exact resume, whichever way they travel."""

import os
import signal
from pathlib import Path

import pytest
import torch
from torch.utils.data import IterableDataset

from shmloader import DataLoader

_STATE_BYTES = 3 << 20


class _Position:
    """An iterator whose state is large and says where it is at its end, too."""

    def __init__(self, length: int, nbytes: int) -> None:
        self._at, self._length, self._nbytes = 0, length, nbytes

    def __iter__(self) -> "_Position":
        return self

    def __next__(self) -> int:
        if self._at == self._length:
            raise StopIteration
        self._at += 1
        if self._at == self._length // 2 and os.environ.get("SHMLOADER_TEST_KILL"):
            del os.environ["SHMLOADER_TEST_KILL"]
            os.kill(os.getpid(), signal.SIGKILL)
        return self._at

    def state_dict(self) -> dict[str, object]:
        return {"filling": bytes([self._at % 256]) * self._nbytes, "at": self._at}

    def load_state_dict(self, state: dict[str, object]) -> None:
        at = state["at"]
        assert isinstance(at, int)
        assert state["filling"] == bytes([at % 256]) * self._nbytes
        self._at = at
        if path := os.environ.get("SHMLOADER_TEST_LOADED"):
            with Path(path).open("a") as file:
                file.write(f"{at}\n")


class _Stream(IterableDataset[int]):
    def __init__(self, nbytes: int = _STATE_BYTES) -> None:
        self._nbytes = nbytes

    def __iter__(self) -> _Position:
        return _Position(40, self._nbytes)


def _loader(every: int, **options: object) -> DataLoader[int]:
    return DataLoader(
        _Stream(),
        batch_size=2,
        num_workers=2,
        snapshot_every_n_steps=every,
        **options,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("every", [1, 10])
@pytest.mark.parametrize("options", [{}, {"shm_size": "16MiB"}, {"persistent_workers": True}])
def test_resumes_from_each_tenth_batch(every: int, options: dict[str, object]) -> None:
    states, batches = [], []
    with _loader(every, **options) as loader:
        for batch in loader:
            if len(batches) % 10 == 0:
                states.append((len(batches), loader.state_dict()))
            batches.append(batch)
    for done, state in states:
        with _loader(every, **options) as loader:
            loader.load_state_dict(state)
            rest = list(loader)
        assert len(rest) == len(batches) - 1 - done
        assert all(map(torch.equal, rest, batches[done + 1 :]))


def test_a_replaced_worker_resumes_from_a_large_state(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with _loader(3) as loader:
        expected = list(loader)
    loaded = tmp_path / "loaded"
    monkeypatch.setenv("SHMLOADER_TEST_LOADED", str(loaded))
    monkeypatch.setenv("SHMLOADER_TEST_KILL", "1")
    with _loader(3, worker_restarts=4) as loader:
        batches = []
        for batch in loader:
            monkeypatch.delenv("SHMLOADER_TEST_KILL", raising=False)
            batches.append(batch)
    assert len(batches) == len(expected)
    assert all(map(torch.equal, batches, expected))
    assert loaded.read_text().split() == ["18", "18"]


def test_a_state_stays_after_the_loader_is_closed() -> None:
    with _loader(5) as loader:
        batches = iter(loader)
        for _ in range(12):
            next(batches)
        during = loader.state_dict()
    assert loader.state_dict() == during
