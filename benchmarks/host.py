"""What memory do the ranks of one host, and their workers, take for a list of a million texts?

A dataset of Python strings, 40 to 200 characters each. Each rank loads its share of two shuffled
epochs with workers of its own: with torch's loader, with ours and the plain list, with ours and
``shmloader.share`` in each rank, and with ``shmloader.share_on_host``. Each run has fresh
processes, and the kinds take turns. At the end of the epochs, while all ranks and workers live, the
proportional set sizes (PSS) of all processes are added up: a page that n processes share counts 1/n
in each of them. The same run with hardly any texts says what interpreters and torch take, which is
taken off ("of data").

Exit code: 0; 2 if a run failed. No figure is a pass or a fail.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
import uuid
from functools import partial
from typing import Any, NamedTuple

from _fresh import in_turn, run_anew
from _machine import describe_machine
from _spread import with_spread_if_any
from _usage import pss_bytes
from memory import Texts, make_texts
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import DistributedSampler

import shmloader
from shmloader import ShardedDataLoader

_RUN_LIMIT_S = 900.0
_BATCH_SIZE = 1_000
KINDS = ("torch", "plain", "share", "share_on_host")


class Setting(NamedTuple):
    """What is run."""

    kind: str
    texts: int
    ranks: int
    workers: int
    method: str


def run(setting: Setting) -> dict[str, Any]:
    """Start the ranks, and look at memory when all have loaded their shares."""
    spawn = multiprocessing.get_context("spawn")
    loaded, ends = spawn.Barrier(setting.ranks + 1), spawn.Event()
    run_id = uuid.uuid4().hex
    began_s = time.perf_counter()
    processes = [
        spawn.Process(target=_rank, args=(setting, rank, run_id, loaded, ends))
        for rank in range(setting.ranks)
    ]
    for process in processes:
        process.start()
    loaded.wait(_RUN_LIMIT_S)
    found = {"elapsed_s": time.perf_counter() - began_s, "nbytes": pss_bytes()}
    ends.set()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    return found


def _rank(setting: Setting, rank: int, run_id: str, loaded: Any, ends: Any) -> None:
    """Load two epochs, as a rank of the run."""
    os.environ |= {
        "TORCHELASTIC_RUN_ID": run_id,
        "RANK": str(rank),
        "WORLD_SIZE": str(setting.ranks),
        "LOCAL_WORLD_SIZE": str(setting.ranks),
    }
    build = partial(_build, setting.texts)
    if setting.kind == "share_on_host":
        dataset = shmloader.share_on_host(build)
    else:
        dataset = shmloader.share(build()) if setting.kind == "share" else build()
    options: dict[str, Any] = {
        "num_workers": setting.workers,
        "persistent_workers": True,
        "multiprocessing_context": setting.method,
    }
    loader: Any
    if setting.kind == "torch":
        sampler = DistributedSampler(dataset, setting.ranks, rank)
        loader = TorchLoader(dataset, _BATCH_SIZE, sampler=sampler, **options)
    else:
        loader = ShardedDataLoader(dataset, _BATCH_SIZE, True, **options)
    for _ in range(2):
        for _ in loader:
            pass
    loaded.wait(_RUN_LIMIT_S)
    ends.wait(_RUN_LIMIT_S)


def _build(count: int) -> Texts:
    return Texts(make_texts(count))


def _list_bytes(count: int) -> int:
    before = pss_bytes()
    texts = make_texts(count)
    nbytes = pss_bytes() - before
    assert len(texts) == count
    return nbytes


def main() -> int:
    """Compare, or do one run for a comparison."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--texts", type=int, default=1_000_000)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--workers", type=int, default=2, help="of each rank")
    parser.add_argument("--method", choices=("fork", "spawn", "forkserver"), default="fork")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--kinds", default=",".join(KINDS), help="which, separated by commas")
    parser.add_argument("--smallest", action="store_true", help="whether it runs, and no more")
    parser.add_argument("--run", choices=KINDS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.smallest:
        options.texts, options.ranks, options.workers = 8 * _BATCH_SIZE, 2, 1
    if options.run:
        setting = Setting(
            options.run, options.texts, options.ranks, options.workers, options.method
        )
        print(json.dumps(run(setting)))
        return 0
    print(describe_machine())
    print(f"{options.texts:,} texts, {options.ranks} ranks of {options.workers} workers, "
          f"{options.method}, {options.rounds} rounds\n")  # fmt: skip
    kinds = ("plain", "share_on_host") if options.smallest else options.kinds.split(",")
    figures: dict[str, list[dict[str, Any]]] = {kind: [] for kind in kinds}
    for round_ in range(options.rounds):
        for kind in in_turn(kinds, round_):
            arguments = [
                f"--run={kind}",
                f"--ranks={options.ranks}",
                f"--workers={options.workers}",
                f"--method={options.method}",
            ]
            few = options.ranks * options.workers * _BATCH_SIZE
            empty = run_anew(__file__, [*arguments, f"--texts={few}"], _RUN_LIMIT_S)
            found = run_anew(__file__, [*arguments, f"--texts={options.texts}"], _RUN_LIMIT_S)
            figures[kind].append({**found, "of_data": found["nbytes"] - empty["nbytes"]})
            print(f"round {round_ + 1} {kind}: {found['nbytes'] / 1e6:,.0f} MB, "
                  f"{found['elapsed_s']:.1f} s", file=sys.stderr)  # fmt: skip
    once = _list_bytes(options.texts)
    print(f"the texts in one list: {once / 1e6:,.0f} MB\n")
    print("| loader | total PSS, MB | of data, MB | to the list | start and two epochs, s |")
    print("|---|---|---|---|---|")
    for kind, runs in figures.items():
        cells = [
            with_spread_if_any([one[key] / unit for one in runs], spec)
            for key, unit, spec in (
                ("nbytes", 1e6, ",.0f"),
                ("of_data", 1e6, ",.0f"),
                ("of_data", once, ".2f"),
                ("elapsed_s", 1, ".1f"),
            )
        ]
        print(f"| {kind} | " + " | ".join(cells) + " |")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
