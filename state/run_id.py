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


def _encode(value: int, chars: int) -> str:
    return "".join(_CROCKFORD[value >> (5 * i) & 31] for i in reversed(range(chars)))
