"""A warm start: requests that were recorded before the planner began, judged as its own past would have been. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from dynamo_local.planner.policies.slo.hindsight import (
    DAY_S,
    FILL_MIN_S,
    LASTED_QUANTILE,
    REQUESTS_MAX,
    STRETCH_MAX_S,
    Bin,
    Hindsight,
    Ranks,
    Record,
    filling_s,
    past_of,
    peak_rate,
    saved_by,
)
from dynamo_local.planner.queueing import Engine, Past, misses

HISTORY_REQUESTS = 60_000
"""A warm start judges about so many requests (4 s of processor time). A longer history is judged by
every second stretch, or every third, …"""

Request = tuple[float, int, int]
"""When it came (seconds, on any clock), and the tokens of its prompt and answer."""


@dataclass(frozen=True, slots=True)
class WarmStart:
    """The judged `past`, whose clock ends at 0 s, the mean rate (requests/s), and the mean number of GPUs that a
    reactive rule would have held in `bins` intervals. `gpus` are those of a worker of each role."""

    past: Hindsight
    rate: float
    mean_gpus: float
    bins: int
    gpus: tuple[int, int]


def warmed(
    requests: Sequence[Request],
    engine: Engine,
    ttft_s: float,
    itl_s: float,
    workers_max: int,
    lead_s: float,
    gpus: tuple[int, int],
    bin_s: float,
) -> WarmStart | None:
    """The last day of these requests, judged; None where they last for less than one interval of `bin_s` seconds.

    `gpus` are those of a worker of each role. A start takes `lead_s`. The history has no decisions. So each
    interval wants as few workers as save all that the intervals of the last lead time save.
    """
    came = sorted(requests)
    if not came or came[-1][0] - came[0][0] < bin_s:
        return None
    until_s = came[-1][0]
    from_s = max(came[0][0], until_s - DAY_S)
    came = [each for each in came if each[0] >= from_s]
    lead_bins = max(1, math.ceil(lead_s / bin_s))
    fill_s = filling_s(sorted(osl for _, _, osl in came)[int(len(came) * LASTED_QUANTILE)] * itl_s)
    roles = [Ranks.of(workers_max), Ranks.of(workers_max)]
    judged, peak, judged_bins, worker_bins = 0.0, 0.0, 0, [0, 0]
    for past in stretches(came, from_s, until_s, bin_s, fill_s):
        found = misses(past, workers_max, engine, ttft_s, itl_s)
        judged_bins += past.bins
        peak = max(peak, peak_rate(found.requests, bin_s))
        judged = _faded(judged, found.requests, roles[0].fades(bin_s))
        for role, missed in enumerate((found.prefill, found.decode)):
            saved = saved_by(missed, workers_max)
            for at in range(past.bins):
                window = saved[:, max(0, at + 1 - lead_bins) : at + 1].sum(axis=1)
                wanted = max(1, int(np.flatnonzero(window)[-1]) + 1 if window.any() else 1)
                worker_bins[role] += wanted
                lead = lead_bins if judged_bins > past.bins else 0  # the workers of the first stretch were there
                roles[role] = roles[role].after(Bin(wanted, saved[:, at], float(missed[-1][at])), lead, bin_s)
    done = [replace(role, wanted=-role.idle * bin_s) for role in roles]
    held = sum(bins * each for bins, each in zip(worker_bins, gpus, strict=True)) / judged_bins
    return WarmStart(
        Hindsight(Record(0.0), (done[0], done[1]), judged, history_peak=peak),
        len(came) / (until_s - from_s),
        held,
        judged_bins,
        gpus,
    )


def stretches(came: Sequence[Request], from_s: float, until_s: float, bin_s: float, fill_s: float) -> list[Past]:
    """The time from `from_s` to `until_s` in stretches, each with the requests of `fill_s` seconds before, which fill
    its workers. `came` is ascending. If there are more requests than `HISTORY_REQUESTS`, most stretches are left out,
    never the last one."""
    bins = int(STRETCH_MAX_S // bin_s)
    step_s = bins * bin_s
    times = [each[0] for each in came]
    count = math.ceil((until_s - from_s) / step_s)
    mean = len(came) / count
    every = max(1, math.ceil(count * min(mean * (1 + fill_s / step_s), REQUESTS_MAX) / HISTORY_REQUESTS))
    found = []
    for number in range((count - 1) % every, count, every):
        here = bins if number else math.ceil((until_s - from_s) / bin_s) - (count - 1) * bins
        begins_s = until_s - (count - 1 - number) * step_s - here * bin_s
        low, high = np.searchsorted(times, (begins_s - fill_s, begins_s + here * bin_s), "left")
        found.append(_past(came[low:high], begins_s, bin_s, here))
    return found


def _past(came: Sequence[Request], begins_s: float, bin_s: float, bins: int) -> Past:
    """If there are more than `REQUESTS_MAX` requests, only the last ones, in whole intervals."""
    if len(came) > REQUESTS_MAX:
        came = came[-REQUESTS_MAX:]
        skipped = math.ceil(max(0.0, came[0][0] + FILL_MIN_S - begins_s) / bin_s)
        skipped = min(skipped, bins - 1)
        begins_s, bins = begins_s + skipped * bin_s, bins - skipped
    return past_of(np.array(came, dtype=float).reshape(-1, 3), begins_s, bin_s, bins)


def _faded(before: float, counts: Sequence[int], fades: float) -> float:
    for count in counts:
        before = fades * before + count
    return before
