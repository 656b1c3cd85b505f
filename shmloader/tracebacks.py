"""Finds the user's code: in tracebacks, and above a call that warns."""

import sys
import traceback
import warnings
from pathlib import Path
from types import TracebackType

from torch.utils.data import _utils, dataloader

_PACKAGE = str(Path(__file__).parent) + "/"

# The file with the method make(), which calls the user's code for a batch.
_MAKER = f"{_PACKAGE}batch/maker.py"

# The files of torch that call a dataset and a collate function.
_TORCHS = frozenset({_utils.fetch.__file__, dataloader.__file__})


def warn_user(text: str, category: type[Warning] = UserWarning) -> None:
    """Warn, with the line of the user's code that has called into the package."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and _is_our_file(frame.f_code.co_filename):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, category, stacklevel=level)


def _is_our_file(file: str) -> bool:
    return file.startswith(_PACKAGE) or file in _TORCHS


def _is_ours(entry: TracebackType) -> bool:
    return _is_our_file(entry.tb_frame.f_code.co_filename)


def _is_maker(entry: TracebackType) -> bool:
    code = entry.tb_frame.f_code
    return code.co_name == "make" and code.co_filename == _MAKER


def user_part(entry: TracebackType | None) -> TracebackType | None:
    """Return a traceback without the loader's frames before the user's first one.

    Args:
        entry: The traceback; its outermost frame comes first.

    Returns:
        The traceback from the user's first frame on. If all frames are the loader's:

        * only the innermost frame if the frames make a batch: it called an object without Python
          code, such as a list that is the dataset;
        * otherwise the whole traceback, since the loader itself raised the exception.
    """
    makes_batch = False
    first = last = entry
    while first is not None and _is_ours(first):
        makes_batch = makes_batch or _is_maker(first)
        first, last = first.tb_next, first
    if first is None and last is not None:
        return last if makes_batch else entry
    return first


def without_ours(entry: TracebackType | None) -> TracebackType | None:
    """Return a traceback without any of the loader's frames."""
    kept: list[TracebackType] = []
    while entry is not None:
        if not _is_ours(entry):
            kept.append(entry)
        entry = entry.tb_next
    chained: TracebackType | None = None
    for each in reversed(kept):
        chained = TracebackType(chained, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return chained


def format_for_user(error: BaseException) -> str:
    """Return an exception as Python prints it, without the loader's frames around the user's."""
    lines = traceback.format_exception(type(error), error, user_part(error.__traceback__))
    return "".join(lines)
