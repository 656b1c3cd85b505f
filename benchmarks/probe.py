"""What does this machine's accelerator cost: page locks, copies from each memory, many copies?

Four measurements, each on memory as the loader uses it:

    * registration: seconds to page-lock and unlock a gigabyte of a slot, at several sizes;
    * bandwidth: copies to the device from a registered slot, from torch's pinned memory and from
      pageable memory, at several sizes;
    * small fields: 114 copies of 2 KB against one copy of them all;
    * launch latency: how long starting a small kernel takes, alone and while a thread registers.

Needs an accelerator; without one it says so in a line and ends. ``--device late`` is for trying it
out on the test device. Exit code: 0.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from _accelerator import Accelerator, open_accelerator
from _files import write_json
from _machine import describe_machine
from _sections import three_digits

from shmloader.device.backend import Backend
from shmloader.memory.arena import Arena, Slot

MIB = 1 << 20
REGISTERED_MIB = (2, 40, 80, 512)
COPIED_KIB = (64, 256, 1024, 4096, 16_384, 39_424, 131_072, 1_048_576)  # 39,424: 256 images
FIELDS, FIELD_BYTES = 114, 2048
MEMORIES = ("registered", "pinned", "pageable")
# A measurement moves so many bytes, so that small copies are many and large ones few.
_MOVED_BYTES = 1 << 31
_MOST_COPIES = 500
_LATENCY_MIB = 80


class Sizes:
    """How much is measured.

    Attributes:
        registered_mib: Sizes that are page-locked.
        copied_kib: Sizes of copies.
        repeats: How often each is measured; the figures are medians.
        launches: Kernels whose start is timed.
        moved_bytes: Bytes that one measurement of the bandwidth moves.
        latency_mib: Size of what is page-locked while launches are timed.
    """

    def __init__(self, *, smallest: bool) -> None:
        self.registered_mib = REGISTERED_MIB[:1] if smallest else REGISTERED_MIB
        self.copied_kib = COPIED_KIB[:2] if smallest else COPIED_KIB
        self.repeats = 2 if smallest else 5
        self.launches = 40 if smallest else 5000
        self.moved_bytes = 1 << 20 if smallest else _MOVED_BYTES
        self.latency_mib = 2 if smallest else _LATENCY_MIB


class Unavailable(Exception):  # noqa: N818 - no fault
    """What is measured does not exist on this device. Its text says why."""


class Registering:
    """Page-locks slots as the loader does.

    Args:
        backend: The device's backend.

    Raises:
        Unavailable: If nothing can be page-locked for this kind of device.
    """

    def __init__(self, backend: Backend) -> None:
        driver = backend.driver
        if isinstance(driver, str):
            raise Unavailable(driver or f"no driver is known for {backend.device.type}")
        self._driver = driver
        self._backend = backend

    def lock(self, slot: Slot) -> float:
        """Lock a slot; return the seconds it took."""
        with self._backend.ready():
            began = time.perf_counter()
            refusal = self._driver.register(slot.address, slot.nbytes)
            took_s = time.perf_counter() - began
        if refusal:
            raise Unavailable(f"page-locking {slot.nbytes} bytes was refused: {refusal}")
        return took_s

    def unlock(self, slot: Slot) -> float:
        """Unlock a slot; return the seconds it took."""
        with self._backend.ready():
            began = time.perf_counter()
            refusal = self._driver.unregister(slot.address)
            took_s = time.perf_counter() - began
        if refusal:
            raise Unavailable(f"unlocking {slot.nbytes} bytes was refused: {refusal}")
        return took_s


def new_arena(nbytes: int) -> Arena:
    """Make an arena of one slot, all of whose pages are in memory."""
    arena = Arena.create(nbytes, 1)
    arena.reach(arena.slots[0], nbytes)
    bytes_of(arena.slots[0], nbytes).fill_(1)
    return arena


def bytes_of(slot: Slot, nbytes: int) -> torch.Tensor:
    """Return the slot's first bytes."""
    return torch.frombuffer(slot.array(), dtype=torch.uint8, count=nbytes)


