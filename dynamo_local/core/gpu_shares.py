"""How many workers each of several models gets on the GPUs of one host. Pure.

Maximises Σ weight × requests within targets per second, for all models together, less the cost of change. The search is
exact: it tries each number of workers of each model, and joins them as a knapsack of GPUs. Rules that hold whatever the
numbers say:

* A model has its `floor`, and never more than its `cap`.
* All models together get no more GPUs than there are.
* A model whose requests are held, and that has no worker, gets one before the oldest has waited `max_wait_s`.
* A worker stays for `min_stay_s`, unless a held request of another model would wait longer than its `max_wait_s`.
* A model without a request for `idle_s` gives back what it has above its floor.
* The same decision on the fleet that was decided changes nothing: each step has a cost, and costs of steps add up.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

HORIZON_S = float(os.environ.get("HZ","30"))
"""A worker that must be started is expected to be of use for so long. It earns nothing until it serves."""
STICKINESS = float(os.environ.get("ST","1.25"))
"""What a worker is worth counts for so much more when it would be taken."""
SERVED_LATE = float(os.environ.get("SL","0.2"))
"""A request that is answered, but not within its targets, counts for so much of one that is."""
KEPT_WORTH = 1e-6
"""A worker of a model that was used lately is worth a little: it stays where nobody needs its GPU."""
STEP_COST = 1e-4
"""A worker that comes or goes costs so much for each of its GPUs, in requests per second."""
MARGIN_S = 1.0
"""A worker that must come before a request has waited too long is ordered so much earlier than it would need."""
TAKEN = float(os.environ.get("TK","0.3"))
QUICK_S = 0.8
COLD = float(os.environ.get("CO","0.7"))
NO_LOAD = 1e-3
"""Requests at once that are none."""
ENOUGH = 0.9995
"""More workers are not tried where so large a share of requests is within its targets."""


@dataclass(frozen=True, slots=True)
class Sharing:
    """The configuration of one model that shares GPUs. Times are in seconds; `cap` None: as many as there are GPUs.

    `slots`: requests that one worker serves at once within the targets; None: as many as its engine takes.
    """

    floor: int = 0
    cap: int | None = None
    weight: float = 1.0
    idle_s: float = 300.0
    min_stay_s: float = 10.0
    max_wait_s: float = 120.0
    slots: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelNow:
    """One model as it is now. `name` is its workers' component.

    `workers` are ready or on their way; `requests` run or wait in them. `held` requests wait for a first worker, the
    oldest for `held_s`. `rate` is in requests per second. A worker serves `slots` requests at once within its targets,
    each for `busy_s`, and `slack_s` may pass before it begins. One more worker serves after `arrives_s`. `stayed_s` is
    how long the newest worker has been ready (None: none is). The last request was there `unused_s` ago.
    """

    name: str
    sharing: Sharing = field(default_factory=Sharing)
    gpus: int = 1
    workers: int = 0
    requests: int = 0
    held: int = 0
    held_s: float = 0.0
    rate: float = 0.0
    rate_long: float = 0.0
    busy_s: float = 1.0
    slots: int = 1
    slack_s: float = 0.5
    arrives_s: float = 10.0
    stayed_s: float | None = None
    young: int | None = None
    unused_s: float = math.inf


@dataclass(frozen=True, slots=True)
class Share:
    """The decision for one model: so many `workers`, and the sentence that says why. `more` is what one worker more
    would be worth, `last` what the last one is, both in weighted requests within targets per second and GPU."""

    workers: int
    why: str
    more: float
    last: float


def shares(models: Sequence[ModelNow], gpus: int) -> Mapping[str, Share]:
    """The decision for all models, by name. `gpus` are all that the models may have together."""
    least = _least(models, gpus)
    left = gpus - sum(least[each.name] * each.gpus for each in models)
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    for model in models:
        options = _options(model, least[model.name], left)
        following: dict[int, tuple[float, tuple[int, ...]]] = {}
        for used, (total, counts) in best.items():
            for count, value in options:
                now = used + (count - least[model.name]) * model.gpus
                if now <= left and total + value > following.get(now, (-math.inf, ()))[0]:
                    following[now] = total + value, (*counts, count)
        best = following
    _, counts = max(best.values())
    return {each.name: _explained(each, count) for each, count in zip(models, counts, strict=True)}


def _least(models: Sequence[ModelNow], gpus: int) -> dict[str, int]:
    """The workers that each model must have: its floor, one for held requests that are urgent, and young ones."""
    given = dict.fromkeys((each.name for each in models), 0)

    def give(model: ModelNow, workers: int) -> None:
        nonlocal gpus
        cap = workers if model.sharing.cap is None else min(workers, model.sharing.cap)
        more = min(cap - given[model.name], max(0, gpus) // max(1, model.gpus))
        if more > 0:
            given[model.name] += more
            gpus -= more * model.gpus

    for model in models:
        give(model, model.sharing.floor)
    drain_s = max((each.busy_s for each in models), default=0.0)
    for model in sorted(models, key=lambda each: (each.workers > 0, each.held_s - each.sharing.max_wait_s), reverse=True):
        if _is_urgent(model, drain_s):
            give(model, 1)
    for model in models:
        give(model, _young(model))
    return given


def _young(model: ModelNow) -> int:
    if model.young is not None:
        return min(model.young, model.workers)
    if model.stayed_s is None or model.stayed_s < model.sharing.min_stay_s:
        return model.workers
    return 0


def _is_urgent(model: ModelNow, drain_s: float) -> bool:
    """Its oldest held request would wait too long if no worker were ordered now, or one is under way for it."""
    if not model.held:
        return False
    return model.workers > 0 or model.held_s + model.arrives_s + drain_s + MARGIN_S >= model.sharing.max_wait_s


def _options(model: ModelNow, least: int, left: int) -> list[tuple[int, float]]:
    """Numbers of workers, from `least` on, and what each is worth from the fleet of now: the change has its cost."""
    most = least + left // max(1, model.gpus)
    if model.sharing.cap is not None:
        most = max(least, min(most, model.sharing.cap))
    values = _values(model, max(most, model.workers))
    now = values[min(model.workers, len(values) - 1)]
    taken = TAKEN * model.sharing.weight * min(max(model.rate, model.rate_long), model.slots / model.busy_s) * (
        (model.busy_s if model.requests else 0.0) + model.arrives_s
    ) / HORIZON_S
    found = []
    for count in range(least, most + 1):
        value = values[min(count, len(values) - 1)]
        change = value - now
        share = HORIZON_S / (HORIZON_S + model.arrives_s) if change > 0 else STICKINESS
        cost = STEP_COST * abs(count - model.workers) * model.gpus
        if count < model.workers:
            cost += (model.workers - count) * taken
        found.append((count, change * share - cost))
        if count >= len(values) and count >= model.workers:
            break
    return found


def _values(model: ModelNow, most: int) -> list[float]:
    """What 0, 1, 2 … workers are worth; shorter than `most` where more are worth no more.

    A fluid of requests, then a queue. The requests that are here are served first; until that is done, new ones are
    late. From then on, a share of them is within the targets, as in a queue M/M/c.
    """
    used = model.requests > 0 or model.held > 0 or model.unused_s < model.sharing.idle_s
    kept = KEPT_WORTH if used else 0.0
    here, rate = model.requests + model.held, max(model.rate, model.rate_long)
    load = rate * model.busy_s
    if here == 0 and load < NO_LOAD:
        return [0.0, *(kept * (n + 1) for n in range(min(most, model.workers)))]
    cold = here == 0 and model.arrives_s + QUICK_S <= model.slack_s
    found = [COLD * model.sharing.weight * rate if cold else 0.0]
    blocked = 1.0
    for workers in range(1, most + 1):
        servers = workers * model.slots
        for n in range(servers - model.slots + 1, servers + 1):
            blocked = load * blocked / (n + load * blocked)
        in_time = 1.0
        if servers > load:
            waits = servers * blocked / (servers - load * (1.0 - blocked))
            in_time = 1.0 - waits * math.exp(-(servers - load) * model.slack_s / model.busy_s)
        share = in_time * _share_of_horizon(model, servers, here, load)
        served = min(servers / model.busy_s, here / HORIZON_S + rate)
        value = rate * share + SERVED_LATE * max(0.0, served - rate * share)
        found.append(max(found[0], model.sharing.weight * value) + kept * workers)
        if share > ENOUGH and workers >= model.workers:
            break
    return found


def _share_of_horizon(model: ModelNow, servers: int, here: int, load: float) -> float:
    """The share of the horizon in which a new request begins before `slack_s` is over, in a fluid of requests."""
    late_s = (here - servers) * model.busy_s / servers - model.slack_s
    if servers > load:
        return 1.0 if late_s <= 0.0 else max(0.0, 1.0 - late_s / (1.0 - load / servers) / HORIZON_S)
    return 0.0 if late_s >= 0.0 else min(1.0, -late_s / max(1e-9, load / servers - 1.0) / HORIZON_S)


def worth(model: ModelNow, workers: int) -> float:
    """Weighted requests per second that so many workers serve within their targets, late ones for `SERVED_LATE`."""
    values = _values(model, workers)
    return values[min(workers, len(values) - 1)]


def _explained(model: ModelNow, workers: int) -> Share:
    values = _values(model, workers + 1)
    last_known = len(values) - 1
    here, above = values[min(workers, last_known)], values[min(workers + 1, last_known)]
    below = values[min(workers - 1, last_known)] if workers else 0.0
    more, last = (above - here) / max(1, model.gpus), (here - below) / max(1, model.gpus)
    load = f"{model.rate:.3g} requests/s, {model.requests} here"
    held = f", {model.held} held for {model.held_s:.1f} s" if model.held else ""
    if workers > model.workers:
        what = f"gets {workers - model.workers} more"
    elif workers < model.workers:
        what = f"gives {model.workers - workers} back"
    else:
        what = f"keeps {workers}"
    return Share(workers, f"{what}: {load}{held}; the last is worth {last:.3g}/s, one more {more:.3g}/s", more, last)
