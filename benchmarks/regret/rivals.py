"""Two rules of others, written here as yardsticks alone, from what was published about them.

Both know the profile of the engines and the targets, as `slo` does.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from benchmarks.contest.clairvoyant import Waiting, Yardstick
from benchmarks.contest.trials import Fleet
from dynamo_local.core.routing.estimates import Timing
from dynamo_local.core.types import Missing
from dynamo_local.planner.policies.load import mean_kv
from dynamo_local.planner.values import Ended, Needs, Observation, Traffic

WINDOW_S = 60.0
"""The traffic that a rule looks at."""
LATELY_S = 10.0
"""A rise of the rate shows within so long."""
BATCH_MAX = 256
KV_TARGET = 0.7
"""The KV use that llm-d's rule aims at on decode workers: our own choice, as its example leaves this to the user."""
WAIT_SHARE = 0.5
"""The wait that the backlog may mean, as a share of the TTFT target: our own choice, too."""


@dataclass(frozen=True, slots=True)
class Rule(Yardstick):
    """The engines as both rules know them."""

    timing: Timing

    def needs(self, state: Waiting) -> Needs:
        return Needs(traffic_window_s=WINDOW_S, requests=True)

    def prefill_velocity(self, isl: float) -> float:
        """Prompt tokens per second that a prefill worker digests, of prompts of that length."""
        return isl / self.timing.prefill_s(max(1, round(isl)))

    def gpu_s(self, isl: float, osl: float) -> float:
        """Seconds of a decode worker for one answer, at the largest batch that keeps the ITL target."""
        context, target_s = isl + osl / 2, self.options.itl_ms / 1000
        low, high = 1, BATCH_MAX
        while low < high:
            middle = (low + high + 1) // 2
            if self.timing.itl_s(middle, round(middle * context)) <= target_s:
                low = middle
            else:
                high = middle - 1
        return osl * self.timing.itl_s(low, round(low * context)) / low


@dataclass(frozen=True, slots=True)
class TokenScale(Rule):
    """Token velocity (arXiv 2512.03416): workers = arriving tokens per second ÷ tokens per second that one worker does.

    Answers are sorted into buckets by their length (powers of 2), each with a velocity of its own. Convertible decoders
    are left out: our decode workers prefill when the dispatch says so, under every policy.
    """

    @property
    def hold_s(self) -> float:
        return 60.0

    def wanted(self, observation: Observation) -> Fleet:
        traffic, requests = observation.traffic, observation.requests
        if not isinstance(traffic, Traffic) or requests is None or isinstance(traffic.isl, Missing):
            return 1, 1
        lately = sum(at_s > observation.at_s - LATELY_S for at_s in requests.began) / LATELY_S
        rate = max(lately, len(requests.began) / max(LATELY_S, requests.at_s - requests.since_s))
        prefill = rate * traffic.isl / self.prefill_velocity(traffic.isl)
        return max(1, math.ceil(prefill)), max(1, math.ceil(rate * self._mean_gpu_s(requests.ended)))

    def _mean_gpu_s(self, ended: Iterable[Ended]) -> float:
        """Seconds of a decode worker for a request, the mean over the buckets."""
        buckets: dict[int, list[Ended]] = defaultdict(list)
        for each in ended:
            buckets[each.osl.bit_length()].append(each)
        count = sum(map(len, buckets.values()))
        means = (
            (len(of), sum(each.isl for each in of) / len(of), sum(each.osl for each in of) / len(of))
            for of in buckets.values()
        )
        return sum(number * self.gpu_s(isl, osl) for number, isl, osl in means) / max(1, count)


@dataclass(frozen=True, slots=True)
class TokenBacklog(Rule):
    """llm-d's rule (llm-d/llm-d#2466): tokens in flight ÷ peak prefill throughput are seconds of wait; that stays below
    a bound. Decode workers follow their KV use. A worker is held for five minutes, as Kubernetes' autoscaler does.

    Tokens in flight are those whose first token has not come: by the queue, or by Little's law from rate and TTFT.
    """

    @property
    def hold_s(self) -> float:
        return 300.0

    def wanted(self, observation: Observation) -> Fleet:
        traffic, queue = observation.traffic, observation.reading.queue
        decode = observation.pools.decode.ready
        kv = mean_kv((observation.reading,))
        wanted = decode if kv is None else math.ceil(decode * kv / KV_TARGET)
        if not isinstance(traffic, Traffic) or isinstance(traffic.isl, Missing):
            return 1, max(1, wanted)
        waiting = 0.0 if queue is None or isinstance(queue, Missing) else queue
        if not isinstance(traffic.num_req, Missing) and not isinstance(traffic.ttft_ms, Missing):
            waiting = max(waiting, traffic.num_req / traffic.duration_s * traffic.ttft_ms / 1000)
        wait_s = waiting * traffic.isl / self.prefill_velocity(traffic.isl)
        bound_s = WAIT_SHARE * self.options.ttft_ms / 1000
        return max(1, math.ceil(wait_s / bound_s)), max(1, wanted)


RIVALS = {"tokenscale": TokenScale, "token-backlog": TokenBacklog}
