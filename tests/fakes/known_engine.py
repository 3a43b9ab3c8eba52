"""An engine whose times are known, to be measured: with noise, a slow GPU, a neighbour or a drift where asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from dynamo_local.profile.points import Kind, Point
from dynamo_local.profile.repetitions import Progress, Sample


@dataclass
class KnownEngine:
    """Several workers with the same engine. `slower` by worker; `at` multiplies by the time; `held_up` is a chance that
    a repetition takes `held_up_by` times as long."""

    workers: tuple[str, ...] = ("w",)
    noise: float = 0.005
    slower: dict[str, float] = field(default_factory=dict)
    at: Callable[[float], float] = lambda at_s: 1.0
    held_up: float = 0.0
    held_up_by: float = 1.5
    mixed: float = 1.0
    """What a pass that prefills and decodes takes, of the sum of both."""
    random: Random = field(default_factory=lambda: Random(5))

    def truth_ms(self, point: Point) -> float:
        """A prompt: 8 ms and 0.02 ms per token that is not cached; a pass: 5 ms, 0.02 µs per KV token, 5 µs per
        request."""
        if point.kind is Kind.MIXED:
            alone = Point(Kind.DECODE, point.tokens, point.requests), Point(Kind.PREFILL, point.chunk)
            return self.mixed * sum(map(self.truth_ms, alone))
        if point.kind is Kind.DECODE:
            return 5 + 2e-5 * point.tokens * point.requests + 5e-3 * point.requests
        return 8 + 0.02 * (point.tokens - point.cached)

    def sample(self, point: Point, worker: str, at_s: float) -> Sample:
        """One repetition on one worker."""
        value = self.truth_ms(point) * self.slower.get(worker, 1.0) * self.at(at_s)
        value *= 1 + self.noise * self.random.gauss(0, 1)
        if self.random.random() < self.held_up:
            value *= self.held_up_by
        kv = float(point.tokens * point.requests) if point.kind in (Kind.DECODE, Kind.MIXED) else 0.0
        return Sample(worker, at_s, value, float(point.requests), kv)


def measure(progress: Progress, engine: KnownEngine, seconds: float = 1.0) -> Progress:
    """Until all is measured, each repetition taking so many seconds."""
    while (point := progress.next_point()) is not None:
        samples = [engine.sample(point, worker, progress.elapsed_s) for worker in engine.workers]
        progress = progress.noted(point, samples, seconds)
    return progress
