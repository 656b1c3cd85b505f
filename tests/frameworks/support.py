"""What the tests of frameworks share: data, and which engine the iterators of a block are of."""

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from shmloader.loader.iterator import BatchIterator

LENGTH = 20

# Of a Trainer of Lightning's.
QUIET = {
    "accelerator": "cpu",
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}

# The wheel of torchvision on PyPI is built for CUDA: with torch for CPUs it lacks its operators,
# and cannot even be imported unless these are declared. No test uses them.
if not torch.cuda.is_available():
    TORCHVISION = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        TORCHVISION.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


class Rows(Dataset):
    """Samples of two features and a label, each with a random number of its own."""

    def __init__(self, length: int = LENGTH) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tensor([float(index), torch.rand(()).item()]), torch.tensor([index / 10])


class DictRows(Rows):
    """The same as a dict, as Hugging Face's models take it."""

    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        return {"x": x, "labels": y}


class Linear(torch.nn.Module):
    """A model that keeps what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        self.seen: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        self.seen.append(x.detach().clone())
        out = self.layer(x)
        if labels is None:
            return out
        return {"loss": torch.nn.functional.mse_loss(out, labels), "logits": out}


def seed_everything() -> None:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)


@contextlib.contextmanager
def engines() -> Iterator[set[str]]:
    """Note on what the iterators run that begin in the block: "shmloader", "torch"."""
    found: set[str] = set()
    original = _BaseDataLoaderIter.__init__

    def noting(self: Any, *args: Any, **kwargs: Any) -> None:
        found.add("shmloader" if isinstance(self, BatchIterator) else "torch")
        original(self, *args, **kwargs)

    _BaseDataLoaderIter.__init__ = noting  # type: ignore[method-assign]
    try:
        yield found
    finally:
        _BaseDataLoaderIter.__init__ = original  # type: ignore[method-assign]


def assert_equal(ours: Any, theirs: Any) -> None:
    """Compare what two runs saw, bit for bit."""
    assert len(ours) == len(theirs) > 0
    for one, other in zip(ours, theirs, strict=True):
        assert type(one) is type(other)
        if isinstance(one, torch.Tensor):
            assert one.dtype == other.dtype
            assert torch.equal(one, other)
        elif isinstance(one, list | tuple):
            assert_equal(one, other)
        elif isinstance(one, dict):
            assert_equal([*one.items()], [*other.items()])
        else:
            assert one == other
