"""The arguments of the command line, and its exit codes.

* 0: done.
* 1: the user's dataset raised an exception, which is printed with its traceback, or ``doctor``
  found a problem.
* 2: the arguments are wrong, or the module or function that they name raised. One line says why.
* 130: Ctrl-C. What was measured so far is printed.
"""

import argparse
import io
import math
import os
import platform
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

import torch

from shmloader import __version__
from shmloader.cli.bench import bench
from shmloader.cli.doctor import doctor
from shmloader.cli.report import report
from shmloader.cli.target import UsageError

_INTERRUPTED = 130
_BAD_ARGUMENTS = 2


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Print one line, without the usage."""
        self.exit(_BAD_ARGUMENTS, f"{self.prog}: error: {message} (--help lists the arguments)\n")


def _number(minimum: float, kind: Callable[[str], float], name: str) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = minimum - 1
        if not minimum <= value < math.inf:
            raise argparse.ArgumentTypeError(f"{text!r} is not {name} from {minimum:g} up")
        return value

    return parse


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    parser = _Parser(prog="shmloader", description="Find out where the time of a data loader goes.")
    version = f"shmloader {__version__}, torch {torch.__version__}, "
    version += f"Python {platform.python_version()}"
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    count = _number(1, int, "a whole number")
    duration = _number(0, float, "a number")

    doctor_help = "show what this machine offers to a loader, or the problems of a loader"
    command = commands.add_parser("doctor", help=doctor_help)
    inspected_help = "a function that returns the loader or dataset to examine"
    command.add_argument("target", metavar="MODULE:FUNCTION", nargs="?", help=inspected_help)
    command.add_argument("--json", action="store_true", help="print one JSON object")
    command.set_defaults(run=doctor)

    bench_help = "run a loader, and show where its time goes"
    command = commands.add_parser("bench", help=bench_help)
    loader_help = "a function that returns a loader"
    command.add_argument("target", metavar="MODULE:FUNCTION", help=loader_help)
    step_help = "duration of a simulated training step after each batch, in ms (%(default)s)"
    command.add_argument("--step-ms", type=duration, default=0.0, help=step_help)
    command.add_argument(
        "--batches", type=count, default=200, help="number of batches to take (%(default)s)"
    )
    vs_help = "run torch's loader on the same dataset in turns, and print medians and ratios"
    command.add_argument("--vs", choices=["torch"], help=vs_help)
    rounds_help = "number of turns of each loader with --vs (%(default)s)"
    command.add_argument("--rounds", type=count, default=5, help=rounds_help)
    command.set_defaults(run=bench)

    command = commands.add_parser("report", help="write a web page that shows a trace")
    command.add_argument("trace", type=Path, help="a file that loader.trace() has written")
    output_help = "the page (default: the name of the trace with .html)"
    command.add_argument("-o", "--output", type=Path, metavar="FILE", help=output_help)
    command.set_defaults(run=report)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        arguments: The arguments, without the program's name; None stands for ``sys.argv[1:]``.

    Returns:
        The exit code.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # its encoding may lack µ and others
    parser = make_parser()
    parsed = parser.parse_args(arguments)
    try:
        return parsed.run(parsed) or 0
    except UsageError as error:
        print(f"shmloader {parsed.command}: error: {error}", file=sys.stderr)
        return _BAD_ARGUMENTS
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:  # the program that reads, such as `head`, has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
