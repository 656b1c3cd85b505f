"""The late device: an accelerator in software, for machines without one (``late_device.cpp``).

It is built on PyTorch's ``PrivateUse1``, so tensors, ``torch.Stream``, ``torch.Event``,
``pin_memory()`` and ``torch.accelerator`` are the real ones, and the loader's own backend runs on
it unchanged. Its work is done only when a thread waits for it. The head of the C++ file lists its
rules.

The library is compiled once for each version of torch and of the source, into the folder of
pytest's cache. Where there is no compiler, `reason_to_skip` says so.

In a test, with the fixture ``late``::

    def test_batches_arrive(late):
        loader = shmloader.DataLoader(..., num_workers=2, device="late")
        found = late.contents(batch for batch in loader)
        assert late.count("pageable copies") == 0

In a program of its own (with the repository's root on ``PYTHONPATH``): ``late = switch_on()``.
"""

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import logging
import os
import shutil
import subprocess
import sys
import types
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from shmloader.device import backend

_SOURCE = Path(__file__).with_name("late_device.cpp")
_CACHE = Path(__file__).parents[1] / ".pytest_cache" / "d" / "late_device"
_COMPILE_S = 300

#: The C++ file is written against the headers of this version, and of later ones.
_OLDEST_TORCH = (2, 8)

#: Kinds of counts, in the order of the C++ enumeration.
COUNTS = (
    "late copies",  # of pinned or registered memory
    *("pageable copies", "device copies", "host copies", "allocations", "new blocks"),
    *("reserved bytes", "used bytes", "most used bytes", "recorded streams", "new streams"),
    *("events", "event waits", "stream waits", "synchronizations", "registered"),
    *("unregistered", "registered bytes", "most registered bytes", "host blocks"),
    *("initializations", "capture breaks", "faults", "waiting", "stream lookups", "forks inside"),
)


@functools.cache
def reason_to_skip() -> str:
    """Why the device cannot be used here, or an empty string."""
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if version < _OLDEST_TORCH:
        return f"the late device needs the headers of torch 2.8, and this is {torch.__version__}"
    if torch.cuda.device_count():
        return "a process has one accelerator, and here it is the GPU"
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        return "the late device is compiled, and there is no g++ (CXX names another one)"
    return ""