def measure_registration(_: Accelerator, backend: Backend, sizes: Sizes) -> list[dict]:
    """Time page locks at several sizes."""
    registering, found = Registering(backend), []
    for mib in sizes.registered_mib:
        arena = new_arena(mib * MIB)
        slot = arena.slots[0]
        pairs = [(registering.lock(slot), registering.unlock(slot)) for _ in range(sizes.repeats)]
        arena.close()
        gigabytes = mib * MIB / 1e9
        lock_s, unlock_s = (
            statistics.median(times) / gigabytes for times in zip(*pairs, strict=True)
        )
        found.append({"MiB": mib, "lock s/GB": lock_s, "unlock s/GB": unlock_s})
    return found


def measure_bandwidth(accelerator: Accelerator, backend: Backend, sizes: Sizes) -> list[dict]:
    """Time copies to the device from each kind of memory."""
    found = []
    for kib in sizes.copied_kib:
        nbytes = kib << 10
        row: dict[str, object] = {"KiB": kib}
        target = torch.empty(nbytes, dtype=torch.uint8, device=accelerator.device)
        for memory in MEMORIES:
            try:
                row[memory] = _bandwidth(accelerator, backend, sizes, memory, target)
            except Unavailable as error:
                row[memory] = str(error)
        found.append(row)
    return found


def _bandwidth(
    accelerator: Accelerator, backend: Backend, sizes: Sizes, memory: str, target: torch.Tensor
) -> float:
    """Return the rate of copies, in gigabytes a second."""
    nbytes = target.nbytes
    if memory != "registered":
        host = torch.ones(nbytes, dtype=torch.uint8)
        return _copy_rate(
            accelerator, sizes, host.pin_memory() if memory == "pinned" else host, target
        )
    registering, arena = Registering(backend), new_arena(nbytes)
    slot = arena.slots[0]
    registering.lock(slot)
    try:
        return _copy_rate(accelerator, sizes, bytes_of(slot, nbytes), target)
    finally:
        registering.unlock(slot)
        arena.close()


