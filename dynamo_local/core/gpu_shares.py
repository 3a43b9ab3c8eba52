"""How many workers each of several models gets on the GPUs of one host. Pure.

Maximises Σ weight × requests within targets per second, for all models together, less the cost of change. The search is
exact: it tries each number of workers of each model, and joins them as a knapsack of GPUs. Rules that hold whatever the
numbers say:

* A model has its `floor`, and never more than its `cap`.
* All models together get no more GPUs than there are.
* A model whose requests are held, and that has no worker, gets one before the oldest has waited `max_wait_s`.
* A worker stays for `min_stay_s`, unless a held request of another model would wait longer than its `max_wait_s`.
* A model without a request for `idle_s` gives back what it has above its floor.
* The same decision on the fleet that was decided changes nothing. A detour never costs less than the direct change.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

RECENT_S, LONG_S = 10.0, 120.0
"""Time constants of the rate of now, and of that of the last minutes."""
HORIZON_S = 60.0
"""A worker is expected to be of use for so long. One that must be started earns nothing until it serves."""
HELD_HORIZON_S = 10.0
"""Held requests take a GPU for about so long, until it can go back."""
STICKINESS = 2.0
"""The worth of a worker counts for so much more when it would be taken."""
TAKEN = 0.5
"""A worker that is taken drains, and may have to come back. So large a share of what it would serve then is lost."""
IDLE_YIELDS = 0.5
"""An idle worker leaves for held requests, if fewer than this share of their number are expected for it meanwhile."""
SERVED_LATE = 0.2
"""A request that is answered, but not within its targets, counts for so much of one that is."""
COLD_SHARE = 0.7
"""A model without a worker or a request counts for so much of one with a worker, if it starts within its target."""
GPU_FREE_S = 0.8
"""A GPU that sleeping or idle workers hold is free after about so long."""
EVIDENCE = 4.0
"""The rate of now counts when it is above that of the last minutes by so many standard deviations."""
KEPT_WORTH = 1e-6
"""A worker of a model that was used lately is worth a little: it stays where nobody needs its GPU."""
STEP_COST = 1e-4
"""A worker that comes or goes costs so much for each of its GPUs, in weighted requests per second."""
MARGIN_S = 1.0
"""A worker that must come before a request has waited too long is ordered so much earlier than it would need."""
SHOWN_FROM = 5e-4
"""Smaller worths are told as 0."""
BUSY_DEFAULT_S = 2.0
BUSY_REQUESTS = 100.0
"""The time in a worker is averaged over about so many requests."""
LOST_AFTER_S = 5.0
"""Requests that are counted nowhere for so long are lost. Less: on their way from a Frontend to a worker."""
SLOTS_DEFAULT = 64
"""For a model of which no worker has told how many requests it takes at once."""
SLACK_DEFAULT_S = 1.0
"""How long a request may wait where the model has no target for the time to first token."""
NO_LOAD = 1e-3
"""So few requests at once count as none."""
ENOUGH = 0.9995
"""More workers are not tried where so large a share of requests is within its targets."""


@dataclass(frozen=True, slots=True)
class Sharing:
    """The configuration of one model that shares GPUs. Times are in seconds; `cap` None: as many as there are GPUs.

    `slots`: requests that one worker serves at once within the targets; None: as many as its engine takes.

    `beside`: these are the prefill workers of that model's component, `each` for each of its workers. They come and go
    with those, and have no other number here.
    """

    floor: int = 0
    cap: int | None = None
    weight: float = 1.0
    idle_s: float = 300.0
    min_stay_s: float = 3.0
    max_wait_s: float = 120.0
    slots: int | None = None
    beside: str | None = None
    each: int = 1


LET_GO = "let_go"
"""The operation at a Frontend's control endpoint that ends what it holds for these components."""


