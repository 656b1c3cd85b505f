"""What ranks of a host share, in the processes that Lightning and accelerate start."""

import textwrap
from pathlib import Path

import pytest

from tests.commands import output_of
from tests.process import one_dataset
from tests.process.one_pool import check

pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.timeout(400)]


def run(folder: Path, text: str, *launcher: str) -> None:
    program = folder / "program.py"
    program.write_text(textwrap.dedent(text))
    output_of(*launcher, program, folder=folder, limit_s=300, OMP_NUM_THREADS="1")


LIGHTNING = """
    from pathlib import Path

    from tests.frameworks.support import QUIET  # before all others: it lets torchvision be imported
    import lightning
    import torch

    from tests.process.one_pool import Report, make


    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(2, 1)
            self.batches, self.report = [], None

        def training_step(self, batch, _):
            self.batches.append(batch)
            if self.report is None:
                self.report = Report(Path(), self.trainer.global_rank, 2)
                self.report.look(self.trainer.train_dataloader)
            return self.layer(batch[1]).sum()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.01)


    if __name__ == "__main__":
        module = Module()
        trainer = lightning.Trainer(
            **QUIET, devices=2, strategy="ddp", max_epochs=2, enable_checkpointing=False
        )
        with make() as loader:
            trainer.fit(module, loader)
            module.report.write(module.batches)
"""


def test_under_lightnings_ddp_the_ranks_share_workers(tmp_path):
    """Lightning starts the second process itself."""
    run(tmp_path, LIGHTNING)
    check(tmp_path, 2)


LIGHTNING_DATASET = """
    import os
    from pathlib import Path

    from tests.frameworks.support import QUIET  # before all others: it lets torchvision be imported
    import lightning
    import torch

    import shmloader
    from tests.process import one_dataset


    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)
            self.batches = []

        def train_dataloader(self):
            dataset = shmloader.share_on_host(one_dataset.Texts)
            self.found = one_dataset.find(dataset)
            return shmloader.ShardedDataLoader(dataset, 1_000, True, num_workers=1, seed=1)

        def training_step(self, batch, _):
            self.batches.append([part.clone() for part in batch])
            return self.layer(batch[1][:1, None].float()).sum()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.0)


    if __name__ == "__main__":
        module = Module()
        trainer = lightning.Trainer(
            **QUIET, devices=2, strategy="ddp", max_epochs=1, enable_checkpointing=False
        )
        trainer.fit(module)
        found = module.found | {"totals": one_dataset.totals(module.batches)}
        one_dataset.write(Path(), trainer.global_rank, 2, found)
"""


def test_under_lightnings_ddp_the_ranks_share_a_dataset(tmp_path):
    run(tmp_path, LIGHTNING_DATASET)
    one_dataset.check(tmp_path, 2)


ACCELERATE = """
    from pathlib import Path

    from accelerate import Accelerator

    from tests.process.MODULE import run_rank

    if __name__ == "__main__":
        accelerator = Accelerator(cpu=True)
        assert accelerator.num_processes == 2
        run_rank(Path(), accelerator.process_index, 2)
        accelerator.end_training()
"""
LAUNCH = (
    *("-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes=2"),
    *("--num_machines=1", "--main_process_port=0"),
)


def test_under_accelerate_launch_the_ranks_share_workers(tmp_path):
    run(tmp_path, ACCELERATE.replace("MODULE", "one_pool"), *LAUNCH)
    check(tmp_path, 2)


def test_under_accelerate_launch_the_ranks_share_a_dataset(tmp_path):
    run(tmp_path, ACCELERATE.replace("MODULE", "one_dataset"), *LAUNCH)
    one_dataset.check(tmp_path, 2)
