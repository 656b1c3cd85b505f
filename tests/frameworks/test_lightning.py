"""Lightning: resuming from checkpoints that are made in the middle and at the end of an epoch."""

import importlib
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DistributedSampler

import shmloader
from shmloader.integrations.lightning import LoaderCallback
from tests.frameworks.support import QUIET, Linear, Rows, assert_equal

pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.timeout(300)]

STEPS = 3  # of an epoch


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = Linear()

    def training_step(self, batch: Any, _: int) -> Any:
        return self.model(*batch)["loss"]

    def predict_step(self, batch: Any, _: int) -> list[float]:
        return batch[0][:, 0].tolist()

    def validation_step(self, batch: Any, _: int) -> None:
        pass

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def fit(
    folder: Path,
    *callbacks: Any,
    checkpoint: Path | None = None,
    validates: bool = False,
    order: dict[str, Any] | None = None,
    **options: Any,
) -> list[torch.Tensor]:
    """What a run of three epochs saw.

    Args:
        folder: The run's folder.
        callbacks: Further callbacks of the Trainer.
        checkpoint: Where to resume.
        validates: Whether an epoch of validation follows each epoch.
        order: The loader's arguments for its order, in place of a shuffled one with a seed.
        options: Further arguments of the Trainer.
    """
    module = Module()
    trainer = lightning.Trainer(
        **QUIET,
        devices=1,
        max_epochs=3,
        default_root_dir=folder,
        callbacks=[LoaderCallback(), *callbacks],
        num_sanity_val_steps=0,
        **options,
    )
    order = {"shuffle": True, "seed": 7} if order is None else order
    loader = shmloader.DataLoader(Rows(), 8, num_workers=1, **order)
    validation = shmloader.DataLoader(Rows(), 8) if validates else None
    trainer.fit(module, loader, validation, ckpt_path=checkpoint)
    return module.model.seen


AT_END = {"every_n_epochs": 1, "save_on_train_epoch_end": True}
EACH_STEP = {"every_n_train_steps": 1, "save_on_train_epoch_end": False}


@pytest.mark.parametrize(
    ("every", "options", "done"),
    [
        (AT_END, {}, [3, 6]),
        (EACH_STEP, {}, [1, 2, 3, 4, 5, 6, 7, 8]),
        (EACH_STEP, {"limit_train_batches": 2}, [1, 2, 3, 4]),
        (EACH_STEP, {"validates": True}, [2, 3, 6]),
        (AT_END | {"save_on_train_epoch_end": False}, {"validates": True}, [3, 6]),
    ],
    ids=["at the end of epochs", "after each step", "limited", "validated", "after validation"],
)
def test_a_seeded_run_resumes_with_the_batches_that_would_have_followed(
    every, options, done, tmp_path
):
    saving = ModelCheckpoint(dirpath=tmp_path, filename="{step}", save_top_k=-1, **every)
    expected = fit(tmp_path, saving, **options)
    assert len(expected) == 3 * options.get("limit_train_batches", STEPS)
    for count in done:
        resumed = fit(tmp_path, checkpoint=tmp_path / f"step={count}.ckpt", **options)
        assert_equal(resumed, expected[count:])


@pytest.mark.parametrize("seed", [None, 7])
def test_samplers_that_are_told_the_epoch_resume_with_its_order(seed, tmp_path):
    def run(*callbacks: Any, checkpoint: Path | None = None) -> list[torch.Tensor]:
        order = {"sampler": DistributedSampler(Rows(), 1, 0, seed=3), "seed": seed}
        seen = fit(tmp_path, *callbacks, checkpoint=checkpoint, order=order)
        return [batch[:, 0] for batch in seen]

    expected = run(ModelCheckpoint(dirpath=tmp_path, filename="{step}", save_top_k=-1, **EACH_STEP))
    for count in (2, 3, 4, 6):
        assert_equal(run(checkpoint=tmp_path / f"step={count}.ckpt"), expected[count:])


def test_after_the_last_step_of_the_run_nothing_follows(tmp_path):
    saving = ModelCheckpoint(dirpath=tmp_path, filename="{step}", save_top_k=-1, **EACH_STEP)
    fit(tmp_path, saving)
    assert fit(tmp_path, checkpoint=tmp_path / f"step={3 * STEPS}.ckpt") == []


def test_a_second_run_of_the_same_loader_begins_with_the_trainers_epoch(tmp_path):
    first = fit(tmp_path)
    assert_equal(fit(tmp_path), first)


def test_the_callback_serves_the_package_pytorch_lightning_too(tmp_path):
    package = importlib.import_module("pytorch_lightning")

    class Own(package.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = Linear()

        training_step = Module.training_step
        configure_optimizers = Module.configure_optimizers

    def fit_it(*callbacks: Any) -> int:
        module = Own()
        trainer = package.Trainer(
            **QUIET, devices=1, max_epochs=3, default_root_dir=tmp_path, callbacks=[*callbacks]
        )
        trainer.fit(module, shmloader.DataLoader(Rows(), 8, shuffle=True, seed=7))
        return len(module.model.seen)

    assert fit_it(LoaderCallback()) == fit_it() == 9


@pytest.mark.parametrize("last_batch", ["pad", "discard", "keep"])
def test_a_sharded_loader_predicts_each_sample_once(last_batch, tmp_path):
    found: list[float] = []
    for rank in range(2):
        loader = shmloader.ShardedDataLoader(
            Rows(21), 4, shuffle=True, num_workers=1, last_batch=last_batch, rank=rank, world_size=2
        )
        trainer = lightning.Trainer(
            **QUIET, devices=1, enable_checkpointing=False, default_root_dir=tmp_path
        )
        predicted = trainer.predict(Module(), loader)
        found += [row for batch in predicted for row in batch]
        assert len(predicted) == len(trainer.predict_dataloaders)
    assert sorted(found) == [*map(float, range(21))]
