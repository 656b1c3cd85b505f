"""Lightning: resuming from checkpoints that are made in the middle and at the end of an epoch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

import shmloader
from shmloader.integrations.lightning import LoaderCallback
from tests.frameworks.support import Linear, Rows, assert_equal

pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.timeout(300)]

STEPS = 3  # of an epoch


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = Linear()

    def training_step(self, batch: Any, _: int) -> Any:
        return self.model(*batch)["loss"]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def fit(folder: Path, *callbacks: Any, checkpoint: Path | None = None) -> list[torch.Tensor]:
    """What a run of three epochs saw."""
    module = Module()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=3,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=[LoaderCallback(), *callbacks],
    )
    loader = shmloader.DataLoader(Rows(), 8, shuffle=True, seed=7, num_workers=1)
    trainer.fit(module, loader, ckpt_path=checkpoint)
    return module.model.seen


@pytest.mark.parametrize(
    ("every", "done"),
    [
        ({"every_n_epochs": 1, "save_on_train_epoch_end": True}, [3, 6]),
        ({"every_n_train_steps": 1, "save_on_train_epoch_end": False}, [1, 2, 4, 5, 7, 8]),
    ],
    ids=["at the end of epochs", "in their middle"],
)
def test_a_seeded_run_resumes_with_the_batches_that_would_have_followed(every, done, tmp_path):
    saving = ModelCheckpoint(dirpath=tmp_path, filename="{step}", save_top_k=-1, **every)
    expected = fit(tmp_path, saving)
    assert len(expected) == 3 * STEPS
    for count in done:
        resumed = fit(tmp_path, checkpoint=tmp_path / f"step={count}.ckpt")
        assert_equal(resumed, expected[count:])


def test_a_second_run_of_the_same_loader_begins_with_the_trainers_epoch(tmp_path):
    first = fit(tmp_path)
    assert_equal(fit(tmp_path), first)
