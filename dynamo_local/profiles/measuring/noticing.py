"""What the repetitions say of the host: a worker slower than its equals, a neighbour, an engine that drifts. Pure.

Each is told as a sentence for a person. All compare a repetition with others of the same point, so the points' own
differences do not matter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import sqrt
from statistics import fmean, median

from dynamo_local.profiles.measuring.plan import Measured
from dynamo_local.profiles.measuring.points import Point
from dynamo_local.profiles.measuring.statistics import Sample, quantile

SLOWER = 1.05
"""So many times its equals' time, in the median over the points, and a worker is called slow."""
SLOWER_AT = 0.75
"""At such a share of the points at least: one point alone may be chance."""
DRIFT = 0.05
"""Change of all times over the run, as a share, that is told."""
SIGMAS = 4.0
"""And it must be so many times as large as its own error."""
HELD_UP = 1.10
"""A repetition so many times as long as the quickest ones of its point was held up by something."""
HELD_UP_SHARE = 0.10
"""Such a share of all repetitions, and there is a neighbour."""
QUICK = 0.25
"""The quickest repetitions: this quantile of a point's."""
OTHERS = 0.25
"""Such a share of the host's processors used by others is told."""


@dataclass(frozen=True, slots=True)
class Noticed:
    """`kind`: slow_worker, noisy_neighbour, drift, busy_host, on_processors or stranger; `size` is a share (0.2: a
    fifth longer)."""

    kind: str
    worker: str | None
    size: float
    text: str


def noticed(known: Mapping[Point, Measured]) -> list[Noticed]:
    """All of it."""
    slow = list(slow_workers(known))
    even = _evened(known, {each.worker: 1 + each.size for each in slow if each.worker})
    drift = list(drifts(even))
    return [*slow, *drift, *([] if drift else neighbours(even))]


def slow_workers(known: Mapping[Point, Measured]) -> Iterator[Noticed]:
    """Workers that take longer than others with the same engine; needs two or more of them."""
    ratios: dict[str, list[float]] = {}
    for each in known.values():
        means = _by_worker(each)
        for worker, mean in means.items():
            others = [other for name, other in means.items() if name != worker]
            if others:
                ratios.setdefault(worker, []).append(mean / median(others))
    for worker, found in sorted(ratios.items()):
        middle = median(found)
        if middle >= SLOWER and sum(ratio > 1 + (SLOWER - 1) / 2 for ratio in found) >= SLOWER_AT * len(found):
            text = (
                f"{worker} takes {middle:.2f} times what its equals take, at {len(found)} points: look at its GPU's "
                "clocks, temperature and power limit; the profile counts it in"
            )
            yield Noticed("slow_worker", worker, middle - 1, text)


def drifts(known: Mapping[Point, Measured]) -> Iterator[Noticed]:
    """One straight line through all repetitions over time, each as a share of its point's mean."""
    rows = [
        (sample.at_s, sample.value_ms / fmean(s.value_ms for s in each.samples))
        for each in known.values()
        if len(each.samples) >= 2
        for sample in each.samples
    ]
    if len(rows) < 8:
        return
    mid = fmean(at_s for at_s, _ in rows)
    squares = sum((at_s - mid) ** 2 for at_s, _ in rows)
    if squares <= 0:
        return
    level = fmean(share for _, share in rows)
    slope = sum((at_s - mid) * (share - level) for at_s, share in rows) / squares
    rest = sum((share - level - slope * (at_s - mid)) ** 2 for at_s, share in rows)
    error = sqrt(rest / (len(rows) - 2) / squares)
    span_s = max(at_s for at_s, _ in rows) - min(at_s for at_s, _ in rows)
    change = slope * span_s
    if abs(change) >= DRIFT and abs(slope) >= SIGMAS * error:
        how = "slower" if change > 0 else "quicker"
        text = (
            f"the engine became {abs(change):.0%} {how} while it was measured ({span_s:.0f} s): a GPU that heats up or "
            "throttles, or a cache that fills; measure again when it is steady"
        )
        yield Noticed("drift", None, change, text)


def neighbours(known: Mapping[Point, Measured]) -> Iterator[Noticed]:
    """Repetitions that took much longer than the quickest of their point: something else ran at that time."""
    held: list[Sample] = []
    count, most = 0, 1.0
    for each in known.values():
        if len(each.samples) < 3:
            continue
        quick = quantile([sample.value_ms for sample in each.samples], QUICK)
        count += len(each.samples)
        late = [sample for sample in each.samples if sample.value_ms > HELD_UP * quick]
        most = max([most, *(sample.value_ms / quick for sample in late)])
        held += late
    if not held or len(held) < HELD_UP_SHARE * count:
        return
    workers = sorted({sample.worker for sample in held})
    text = (
        f"{len(held)} of {count} repetitions took up to {most:.1f} times as long as the quickest of their point, on "
        f"{', '.join(workers)}: something else uses the GPU or the processors now and then; end it and measure again"
    )
    yield Noticed("noisy_neighbour", workers[0] if len(workers) == 1 else None, most - 1, text)


def busy_processors(share: float) -> Iterator[Noticed]:
    """Of the host's processors, in the mean over the run, other processes than the measured graph's used so much."""
    if share >= OTHERS:
        text = (
            f"other processes used {min(share, 1.0):.0%} of this host's processors meanwhile: what runs on those (the "
            "way over HTTP, starts, an engine without a GPU) takes longer than on a quiet host; measure again then"
        )
        yield Noticed("busy_host", None, share, text)


def on_processors(count: int, model: str) -> Iterator[Noticed]:
    """Engines whose GPUs are simulated, and which compute all the same."""
    text = (
        f"the GPUs are simulated: these engines compute on {count} × {model}, which they share with whatever else runs "
        "on this host, and several workers were measured one after the other"
    )
    yield Noticed("on_processors", None, 1.0, text)


def strangers(seen: Mapping[tuple[int, str], int]) -> Iterator[Noticed]:
    """Processes (pid, name) that used a measured GPU beside its worker, by the device's index."""
    for (pid, name), index in sorted(seen.items()):
        text = f"GPU {index} was also used by {name} (pid {pid}): the times of its worker are not its own; end it"
        yield Noticed("stranger", None, 1.0, text)


def _by_worker(each: Measured) -> dict[str, float]:
    values: dict[str, list[float]] = {}
    for sample in each.samples:
        values.setdefault(sample.worker, []).append(sample.value_ms)
    return {worker: median(found) for worker, found in values.items()}


def _evened(known: Mapping[Point, Measured], slower: Mapping[str, float]) -> dict[Point, Measured]:
    """Without what is known to be slow about a worker, which would look like a neighbour."""
    if not slower:
        return dict(known)
    return {
        point: Measured(
            tuple(
                Sample(s.worker, s.at_s, s.value_ms / slower.get(s.worker, 1.0), s.requests, s.kv_tokens)
                for s in each.samples
            ),
            each.spent_s,
        )
        for point, each in known.items()
    }
