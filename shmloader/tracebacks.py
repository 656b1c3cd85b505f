"""Finds the user's code: in tracebacks, and above a call that warns."""

import sys
import traceback
import warnings
from pathlib import Path
from types import TracebackType

from torch.utils.data import _utils, dataloader

_PACKAGE = str(Path(__file__).parent) + "/"

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


def user_part(entry: TracebackType | None) -> TracebackType | None:
    """Return a traceback from the user's first frame on; the whole of it if there is none.

    Args:
        entry: The traceback; its outermost frame comes first.
    """
    first = entry
    while first is not None and _is_our_file(first.tb_frame.f_code.co_filename):
        first = first.tb_next
    return first or entry


def format_for_user(error: BaseException) -> str:
    """Return an exception as Python prints it, without the loader's frames around the user's."""
    lines = traceback.format_exception(type(error), error, user_part(error.__traceback__))
    return "".join(lines)
