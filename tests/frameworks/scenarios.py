"""Each framework's own training loop, as its documentation has it, over a small dataset.

A scenario gets a loader class, the number of workers and an empty folder. It runs the framework for
two epochs where it has epochs, and returns what the training step saw. Frameworks that choose the
class themselves ignore the class.
"""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.frameworks.support import LENGTH, QUIET, DictRows, Linear, Rows

Seen = list[Any]


def accelerate(cls: Any, workers: int, _: Path) -> Seen:
    from accelerate import Accelerator

    loader = Accelerator(cpu=True).prepare(
        cls(Rows(), batch_size=8, shuffle=True, num_workers=workers)
    )
    return [batch for _ in range(2) for batch in loader]


def lightning(cls: Any, workers: int, folder: Path) -> Seen:
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
        **QUIET, devices=1, max_epochs=2, enable_checkpointing=False, default_root_dir=folder
    )
    trainer.fit(module, cls(Rows(), batch_size=8, shuffle=True, num_workers=workers))
    return module.model.seen


def fabric(cls: Any, workers: int, _: Path) -> Seen:
    from lightning.fabric import Fabric

    loader = Fabric(accelerator="cpu", devices=1).setup_dataloaders(
        cls(Rows(), batch_size=8, shuffle=True, num_workers=workers)
    )
    return [batch for _ in range(2) for batch in loader]


