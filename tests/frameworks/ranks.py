"""A program that torchrun runs on two processes: what each of them gets from a loader.

Arguments: the framework, how (torch, install, class, adapter), a folder, and more of the
framework's own as JSON. Each rank writes `<rank>.pt`: what it saw, and on what its iterators ran.
"""

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader as TorchLoader

import shmloader
from tests.frameworks.support import QUIET, Linear, Rows, engines, seed_everything

LENGTH = 21  # neither two ranks nor batches of 4 divide it


def make(how: str, **kwargs: Any) -> Any:
    cls = shmloader.DataLoader if how in ("class", "adapter") else TorchLoader
    options = {"worker_restarts": 1, "seed": 7} if cls is shmloader.DataLoader else {}
    return cls(Rows(LENGTH), batch_size=4, num_workers=1, **options, **kwargs)


def accelerate(how: str, folder: Path, **config: Any) -> dict[str, Any]:
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    from shmloader.integrations import accelerate as adapter

    def prepared() -> tuple[Any, Any]:
        accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**config))
        loader = make(how, shuffle=how != "adapter")
        if how == "adapter":
            return accelerator, adapter.prepare(accelerator, loader)
        return accelerator, accelerator.prepare(loader)

    accelerator, loader = prepared()
    found: dict[str, Any] = {"class": type(getattr(loader, "base_dataloader", loader)).__module__}
    found["seen"] = [batch[0].clone() for _ in range(2) for batch in loader]
    if config.get("even_batches", True):  # otherwise, accelerate cannot gather the last batch
        found["gathered"] = torch.cat(
            [accelerator.gather_for_metrics(batch[0][:, 0].contiguous()) for batch in loader]
        )
    if how == "adapter":
        base = loader.base_dataloader
        found["options"] = (base.worker_restarts, base.seed)
        # Where batches are dispatched, those of all processes are counted.
        rest = adapter.skip_first_batches(loader, 2 if config.get("dispatch_batches") else 1)
        found["skipped"] = [batch[0][:, 0].clone() for batch in rest]
        found["whole"] = [batch[0][:, 0].clone() for batch in loader]
        if not config.get("dispatch_batches"):
            iterator = iter(loader)
            next(iterator)
            accelerator.save_state(str(folder / "state"))
            found["rest"] = [batch[0].clone() for batch in iterator]
            accelerator.wait_for_everyone()
            accelerator.free_memory()
            accelerator, loader = prepared()
            accelerator.load_state(str(folder / "state"))
            found["resumed"] = [batch[0].clone() for batch in loader]
    return found


def lightning(how: str, folder: Path, **_: Any) -> dict[str, Any]:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = Linear()

        def training_step(self, batch: Any, _: int) -> Any:
            return self.model(*batch)["loss"]

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    module = Module()
    trainer = lightning.Trainer(
        **QUIET,
        devices=2,
        strategy="ddp",
        max_epochs=2,
        enable_checkpointing=False,
        default_root_dir=folder,
    )
    trainer.fit(module, make(how, shuffle=True))
    return {"seen": module.model.seen, "class": type(trainer.train_dataloader).__module__}


def fabric(how: str, folder: Path, **_: Any) -> dict[str, Any]:
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    loader = fabric.setup_dataloaders(make(how, shuffle=True))
    return {
        "seen": [batch[0].clone() for _ in range(2) for batch in loader],
        "class": type(loader._dataloader).__module__,
    }


def transformers(how: str, folder: Path, **_: Any) -> dict[str, Any]:
    from tests.frameworks.scenarios import transformers as run

    return {"seen": run(None, 1, folder), "class": ""}


def main() -> None:
    name, how, path, config = sys.argv[1:]
    folder = Path(path)
    rank = os.environ["RANK"]
    seed_everything()
    with contextlib.ExitStack() as stack:
        used = stack.enter_context(engines())
        if how == "install":
            stack.enter_context(shmloader.installed())
        found = globals()[name](how, folder, **json.loads(config))
        found["engines"] = used
    torch.save(found, folder / f"{rank}.pt")


if __name__ == "__main__":
    main()
