"""Does the device path work on this machine's GPU, and how fast is it? ``make gpu`` runs this.

Runs three steps one after the other, each with a time limit of its own, and writes all that they
found to one JSON file and one page of Markdown, and on request to a section of ``RESULTS.md``:

    * ``benchmarks/probe.py``: what page locks and copies cost on this machine;
    * ``tests/cuda``: content, page locks, graph capture, and loaders that leave a rule out, whose
      wrong batches the tests must find;
    * ``benchmarks/device.py``: the loader beside torch's, and the goals.

It needs no network and no installation: a Python with torch, numpy, cloudpickle, psutil, pytest
and hypothesis is enough. All steps together take less than 25 minutes.

Exit code: 0, also if there is no accelerator, which it says in a line; 1 if a step failed, a test
failed or batches were wrong. Missed goals are reported, but are no failure.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import device as device_benchmark
import probe
import psutil
from _accelerator import find_device
from _files import write_json
from _machine import describe_machine, find_commit
from _sections import put_section

ROOT = Path(__file__).parents[1]
# Seconds. The sum stays below 25 minutes: probe, tests and benchmark.
PROBE_S, TESTS_S, BENCHMARK_S = 150, 450, 780
# The benchmark begins no further run when only so many seconds of its time are left.
_LAST_RUN_S = 40

_TEST_LINE = re.compile(r"^(tests/.+?) (PASSED|FAILED|SKIPPED|ERROR)\b", re.MULTILINE)


def run_step(command: list[str], limit_s: float, log: Path) -> str:
    """Run a program. At the time limit, it is killed with all its children, in any session.

    Args:
        command: The program and its arguments.
        limit_s: Seconds after which it is killed.
        log: Where its output goes.

    Returns:
        What went wrong, or an empty string.
    """
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    with log.open("w") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env=environment,
            start_new_session=True,
        )
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            for child in psutil.Process(process.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
            return f"it was ended after {limit_s:.0f} s; {log.name} has its output until then"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return "" if code == 0 else f"exit code {code}: {_last_line(log.read_text())}"


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no output"])[-1]


def run_probe(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run the probe; return what it found, even if it was ended at its time limit."""
    return _run_tool("probe", PROBE_S, [], options, folder)


def run_benchmark(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run the benchmark; return what it found, even if it was ended at its time limit."""
    arguments = [f"--budget-s={BENCHMARK_S - _LAST_RUN_S}"]
    if options.workers is not None:
        arguments.append(f"--workers={options.workers}")
    return _run_tool("device", BENCHMARK_S, arguments, options, folder)


def _run_tool(
    name: str, limit_s: float, arguments: list[str], options: argparse.Namespace, folder: Path
) -> dict[str, Any]:
    found = folder / f"{name}.json"
    found.unlink(missing_ok=True)
    command = [sys.executable, f"benchmarks/{name}.py", f"--json={found}", *arguments]
    if options.device:
        command.append(f"--device={options.device}")
    if options.smallest:
        command.append("--smallest")
    failure = run_step(command, limit_s, folder / f"{name}.log")
    text = found.read_text() if found.exists() else "{}"
    return {**json.loads(text), "failure": failure}


def run_tests(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run ``tests/cuda``; return the names of the tests by how they ended."""
    log = folder / "tests.log"
    command = [
        sys.executable, "-m", "pytest", "tests/cuda", "-v", "-rfEs", "--tb=short",
        "-p", "no:timeout", "-p", "no:xdist", "-p", "no:cacheprovider",
        # The project's own options ask for plugins that this machine need not have.
        "-o", "addopts=--import-mode=importlib --strict-markers",
        "-W", "ignore:Unknown config option",
    ]  # fmt: skip
    if options.device:
        command.append(f"--accelerator={options.device}")
    failure = run_step(command, TESTS_S, log)
    ended: dict[str, list[str]] = {}
    for name, outcome in _TEST_LINE.findall(log.read_text()):
        ended.setdefault(outcome.lower(), []).append(name)
    if not failure and not ended.get("passed"):
        failure = "no test has passed"
    return {"failure": failure, **ended}


def page_of(found: dict[str, Any]) -> str:
    """Return everything as one page of Markdown."""
    lines = ["# The device path on a GPU", ""]
    lines += [f"- device: {found['probe'].get('device', 'unknown, since the probe failed')}"]
    lines += [f"- {name}: {value}" for name, value in found["machine"].items()]
    lines += ["", "## Goals", "", device_benchmark.goals_of(found["benchmark"], found["probe"])]
    lines += ["", "## Tests", "", _tests_of(found["tests"])]
    lines += ["", "## Benchmark", "", _of("benchmark", device_benchmark.to_markdown, found)]
    lines += ["", "## Probe", "", _of("probe", probe.to_markdown, found)]
    return "\n".join(lines) + "\n"


def section_of(found: dict[str, Any]) -> list[str]:
    """Return the same as the lines of a section of ``RESULTS.md``."""
    lines = page_of(found).rstrip().splitlines()
    return [f"#{line}" if line.startswith("#") else line for line in lines]


def _of(step: str, render: Any, found: dict[str, Any]) -> str:
    failure = found[step]["failure"]
    text = render(found[step])
    return f"**Failed**: {failure}\n\n{text}" if failure else text


def _tests_of(tests: dict[str, Any]) -> str:
    counts = ", ".join(
        f"{len(tests.get(outcome, []))} {outcome}" for outcome in ("passed", "failed", "skipped")
    )
    lines = [f"`tests/cuda`: {counts}."]
    if tests["failure"]:
        lines.append(f"\n**Failed**: {tests['failure']}\n")
    lines += [f"- {name}" for kind in ("failed", "error") for name in tests.get(kind, [])]
    return "\n".join(lines)


def describe() -> dict[str, str]:
    """Describe what the figures were made on, except the device: the probe describes it."""
    compiled = importlib.util.find_spec("shmloader.memory._streaming") is not None
    return {
        **describe_machine(),
        "commit": find_commit(),
        "copies past the caches": "compiled" if compiled else "not compiled, torch copies instead",
    }


def main() -> int:
    """Run all steps and write both files."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", help="such as cuda:1 (default: the one that torch finds)")
    parser.add_argument("--smallest", action="store_true", help="only check that it runs")
    parser.add_argument("--workers", type=int, help="workers of the benchmark's loaders")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu", help="a folder")
    parser.add_argument(
        "--results", type=Path, help="page that gets the result as a section, if no step failed"
    )
    options = parser.parse_args()
    if options.smallest and options.results:
        parser.error("--results is for whole runs, and not for --smallest")
    device = find_device(options.device)
    if isinstance(device, str):
        print(device)
        return 0
    folder = options.out.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {"machine": describe()}
    steps = {"probe": run_probe, "tests": run_tests, "benchmark": run_benchmark}
    for name, step in steps.items():
        began = time.monotonic()
        found[name] = step(options, folder)
        took_s = time.monotonic() - began
        found[name]["seconds"] = took_s
        print(f"{name}: {found[name]['failure'] or 'done'} ({took_s:.0f} s)", flush=True)
        write_json(folder / "gpu.json", found)
    (folder / "gpu.md").write_text(page_of(found))
    has_failed = any(found[name]["failure"] for name in steps)
    if options.results and not has_failed:
        put_section(options.results, "gpu.py", section_of(found))
    print(f"\n{(folder / 'gpu.md').read_text()}\n{folder / 'gpu.json'}\n{folder / 'gpu.md'}")
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main())
