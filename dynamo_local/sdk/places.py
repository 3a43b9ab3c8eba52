"""Where in the user's code something was written: `graphs/disagg.py:12`, for errors a person can act on."""

from __future__ import annotations

import os
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

_SDK_FOLDER = os.path.dirname(os.path.abspath(__file__))


@dataclass(frozen=True, slots=True)
class Place:
    """A line of a file; shown relative to the current folder when it lies below it."""

    file: str
    line: int

    def __str__(self) -> str:
        shown = os.path.relpath(self.file) if Path(self.file).is_relative_to(Path.cwd()) else self.file
        return f"{shown}:{self.line}"


def caller_place() -> Place:
    """The innermost line that is running outside this package: the user's decorator, or `link` call."""
    frame = _caller()
    return Place(frame.f_code.co_filename, frame.f_lineno)


def importing_module() -> str | None:
    """The module whose top level called into this package; None if a function did."""
    frame = _caller()
    return str(frame.f_globals.get("__name__")) if frame.f_code.co_name == "<module>" else None


def _caller() -> FrameType:
    frame = sys._getframe(1)
    while frame.f_back is not None and os.path.dirname(frame.f_code.co_filename) == _SDK_FOLDER:
        frame = frame.f_back
    return frame


def error_place(error: BaseException, base_dir: Path) -> Place | None:
    """Where an import failed: the innermost line below `base_dir`, else the innermost outside the import machinery."""
    if isinstance(error, SyntaxError) and error.filename:
        return Place(error.filename, error.lineno or 1)
    places = [
        Place(os.path.abspath(frame.filename), frame.lineno or 1)
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith("<frozen") and "importlib" not in Path(frame.filename).parts
    ]
    places = [place for place in places if os.path.dirname(place.file) != _SDK_FOLDER]
    own = [place for place in places if Path(place.file).is_relative_to(base_dir)]
    found = own or places
    return found[-1] if found else None
