"""Which worker gets the next request. Pure: candidates and loads in, an instance id out.

A picker also remembers what this Processor has sent: a sample is up to a second old. Without that memory a burst of
requests would all go to the one that looked idle.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Literal, Protocol, get_args

from dynamo_local.core.types import Load, Missing

PUBLISH_INTERVAL_S = 1.0
"""How often a worker publishes its load, at least."""
MIN_CHANGE_INTERVAL_S = 0.1
"""How often at most, where it changes all the time."""

ON_ITS_WAY_S = 0.1
"""How long a request may take to its worker, on a host that is busy with a burst of them."""

ENDED_KEPT_S = 3 * PUBLISH_INTERVAL_S
"""No older sample is believed, so nobody asks what was in flight before."""

RouterPolicy = Literal["least-loaded", "slo", "kv", "kv-load", "round-robin", "random"]
"""How a worker is picked: fewest requests; fewest expected misses of targets; what it has cached against its load; its
load as `kv` sees it; in turn; by chance."""


@dataclass(frozen=True, slots=True)
class RouterSettings:
    """The settings of a Router that can change while it runs."""

    router: RouterPolicy = "least-loaded"

    def __post_init__(self) -> None:
        if self.router not in get_args(RouterPolicy):
            raise ValueError(f"router must be one of {', '.join(get_args(RouterPolicy))}, not {self.router!r}")


@dataclass(frozen=True, slots=True)
class Sample:
    """A worker's load, and when (monotonic seconds of the Processor) it was taken."""

    load: Load | Missing
    at_s: float


NO_HITS: Mapping[int, float] = {}
"""Nobody is known to have cached anything."""


class Picker(Protocol):
    """A choice among instance ids. `routed` and `finished` bracket each request that was sent."""

    def pick(
        self,
        candidates: Sequence[int],
        loads: Mapping[int, Sample],
        hits: Mapping[int, float] = NO_HITS,
        prompt_tokens: int = 0,
    ) -> int:
        """One of `candidates` (never empty). `hits` is the share (0..1) of the prompt that a worker has cached. The
        prompt has `prompt_tokens` (0: unknown)."""
        ...

    def routed(self, instance_id: int, request_id: str, tokens: int, now_s: float, prompt_tokens: int = 0) -> None:
        """The request went to that worker; `tokens` bounds what it may still generate, beyond its `prompt_tokens`."""
        ...

    def finished(self, instance_id: int, request_id: str, now_s: float) -> None:
        """That request is done there, or was given up: it counts no more."""
        ...


class RoundRobin:
    """In turn, by instance id, whatever joins or leaves."""

    def __init__(self) -> None:
        self._last = -1

    def pick(
        self,
        candidates: Sequence[int],
        loads: Mapping[int, Sample],
        hits: Mapping[int, float] = NO_HITS,
        prompt_tokens: int = 0,
    ) -> int:
        order = sorted(candidates)
        self._last = next((i for i in order if i > self._last), order[0])
        return self._last

    def routed(self, instance_id: int, request_id: str, tokens: int, now_s: float, prompt_tokens: int = 0) -> None:
        """Turns do not depend on load."""

    def finished(self, instance_id: int, request_id: str, now_s: float) -> None:
        """Turns do not depend on load."""


@dataclass(frozen=True, slots=True)
class Sent:
    """A request that was routed at that moment; `tokens` is what it may still cost its worker."""

    tokens: int
    at_s: float


