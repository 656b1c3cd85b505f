"""``worker_scope="host"`` in the processes that Lightning and accelerate start."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.process.one_pool import check

pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.timeout(400)]

ROOT = Path(__file__).parents[2]


def run(folder: Path, text: str, *launcher: str) -> None:
    program = folder / "program.py"
    program.write_text(textwrap.dedent(text))
    done = subprocess.run(
        [sys.executable, *launcher, str(program)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]


LIGHTNING = """
    from pathlib import Path

    import tests.frameworks.support  # lets torchvision be imported, before all others
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
            accelerator="cpu",
            devices=2,
            strategy="ddp",
            max_epochs=2,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        with make() as loader:
            trainer.fit(module, loader)
            module.report.write(module.batches)
"""


def test_under_lightnings_ddp_the_ranks_share_workers(tmp_path):
    """Lightning starts the second process itself."""
    run(tmp_path, LIGHTNING)
    check(tmp_path, 2)


ACCELERATE = """
    from pathlib import Path

    from accelerate import Accelerator

    from tests.process.one_pool import run_rank

    if __name__ == "__main__":
        accelerator = Accelerator(cpu=True)
        assert accelerator.num_processes == 2
        run_rank(Path(), accelerator.process_index, 2)
        accelerator.end_training()
"""


def test_under_accelerate_launch_the_ranks_share_workers(tmp_path):
    launcher = ("-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes=2")
    run(tmp_path, ACCELERATE, *launcher, "--num_machines=1", "--main_process_port=0")
    check(tmp_path, 2)
