"""Arguments of the command line, and its exit codes.

0: done; 1: the user's dataset raised, as Python has it; 2: bad arguments, told in one line, and a
module or function that they name and that raises; 130: Ctrl-C, after what was measured so far.
"""

import argparse
import io
import math
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from shmloader.cli.bench import bench
from shmloader.cli.doctor import doctor
from shmloader.cli.report import report
from shmloader.cli.target import UsageError
from shmloader.cli.tune import tune

_INTERRUPTED = 130
_BAD_ARGUMENTS = 2


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line, not the usage as well."""
        self.exit(_BAD_ARGUMENTS, f"{self.prog}: error: {message} (--help lists the options)\n")


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
    """The parser of all commands."""
    parser = _Parser(prog="shmloader", description="Where does the time of a data loader go?")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    count = _number(1, int, "a whole number")
    duration = _number(0, float, "a number")

    found = commands.add_parser("doctor", help="what this machine offers a loader")
    found.set_defaults(run=lambda _: doctor())

    found = commands.add_parser("bench", help="run a loader, and say where its time goes")
    found.add_argument("target", metavar="MODULE:FUNCTION", help="a function that makes a loader")
    found.add_argument("--batches", type=count, default=200, help="to be taken (%(default)s)")
    step_help = "a training step that takes so long, between two batches (%(default)s)"
    found.add_argument("--step-ms", type=duration, default=0.0, help=step_help)
    vs_help = "run torch's loader on the same dataset, too, and print the ratios"
    found.add_argument("--vs", choices=["torch"], help=vs_help)
    found.set_defaults(run=bench)

    found = commands.add_parser("tune", help="find the best num_workers and prefetch_factor")
    found.add_argument("target", metavar="MODULE:FUNCTION", help="a function that makes a loader")
    found.add_argument("--step-ms", type=duration, default=0.0, help=step_help)
    seconds_help = "seconds that a setting is measured at most (%(default)s)"
    found.add_argument(
        "--seconds", type=_number(0.1, float, "a number"), default=5.0, help=seconds_help
    )
    found.add_argument("--plot", type=Path, metavar="FILE", help="draw the curve (png, svg or pdf)")
    found.set_defaults(run=tune)

    found = commands.add_parser("report", help="make a page of a trace")
    found.add_argument("trace", type=Path, help="what loader.trace() has written")
    found.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="the page (the trace's name, .html)"
    )
    found.add_argument("--png", action="store_true", help="a picture as well, beside the page")
    found.set_defaults(run=report)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        arguments: Of the command line, without the program's name; None: this process's.

    Returns:
        The exit code.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # of bars and µ, where it cannot write these
    parser = make_parser()
    parsed = parser.parse_args(arguments)
    try:
        parsed.run(parsed)
    except UsageError as error:
        print(f"shmloader {parsed.command}: error: {error}", file=sys.stderr)
        return _BAD_ARGUMENTS
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:  # of a reader such as `head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return 0
