"""Names of runs: sortable by time, unique without coordination (the ULID layout, github.com/ulid/spec)."""

from __future__ import annotations

import secrets
import time

_CROCKFORD = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
_TIME_CHARS, _RANDOM_CHARS = 10, 16


def new_run_id(now_ms: int | None = None) -> str:
    """26 characters of Crockford base 32: 48 bits of milliseconds since 1970, then 80 random bits."""
    moment = time.time_ns() // 1_000_000 if now_ms is None else now_ms
    return _encode(moment, _TIME_CHARS) + _encode(secrets.randbits(80), _RANDOM_CHARS)


def began_at(run_id: str) -> float | None:
    """When the run of that name was begun, in seconds since 1970; None for something that is no such name."""
    head = run_id[:_TIME_CHARS]
    if len(run_id) != _TIME_CHARS + _RANDOM_CHARS or not set(head) <= set(_CROCKFORD):
        return None
    return sum(_CROCKFORD.index(char) << (5 * place) for place, char in enumerate(reversed(head))) / 1000


def _encode(value: int, chars: int) -> str:
    return "".join(_CROCKFORD[value >> (5 * i) & 31] for i in reversed(range(chars)))
