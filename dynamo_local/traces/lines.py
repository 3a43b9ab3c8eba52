"""Files of JSON lines, gzipped where their name ends in `.gz`: their objects, and the fields of one of these.

Whatever is wrong is a `BadTrace` that names the file, the line and the field.
"""

from __future__ import annotations

import gzip
import json
import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from dynamo_local.errors import BadInput

LINE_BYTES_MAX = 64 * 1024 * 1024
"""A longer line is refused before all of it is read: a gzipped file may hold a thousand times its size."""
TOKENS_MAX = 1_000_000_000

_SHOWN = 60


class BadTrace(BadInput):
    """A trace cannot be used; the message names the file, the line and the field."""

    code = "bad_trace"


@dataclass(frozen=True, slots=True)
class Row:
    """One line's object. `where` names file and line for messages."""

    fields: dict[str, Any]
    where: str

    def field(self, name: str) -> Any:
        """The value of a field that must be there."""
        if name not in self.fields:
            there = ", ".join(map(str, self.fields)) or "nothing"
            raise BadTrace(f"{self.where}: {name} is missing; the line has: {there}")
        return self.fields[name]

    def milliseconds(self, name: str) -> float:
        """A time, 0 or more."""
        value = self.field(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not _is_finite(value):
            raise BadTrace(f"{self.where}: {name} must be a number of milliseconds, not {shown(value)}")
        if value < 0:
            raise BadTrace(f"{self.where}: {name} must be 0 or more, not {shown(value)}")
        return float(value)

    def tokens(self, name: str, *, least: int = 1) -> int:
        """A whole number of tokens."""
        value = self.field(name)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise BadTrace(
                f"{self.where}: {name} must be a whole number of tokens, {least} or more, not {shown(value)}"
            )
        if value > TOKENS_MAX:
            raise BadTrace(f"{self.where}: {name} is {shown(value)} tokens; no request has more than {TOKENS_MAX:,}")
        return value

    def inner(self, name: str) -> Row:
        """An object within the object; its fields are told as `name.field`."""
        value = self.field(name)
        if not isinstance(value, dict):
            raise BadTrace(f"{self.where}: {name} must be an object, not {shown(value)}")
        return Row(value, f"{self.where}, in {name}")


def read_rows(path: Path) -> Iterator[Row]:
    """The objects of a file, one at a time; empty lines are passed over. Raises `BadTrace`."""
    for number, line in enumerate(_lines(path), start=1):
        if text := line.strip():
            yield _row(text, f"{path}, line {number}")


def shown(value: Any) -> str:
    """A value as a message shows it: JSON, or a line's own text, cut where it is long."""
    text = value.decode("utf-8", "replace") if isinstance(value, bytes) else json.dumps(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def _lines(path: Path) -> Iterator[bytes]:
    try:
        with _opened(path) as file:
            while line := file.readline(LINE_BYTES_MAX + 1):
                if len(line) > LINE_BYTES_MAX:
                    raise BadTrace(f"trace {path} has a line of more than {LINE_BYTES_MAX:,} bytes")
                yield line
    except (OSError, EOFError, zlib.error) as error:
        what = "there is no such file" if isinstance(error, FileNotFoundError) else str(error)
        raise BadTrace(f"trace {path} cannot be read: {what}") from error


def _opened(path: Path) -> IO[bytes] | gzip.GzipFile:
    return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")


def _row(line: bytes, where: str) -> Row:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BadTrace(f"{where}: this is no JSON ({error}): {shown(line)}") from error
    if not isinstance(row, dict):
        raise BadTrace(f"{where}: a request is a JSON object, not {shown(line)}")
    return Row(row, where)


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number of hundreds of digits
        return False
