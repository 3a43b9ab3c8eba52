"""One mix under each policy: the share within targets, the largest load, and the best static split's beside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from benchmarks.harness import percentile
from benchmarks.mixes.made import LOAD_MAX, Mix, Request
from benchmarks.mixes.policies import Fixed, Ours, Swap, best_split, kept_by_halves, mux
from benchmarks.mixes.world import Policy, Result, World, within

TARGET = 0.99
LOADS = tuple(round(LOAD_MAX * 1.15**-n, 6) for n in range(24))
"""Load factors that are tried, from the largest: each is 15 % above the next."""
GPUS_TRIED = 3.0
"""The smallest static split that keeps our share is looked for on up to so many times the GPUs."""
COLD_REQUESTS = 0.05
"""A model is cold if it has less than so large a share of the requests."""
POLICIES = ("ours", "static", "half", "swap", "mux")


@dataclass(frozen=True, slots=True)
class Row:
    """One policy on one mix. `load`: the largest load factor at which 99 % are within targets (0: none is).

    The rest is at the load factor `at`, which is the same for all policies. `gpu_hours`: those that are held. For a
    static split: those of the smallest that keeps our share (inf: none up to `GPUS_TRIED`). `cold_wait_s`: p99 of the
    wait for a worker of cold models' requests.
    """

    family: str
    size: str
    seed: int
    policy: str
    load: float
    at: float
    share: float
    gpu_hours: float
    cold_wait_s: float
    switches_per_hour: float

    def to_dict(self) -> dict[str, object]:
        """For machines."""
        return asdict(self)


def share_of(mix: Mix, requests: Sequence[Request], policy: Policy) -> tuple[float, Result]:
    """The share of the judged requests that is within both targets, and the run."""
    result = World(mix, requests, policy).run()
    counts = within(mix, requests, result).values()
    return sum(kept for _, kept in counts) / max(1, sum(came for came, _ in counts)), result


def static_share(mix: Mix, requests: Sequence[Request], whole: bool, gpus: float | None = None) -> float:
    """What the best static split keeps on so many GPUs (None: those of the mix)."""
    halves = round(2 * (mix.gpus if gpus is None else gpus))
    curves = [kept_by_halves(mix, requests, model, halves, whole) for model in range(len(mix.engines))]
    return best_split(curves, halves).kept / max(1, sum(each.at_s >= mix.warm_up_s for each in requests))


def largest_load(share_at: Callable[[float], float]) -> float:
    """The largest of `LOADS` with 99 % within targets, found by bisection; 0 if there is none."""
    low, high = 0, len(LOADS)
    while low < high:
        middle = (low + high) // 2
        if share_at(LOADS[middle]) >= TARGET:
            high = middle
        else:
            low = middle + 1
    return LOADS[low] if low < len(LOADS) else 0.0


def share_with(mix: Mix, policy: str, requests: Sequence[Request]) -> float:
    """The share that the policy of that name keeps."""
    if policy in ("static", "half"):
        return static_share(mix, requests, whole=policy == "static")
    if policy == "mux":
        return max(share_of(mix, requests, fixed)[0] for fixed in mux(mix, requests))
    return share_of(mix, requests, Ours() if policy == "ours" else Swap())[0]


def judged(mix: Mix, policies: Sequence[str] = POLICIES, at: float | None = None) -> list[Row]:
    """All policies on that mix. `at`: the common load factor (None: the largest at which ours keeps 99 %)."""
    loads = {policy: largest_load(lambda load, p=policy: share_with(mix, p, mix.at(load))) for policy in policies}
    common = at or max(loads.get("ours", 0.0), LOADS[-1])
    return [_row(mix, policy, load, common) for policy, load in loads.items()]


def _row(mix: Mix, policy: str, load: float, at: float) -> Row:
    requests = mix.at(at)
    hours = (mix.length_s - mix.warm_up_s) / 3600
    if policy in ("static", "half"):
        share, ours = static_share(mix, requests, policy == "static"), share_with(mix, "ours", requests)
        return Row(mix.family, mix.size, mix.seed, policy, load, at, share, _least_gpus(mix, requests, ours, policy) * hours, 0.0, 0.0)
    runs = [share_of(mix, requests, each) for each in _policies(mix, policy, requests)]
    share, result = max(runs, key=lambda run: run[0])
    wait_s = cold_wait_s(mix, requests, result)
    return Row(mix.family, mix.size, mix.seed, policy, load, at, share, result.gpu_hours, wait_s, result.switches / hours)


def _policies(mix: Mix, policy: str, requests: Sequence[Request]) -> Sequence[Policy]:
    if policy == "mux":
        return mux(mix, requests)
    return [Ours() if policy == "ours" else Swap()]


def _least_gpus(mix: Mix, requests: Sequence[Request], share: float, policy: str) -> float:
    """The fewest GPUs on which a static split keeps that share."""
    halves = round(2 * GPUS_TRIED * mix.gpus)
    whole = policy == "static"
    curves = [kept_by_halves(mix, requests, model, halves, whole) for model in range(len(mix.engines))]
    judged_count = sum(each.at_s >= mix.warm_up_s for each in requests)
    for count in range(1, halves + 1):
        if best_split(curves, count).kept >= share * judged_count - 1e-9:
            return count / 2
    return float("inf")


def cold_wait_s(mix: Mix, requests: Sequence[Request], result: Result) -> float:
    """p99 of the wait for a worker, of requests of cold models. 0 without a cold model."""
    counts = [0] * len(mix.engines)
    for each in requests:
        counts[each.model] += 1
    cold = {model for model, count in enumerate(counts) if count < COLD_REQUESTS * len(requests)}
    waits = [
        wait
        for each, wait in zip(requests, result.waits_s, strict=True)
        if each.model in cold and each.at_s >= mix.warm_up_s
    ]
    return percentile(waits, 0.99) if waits else 0.0


__all__ = ["Fixed", "Row", "judged", "largest_load", "share_of", "share_with"]
