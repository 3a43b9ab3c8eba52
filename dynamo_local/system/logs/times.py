"""Logs of several processes by time: when a line was written, and lines of many files in one order.

Each kind of process writes the time in a way of its own: ours `2026-03-01 14:05:21,123`, etcd
`"ts":"2026-03-01T14:05:21.123Z"`, NATS `2026/03/01 14:05:21.123456`, vLLM `INFO 03-01 14:05:21`. A line without one
belongs to the line before it.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime, timedelta
from functools import lru_cache
from operator import itemgetter

from dynamo_local.errors import BadInput

LOOKED_AT = 96
"""Characters of a line in which its time is looked for: what follows is the message, which may have times, too."""
UNKNOWN_MAX = 1000
"""So many lines may come before the first that has a time."""

_DATED = re.compile(
    r"(?P<day>\d{4}[-/]\d\d[-/]\d\d)[T ](?P<time>\d\d:\d\d:\d\d)"
    r"(?:[.,](?P<fraction>\d{1,9}))?(?P<zone>Z|[+-]\d\d:?\d\d)?"
)
_VLLM = re.compile(r"^(?:\([^)]*\) )?[A-Z]+ (?P<day>\d\d-\d\d) (?P<time>\d\d:\d\d:\d\d) ")
_AGO = re.compile(r"(?:(?P<d>\d+)d)?(?:(?P<h>\d+)h)?(?:(?P<m>\d+)m)?(?:(?P<s>\d+)s)?")
_CLOCK = re.compile(r"\d{1,2}:\d\d(:\d\d)?")


def written_at(line: str, now: datetime) -> float | None:
    """When the line was written, in seconds since 1970; None where it does not say. Without a zone: local time.

    vLLM leaves the year out; it is the last one in which that day is not after `now`.
    """
    head = line[:LOOKED_AT]
    found = _DATED.search(head)
    if found is not None:
        fraction = float(f"0.{found['fraction']}") if found["fraction"] else 0.0
        whole = _seconds(found["day"].replace("/", "-"), found["time"], found["zone"] or "")
        return None if whole is None else whole + fraction
    found = _VLLM.match(head)
    if found is None:
        return None
    this_year = _seconds(f"{now.year}-{found['day']}", found["time"], "")
    if this_year is not None and this_year <= now.timestamp() + 86_400.0:
        return this_year
    return _seconds(f"{now.year - 1}-{found['day']}", found["time"], "")


@lru_cache(maxsize=64)
def _seconds(day: str, time: str, zone: str) -> float | None:
    """Cached: lines come many to a second."""
    try:
        return datetime.fromisoformat(f"{day}T{time}{zone}").timestamp()
    except (ValueError, OverflowError):  # the 31st of February
        return None


def timed(lines: Iterable[str], now: datetime, otherwise_s: float) -> Iterator[tuple[float, str]]:
    """Each line with its time: that of the line before it where it has none, of the next one for the first lines.

    `otherwise_s` is the time of lines in a file without any.
    """
    waiting: list[str] = []
    at_s: float | None = None
    for line in lines:
        found = written_at(line, now)
        at_s = at_s if found is None else found
        if at_s is None and len(waiting) < UNKNOWN_MAX:
            waiting.append(line)
            continue
        at_s = otherwise_s if at_s is None else at_s
        for earlier in waiting:
            yield at_s, earlier
        waiting.clear()
        yield at_s, line
    for earlier in waiting:
        yield otherwise_s, earlier


def merged(streams: Mapping[str, Iterable[tuple[float, str]]]) -> Iterator[tuple[str, str]]:
    """`(name, line)` of all streams by time. The lines of one stream keep their order, whatever their times say."""
    named = [_named(name, stream) for name, stream in streams.items()]
    for _, name, line in heapq.merge(*named, key=itemgetter(0)):
        yield name, line


def _named(name: str, stream: Iterable[tuple[float, str]]) -> Iterator[tuple[float, str, str]]:
    return ((at_s, name, line) for at_s, line in stream)


def since(text: str, now: datetime) -> float:
    """`10m`, `1h30m`, `14:05`, `2026-03-01`, `2026-03-01 14:05:21`, `2026-03-01T14:05Z`: in seconds since 1970.

    A time without a day is the last one that has been. Raises `BadInput` for anything else.
    """
    word = text.strip()
    if re.match(r"\d", word) and (ago := _AGO.fullmatch(word)) is not None:
        d, h, m, s = (int(ago[unit] or 0) for unit in "dhms")
        try:
            return (now - timedelta(days=d, hours=h, minutes=m, seconds=s)).timestamp()
        except OverflowError:
            return 0.0
    try:
        if _CLOCK.fullmatch(word):
            at = datetime.combine(now.date(), datetime.strptime(word, _clock_format(word)).time())  # noqa: DTZ007 - local
            at = at.astimezone()
            return (at if at <= now else at - timedelta(days=1)).timestamp()
        return datetime.fromisoformat(word).timestamp()
    except (ValueError, OverflowError):
        raise BadInput(
            f"--since {text}: say how long ago (90s, 10m, 2h, 1d, 1h30m) or when "
            "(14:05, 2026-03-01, '2026-03-01 14:05:21')"
        ) from None


def _clock_format(word: str) -> str:
    return "%H:%M:%S" if word.count(":") == 2 else "%H:%M"
