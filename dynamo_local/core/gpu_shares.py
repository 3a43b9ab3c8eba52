"""How many workers each of several models gets on the GPUs of one host. Pure.

Maximises Σ weight × requests within targets per second, for all models together: a GPU goes where one more is worth
most. A worker that is there counts for more than one that must be started, so that models do not change places without
need. Rules that hold whatever the numbers say:

* A model has its `floor`, and never more than its `cap`.
* All models together get no more GPUs than there are.
* A model whose requests are held, and that has no worker, gets one before the oldest has waited `max_wait_s`.
* A worker stays for `min_stay_s`, unless a held request of another model would wait longer than its `max_wait_s`.
* A model without a request for `idle_s` gives back what it has above its floor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

HORIZON_S = 60.0
"""A worker that must be started is expected to be of use for so long. It earns nothing until it serves."""
HELD_HORIZON_S = 10.0
"""Held requests count as a demand that comes in so long."""
STICKINESS = 1.25
"""A worker that is there counts for so much more than one that must be started."""
SERVED_LATE = 0.2
"""A request that is answered, but not within its targets, counts for so much of one that is."""
KEPT_WORTH = 1e-6
"""A worker of a model that was used lately is worth a little: it stays where nobody needs its GPU."""
MARGIN_S = 1.0
"""A worker that must come before a request has waited too long is ordered so much earlier than it would need."""


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


@dataclass(frozen=True, slots=True)
class HeldNow:
    """Requests of one model that a Frontend holds: how many, and since when the oldest (seconds of CLOCK_MONOTONIC,
    which all processes of a host share)."""

    count: int
    since_s: float


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
    busy_s: float = 1.0
    slots: int = 1
    slack_s: float = 0.5
    arrives_s: float = 10.0
    stayed_s: float | None = None
    unused_s: float = math.inf


@dataclass(frozen=True, slots=True)
class Share:
    """The decision for one model: so many `workers`, and the sentence that says why. `more` is what one worker more
    would be worth, `last` what the last one is, both in weighted requests within targets per second and GPU."""

    workers: int
    why: str
    more: float
    last: float


def erlang_c(servers: int, load: float) -> float:
    """The probability that a request must wait, in a queue M/M/c with `load` = rate × service time < servers.

    Source: Erlang 1917, in the form of Erlang B's recursion.
    """
    if load <= 0.0:
        return 0.0
    if load >= servers:
        return 1.0
    blocked = 1.0
    for n in range(1, servers + 1):
        blocked = load * blocked / (n + load * blocked)
    return servers * blocked / (servers - load * (1.0 - blocked))


def worth(model: ModelNow, workers: int) -> float:
    """Weighted requests per second that so many workers serve within their targets, late ones for `SERVED_LATE`."""
    load = _rate(model) * model.busy_s
    if load <= 0.0 or workers <= 0:
        return 0.0
    servers = workers * model.slots
    served = min(1.0, servers / load)
    in_time = 0.0
    if servers > load:
        waits = erlang_c(servers, load)
        in_time = 1.0 - waits * math.exp(-(servers - load) * model.slack_s / model.busy_s)
    return model.sharing.weight * _rate(model) * (SERVED_LATE * served + (1.0 - SERVED_LATE) * in_time)


def shares(models: Sequence[ModelNow], gpus: int) -> Mapping[str, Share]:
    """The decision for all models, by name. `gpus` are all that the models may have together."""
    given = _floors(models, gpus)
    left = gpus - sum(given[each.name] * each.gpus for each in models)
    for model in sorted(models, key=lambda each: each.held_s - each.sharing.max_wait_s, reverse=True):
        if _is_urgent(model) and given[model.name] == 0 and model.gpus <= left:
            given[model.name] = 1
            left -= model.gpus
    while True:
        best = max((_best_step(each, given[each.name], left) for each in models), key=lambda step: step[0])
        value, name, count = best
        if value <= 0.0 or not count:
            break
        given[name] += count
        left -= count * next(each.gpus for each in models if each.name == name)
    return {each.name: _explained(each, given[each.name]) for each in models}


def _floors(models: Sequence[ModelNow], gpus: int) -> dict[str, int]:
    given: dict[str, int] = {}
    for model in models:
        fits = max(0, gpus) // max(1, model.gpus)
        given[model.name] = min(model.sharing.floor, fits)
        gpus -= given[model.name] * model.gpus
    return given


def _is_urgent(model: ModelNow) -> bool:
    """Its oldest held request would wait too long if no worker were ordered now, or one is under way for it."""
    if not model.held:
        return False
    return model.workers > 0 or model.held_s + model.arrives_s + MARGIN_S >= model.sharing.max_wait_s


def _rate(model: ModelNow) -> float:
    return model.rate + model.held / HELD_HORIZON_S


def _best_step(model: ModelNow, have: int, left: int) -> tuple[float, str, int]:
    """The most that the next workers of the model are worth per GPU, and how many of them that takes."""
    cap = left // model.gpus if model.gpus else left
    if model.sharing.cap is not None:
        cap = min(cap, model.sharing.cap - have)
    best = (0.0, model.name, 0)
    total = 0.0
    for count in range(1, cap + 1):
        total += _kept_or_new(model, have + count)
        value = total / (count * max(1, model.gpus))
        if value > best[0] * (1 + 1e-9):
            best = (value, model.name, count)
        if have + count > model.workers and worth(model, have + count) - worth(model, have + count - 1) < KEPT_WORTH:
            break
    return best


def _kept_or_new(model: ModelNow, number: int) -> float:
    """What the worker of that number, from 1, is worth."""
    gain = worth(model, number) - worth(model, number - 1)
    if number > model.workers:
        return gain * HORIZON_S / (HORIZON_S + model.arrives_s) if gain > KEPT_WORTH else 0.0
    if model.stayed_s is None or model.stayed_s < model.sharing.min_stay_s:
        return max(gain * STICKINESS, 0.0) + 1e6  # it was ordered, or came, just now
    used = model.requests > 0 or model.held > 0 or model.unused_s < model.sharing.idle_s
    return gain * STICKINESS + (KEPT_WORTH if used else 0.0)


def _explained(model: ModelNow, workers: int) -> Share:
    more = (worth(model, workers + 1) - worth(model, workers)) / max(1, model.gpus)
    last = (worth(model, workers) - worth(model, workers - 1)) / max(1, model.gpus) if workers else 0.0
    load = f"{model.rate:.3g} requests/s, {model.requests} here"
    held = f", {model.held} held for {model.held_s:.1f} s" if model.held else ""
    if workers > model.workers:
        what = f"gets {workers - model.workers} more"
    elif workers < model.workers:
        what = f"gives {model.workers - workers} back"
    else:
        what = f"keeps {workers}"
    return Share(workers, f"{what}: {load}{held}; the last is worth {last:.3g}/s, one more {more:.3g}/s", more, last)