def transformers(_: Any, workers: int, folder: Path) -> Seen:
    from transformers import Trainer, TrainingArguments

    model = Linear()
    arguments = TrainingArguments(
        output_dir=str(folder),
        num_train_epochs=2,
        per_device_train_batch_size=8,
        dataloader_num_workers=workers,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    Trainer(model=model, args=arguments, train_dataset=DictRows()).train()
    return model.seen


def datasets(cls: Any, workers: int, _: Path) -> Seen:
    import datasets

    table = {"x": [[float(i), 1.0] for i in range(LENGTH)], "y": list(range(LENGTH))}
    dataset = datasets.Dataset.from_dict(table).with_format("torch")
    loader = cls(dataset, batch_size=8, shuffle=True, num_workers=workers)
    stream = cls(dataset.to_iterable_dataset(num_shards=4), batch_size=4, num_workers=workers)
    return [batch for each in (loader, loader, stream) for batch in each]


def torch_geometric(_: Any, workers: int, __: Path) -> Seen:
    from torch_geometric.data import Data
    from torch_geometric.loader import DataLoader

    graphs = [
        Data(
            x=torch.full((3 + i % 4, 2), float(i)),
            edge_index=torch.tensor([[0, 1, 2], [1, 2, 0]]),
            y=torch.tensor([i]),
        )
        for i in range(LENGTH)
    ]
    loader = DataLoader(graphs, batch_size=8, shuffle=True, num_workers=workers)
    return [batch.to_dict() for _ in range(2) for batch in loader]


def monai(_: Any, workers: int, __: Path) -> Seen:
    from monai.data import DataLoader, Dataset
    from monai.transforms import Compose, RandGaussianNoised, ToTensord

    items = [{"image": np.full((1, 4, 4), i, np.float32), "label": i} for i in range(LENGTH)]
    transform = Compose([RandGaussianNoised("image", prob=1.0), ToTensord("image")])
    transform.set_random_state(seed=3)
    loader = DataLoader(Dataset(items, transform), batch_size=8, shuffle=True, num_workers=workers)
    return [torch.as_tensor(batch["image"]) for _ in range(2) for batch in loader]


def webdataset(_: Any, workers: int, folder: Path) -> Seen:
    import webdataset

    for shard in range(2):
        with tarfile.open(folder / f"{shard}.tar", "w") as tar:
            for i in range(LENGTH // 2):
                info = tarfile.TarInfo(f"{shard}{i:03}.cls")
                info.size = 2
                tar.addfile(info, io.BytesIO(f"{i:02}".encode()))
    dataset = webdataset.WebDataset(
        [str(folder / f"{shard}.tar") for shard in range(2)], shardshuffle=False
    )
    loader = webdataset.WebLoader(
        dataset.decode().to_tuple("cls"), batch_size=4, num_workers=workers
    )
    return [batch for _ in range(2) for batch in loader]


def litdata(cls: Any, workers: int, folder: Path) -> Seen:
    from litdata import StreamingDataset

    return list(cls(StreamingDataset(_litdata(folder)), batch_size=4, num_workers=workers))


def litdata_loader(_: Any, workers: int, folder: Path) -> Seen:
    from litdata import StreamingDataLoader, StreamingDataset

    dataset = StreamingDataset(_litdata(folder))
    return list(StreamingDataLoader(dataset, batch_size=4, num_workers=workers))


def _litdata(folder: Path) -> str:
    from litdata.streaming.writer import BinaryWriter

    if not (folder / "index.json").exists():
        writer = BinaryWriter(cache_dir=str(folder), chunk_size=5)
        for i in range(LENGTH):
            writer[i] = torch.tensor([i])
        writer.done()
        writer.merge()
    return str(folder)


def streaming(cls: Any, workers: int, folder: Path) -> Seen:
    from streaming import MDSWriter, StreamingDataset
    from streaming.base.util import clean_stale_shared_memory

    if not (folder / "mds").exists():
        with MDSWriter(out=str(folder / "mds"), columns={"x": "int"}) as writer:
            for i in range(LENGTH):
                writer.write({"x": i})
    clean_stale_shared_memory()
    dataset = StreamingDataset(local=str(folder / "mds"), batch_size=4, shuffle=False)
    loader = cls(dataset, batch_size=4, num_workers=workers)
    return list(loader)


def timm(_: Any, workers: int, __: Path) -> Seen:
    from timm.data import create_loader
    from torchvision.datasets import FakeData

    seen = []
    for several in (False, True):
        loader = create_loader(
            FakeData(LENGTH, (3, 16, 16)),
            (3, 16, 16),
            8,
            is_training=True,
            use_prefetcher=False,
            num_workers=workers,
            persistent_workers=False,
            use_multi_epochs_loader=several,
            device=torch.device("cpu"),
            pin_memory=False,
        )
        seen += [batch for _ in range(2) for batch in loader]
        del loader
    return seen


def fastai(cls: Any, workers: int, folder: Path) -> Seen:
    from fastai.callback.progress import ProgressCallback  # noqa: F401 - adds no_bar()
    from fastai.data.core import DataLoaders
    from fastai.learner import Learner

    loader = cls(Rows(), batch_size=8, shuffle=True, num_workers=workers)
    model = Linear()
    data = DataLoaders(loader, loader, device="cpu")
    learner = Learner(data, model, loss_func=torch.nn.functional.mse_loss, path=folder)
    with learner.no_bar(), learner.no_logging():
        learner.fit(1)
    return model.seen


def fastai_own(_: Any, workers: int, __: Path) -> Seen:
    from fastai.data.load import DataLoader

    return list(DataLoader(Rows(), bs=8, num_workers=workers))


def skorch(cls: Any, workers: int, _: Path) -> Seen:
    from skorch import NeuralNetRegressor

    model = Linear()
    net = NeuralNetRegressor(
        model,
        iterator_train=cls,
        iterator_train__num_workers=workers,
        iterator_train__shuffle=True,
        iterator_valid=cls,
        train_split=None,
        batch_size=8,
        max_epochs=2,
        verbose=0,
    )
    net.fit(Rows(), y=None)
    net.predict(Rows())
    return net.module_.seen


def ignite(cls: Any, workers: int, _: Path) -> Seen:
    from ignite.distributed import auto_dataloader
    from ignite.engine import Engine

    seen: Seen = []
    is_torchs = cls is torch.utils.data.DataLoader
    make = auto_dataloader if is_torchs else cls  # the first creates torch's
    loader = make(Rows(), batch_size=8, shuffle=True, num_workers=workers)
    Engine(lambda _, batch: seen.append(batch)).run(loader, max_epochs=2)
    return seen


def torchvision(cls: Any, workers: int, _: Path) -> Seen:
    from torchvision.datasets import FakeData
    from torchvision.transforms import v2

    transform = v2.Compose(
        [v2.ToImage(), v2.RandomResizedCrop(8), v2.ToDtype(torch.float32, scale=True)]
    )
    dataset = FakeData(LENGTH, (3, 12, 12), transform=transform)
    loader = cls(dataset, batch_size=8, shuffle=True, num_workers=workers)
    return [batch for _ in range(2) for batch in loader]


class _Flipped(Rows):
    def __init__(self) -> None:
        super().__init__()
        import albumentations

        self.transform = albumentations.Compose(
            [albumentations.RandomBrightnessContrast(p=1.0)], seed=5
        )

    def __getitem__(self, index: int) -> Any:
        image = np.full((4, 4, 3), index + 100, np.uint8)
        return torch.from_numpy(self.transform(image=image)["image"])


def albumentations(cls: Any, workers: int, _: Path) -> Seen:
    # Without workers, one generator goes on through both runs: each has its own dataset.
    return list(cls(_Flipped(), batch_size=8, num_workers=workers))


def ray(cls: Any, workers: int, _: Path) -> Seen:
    from ray.train.torch.train_loop_utils import _WrappedDataLoader

    # What ray.train.torch.prepare_data_loader does in each training process.
    loader = cls(Rows(), batch_size=8, shuffle=True, num_workers=workers)
    wrapped = _WrappedDataLoader(loader, torch.device("cpu"), auto_transfer=False)
    return [batch for _ in range(2) for batch in wrapped]


@dataclass(frozen=True)
class Scenario:
    """A framework's loop.

    Attributes:
        run: Runs it; see the module.
        name: The framework, as the documentation calls it.
        takes_class: Whether the user chooses the class of the loader.
        adapter: What `shmloader.integrations` has for it; or "".
        why: Why a class of ours is not used, or cannot be; or what else there is to know.
    """

    run: Callable[[Any, int, Path], Seen]
    name: str
    takes_class: bool = True
    adapter: str = ""
    why: str = ""


SCENARIOS = {
    one.run.__name__: one
    for one in (
        Scenario(
            lightning,
            "Lightning",
            adapter="`lightning.LoaderCallback`",
            why="checkpoints at an epoch's end need the callback",
        ),
        Scenario(fabric, "Lightning Fabric"),
        Scenario(
            accelerate,
            "accelerate",
            adapter="`accelerate.prepare`",
            why="`prepare` builds a loader of torch's class from the attributes",
        ),
        Scenario(
            transformers,
            "Hugging Face Trainer",
            takes_class=False,
            why="it creates the loader, and passes it to accelerate",
        ),
        Scenario(datasets, "Hugging Face datasets"),
        Scenario(
            ray,
            "Ray Train",
            why="`prepare_data_loader` may build a loader of torch's class: use `install()`, or "
            "`ShardedDataLoader`",
        ),
        Scenario(
            torch_geometric,
            "PyTorch Geometric",
            takes_class=False,
            why="its `DataLoader` is a subclass of torch's",
        ),
        Scenario(
            monai, "MONAI", takes_class=False, why="its `DataLoader` is a subclass of torch's"
        ),
        Scenario(
            webdataset, "webdataset", takes_class=False, why="`WebLoader` creates torch's class"
        ),
        Scenario(litdata, "litdata `StreamingDataset`"),
        Scenario(
            litdata_loader,
            "litdata `StreamingDataLoader`",
            takes_class=False,
            why="it has a `_get_iterator` of its own; give its dataset to `shmloader.DataLoader`",
        ),
        Scenario(streaming, "MosaicML `StreamingDataset`"),
        Scenario(timm, "timm", takes_class=False, why="`create_loader` creates torch's class"),
        Scenario(fastai, "fastai `Learner`", why="`DataLoaders` takes loaders of any class"),
        Scenario(
            fastai_own,
            "fastai `DataLoader`",
            takes_class=False,
            why="it calls torch's iterators itself; give `DataLoaders` loaders of ours",
        ),
        Scenario(
            skorch,
            "skorch",
            why="the classes are `iterator_train=` and, to predict, `iterator_valid=`",
        ),
        Scenario(ignite, "Ignite"),
        Scenario(torchvision, "torchvision"),
        Scenario(albumentations, "Albumentations"),
    )
}
