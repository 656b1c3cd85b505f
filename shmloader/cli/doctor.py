"""``shmloader doctor``: what the machine offers, or what stands in the way of a loader."""

import argparse
import dataclasses
import json
import platform

import torch

from shmloader.cli.diagnosis import Diagnosis, Problem, diagnose
from shmloader.cli.machine import examine_machine
from shmloader.cli.target import call, find
from shmloader.insight.text import counted, seconds, size

_WIDTH = 16


def doctor(options: argparse.Namespace) -> int:
    """Run the command.

    Returns:
        The exit code: 1 if the loader has a problem.

    Raises:
        UsageError: If the argument names no function that returns a loader or a dataset.
    """
    if options.target is None:
        _show_machine(as_json=options.json)
        return 0
    found = diagnose(call(find(options.target), options.target), options.target)
    if options.json:
        print(json.dumps({"target": options.target, **_values(found)}, indent=2))
    else:
        _show(found, options.target)
    return 0 if found.is_healthy else 1


def _show_machine(*, as_json: bool) -> None:
    findings = examine_machine()
    if as_json:
        print(json.dumps({name: [value, meaning] for name, value, meaning in findings}, indent=2))
        return
    print(
        f"Python {platform.python_version()}, torch {torch.__version__}, {platform.system()} "
        f"{platform.release()}, {platform.machine()}\n"
    )
    for name, value, meaning in findings:
        _print(name, value, meaning)


def _values(found: Diagnosis) -> dict[str, object]:
    return {
        **dataclasses.asdict(found),
        "worker_bytes": found.worker_bytes,
        "slot_bytes": found.slot_bytes,
        "rank_bytes": found.rank_bytes,
        "fitting": found.fitting,
        "is_healthy": found.is_healthy,
    }


def _print(name: str, value: str, meaning: str) -> None:
    print(f"  {name:<{_WIDTH}}{value}")
    if meaning:
        print(f"  {'':<{_WIDTH}}{meaning}")


def _show(found: Diagnosis, target: str) -> None:
    is_threaded = found.method == "threads"
    how = "threads" if is_threaded else f"processes, start method {found.method}"
    print(f"{target}: {found.kind}; workers are {how}\n")
    _print("dataset", *_describe_dataset(found))
    _print("batch", *_describe_batch(found))
    if not is_threaded:
        _print("pickle", *_describe_pickle(found))
        _print("a worker", *_describe_worker(found))
        _print("start methods", *_describe_methods(found))
    _print("further ranks", *_describe_ranks(found))
    print()
    for problem in found.problems:
        if not problem.methods or is_threaded == ("threads" in problem.methods):
            _show_problem(problem)
    if found.is_healthy:
        print("No problem was found.")


def _show_problem(problem: Problem) -> None:
    _print("problem" if problem.matters else "note", f"{problem.path} ({problem.kind})", "")
    where = f"With {' and '.join(problem.methods)}: " if problem.methods else ""
    print(f"  {'':<{_WIDTH}}{where}{problem.what}.")
    print(f"  {'':<{_WIDTH}}Remedy: {problem.remedy}.\n")


def _describe_dataset(found: Diagnosis) -> tuple[str, str]:
    value = (
        f"{size(found.array_bytes)} of tensors and arrays, about {found.objects:,} Python objects "
        f"({size(found.object_bytes)})"
    )
    if found.shared_bytes:
        value += f", {size(found.shared_bytes)} in shared memory or mapped files"
    if not found.is_complete:
        value += "; it was not looked through completely"
    if found.wants_sharing:
        return value, (
            "dataset = shmloader.share(dataset) keeps the objects in memory only once; "
            "share_on_host(build) once for all ranks of a host."
        )
    return value, ""


def _describe_pickle(found: Diagnosis) -> tuple[str, str]:
    if found.pickle_bytes is None or found.pickle_s is None:
        if any("spawn" in problem.methods for problem in found.problems):
            return "not possible, see below", ""
        return "not tried: there is too little free memory for a copy of the dataset", ""
    value = f"{size(found.pickle_bytes)} in {seconds(found.pickle_s)}"
    if found.by_value:
        value += ", by cloudpickle"
    return value, "With spawn and forkserver, sent once for all workers; not sent with fork."


def _describe_batch(found: Diagnosis) -> tuple[str, str]:
    if found.batch_bytes is None or found.batch_s is None:
        return "none", ""
    value = f"{size(found.batch_bytes)}; the first one took {seconds(found.batch_s)}"
    if found.method == "threads":
        return value, "The threads share everything, and batches stay as they are."
    slots = counted(found.slots, "batch", "batches")
    whole = size(found.slot_bytes)
    return value, f"{counted(found.workers, 'worker')}: shared memory for {slots}, {whole}."


def _describe_worker(found: Diagnosis) -> tuple[str, str]:
    if found.worker_bytes is None:
        return "unknown", ""
    meaning = "The Python objects that it uses, and its share of the batches; not the interpreter."
    return size(found.worker_bytes), meaning


def _describe_ranks(found: Diagnosis) -> tuple[str, str]:
    value = f"each takes {size(found.rank_bytes)} more on the same host, for the dataset"
    if found.method == "threads":
        return value, "shmloader.share_on_host(build) keeps one dataset for all of them."
    value += f" and {counted(found.workers, 'worker')}"
    meaning = (
        "shmloader.share_on_host(build) keeps one dataset for all of them, and "
        "ShardedDataLoader(worker_scope='host') one pool of workers."
    )
    if found.slot_bytes:
        meaning += f" Each still takes {size(found.slot_bytes)} for its batches."
    return value, meaning


def _describe_methods(found: Diagnosis) -> tuple[str, str]:
    fitting = found.fitting
    if not fitting:
        return "none works", "Solve the problems below, or use num_workers=0."
    best = fitting[0]
    meaning = {
        "fork": "fork starts workers in milliseconds and copies nothing.",
        "forkserver": "forkserver starts workers in milliseconds, and pickles the dataset once.",
        "spawn": "spawn starts an interpreter for each worker: use persistent_workers=True.",
    }[best]
    return f"{', '.join(fitting)}", meaning
