"""Requests, tokens and latencies of the last minute, by component. Pure.

Each worker counts since its start (`Served`), latencies by bucket. The arbiter hears the counters beside the loads and
takes differences (`LastMinute`). An unknown figure is None, never 0.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Final

PER_DECADE: Final = 20
BOUNDS_S: Final = tuple(10 ** (n / PER_DECADE) for n in range(-4 * PER_DECADE, 3 * PER_DECADE + 1))
"""Upper bounds of the buckets, from 0.1 ms to 1000 s. Each is 12 % above the one before."""

REQUESTS: Final = "requests"
TOKENS: Final = "tokens"
TTFT: Final = "ttft"
ITL: Final = "itl"
LATENCIES: Final = (TTFT, ITL)
"""Counters of a latency are named by its bucket: `ttft.57`."""
MAX_COUNTERS: Final = 2 + len(LATENCIES) * (len(BOUNDS_S) + 1)

WINDOW_S: Final = 60.0
STEP_S: Final = 1.0
STALE_AFTER_S: Final = 5.0
"""A component that was silent for so long has no figures."""


class Served:
    """The counts of one worker since its start. No method may be slow: some are called for each token."""

    __slots__ = ("_itl", "_requests", "_tokens", "_ttft")

    def __init__(self) -> None:
        self._requests = 0
        self._tokens = 0
        self._ttft = [0] * (len(BOUNDS_S) + 1)
        self._itl = [0] * (len(BOUNDS_S) + 1)

    def first(self, ttft_s: float, tokens: int) -> None:
        """The first tokens of an answer."""
        self._tokens += tokens
        self._ttft[bisect_left(BOUNDS_S, ttft_s)] += 1

    def more(self, gap_s: float, tokens: int) -> None:
        """Further tokens. They came together, so long after the ones before."""
        self._tokens += tokens
        self._itl[bisect_left(BOUNDS_S, gap_s / tokens)] += tokens

    def ended(self) -> None:
        """A request ended, with an answer or without."""
        self._requests += 1

    def counters(self) -> dict[str, float]:
        """As the worker reports them. A bucket without a count is left out."""
        found: dict[str, float] = {REQUESTS: self._requests, TOKENS: self._tokens}
        for name, counts in ((TTFT, self._ttft), (ITL, self._itl)):
            found |= {f"{name}.{n}": count for n, count in enumerate(counts) if count}
        return found


def rebinned(name: str, buckets: Sequence[tuple[float, float]]) -> dict[str, float]:
    """Another program's histogram in our buckets: (upper bound in seconds, cumulative count), ascending.

    The count of a bucket is spread evenly, on a log scale, over ours within it.
    """
    found: Counter[str] = Counter()
    for (low_s, below), (high_s, upto) in pairwise([(BOUNDS_S[0], 0.0), *buckets]):
        low, high = bisect_left(BOUNDS_S, low_s * (1 + 1e-9)), bisect_left(BOUNDS_S, high_s)
        covered = range(low, max(low, high) + 1)
        for n in covered if upto > below else ():
            found[f"{name}.{n}"] += (upto - below) / len(covered)  # type: ignore[assignment]
    return dict(found)


class LastMinute:
    """The last minute of each component. Memory is bounded: sixty sums a component, and workers heard within it."""

    def __init__(self) -> None:
        self._before: dict[tuple[str, str], tuple[float, Mapping[str, float]]] = {}
        self._totals: dict[str, Counter[str]] = {}
        self._heard_s: dict[str, float] = {}
        self._sums: dict[str, deque[tuple[float, Counter[str]]]] = {}

    def heard(self, reported: Mapping[tuple[str, str], Mapping[str, float]], now_s: float) -> None:
        """Add the counters that workers report now, by component and worker.

        The first report of a worker adds nothing: its requests may be older. Lower counters are those of a new process.
        """
        for (component, worker), counters in reported.items():
            total = self._totals.setdefault(component, Counter())
            known = self._before.get((component, worker))
            self._before[component, worker] = (now_s, counters)
            self._heard_s[component] = now_s
            if known is None:
                total.update({name: 0.0 for name in counters if name == REQUESTS})
                continue
            before = known[1]
            if any(counters.get(name, 0.0) < value for name, value in before.items()):
                before = {}
            total.update({name: value - before.get(name, 0.0) for name, value in counters.items()})
        self._before = {key: each for key, each in self._before.items() if now_s - each[0] <= WINDOW_S}
        for component in {component for component, _ in reported}:
            sums = self._sums.setdefault(component, deque())
            if not sums or now_s - sums[-1][0] >= STEP_S / 2:
                sums.append((now_s, Counter(self._totals[component])))
            while len(sums) > 1 and sums[1][0] <= now_s - WINDOW_S:
                sums.popleft()
        for component in [name for name, at_s in self._heard_s.items() if now_s - at_s > WINDOW_S]:
            for of in (self._totals, self._heard_s, self._sums):
                of.pop(component)

    def ended(self, component: str) -> float | None:
        """Requests that have ended since the component was first heard. After a minute of silence it is 0 again.

        None: its workers do not tell.
        """
        total = self._totals.get(component)
        return 0.0 if total is None else total.get(REQUESTS)

    def figures(self, component: str, now_s: float) -> dict[str, Any] | None:
        """`components` in `dynamo status --json`. None: its workers report nothing, or not twice yet.

        Latencies are in milliseconds, and None where no token came.
        """
        heard_s, sums = self._heard_s.get(component), self._sums.get(component)
        if heard_s is None or not sums or now_s - heard_s > STALE_AFTER_S or heard_s <= sums[0][0]:
            return None
        began_s, first = sums[0]
        span_s, counted = heard_s - began_s, self._totals[component] - first
        latencies = {f"{name}_ms": _percentiles(name, counted) for name in LATENCIES}
        return {
            "seconds": round(span_s, 3),
            "requests_per_s": round(counted[REQUESTS] / span_s, 3),
            "tokens_per_s": round(counted[TOKENS] / span_s, 3),
            **latencies,
        }


def _percentiles(name: str, counted: Mapping[str, float]) -> dict[str, float | None]:
    counts = {int(key.partition(".")[2]): count for key, count in counted.items() if key.startswith(f"{name}.")}
    return {word: _percentile_ms(counts, share) for word, share in (("p50", 0.5), ("p95", 0.95))}


def _percentile_ms(counts: Mapping[int, float], share: float) -> float | None:
    """Within its bucket the value is interpolated on a log scale, so it is off by a few per cent at most."""
    rank, below = share * sum(counts.values()), 0.0
    for n in sorted(counts):
        if below + counts[n] >= rank:
            low_s, high_s = BOUNDS_S[max(0, n - 1)], BOUNDS_S[min(n, len(BOUNDS_S) - 1)]
            return float(round(1000 * low_s * (high_s / low_s) ** ((rank - below) / counts[n]), 3))
        below += counts[n]
    return None
