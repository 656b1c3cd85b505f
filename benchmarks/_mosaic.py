"""MosaicML Streaming's package, also where torchvision does not fit the torch that is installed.

Its ``__init__`` imports classes of pictures, which are made of torchvision's. No benchmark uses
these, so a stand-in takes their place if torchvision cannot be imported.
"""

import sys
from types import ModuleType

import transformers  # noqa: F401 - it looks for torchvision itself

try:
    import torchvision  # noqa: F401
except Exception:  # noqa: BLE001 - a build for another torch raises RuntimeError
    for _name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        del sys.modules[_name]
    sys.modules["torchvision"] = ModuleType("torchvision")
    _datasets = ModuleType("torchvision.datasets")
    _datasets.VisionDataset = type("VisionDataset", (), {})  # type: ignore[attr-defined]
    sys.modules["torchvision.datasets"] = _datasets
    _transforms = ModuleType("torchvision.transforms.functional")
    _transforms.to_tensor = None  # type: ignore[attr-defined]
    sys.modules["torchvision.transforms"] = ModuleType("torchvision.transforms")
    sys.modules["torchvision.transforms.functional"] = _transforms

from streaming import MDSWriter, StreamingDataLoader, StreamingDataset

__all__ = ["MDSWriter", "StreamingDataLoader", "StreamingDataset"]
