"""Where the time of this process's start goes, stage by stage: told in one line when it is ready.

Measured from when the process was made, or from when a spare got its order.
"""

from __future__ import annotations

import os
import time

from dynamo_local.system.processes import start_time_s

_began_s: float | None = None
_passed: list[tuple[str, float]] = []


def _now_s() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def begin_anew() -> None:
    """What came before was no part of the start: a spare's imports."""
    global _began_s
    _began_s = _now_s()
    _passed.clear()


def passed(stage: str) -> None:
    """The stage has ended now; it began with the end of the one before."""
    _passed.append((stage, _now_s()))


def stages() -> dict[str, float]:
    """Seconds by stage, in their order."""
    began_s = _began_s if _began_s is not None else start_time_s(os.getpid()) or _now_s()
    found: dict[str, float] = {}
    for stage, at_s in _passed:
        found[stage] = found.get(stage, 0.0) + at_s - began_s
        began_s = at_s
    return found


def words() -> str:
    """`7.31 s: interpreter 0.20, imports 0.93, connections 0.04, …`"""
    found = stages()
    return f"{sum(found.values()):.2f} s: " + ", ".join(f"{stage} {seconds:.2f}" for stage, seconds in found.items())
