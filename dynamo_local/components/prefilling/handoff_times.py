"""How long one engine's hand-offs take, in whichever role: by that, not by a constant, a canary is given time.

The worker keeps it when it changes its role.
"""

from __future__ import annotations

from collections import deque

HANDOFF_TIMES = "handoff_times"
"""Under which it is handed over to the next role."""
KEPT = 20
TIMES_SLOWEST = 3.0
LEAST_S = 2.0
UNKNOWN_S = 5.0
"""Of an engine that has taken no KV yet: at the first hand-off two engines make each other's acquaintance."""
MOST_S = 8.0
"""Below the deadline of a flip."""


class HandoffTimes:
    """The last ones, in seconds: `prefills` that were computed here, `pulls` from KV's identity to the first token."""

    def __init__(self) -> None:
        self.prefills: deque[float] = deque(maxlen=KEPT)
        self.pulls: deque[float] = deque(maxlen=KEPT)

    def patience_s(self) -> float:
        """For a hand-off that is tried out: a multiple of the slowest that was seen here."""
        slowest_s = max(self.prefills, default=0.0) + max(self.pulls, default=0.0)
        return min(MOST_S, max(LEAST_S if self.pulls else UNKNOWN_S, TIMES_SLOWEST * slowest_s))

    def words(self) -> str:
        """For a person: by what the patience was chosen."""
        if not self.pulls:
            return "this engine has taken no KV yet"
        return f"this engine's last ones took {max(self.pulls):.2f} s at most"
