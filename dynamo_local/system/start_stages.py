"""Where the time of this process's start goes, stage by stage: told in one line when it is ready. `Stages` is the same
for whatever else takes several steps.

A start is measured from when the process was made, or from when a spare got its order.
"""

from __future__ import annotations

import os
import socket
import time

from dynamo_local.system.processes import start_time_s


def _now_s() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Stages:
    """Measured from when this was made, or from `began_s` (seconds since boot)."""

    def __init__(self, began_s: float | None = None) -> None:
        self._began_s = _now_s() if began_s is None else began_s
        self._passed: list[tuple[str, float]] = []

    def passed(self, stage: str) -> None:
        """End a stage now. The stage began with the end of the one before."""
        self._passed.append((stage, _now_s()))

    def stages(self) -> dict[str, float]:
        """Seconds by stage, in their order."""
        began_s = self._began_s
        found: dict[str, float] = {}
        for stage, at_s in self._passed:
            found[stage] = found.get(stage, 0.0) + at_s - began_s
            began_s = at_s
        return found

    def describe(self, digits: int = 2) -> str:
        """`7.31 s: interpreter 0.20, imports 0.93, connections 0.04, …`"""
        found = self.stages()
        each = ", ".join(f"{stage} {seconds:.{digits}f}" for stage, seconds in found.items())
        return f"{sum(found.values()):.{digits}f} s: {each}"


_start: Stages | None = None


def _own() -> Stages:
    global _start
    if _start is None:
        _start = Stages(start_time_s(os.getpid()))
    return _start


def begin_anew() -> None:
    """Forget the time before: the imports of a prewarmed process are no part of the start."""
    global _start
    _start = Stages()


def passed(stage: str) -> None:
    _own().passed(stage)


def stages() -> dict[str, float]:
    return _own().stages()


def describe() -> str:
    return _own().describe()


# systemd's readiness protocol (sd_notify(3)): one datagram to `$NOTIFY_SOCKET`. Without that variable nothing is sent.


def notify(message: str) -> bool:
    """Send e.g. `READY=1` or `STOPPING=1`; False where no service manager listens."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return False
    if address.startswith("@"):
        address = "\0" + address[1:]  # an abstract socket
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as client:
            client.sendto(message.encode(), address)
    except OSError:
        return False  # nobody listens any more
    return True
