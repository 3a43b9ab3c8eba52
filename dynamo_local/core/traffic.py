"""Reports about requests: counted together, under our names for counters that only grow and Dynamo's for its
histograms, and the last ones one by one. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

HISTOGRAMS: Mapping[str, str] = {
    "ttft_s": "time_to_first_token_seconds",
    "itl_s": "inter_token_latency_seconds",
    "duration_s": "request_duration_seconds",
    "isl": "input_sequence_tokens",
    "osl": "output_sequence_tokens",
    "cached": "cached_tokens",
}
"""A histogram is counted as `{name}_sum` and `{name}_count`."""
REQUESTS = "requests"
"""Requests that began."""
HIT_RATE = "hit_rate"
"""A histogram of shares: what a router knew to be cached of each prompt."""
HIT_RATE_METRIC = "dynamo_component_router_kv_hit_rate"
ACCEPT_LENGTH = "accept_length"
"""Means of tokens per decode pass, of engines that tell no more of their speculation: counted as a histogram is."""
ACCEPT_LENGTH_METRICS = ("sglang:spec_accept_length", "trtllm_spec_decode_acceptance_length")
STARTED, ENDED = "requests_started_total", "requests_total"
"""The first counts requests as they begin; frontends that have only the second count them as they end."""

RECENT_MAX = 4096
"""So many beginnings, and so many answers, are remembered one by one."""


@dataclass(frozen=True, slots=True)
class Answered:
    """A request whose last token came `age_s` ago: its tokens, and its latencies in seconds. `itl_s` is the mean gap
    between its own tokens (None: it has no two)."""

    age_s: float
    isl: int
    osl: int
    ttft_s: float
    itl_s: float | None


@dataclass(frozen=True, slots=True)
class Recent:
    """Requests of a while, the oldest first: how many seconds ago they began, and those that were answered."""

    began_s: tuple[float, ...] = ()
    answered: tuple[Answered, ...] = ()


class RecentRequests:
    """The last requests of a frontend. Times are seconds of the caller's clock."""

    def __init__(self) -> None:
        self._began: deque[float] = deque(maxlen=RECENT_MAX)
        self._answered: deque[tuple[float, int, int, float, float | None]] = deque(maxlen=RECENT_MAX)

    def began(self, at_s: float) -> None:
        """One more."""
        self._began.append(at_s)

    def answered(self, at_s: float, isl: int, osl: int, ttft_s: float, itl_s: float | None) -> None:
        """Its last token came then."""
        self._answered.append((at_s, isl, osl, ttft_s, itl_s))

    def of(self, window_s: float, now_s: float) -> Recent | None:
        """Those of the last so many seconds; None where there were more than are remembered."""
        since_s = now_s - window_s
        if len(self._began) == RECENT_MAX and self._began[0] > since_s:
            return None
        if len(self._answered) == RECENT_MAX and self._answered[0][0] > since_s:
            return None
        return Recent(
            tuple(now_s - at_s for at_s in self._began if since_s < at_s <= now_s),
            tuple(
                Answered(now_s - at_s, isl, osl, ttft_s, itl_s)
                for at_s, isl, osl, ttft_s, itl_s in self._answered
                if since_s < at_s <= now_s
            ),
        )


# --- admission
# How many requests a graph takes in before it refuses, and how long one may take: the defaults of the components and of
# the simulator.
#
# With them an overloaded graph queues. A request waits until its deadline, as with `vllm serve`, and is not refused.

MAX_INFLIGHT: Final = 8192
"""Requests that a Frontend serves at once, those that wait included. Two descriptors each."""

MAX_NUM_WAITING: Final = 8192
"""Requests that wait for one worker's engine."""

REQUEST_TIMEOUT_S: Final = 600.0
"""From a request's first byte to its answer's last: the default of OpenAI's clients, too."""
