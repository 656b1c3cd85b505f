"""The Hugging Face Trainer with the mixin: engine, losses, arguments, resuming."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from shmloader.integrations.transformers import LoaderMixin
from tests.frameworks.support import DictRows, Linear, assert_equal, engines, seed_everything

pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.timeout(300)]


class Mine(LoaderMixin, transformers.Trainer):
    pass


class Fixed(DictRows):
    """Without random numbers, which a resumed run would draw anew."""

    def __getitem__(self, index: int) -> Any:
        return {"x": torch.tensor([float(index), 1.0]), "labels": torch.tensor([index / 10])}


def train(kind: Any, folder: Path, *, resume: str | None = None, **options: Any) -> Any:
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
    trainer = kind(model=model, args=arguments, train_dataset=Fixed())
    if options:
        trainer.loader_options = options
    trainer.train(resume_from_checkpoint=resume)
    return model.seen, [row["loss"] for row in trainer.state.log_history if "loss" in row]


def test_the_mixin_trains_on_our_engine_with_the_same_batches_and_losses(tmp_path):
    expected = train(transformers.Trainer, tmp_path / "torch")
    with engines() as found:
        assert_equal(train(Mine, tmp_path / "ours"), expected)
    assert found == {"shmloader"}
    loader = torch.utils.data.DataLoader([1])
    assert type(iter(loader)).__module__.startswith("torch.")  # nothing stays installed


def test_it_resumes_in_the_middle_of_an_epoch(tmp_path):
    expected, _ = train(Mine, tmp_path)
    with engines() as found:
        resumed, _ = train(Mine, tmp_path, resume=str(tmp_path / "checkpoint-2"))
    assert found == {"shmloader"}
    assert_equal(resumed, expected[2:])


def test_its_options_reach_the_loaders(tmp_path):
    first, _ = train(Mine, tmp_path / "1", seed=3)
    assert_equal(train(Mine, tmp_path / "2", seed=3)[0], first)
    with pytest.raises(ValueError, match="on_error should be"):
        train(Mine, tmp_path / "3", on_error="ignore")
    assert not hasattr(torch.utils.data.DataLoader.__iter__, "_shmloader")
