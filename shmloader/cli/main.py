"""The arguments of the command line, and its exit codes.

* 0: done.
* 1: the user's dataset raised an exception, which is printed with its traceback, or ``doctor``
  found a problem.
* 2: the arguments are wrong, or the module or function that they name raised. One line says why.
* 130: Ctrl-C. What was measured so far is printed.
"""

import argparse
import contextlib
import io
import json
import math
import os
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NoReturn

import torch

from shmloader import __version__
from shmloader.cli.bench import bench
from shmloader.cli.doctor import doctor
from shmloader.cli.index import index
from shmloader.cli.report import report
from shmloader.cli.target import UsageError

_INTERRUPTED = 130
_BAD_ARGUMENTS = 2


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Print one line, without the usage."""
        self.exit(_BAD_ARGUMENTS, f"{self.prog}: error: {message} (--help lists the arguments)\n")


def count(text: str) -> int:
    """Return a number of batches, rounds or processes from 1 up."""
    if int(text) < 1:
        raise ValueError
    return int(text)


def duration(text: str) -> float:
    """Return a duration that is not negative."""
    if not 0 <= float(text) < math.inf:
        raise ValueError
    return float(text)


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    parser = _Parser(prog="shmloader", description="Find out where the time of a data loader goes.")
    version = f"shmloader {__version__}, torch {torch.__version__}, "
    version += f"Python {platform.python_version()}"
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, run: Callable[..., object], text: str) -> Callable[..., object]:
        added = commands.add_parser(name, help=text)
        added.set_defaults(run=run)
        return added.add_argument

    add = command("doctor", doctor, "show what this machine offers, or the problems of a loader")
    text = "a function that returns the loader or dataset to examine"
    add("target", metavar="MODULE:FUNCTION", nargs="?", help=text)
    add("--json", action="store_true", help="print one JSON object")

    add = command("bench", bench, "run a loader, and show where its time goes")
    add("target", metavar="MODULE:FUNCTION", help="a function that returns a loader")
    text = "duration of a simulated training step after each batch, in ms (%(default)s)"
    add("--step-ms", type=duration, default=0.0, help=text)
    add("--batches", type=count, default=200, help="number of batches to take (%(default)s)")
    text = "run torch's loader on the same dataset in turns, and print medians and ratios"
    add("--vs", choices=["torch"], help=text)
    text = "number of turns of each loader with --vs (%(default)s)"
    add("--rounds", type=count, default=5, help=text)
    add("--json", action="store_true", help="print one JSON object")

    add = command("report", report, "write a web page that shows a trace")
    add("trace", type=Path, help="a file that loader.trace() has written")
    text = "the page (default: the name of the trace with .html)"
    add("-o", "--output", type=Path, metavar="FILE", help=text)

    add = command("index", index, "index tar and JSON Lines shards to find records by number")
    text = "shards, such as data-0001.tar or data-0001.jsonl.gz"
    add("files", nargs="+", metavar="FILE", help=text)
    text = "number of processes (default: one for each core)"
    add("--jobs", type=count, metavar="N", help=text)
    return parser


@contextlib.contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Send to stderr what the user's code prints, here and in worker processes."""
    sys.stdout.flush()
    ours = os.dup(1)
    try:
        os.dup2(2, 1)
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(ours, 1)
        os.close(ours)


def run(parsed: argparse.Namespace) -> int:
    """Run a command, and return the exit code. With ``--json``, stdout has the result alone."""
    parsed.result = None
    if not getattr(parsed, "json", False):
        return parsed.run(parsed) or 0
    try:
        with stdout_to_stderr():
            return parsed.run(parsed) or 0
    finally:
        if parsed.result is not None:
            print(json.dumps(parsed.result, indent=2))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command, by default that of ``sys.argv``, and return the exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # its encoding may lack µ and others
    parser = make_parser()
    parsed = parser.parse_args(arguments)
    try:
        return run(parsed)
    except UsageError as error:
        print(f"shmloader {parsed.command}: error: {error}", file=sys.stderr)
        return _BAD_ARGUMENTS
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:  # the program that reads, such as `head`, has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
