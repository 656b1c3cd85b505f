"""The Hugging Face Trainer in a block of `installed()`: engine, losses, arguments, resuming."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from shmloader import installed
from tests.frameworks.support import DictRows, Linear, assert_equal, engines, seed_everything

pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.timeout(300)]


class Fixed(DictRows):
    """Without random numbers, which a resumed run would draw anew."""

    def __getitem__(self, index: int) -> Any:
        return {"x": torch.tensor([float(index), 1.0]), "labels": torch.tensor([index / 10])}


def train(folder: Path, resume: str | None = None) -> Any:
    seed_everything()
    model = Linear()
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        num_train_epochs=2,
        per_device_train_batch_size=8,
        dataloader_num_workers=2,
        use_cpu=True,
        report_to=[],
        save_steps=2,
        logging_steps=1,
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=Fixed())
    trainer.train(resume_from_checkpoint=resume)
    return model.seen, [row["loss"] for row in trainer.state.log_history if "loss" in row]


def test_it_trains_on_our_engine_with_the_same_batches_and_losses(tmp_path):
    expected = train(tmp_path / "torch")
    with engines() as found, installed():
        assert_equal(train(tmp_path / "ours"), expected)
    assert found == {"shmloader"}


def test_it_resumes_in_the_middle_of_an_epoch(tmp_path):
    with engines() as found, installed():
        expected, _ = train(tmp_path)
        resumed, _ = train(tmp_path, str(tmp_path / "checkpoint-2"))
    assert found == {"shmloader"}
    assert_equal(resumed, expected[2:])


def test_arguments_reach_its_loaders(tmp_path):
    with installed(seed=3):
        first, _ = train(tmp_path / "1")
        assert_equal(train(tmp_path / "2")[0], first)
