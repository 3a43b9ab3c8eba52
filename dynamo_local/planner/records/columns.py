"""Columns of numbers, packed small and without loss: for the log of ticks, most of which are engines' passes.

Neighbours in a column are alike (a pass has a token more than the one before), and most numbers are small or have few
decimals. So each column becomes whole numbers if it can, their differences if these are smaller, and its bytes are
sorted by their weight: the upper ones are then long runs of zeros, which zlib makes nothing of.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from itertools import accumulate, pairwise

_HEAD = struct.Struct("<I")
_COLUMN = struct.Struct("<BBBI")
"""Kind, whether it is of differences, bytes of each number, and bytes that follow."""
_WHOLE, _FLOAT = 0, 255
"""Kinds; one between is of floats with so many decimals."""
_DECIMALS = (0, 3, 4, 6)
_LARGEST = 2**53
_LEVEL = 6


def packed(columns: Sequence[Sequence[float]]) -> bytes:
    """Of columns of one length. Whole numbers must be within 2^53; `unpacked` gives the same numbers, of the same
    types."""
    return b"".join([_HEAD.pack(len(columns[0]) if columns else 0), *map(_column_out, columns)])


def unpacked(data: bytes) -> list[list[float]]:
    """The columns. Raises `ValueError` or `zlib.error` for what `packed` did not write."""
    found: list[list[float]] = []
    try:
        (count,) = _HEAD.unpack_from(data)
        at = _HEAD.size
        while at < len(data):
            kind, differs, width, size = _COLUMN.unpack_from(data, at)
            at += _COLUMN.size
            found.append(_column_in(kind, bool(differs), width, count, data[at : at + size]))
            at += size
    except struct.error as error:
        raise ValueError(f"a column ends too early: {error}") from None
    return found


def _column_out(values: Sequence[float]) -> bytes:
    kind, numbers = _as_whole(values)
    if numbers is None:
        raw, differs, width = struct.pack(f"<{len(values)}d", *values), False, 8
    else:
        steps = [*numbers[:1], *(after - before for before, after in pairwise(numbers))]
        differs = sum(map(abs, steps)) < sum(map(abs, numbers))
        # The sign goes into the lowest bit: small numbers stay small on both sides of 0.
        unsigned = [n + n if n >= 0 else -n - n - 1 for n in (steps if differs else numbers)]
        width = (max(unsigned, default=0).bit_length() + 7) // 8
        raw = struct.pack(f"<{len(unsigned)}Q", *unsigned)
    by_weight = b"".join(raw[weight::8] for weight in range(width))
    small = zlib.compress(by_weight, _LEVEL)
    return _COLUMN.pack(kind, differs, width, len(small)) + small


def _as_whole(values: Sequence[float]) -> tuple[int, list[int] | None]:
    """The kind, and the column as whole numbers; None where it has too many decimals."""
    if all(type(value) is int for value in values):
        return _WHOLE, [int(value) for value in values]
    if all(type(value) is float and abs(value) < _LARGEST / 10 ** _DECIMALS[-1] for value in values):
        for decimals in _DECIMALS:
            scale = 10**decimals
            numbers = [round(value * scale) for value in values]
            if all(number / scale == value for number, value in zip(numbers, values, strict=True)):
                return decimals + 1, numbers
    return _FLOAT, None


def _column_in(kind: int, differs: bool, width: int, count: int, small: bytes) -> list[float]:
    by_weight = zlib.decompress(small)
    if width > 8 or len(by_weight) != width * count:
        raise ValueError(f"a column has {len(by_weight)} bytes, and not {width} for each of {count} numbers")
    raw = bytearray(8 * count)
    for weight in range(width):
        raw[weight::8] = by_weight[weight * count : (weight + 1) * count]
    if kind == _FLOAT:
        return list(struct.unpack(f"<{count}d", raw))
    signed = [n >> 1 if n & 1 == 0 else -(n >> 1) - 1 for n in struct.unpack(f"<{count}Q", raw)]
    numbers = list(accumulate(signed)) if differs else signed
    if kind == _WHOLE:
        return [*numbers]
    scale = 10 ** (kind - 1)
    return [number / scale for number in numbers]