@dataclass(frozen=True, slots=True)
class HeldNow:
    """Requests of one model that a Frontend holds: how many, and since when the oldest (seconds of CLOCK_MONOTONIC,
    which all processes of a host share)."""

    count: int
    since_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelNow:
    """One model as it is now. `name` is its workers' component.

    `workers` are ready, on their way, or ordered; `requests` run or wait in them, without those of workers that leave.
    `held` requests wait for a first worker, the oldest for `held_s`. `rate` is in requests per second, and `rate_long`
    is its mean over the last minutes. Chance alone takes `rate` off it by `rate_sd` (standard deviation). A worker
    serves `slots` requests at once within its targets, each for `busy_s`, and `slack_s` may pass before it begins. One
    more worker serves after `arrives_s`. `stayed_s` is how long the newest worker has been ready (None: none is, or one
    is on its way). `young` workers were ordered, or became ready, less than `min_stay_s` ago (None: all, if the newest
    has not stayed so long). The last request was there `unused_s` ago.
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
    rate_sd: float = 0.0
    busy_s: float = 1.0
    slots: int = 1
    slack_s: float = 0.5
    arrives_s: float = 10.0
    stayed_s: float | None = None
    young: int | None = None
    unused_s: float = math.inf

    @property
    def here(self) -> int:
        """Requests that run or wait anywhere."""
        return self.requests + self.held

    @property
    def is_used(self) -> bool:
        """It has requests, or had one lately."""
        return self.here > 0 or self.unused_s < self.sharing.idle_s

    @property
    def expected_rate(self) -> float:
        """The rate that is planned for: that of the last minutes, unless the rate of now is above it by more than
        chance. A lull of some seconds is no reason to give a GPU away, and some requests more are none to take one."""
        if not self.is_used:
            return 0.0
        return self.rate if self.rate > self.rate_long + EVIDENCE * self.rate_sd else self.rate_long

    @property
    def when_idle(self) -> tuple[Any, ...] | None:
        """All that decides about its share while it has no load; None while it has some."""
        if self.here or self.expected_rate:
            return None
        return self.name, self.sharing, self.gpus, self.workers, self.is_used, self.locked, self.arrives_s

    @property
    def locked(self) -> int:
        """Workers that have not stayed for `min_stay_s`."""
        if self.young is not None:
            return min(self.young, self.workers)
        return self.workers if self.stayed_s is None or self.stayed_s < self.sharing.min_stay_s else 0


def rate_deviation(rate_long: float) -> float:
    """The standard deviation of the rate of now, with Poisson arrivals. At least one request in `LONG_S` is assumed."""
    return math.sqrt(max(rate_long, 1 / LONG_S) / (2 * RECENT_S))


# --- what is measured ----------------------------------------------------------------------------


@dataclass(slots=True)
class Usage:
    """One model's load, as looks at its workers tell it: rates of arrival, and the time in a worker.

    Arrivals are counted by what is here and what has ended since. The time in a worker is the mean number that run
    there ÷ the rate at which they end (Little's law). Requests that wait for a place do not count.
    """

    seen_s: float
    used_s: float
    """When it had a request last."""
    slots: int = SLOTS_DEFAULT
    busy_s: float = BUSY_DEFAULT_S
    rate: float = 0.0
    """Requests per second: an exponential mean over `RECENT_S`, and over `LONG_S`."""
    rate_long: float = 0.0
    _here: int = 0
    _ended: float = 0.0
    _known: float = 0.0
    """The most that were counted: here, or ended since the first look."""
    _known_s: float = 0.0
    _total: float = 0.0
    _ran_s: float = 0.0
    _finished: float = 0.0

    def look(self, now_s: float, *, running: int, here: int, ended: float | None) -> None:
        """`running` requests have a place in a worker; `here` run, wait or are held. `ended` is a counter, which may
        begin anew. None: nobody counts them, so those have ended that are here no more."""
        passed_s, self.seen_s = now_s - self.seen_s, now_s
        if ended is None:
            more: float = max(0, self._here - here)
        else:
            more = ended - self._ended if ended >= self._ended else ended
            self._ended = ended
        self._here = here
        self._total += more
        came = self._came(now_s, self._total + here)
        if here or came:
            self.used_s = now_s
        self.rate = _mean(self.rate, came, passed_s, RECENT_S)
        self.rate_long = _mean(self.rate_long, came, passed_s, LONG_S)
        kept = math.exp(-more / BUSY_REQUESTS)
        self._ran_s = self._ran_s * kept + running * passed_s
        self._finished = self._finished * kept + more
        if self._finished >= 1.0 and self._ran_s:  # else none ended yet, or all were too short to be seen
            self.busy_s = max(0.001, self._ran_s / self._finished)

    def _came(self, now_s: float, counted: float) -> float:
        """Those that were not counted before."""
        came = max(0.0, counted - self._known)
        if counted >= self._known or now_s - self._known_s > LOST_AFTER_S:
            self._known, self._known_s = counted, now_s
        return came

    @property
    def rate_sd(self) -> float:
        """The standard deviation of `rate`."""
        return rate_deviation(self.rate_long)


def _mean(rate: float, came: float, passed_s: float, constant_s: float) -> float:
    """The exponential mean of a rate, after so many more events in so many seconds."""
    kept = math.exp(-passed_s / constant_s)
    return rate * kept + came * ((1.0 - kept) / passed_s if passed_s > 0.0 else 1.0 / constant_s)


def slack_s(ttft_s: float | None) -> float:
    """How long a request may wait: half of the target for its first token. The other half is for its prefill."""
    return SLACK_DEFAULT_S if ttft_s is None else ttft_s / 2


# --- what is decided -----------------------------------------------------------------------------


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
    left = max(0, gpus - sum(least[each.name] * each.gpus for each in models))
    # GPUs used beyond the least -> the most that the models so far are worth, and the last model's workers.
    layers: list[dict[int, tuple[float, int]]] = [{0: (0.0, 0)}]
    values = {each.name: _values(each, max(_most(each, least[each.name], left), each.workers) + 1) for each in models}
    for model in models:
        fewest, size = least[model.name], model.gpus
        options = _options(model, values[model.name], fewest, _most(model, fewest, left))
        steps = [(count, (count - fewest) * size, value) for count, value in options]
        following: dict[int, tuple[float, int]] = {}
        for used, (total, _) in layers[-1].items():
            for count, more, value in steps:
                if used + more > left:
                    break
                known = following.get(used + more)
                if known is None or total + value > known[0]:
                    following[used + more] = total + value, count
        layers.append(following)
    used = max(layers[-1], key=lambda each: layers[-1][each][0])
    counts: dict[str, int] = {}
    for model, layer in zip(reversed(models), reversed(layers), strict=False):
        counts[model.name] = count = layer[used][1]
        used -= (count - least[model.name]) * model.gpus
    return {each.name: _explained(each, values[each.name], counts[each.name]) for each in models}


# --- what must be --------------------------------------------------------------------------------


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
    for model in sorted((each for each in models if _is_urgent(each, drain_s)), key=_by_urgency):
        give(model, 1)
    for model in models:
        give(model, model.locked)
    for model in models:
        if model.held and not given[model.name] and _idle_gpus_for(model, models) >= model.gpus:
            give(model, 1)
    return given


def _idle_gpus_for(asking: ModelNow, models: Sequence[ModelNow]) -> int:
    """GPUs of workers that have nothing to do, and little to expect while they are away (`IDLE_YIELDS`)."""
    return sum(
        (each.workers - max(each.sharing.floor, each.locked)) * each.gpus
        for each in models
        if not each.here
        and each.workers > max(each.sharing.floor, each.locked)
        and each.sharing.weight * each.expected_rate * (asking.arrives_s + asking.busy_s + each.arrives_s)
        < IDLE_YIELDS * asking.sharing.weight * asking.held
    )


def _is_urgent(model: ModelNow, drain_s: float) -> bool:
    """Its oldest held request would wait too long if no worker were ordered now, or one is under way for it."""
    if not model.held:
        return False
    return model.workers > 0 or model.held_s + drain_s + model.arrives_s + MARGIN_S >= model.sharing.max_wait_s


def _by_urgency(model: ModelNow) -> tuple[bool, float]:
    """Models with a worker under way come first, then those whose time is over first."""
    return model.workers == 0, model.sharing.max_wait_s - model.held_s


# --- what is worth most --------------------------------------------------------------------------


def _most(model: ModelNow, least: int, left: int) -> int:
    """The most workers that it can have where `left` GPUs are left beyond its least."""
    most = least + left // max(1, model.gpus)
    return most if model.sharing.cap is None else max(least, min(most, model.sharing.cap))


def _options(model: ModelNow, values: Sequence[float], least: int, most: int) -> list[tuple[int, float]]:
    """Numbers of workers, from `least` on, and what the change to each is worth, in weighted requests per second."""
    now = values[min(model.workers, len(values) - 1)]
    soon = HORIZON_S / (HORIZON_S + model.arrives_s)
    away_s = (model.busy_s if model.requests else 0.0) + model.arrives_s
    lost = _carried(model)
    taken = TAKEN * model.sharing.weight * away_s / HORIZON_S
    found = []
    for count in range(least, most + 1):
        change = values[min(count, len(values) - 1)] - now
        change *= soon if count > model.workers else STICKINESS
        change -= STEP_COST * abs(count - model.workers) * model.gpus + taken * sum(lost[count:])
        found.append((count, change))
        if count >= len(values) and count >= model.workers:
            break
    return found


def _values(model: ModelNow, most: int) -> list[float]:
    """The worth of 0, 1, 2 … workers in weighted requests per second; short where more are worth no more.

    A fluid of requests, then a queue. The requests that are here are served first; until that is done, new ones are
    late. From then on, a share of them is within the targets, as in a queue M/M/c (Erlang 1917, by Erlang B's
    recursion).
    """
    rate, weight = model.expected_rate, model.sharing.weight
    load = rate * model.busy_s
    # An idle worker must cost more than its step, or it would stay for ever.
    kept = KEPT_WORTH if model.is_used else -2 * STEP_COST * model.gpus
    if model.here == 0 and load < NO_LOAD:
        return [kept * n for n in range(min(most, model.workers) + 1)]
    starts_in_time = model.here == 0 and model.arrives_s + GPU_FREE_S <= model.slack_s
    found = [COLD_SHARE * weight * rate if starts_in_time else 0.0]
    in_time = model.held_s + model.arrives_s <= model.slack_s
    held = min(model.held, model.slots) * (1.0 if in_time else SERVED_LATE) / HELD_HORIZON_S
    for workers, blocked in enumerate(itertools.islice(_blocked(model, load), most), start=1):
        servers = workers * model.slots
        share = _share_of_horizon(model, servers, load)
        if servers > load:
            waits = servers * blocked / (servers - load * (1.0 - blocked))
            share *= 1.0 - waits * math.exp(-(servers - load) * model.slack_s / model.busy_s)
        served = min(servers / model.busy_s, model.here / HORIZON_S + rate)
        value = rate * share + SERVED_LATE * max(0.0, served - rate * share) + held
        found.append(max(found[0], weight * value) + kept * workers)
        if share > ENOUGH and workers >= model.workers:
            break
    return found


def _carried(model: ModelNow) -> list[float]:
    """Requests per second that each of its workers serves, where a request takes the first worker with a free place.

    A worker serves what those before it turn away, less what it turns away, too (Erlang B).
    """
    load = model.expected_rate * model.busy_s
    turned_away = [1.0, *itertools.islice(_blocked(model, load), model.workers)]
    return [load * (before - after) / model.busy_s for before, after in itertools.pairwise(turned_away)]


def _blocked(model: ModelNow, load: float) -> Iterator[float]:
    """The share of requests that 1, 2 … of its workers turn away, where none may wait (Erlang B's recursion)."""
    blocked = 1.0
    for n in itertools.count(1):
        blocked = load * blocked / (n + load * blocked)
        if n % model.slots == 0:
            yield blocked


def _share_of_horizon(model: ModelNow, servers: int, load: float) -> float:
    """The share of the horizon in which a new request begins before `slack_s` is over, in a fluid of requests."""
    late_s = (model.here - servers) * model.busy_s / servers - model.slack_s
    if servers > load:
        return 1.0 if late_s <= 0.0 else max(0.0, 1.0 - late_s / (1.0 - load / servers) / HORIZON_S)
    return 0.0 if late_s >= 0.0 else min(1.0, -late_s / max(1e-9, load / servers - 1.0) / HORIZON_S)


def _explained(model: ModelNow, values: Sequence[float], workers: int) -> Share:
    top = len(values) - 1
    here, above = values[min(workers, top)], values[min(workers + 1, top)]
    below = values[min(workers - 1, top)] if workers else here
    more, last = (above - here) / max(1, model.gpus), (here - below) / max(1, model.gpus)
    load = f"{model.rate:.3g} requests/s, {model.requests} here"
    held = f", {model.held} held for {model.held_s:.1f} s" if model.held else ""
    if workers > model.workers:
        what = f"gets {workers - model.workers} more"
    elif workers < model.workers:
        what = f"gives {model.workers - workers} back"
    else:
        what = f"keeps {workers}"
    worth = f"the last is worth {_worth(last)}, one more {_worth(more)}"
    return Share(workers, f"{what}: {load}{held}; {worth}", more, last)


def _worth(value: float) -> str:
    """In requests per second. A tiny worth only keeps a worker where nobody needs its GPU."""
    return f"{value:.3g}/s" if abs(value) >= SHOWN_FROM else "0/s"
