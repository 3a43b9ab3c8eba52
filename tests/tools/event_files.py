"""TensorBoard's event files, read back as its own reader does: records with checksums, each an `Event`."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

from tensorboardX.proto.event_pb2 import Event
from tensorboardX.record_writer import masked_crc32c


@dataclass(frozen=True, slots=True)
class Point:
    """One scalar: `step` in seconds since the start, `wall_s` since 1970."""

    name: str
    value: float
    step: int
    wall_s: float


def read_points(folder: Path) -> list[Point]:
    """All points of all event files in the folder, by the files' names. AssertionError if one is broken."""
    return [point for path in sorted(folder.glob("*tfevents*")) for point in _points(path)]


def named(points: list[Point], name: str) -> list[tuple[int, float]]:
    """`(step, value)` of one scalar; values rounded, as the files hold 32-bit floats."""
    return [(point.step, round(point.value, 5)) for point in points if point.name == name]


def _points(path: Path) -> list[Point]:
    data, at, events = path.read_bytes(), 0, []
    while at < len(data):
        header, crc = data[at : at + 8], struct.unpack("I", data[at + 8 : at + 12])[0]
        assert masked_crc32c(header) == crc, f"{path} is broken at byte {at}"
        size = struct.unpack("Q", header)[0]
        body, crc = data[at + 12 : at + 12 + size], struct.unpack("I", data[at + 12 + size : at + 16 + size])[0]
        assert masked_crc32c(body) == crc, f"{path} is broken at byte {at + 12}"
        events.append(Event.FromString(body))
        at += 16 + size
    for first in events[:1]:  # nothing is in the file before its first flush
        assert first.file_version == "brain.Event:2", f"{path} does not begin as TensorBoard wants it"
    return [
        Point(value.tag, value.simple_value, event.step, event.wall_time)
        for event in events
        for value in event.summary.value
    ]
