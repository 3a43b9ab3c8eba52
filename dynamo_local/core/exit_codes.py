"""Exit codes of processes, in words."""

from __future__ import annotations

import signal


def how_it_ended(code: int | None) -> str:
    """Of a process that nobody asked to end. Negative for a signal, None where nobody could collect the code."""
    if code is None:
        return "ended unasked"
    if code < 0:
        named = -code in signal.Signals.__members__.values()
        return f"was killed by {signal.Signals(-code).name if named else f'signal {-code}'}"
    return f"exited with code {code} unasked"