def _copy_rate(
    accelerator: Accelerator, sizes: Sizes, host: torch.Tensor, target: torch.Tensor
) -> float:
    copies = max(2, min(_MOST_COPIES, sizes.moved_bytes // host.nbytes))
    rates = []
    for _ in range(sizes.repeats):
        accelerator.synchronize()
        began = time.perf_counter()
        for _ in range(copies):
            target.copy_(host, non_blocking=True)
        accelerator.synchronize()
        rates.append(copies * host.nbytes / (time.perf_counter() - began) / 1e9)
    return statistics.median(rates)


def measure_small_fields(accelerator: Accelerator, _: Backend, sizes: Sizes) -> list[dict]:
    """Time 114 small copies, and one copy of all of them."""
    fields = [torch.full((FIELD_BYTES,), 1, dtype=torch.uint8) for _ in range(FIELDS)]
    block = torch.cat(fields).pin_memory()
    pinned = [field.pin_memory() for field in fields]
    found = []
    for name, tensors in (
        ("114, pageable", fields),
        ("114, pinned", pinned),
        ("1, pinned", [block]),
    ):
        started, done = [], []
        for _ in range(sizes.repeats + 1):  # the first allocates
            accelerator.synchronize()
            began = time.perf_counter()
            copies = [tensor.to(accelerator.device, non_blocking=True) for tensor in tensors]
            started.append(time.perf_counter() - began)
            accelerator.synchronize()
            done.append(time.perf_counter() - began)
            del copies
        started_us, done_us = (statistics.median(times[1:]) * 1e6 for times in (started, done))
        found.append({"copies": name, "started µs": started_us, "done µs": done_us})
    return found


def measure_launches(accelerator: Accelerator, backend: Backend, sizes: Sizes) -> list[dict]:
    """Time the starts of small kernels, alone and while a thread registers."""
    rows = [{"meanwhile": "nothing", **_launch_times(accelerator, sizes)}]
    with _registering_all_the_time(Registering(backend), sizes) as times_s:
        row = _launch_times(accelerator, sizes)
        registrations = len(times_s)
    what = f"{registrations} registrations of {sizes.latency_mib} MiB"
    return [*rows, {"meanwhile": what, **row}]


@contextlib.contextmanager
def _registering_all_the_time(registering: Registering, sizes: Sizes) -> Iterator[list[float]]:
    """Run a thread that locks and unlocks a slot; yield its growing list of times."""
    arena, times_s = new_arena(sizes.latency_mib * MIB), []
    slot = arena.slots[0]
    errors: list[Exception] = []
    has_begun, is_over = threading.Event(), threading.Event()

    def run() -> None:
        try:
            while not is_over.is_set():
                times_s.append(registering.lock(slot))
                has_begun.set()
                registering.unlock(slot)
        except Unavailable as error:
            errors.append(error)
        finally:
            has_begun.set()

    thread = threading.Thread(target=run)
    thread.start()
    has_begun.wait()
    try:
        yield times_s
    finally:
        is_over.set()
        thread.join()
        arena.close()
    if errors:
        raise errors[0]


def _launch_times(accelerator: Accelerator, sizes: Sizes) -> dict[str, float]:
    """Return how many microseconds a launch takes in the calling thread."""
    number = torch.zeros(1, device=accelerator.device)
    times_ns = []
    for index in range(sizes.launches):
        if index % 100 == 0:
            accelerator.synchronize()  # a full queue would make launches wait
        began = time.perf_counter_ns()
        number.add_(1)
        times_ns.append(time.perf_counter_ns() - began)
    accelerator.synchronize()
    times_us = sorted(time_ns / 1e3 for time_ns in times_ns)
    return {
        "median µs": statistics.median(times_us),
        "99 % µs": times_us[len(times_us) * 99 // 100],
        "most µs": times_us[-1],
    }


PARTS: dict[str, Callable[[Accelerator, Backend, Sizes], list[dict]]] = {
    "registration": measure_registration,
    "bandwidth, GB/s": measure_bandwidth,
    "small fields": measure_small_fields,
    "launch latency": measure_launches,
}


def to_markdown(found: dict) -> str:
    """Return tables of what was measured."""
    return "\n\n".join(_table(name, found[name]) for name in PARTS if name in found)


def _table(name: str, rows: list[dict] | str) -> str:
    if isinstance(rows, str):
        return f"**{name}**: not measured, since {rows}"
    lines = [f"| {name}: {' | '.join(rows[0])} |", "|" + "---|" * len(rows[0])]
    for row in rows:
        cells = (
            three_digits(cell) if isinstance(cell, float) else str(cell) for cell in row.values()
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def probe(accelerator: Accelerator, sizes: Sizes) -> Iterator[dict]:
    """Measure part by part; yield all results so far after each part."""
    backend = Backend(accelerator.device)
    found: dict[str, object] = {**accelerator.describe()}
    for name, measure in PARTS.items():
        try:
            found[name] = measure(accelerator, backend, sizes)
        except Unavailable as error:
            found[name] = str(error)
        except (RuntimeError, MemoryError) as error:  # the others may work
            found[name] = f"it failed: {type(error).__name__}: {error}"
        yield found


def main() -> int:
    """Measure, and print tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", help="such as cuda:1 (default: the one that torch finds)")
    parser.add_argument("--smallest", action="store_true", help="only check that it runs")
    parser.add_argument("--json", type=Path, help="file for results, part by part")
    options = parser.parse_args()
    accelerator = open_accelerator(options.device)
    if isinstance(accelerator, str):
        print(accelerator)
        return 0
    for name, value in describe_machine().items():
        print(f"{name}: {value}")
    for found in probe(accelerator, Sizes(smallest=options.smallest)):
        if options.json:
            write_json(options.json, found)
    print(f"device: {found['device']}\n\n{to_markdown(found)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
