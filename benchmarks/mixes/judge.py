"""One mix under each policy: the share within targets, the largest load, and the best static split's beside it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from statistics import fmean

from benchmarks.harness import percentile
from benchmarks.mixes.made import LOAD_MAX, MadeMix, mix_of
from benchmarks.mixes.policies import Swap, kept_by_halves, mux
from dynamo_local.simulator.mix import Mix, Policy, Request, Result, Shared, World, within
from dynamo_local.simulator.mix_plans import most_kept

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


def static_shares(mix: Mix, requests: Sequence[Request], whole: bool, share: float) -> tuple[float, float]:
    """The share of the best static split on the GPUs of the mix, and the fewest GPUs on which one keeps `share`."""
    most = round(2 * GPUS_TRIED * mix.gpus)
    curves = [kept_by_halves(mix, requests, model, most, whole) for model in range(len(mix.engines))]
    count = max(1, sum(each.at_s >= mix.warm_up_s for each in requests))
    enough = (n for n in range(1, most + 1) if most_kept(curves, n)[1] >= share * count - 1e-9)
    return most_kept(curves, 2 * mix.gpus)[1] / count, next(enough, math.inf) / 2


def static_share(mix: Mix, requests: Sequence[Request], whole: bool) -> float:
    """The share that the best static split keeps."""
    curves = [kept_by_halves(mix, requests, model, 2 * mix.gpus, whole) for model in range(len(mix.engines))]
    return most_kept(curves, 2 * mix.gpus)[1] / max(1, sum(each.at_s >= mix.warm_up_s for each in requests))


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
    return share_of(mix, requests, Shared() if policy == "ours" else Swap())[0]


Task = tuple[str, str, int, float | None]
"""Family, size and seed of a mix, and the load factor to judge it at; None: look for the largest."""


def judged_task(task: Task) -> list[Row]:
    """All policies on that mix. Here, not in `__main__`, because a fresh process imports it."""
    family, size, seed, at = task
    return judged(mix_of(family, size, seed), POLICIES, at)


def judged(mix: MadeMix, policies: Sequence[str] = POLICIES, at: float | None = None) -> list[Row]:
    """All policies on that mix. `at`: only at this load factor. None: the largest load of each policy is looked for,
    and the common load factor is the largest at which ours keeps 99 %."""
    loads = dict.fromkeys(policies, 0.0)
    if at is None:
        for policy in policies:
            loads[policy] = largest_load(partial(_share_at, mix, policy))
        at = max(loads["ours"], LOADS[-1])
    requests = mix.at(at)
    ours = share_with(mix, "ours", requests)
    found = []
    for policy in policies:
        judge = _static_row if policy in ("static", "half") else _moving_row
        found.append(judge(mix, policy, loads[policy], at, ours))
    return found


def _share_at(mix: MadeMix, policy: str, load: float) -> float:
    return share_with(mix, policy, mix.at(load))


def _static_row(mix: MadeMix, policy: str, load: float, at: float, ours: float) -> Row:
    requests = mix.at(at)
    share, gpus = static_shares(mix, requests, policy == "static", ours)
    hours = gpus * (mix.length_s - mix.warm_up_s) / 3600
    return Row(mix.family, mix.size, mix.seed, policy, load, at, share, hours, 0.0, 0.0)


def _moving_row(mix: MadeMix, policy: str, load: float, at: float, ours: float) -> Row:
    requests = mix.at(at)
    runs = [share_of(mix, requests, each) for each in _policies(mix, policy, requests)]
    share, result = max(runs, key=lambda run: run[0])
    per_hour = result.switches / (mix.length_s - mix.warm_up_s) * 3600
    wait_s = cold_wait_s(mix, requests, result)
    return Row(mix.family, mix.size, mix.seed, policy, load, at, share, result.gpu_hours, wait_s, per_hour)


def _policies(mix: Mix, policy: str, requests: Sequence[Request]) -> Sequence[Policy]:
    if policy == "mux":
        return mux(mix, requests)
    return [Shared() if policy == "ours" else Swap()]


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


# --- the table -----------------------------------------------------------------------------------


def table(rows: Iterable[Row]) -> str:
    """Markdown: for each family and size the means over seeds, of each policy in one cell."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.family, row.size), []).append(row)
    lines = [
        f"| Mix | Seeds | {' / '.join(POLICIES)}: largest load | share, % | GPU-hours | cold p99, s | switches/h |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for (family, size), found in sorted(groups.items()):
        by = {policy: [row for row in found if row.policy == policy] for policy in POLICIES}
        moving = ("ours", "swap")
        cells = (
            f"{family}, {size}",
            str(len(by["ours"])),
            " / ".join(f"{fmean(row.load for row in by[policy]):.2f}" for policy in POLICIES),
            " / ".join(f"{100 * fmean(row.share for row in by[policy]):.1f}" for policy in POLICIES),
            " / ".join(f"{fmean(row.gpu_hours for row in by[policy]):.2f}" for policy in POLICIES[:3]),
            " / ".join(f"{fmean(row.cold_wait_s for row in by[policy]):.1f}" for policy in moving),
            " / ".join(f"{fmean(row.switches_per_hour for row in by[policy]):.0f}" for policy in moving),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