def compile_library() -> Path:
    """Return the library, compiled if it is not in the cache.

    Raises:
        RuntimeError: If the compiler finds errors; has its output.
    """
    # Where torch was built for CUDA and there is no GPU, importing it prints a warning on stderr,
    # which tests of programs take for a fault.
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    from torch.utils import cpp_extension  # takes long to import

    paths = [f"-I{path}" for path in cpp_extension.include_paths()]
    folders = cpp_extension.library_paths()
    abi = int(torch._C._GLIBCXX_USE_CXX11_ABI)
    command = [
        os.environ.get("CXX", "g++"), "-std=c++20", "-O1", "-w", "-shared", "-fPIC",
        f"-D_GLIBCXX_USE_CXX11_ABI={abi}", *paths, str(_SOURCE),
        *(f"-L{folder}" for folder in folders), *(f"-Wl,-rpath,{folder}" for folder in folders),
        "-ltorch_cpu", "-lc10",
    ]  # fmt: skip
    seen = "\n".join([torch.__version__, sys.version, *command]).encode() + _SOURCE.read_bytes()
    library = _CACHE / f"{hashlib.sha256(seen).hexdigest()[:16]}.so"
    library.parent.mkdir(parents=True, exist_ok=True)
    with (_CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # other pytest processes may compile it as well
        if not library.exists():
            made = library.with_suffix(".part")
            done = subprocess.run(
                [*command, "-o", str(made)],
                capture_output=True, text=True, timeout=_COMPILE_S, check=False,
            )  # fmt: skip
            if done.returncode != 0:
                raise RuntimeError(f"the late device does not compile:\n{done.stderr[-4000:]}")
            made.rename(library)
    return library


class _Driver:
    """The device's driver, with the interface of `shmloader.device.backend.CudaDriver`.

    Attributes:
        refuses: Why registering is refused; empty if it is not.
        calls: The calls of `register` and `unregister`, with their arguments.
    """

    def __init__(self, library: Any) -> None:
        self._library = library
        self.refuses = ""
        self.calls: list[tuple[Any, ...]] = []

    def register(self, address: int, nbytes: int) -> str:
        self.calls.append(("register", address, nbytes))
        if self.refuses:
            return self.refuses
        return self._describe(self._library.late_register(address, nbytes))

    def unregister(self, address: int) -> str:
        self.calls.append(("unregister", address))
        error = self._library.late_unregister(address)
        return self._describe(0 if error == 713 else error)  # it is not registered

    def relax_capture(self) -> int:
        return int(self._library.late_relax(1))

    def restore_capture(self, mode: int) -> None:
        self._library.late_relax(mode)

    def has_context(self) -> bool:
        return bool(self._library.late_has_context())

    @staticmethod
    def _describe(error: int) -> str:
        return f"late error {error}" if error else ""


class LateDevice:
    """The device, of which a process has one. Its methods may be called from any thread.

    Attributes:
        driver: The driver that the loader asks for page locks.
    """

    def __init__(self) -> None:
        library = ctypes.CDLL(str(compile_library()))
        for name in ("late_count", "late_registered_bytes", "late_unfinished"):
            getattr(library, name).restype = ctypes.c_int64
        library.late_register.argtypes = [ctypes.c_size_t, ctypes.c_size_t]
        library.late_unregister.argtypes = [ctypes.c_size_t]
        library.late_registered_bytes.argtypes = [ctypes.c_size_t]
        library.late_fail_after.argtypes = [ctypes.c_int, ctypes.c_int64]
        library.late_load()
        self.library = library
        self.is_on = False
        self.driver = _Driver(library)
        torch.utils.rename_privateuse1_backend("late")
        torch._register_device_module("late", self._make_module())

    def _make_module(self) -> types.ModuleType:
        library, module = self.library, types.ModuleType("torch.late")
        module.__dict__.update(
            is_available=lambda: self.is_on,
            device_count=lambda: 2 if self.is_on else 0,
            is_initialized=lambda: bool(library.late_is_initialized()),
            _lazy_init=lambda: None,
            _is_in_bad_fork=lambda: False,
            manual_seed_all=lambda seed: None,
            current_device=torch._C._accelerator_getDeviceIndex,
            set_device=torch._C._accelerator_setDeviceIndex,
        )
        return module

    def switch(self, *, is_on: bool) -> None:
        """Switch the device on, as new, or off; then torch finds no accelerator."""
        self.library.late_switch(is_on)
        self.is_on = is_on
        self.driver.refuses = ""
        self.driver.calls.clear()
        if is_on:
            backend.DRIVERS["late"] = lambda: self.driver
        else:
            backend.DRIVERS.pop("late", None)

    def count(self, name: str) -> int:
        """Return one of `COUNTS`, as counted since the device was switched on."""
        return int(self.library.late_count(COUNTS.index(name)))

    @property
    def unfinished_count(self) -> int:
        """Number of operations on streams that are not done."""
        return int(self.library.late_unfinished())

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Let the device do no work; threads that wait for its work block."""
        self.library.late_hold(1)
        try:
            yield
        finally:
            self.library.late_hold(0)

    def stay_inside(self, seconds: float) -> None:
        """Make a call of the device that takes so long."""
        self.library.late_stay(int(seconds * 1e6))

    @contextlib.contextmanager
    def capturing(self) -> Iterator[None]:
        """Capture a graph. Calls that would break the capture count as "capture breaks"."""
        self.library.late_capture(1)
        try:
            yield
        finally:
            self.library.late_capture(0)

    def fail_after(self, copies: int) -> None:
        """Let every call of device 0 raise after so many copies. Negative: from now on."""
        self.library.late_fail_after(0, copies)

    def registered_bytes(self, address: int) -> int:
        """Return how many bytes are registered from this address on."""
        return int(self.library.late_registered_bytes(address))

    def contents(self, batches: Iterable[Any]) -> list[list[int]]:
        """Return the first and the last number of each tensor of each batch.

        Works like a training loop that never waits: it starts a copy on the device, and drops the
        batch before the copy is done. It waits only after the last batch.
        """
        ends: list[list[torch.Tensor]] = []
        for batch in batches:
            ends.append([end for tensor in tensors_in(batch) for end in _ends_of(tensor)])
            del batch
        return [[int(end) for end in each] for each in ends]


def to_host(batch: Any) -> Any:
    """Return a batch of lists, tuples and dicts with its tensors on the host."""
    if isinstance(batch, torch.Tensor):
        return batch.cpu()
    if isinstance(batch, dict):
        return {key: to_host(part) for key, part in batch.items()}
    if isinstance(batch, list | tuple):
        return type(batch)(map(to_host, batch))
    return batch


def _ends_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    flat = tensor.view(-1)
    return [flat[:1].clone(), flat[-1:].clone()]


def tensors_in(batch: Any) -> list[torch.Tensor]:
    """Return the tensors of a batch of lists, tuples and dicts, in order."""
    if isinstance(batch, torch.Tensor):
        return [batch]
    if isinstance(batch, dict):
        batch = list(batch.values())
    if isinstance(batch, list | tuple):
        return [tensor for part in batch for tensor in tensors_in(part)]
    return []


@functools.cache
def _the_device() -> LateDevice:
    return LateDevice()


def switch_on() -> LateDevice:
    """Switch the device on, as new, in a program. A test has the fixture ``late`` for that."""
    device = _the_device()
    device.switch(is_on=True)
    return device


@contextlib.contextmanager
def switched_on() -> Iterator[LateDevice]:
    """Switch the device on, as new, and off at the end. Skip the test if it cannot be used."""
    if reason := reason_to_skip():
        pytest.skip(reason)
    device = switch_on()
    try:
        yield device
    finally:
        device.switch(is_on=False)