class SentRequests:
    """The requests that were sent from here and have not ended, by worker, and those that ended within
    `ENDED_KEPT_S`."""

    def __init__(self) -> None:
        self._sent: dict[int, dict[str, Sent]] = {}
        self._ended: dict[int, deque[tuple[float, float]]] = {}
        self._asked: dict[int, tuple[float, int]] = {}
        """For each worker: the moment that was last asked about, and how many of those in flight then have ended. Going
        through all that have ended at each request was a tenth of a Frontend's work at 500 requests per second."""

    def routed(self, instance_id: int, request_id: str, tokens: int, now_s: float) -> None:
        self._sent.setdefault(instance_id, {})[request_id] = Sent(tokens, now_s)

    def finished(self, instance_id: int, request_id: str, now_s: float) -> None:
        """That request is done there: it counts no more."""
        sent = self._sent.get(instance_id, {})
        request = sent.pop(request_id, None)
        if not sent:
            self._sent.pop(instance_id, None)
        if request is not None:
            self._ended.setdefault(instance_id, deque()).append((request.at_s, now_s))
            at_s, ended_since = self._asked.get(instance_id, (now_s, 0))
            if request.at_s < at_s < now_s:
                self._asked[instance_id] = at_s, ended_since + 1
        for worker, ended in list(self._ended.items()):
            while ended and ended[0][1] < now_s - ENDED_KEPT_S:
                ended.popleft()
            if not ended:
                del self._ended[worker]
                self._asked.pop(worker, None)

    def in_flight(self, instance_id: int) -> list[Sent]:
        """All of them."""
        return list(self._sent.get(instance_id, {}).values())

    def since(self, instance_id: int, at_s: float) -> list[Sent]:
        """Those that a sample of `at_s` cannot know."""
        newest_first = reversed(self._sent.get(instance_id, {}).values())
        return list(takewhile(lambda sent: sent.at_s >= at_s, newest_first))

    def count(self, instance_id: int) -> int:
        """How many are in flight."""
        return len(self._sent.get(instance_id, ()))

    def count_at(self, instance_id: int, at_s: float) -> int:
        """How many were in flight at that moment, which is not long ago."""
        asked_s, ended_since = self._asked.get(instance_id, (None, 0))
        if asked_s != at_s:
            newest_first = reversed(self._ended.get(instance_id, ()))
            ended_since = sum(sent_s < at_s for sent_s, _ in takewhile(lambda times: times[1] > at_s, newest_first))
            if instance_id in self._ended or instance_id in self._sent:
                self._asked[instance_id] = at_s, ended_since
        return self.count(instance_id) - len(self.since(instance_id, at_s)) + ended_since


class LeastLoaded:
    """Fewest requests beyond a worker's slots, then fewest requests, then fewest tokens still to come, then in turn.

    Requests that were sent from here are counted exactly. A sample is late, and on a busy host so late that hundreds
    of requests would go by it. A sample shows the requests of others: its number less those from here at that time.
    Without news of ends (`hears_ends`), requests since the sample are added to it. So are those that were sent so
    shortly before it that they may not have arrived.

    A worker whose load is missing is not taken for idle. It counts as the busiest known one, or as its requests in
    flight from here, whichever is more. If no load is known, the requests in flight from here decide.
    """

    def __init__(self, *, hears_ends: bool = True) -> None:
        self._hears_ends = hears_ends
        self._sent = SentRequests()
        self._turn = RoundRobin()

    def pick(
        self,
        candidates: Sequence[int],
        loads: Mapping[int, Sample],
        hits: Mapping[int, float] = NO_HITS,
        prompt_tokens: int = 0,
    ) -> int:
        if len(candidates) == 1:
            return candidates[0]
        known = {i: score for i in candidates if (score := self._score(i, loads.get(i))) is not None}
        worst = max(known.values(), default=(0, 0, 0))
        scores = {i: known[i] if i in known else max(worst, (0, *self.in_flight(i))) for i in candidates}
        best = min(scores.values())
        return self._turn.pick([i for i in candidates if scores[i] == best], loads)

    def routed(self, instance_id: int, request_id: str, tokens: int, now_s: float, prompt_tokens: int = 0) -> None:
        self._sent.routed(instance_id, request_id, tokens, now_s)

    def finished(self, instance_id: int, request_id: str, now_s: float) -> None:
        self._sent.finished(instance_id, request_id, now_s)

    def _score(self, instance_id: int, sample: Sample | None) -> tuple[int, int, int] | None:
        """(requests that would wait for a slot, requests, tokens), or None where the load is missing."""
        if sample is None or isinstance(sample.load, Missing):
            return None
        load = sample.load
        since = self._sent.since(instance_id, sample.at_s if self._hears_ends else sample.at_s - ON_ITS_WAY_S)
        requests = load.request_active_slots + load.num_requests_waiting
        if self._hears_ends:
            others = max(0, requests - self._sent.count_at(instance_id, sample.at_s))
            requests = others + self._sent.count(instance_id)
        else:
            requests += len(since)
        slots = load.request_total_slots
        overflow = max(0, requests + 1 - slots) if slots else 0
        return overflow, requests, load.remaining_tokens + sum(s.tokens for s in since)

    def in_flight(self, instance_id: int) -> tuple[int, int]:
        """(requests, tokens) that were sent to this worker and have not ended."""
        sent = self._sent.in_flight(instance_id)
        return len(sent), sum(s.tokens for s in sent)
