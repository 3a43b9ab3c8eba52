"""Engines, traffic and pulls for the throughput-load policy: the engine of the facts page's worked examples.

A prefill pass takes 10 ms + 20 us per token, a decode pass 5 ms + 0.1 us per KV token + 10 us per request. An engine
batches 8192 tokens, runs 256 requests and holds 200,000 tokens of KV. Prompts were 3517 tokens long, contexts 2167.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dynamo_local.config.planner import PlannerConfig
from dynamo_local.core.passes import EngineId, ForwardPass, Requests
from dynamo_local.core.types import Missing
from dynamo_local.planner.driver import PolicyDriver
from dynamo_local.planner.pass_model import Kind, PassModel
from dynamo_local.planner.policies.throughput_load.policy import ThroughputLoadPolicy
from dynamo_local.planner.values import (
    Capabilities,
    Decision,
    EngineSeen,
    Forecasts,
    ForecastTask,
    Observation,
    Pool,
    Reading,
    Traffic,
    WorkerPools,
)
from tests.fakes.planner.observations import DECODE, PREFILL, worker_pools
from tests.fakes.planner.options import throughput_load_options

LIMITS = Capabilities(max_num_batched_tokens=8192, max_num_seqs=256, max_kv_tokens=200_000, context_length=32_768)
CONTEXT = 2167
NOT_SEEN = Missing("nothing came from it")
TRAINER = EngineId("0")


def sla(**more: Any) -> PlannerConfig:
    """The options of the worked examples; by default the throughput loop alone."""
    given = {"optimization_target": "sla", "ttft_ms": 500.0, "itl_ms": 20.0, "max_gpu_budget": 16}
    return throughput_load_options(**(given | more))


def load_loop(**more: Any) -> PlannerConfig:
    return sla(enable_throughput_scaling=False, enable_load_scaling=True, **more)


def both_loops(**more: Any) -> PlannerConfig:
    return sla(enable_load_scaling=True, **more)


# --- passes ----------------------------------------------------------------------------------------


def prefill_pass(tokens: int, requests: int = 1, *, engine: EngineId = TRAINER, at_s: float = 0.0) -> ForwardPass:
    scheduled = Requests(num_prefill_requests=requests, sum_prefill_tokens=tokens)
    return ForwardPass(engine, 0, 0.010 + 20e-6 * tokens, scheduled, at_s=at_s)


def decode_pass(requests: int, kv: int, *, engine: EngineId = TRAINER, at_s: float = 0.0) -> ForwardPass:
    """So many requests, with so much KV together."""
    scheduled = Requests(num_decode_requests=requests, sum_decode_kv_tokens=kv)
    return ForwardPass(engine, 0, 0.005 + 0.1e-6 * kv + 10e-6 * requests, scheduled, at_s=at_s)


def agg_pass(tokens: int, requests: int, kv: int) -> ForwardPass:
    """Prompts and answers in one pass: 8 ms + 20 us per prompt token + 0.1 us per KV token."""
    prompts = 1 if tokens else 0
    scheduled = Requests(prompts, tokens, num_decode_requests=requests, sum_decode_kv_tokens=kv)
    return ForwardPass(TRAINER, 0, 0.008 + 20e-6 * tokens + 0.1e-6 * kv, scheduled)


def heartbeat(engine: EngineId = TRAINER, *, at_s: float = 0.0, queued_tokens: int = 0) -> ForwardPass:
    """A second without a pass."""
    queued = Requests(num_prefill_requests=bool(queued_tokens), sum_prefill_tokens=queued_tokens)
    return ForwardPass(engine, 0, 0.0, queued=queued, at_s=at_s)


PREFILL_PASSES = tuple(prefill_pass(tokens) for tokens in (1000, 2000, 3517, 5034, 6034))
DECODE_PASSES = tuple(
    decode_pass(requests, requests * context)
    for requests, context in ((10, 1167), (20, 1667), (30, 2167), (40, 2667), (50, 3167))
)
AGG_PASSES = tuple(
    agg_pass(tokens, requests, requests * CONTEXT)
    for tokens, requests in ((0, 10), (2000, 40), (4000, 20), (0, 60), (3000, 5), (3000, 30))
)

MODELS: Mapping[Kind, PassModel] = {
    Kind.PREFILL: PassModel(Kind.PREFILL).observed(PREFILL_PASSES),
    Kind.DECODE: PassModel(Kind.DECODE).observed(DECODE_PASSES),
    Kind.AGG: PassModel(Kind.AGG).observed(AGG_PASSES),
}


def untrained() -> dict[Kind, PassModel]:
    """Models that have seen nothing."""
    return {kind: PassModel(kind) for kind in Kind}


# --- engines ---------------------------------------------------------------------------------------


def prefill_engine(name: str, queued: int | None, at_s: float) -> tuple[EngineId, EngineSeen]:
    """With so many tokens in its queue; 0: idle; None: nothing is known of it."""
    engine = EngineId(name)
    if queued is None:
        return engine, EngineSeen(PREFILL, last=NOT_SEEN)
    if queued == 0:
        return engine, EngineSeen(PREFILL, last=heartbeat(engine, at_s=at_s))
    waiting = Requests(num_prefill_requests=1, sum_prefill_tokens=queued)
    last = ForwardPass(engine, 1, 0.1, Requests(1, 4500), waiting, at_s)
    return engine, EngineSeen(PREFILL, last=last)


def decode_engine(
    name: str, kv: int | None, at_s: float, *, queued_prompt_tokens: int = 0
) -> tuple[EngineId, EngineSeen]:
    """With so much KV, of requests of the usual context; 0: idle; None: nothing is known of it."""
    engine = EngineId(name)
    if kv is None:
        return engine, EngineSeen(DECODE, last=NOT_SEEN)
    if kv == 0 and not queued_prompt_tokens:
        return engine, EngineSeen(DECODE, last=heartbeat(engine, at_s=at_s))
    scheduled = Requests(num_decode_requests=round(kv / CONTEXT), sum_decode_kv_tokens=kv)
    queued = Requests(num_prefill_requests=bool(queued_prompt_tokens), sum_prefill_tokens=queued_prompt_tokens)
    return engine, EngineSeen(DECODE, last=ForwardPass(engine, 1, 0.02, scheduled, queued, at_s))


# --- pulls -----------------------------------------------------------------------------------------


def traffic(at_s: float, num_req: float | Missing, isl: float = 2000, osl: float = 200, **more: Any) -> Traffic:
    """A window of 180 s. Without requests there are no lengths."""
    if isinstance(num_req, Missing) or num_req == 0:
        return Traffic(at_s, 180.0, num_req, **more)
    return Traffic(at_s, 180.0, num_req, isl, osl, **more)


def observation(
    at_s: float,
    prefill: int | Pool | None = 1,
    decode: int | Pool = 1,
    *,
    queues: Sequence[int | None] | None = None,
    kvs: Sequence[int | None] | None = None,
    seen: Traffic | Missing | None = None,
    limits: Capabilities = LIMITS,
    engines: Mapping[EngineId, EngineSeen] | None = None,
    waiting: float | Missing | None = None,
    **more: Any,
) -> Observation:
    """Pools, and one engine for each queue and KV (by default: all that are ready, idle). `waiting`: prompts in a queue
    of the graph, where it has one."""
    pools: WorkerPools = worker_pools(prefill, decode)
    ready_prefill = 0 if pools.prefill is None else pools.prefill.ready
    found: dict[EngineId, EngineSeen] = {}
    if engines is None:
        for n, queued in enumerate([0] * ready_prefill if queues is None else queues):
            found.update([prefill_engine(f"1{n}", queued, at_s)])
        for n, kv in enumerate([0] * pools.decode.ready if kvs is None else kvs):
            found.update([decode_engine(f"2{n}", kv, at_s)])
    capabilities = {one.component: limits for one in pools.all}
    return Observation(
        Reading(at_s, waiting, {}), pools, seen, found if engines is None else engines, capabilities, **more
    )


class LastValue:
    """A forecaster that expects the last window again, at once; or whose predictor has died."""

    def __init__(self, failed: str | None = None) -> None:
        self.failed = failed
        self.tasks: list[ForecastTask] = []

    async def run(self, task: ForecastTask, deadline_s: float) -> Forecasts | Missing:
        self.tasks.append(task)
        if self.failed is not None:
            return Missing(self.failed)
        return Forecasts(tuple((series[-1],) for series in task.series))


def driver(
    options: PlannerConfig, models: Mapping[Kind, PassModel] = MODELS, forecaster: LastValue | None = None
) -> PolicyDriver:
    return PolicyDriver(ThroughputLoadPolicy(options, models), 0.0, forecaster=forecaster or LastValue())


def replicas(decision: Decision | None) -> tuple[int | None, int | None]:
    assert decision is not None
    return decision.targets.get(PREFILL), decision.targets.get(DECODE)


def rules(decision: Decision | None) -> dict[str, str]:
    assert decision is not None
    return {reason.component: reason.rule for reason in decision.reasons}


def numbers(decision: Decision | None, component: str) -> Mapping[str, float]:
    assert decision is not None
    (found,) = (reason.numbers for reason in decision.reasons if reason.component == component)
    return found


def decide(options: PlannerConfig, *args: Any, models: Mapping[Kind, PassModel] = MODELS, **more: Any) -> Decision:
    """The first decision of the loop that is alone, from one pull: `decide(load_loop(), 2, 1, queues=[30_000, 0])`."""
    drives = driver(options, models)
    decision = drives.tick_now(observation(drives.next_at_s, *args, **more))
    assert decision is not None
    return decision


def sized(options: PlannerConfig, num_req: float | Missing, *args: Any, **more: Any) -> Decision:
    """What the throughput loop makes of a window: `sized(sla(), 7200, 1, 1, isl=2000, osl=200)`."""
    of_traffic = {key: more.pop(key) for key in ("isl", "osl", "kv_hit_rate", "accept_length") if key in more}
    at_s = options.throughput_adjustment_interval_seconds
    return decide(options, *args, seen=traffic(at_s, num_req, **of_traffic), **more)
