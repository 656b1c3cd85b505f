"""``shmloader report``: one page of a trace, that works without a network; or a picture.

Modules: ``data`` (reads a trace), ``page`` (writes the page: ``page.html`` with the data in it) and
``picture`` (draws the same with matplotlib).
"""

import argparse

from shmloader.cli.report.data import read_trace
from shmloader.cli.report.page import write_page
from shmloader.cli.report.picture import find_matplotlib, write_picture
from shmloader.cli.target import UsageError

__all__ = ["report"]


def report(options: argparse.Namespace) -> None:
    """Run the command.

    Raises:
        UsageError: If the trace cannot be read, or the page not be written.
    """
    if options.png:
        find_matplotlib()
    page = options.output or options.trace.with_suffix(".html")
    picture = page.with_suffix(".png")
    if page.absolute() == options.trace.absolute():
        raise UsageError(f"{page} is the trace: name another file for the page (-o)")
    if options.png and page.absolute() == picture.absolute():
        raise UsageError(f"{page} is where the picture goes: name a page.html (-o)")
    run = read_trace(options.trace)
    try:
        write_page(run, page)
        print(f"page: {page}")
        if options.png:
            write_picture(run, picture)
            print(f"picture: {picture}")
    except OSError as error:
        raise UsageError(f"cannot write {page}: {error.strerror}") from error
