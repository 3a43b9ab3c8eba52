"""Reports about requests: counted together, under our names for counters that only grow and Dynamo's for its
histograms, and the last ones one by one. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

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


# --- targets
# The outcomes of requests against targets for their latencies.

KEPT: Final = "kept"
OUTCOMES: Final = (KEPT, "waited", "prefilled", "handed_off", "decoded", "unknown", "failed")
"""`kept`: both targets. Else the part of the request that took longest before a late first token: it `waited`, was
`prefilled`, or was `handed_off` to another engine. `unknown`: its worker does not say which. `decoded`: its tokens came
too slowly. `failed`: it got no complete answer."""
TARGET_PREFIX: Final = "targets."
"""Frontends report the outcomes, and their targets in ms, under names that begin so."""


@dataclass(frozen=True, slots=True)
class Phases:
    """Seconds of a first token's time: the prompt's computation, and the KV's way to the engine that decodes."""

    prefilled_s: float
    handed_off_s: float = 0.0
    prefill_worker: str | None = None
    """The watcher that computed the prompt; None: the engine that decodes did, or it is not known."""


def outcome_of(
    ttft_s: float, itl_s: float | None, targets_s: tuple[float | None, float | None], phases: Phases | None
) -> str:
    """The outcome of an answered request. `targets_s` are those for TTFT and ITL; None: there is no such target."""
    ttft_max_s, itl_max_s = targets_s
    if ttft_max_s is not None and ttft_s > ttft_max_s:
        if phases is None:
            return "unknown"
        parts = {"prefilled": phases.prefilled_s, "handed_off": phases.handed_off_s}
        parts["waited"] = ttft_s - phases.prefilled_s - phases.handed_off_s
        return max(parts, key=lambda name: parts[name])
    return "decoded" if itl_max_s is not None and itl_s is not None and itl_s > itl_max_s else KEPT


_MISSES = {
    "waited": "waited",
    "prefilled": "were prefilled",
    "handed_off": "were handed off",
    "decoded": "were decoded too slowly",
    "failed": "failed",
    "unknown": "had a late first token, and their worker does not say why",
}


def kept_words(targets: Mapping[str, Any] | None) -> Iterator[str]:
    """`kept both targets: 97.0 % of 200 requests in the last minute, …; of those that missed, 4 waited`

    Nothing without targets.
    """
    if not targets:
        return
    spans = {"minute": "in the last minute", "hour": "in the last hour", "day": "in the last day", "total": "in all"}
    parts, before = list[str](), None
    for name, span in spans.items():
        found = targets.get(name) or {}
        if found.get("share") is not None and found["requests"] != before:
            before = found["requests"]  # a longer window that has no more requests says the same
            parts.append(f"{100 * found['share']:.2f} % of {found['requests']:,} requests {span}")
    missed = (targets.get("total") or {}).get("missed") or {}
    causes = [
        f"{count:,} {_MISSES.get(name, name)}" for name, count in sorted(missed.items(), key=lambda each: -each[1])
    ]
    tail = f"; of those that missed, {', '.join(causes)}" if causes else ""
    yield f"kept both targets: {', '.join(parts) or 'no request has ended yet'}{tail}"


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

UNREAD_BOUND_S: Final = 30.0
"""While a worker leaves, an answer of which the client has taken no byte for so long is ended."""
