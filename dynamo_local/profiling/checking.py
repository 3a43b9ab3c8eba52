"""A mixed trace through the measured graph and through the twin with the fresh profile: do they agree?

The twin knows no HTTP and no data plane; what those take of a request that is alone was measured, and is added.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from dynamo_local.core.admission import MAX_INFLIGHT
from dynamo_local.core.disagg import DisaggSettings
from dynamo_local.core.dispatch.targets import Targets
from dynamo_local.engines.sim.options import SimOptions
from dynamo_local.errors import BadInput, DynamoError
from dynamo_local.profiles import ProfileModel
from dynamo_local.profiles.measuring.certifying import Compared, compared
from dynamo_local.profiles.measuring.document import PathFacts
from dynamo_local.profiles.measuring.fit import beyond
from dynamo_local.profiles.measuring.points import Limits
from dynamo_local.profiling.graph import MeasuredGraph
from dynamo_local.profiling.requests import Frontend
from dynamo_local.profiling.target import AGG, DECODE, PREFILL, WAITING_MAX, Target
from dynamo_local.twin.generator.options import GeneratorOptions
from dynamo_local.twin.generator.requests import generate
from dynamo_local.twin.options import FleetShape, TwinOptions
from dynamo_local.twin.simulation import Simulation
from dynamo_local.twin.trace import TraceRequest

BUSY = 0.5
"""How busy the trace keeps the side that is busier, of what the profile says that it can do."""
RATE_MAX = 10.0
"""Requests per second that one client sends and still notes their times well."""
LOST_MAX = 0.02
"""Share of requests that may be lost; more, and the comparison says nothing."""


def mixed_trace(
    model: ProfileModel, limits: Limits, shape: FleetShape, seconds: float, seed: int, slower: float = 1.0
) -> list[TraceRequest]:
    """Prompts and answers of many lengths, at a rate that keeps the engines half busy; `slower`, see `slower_over`."""
    isl = max(16, min(1000, limits.context_length // 8))
    osl = max(8, min(100, limits.context_length // 16))
    kv = min(limits.max_kv_tokens * BUSY, limits.max_num_seqs * BUSY * (isl + osl))
    per_second = kv / (isl + osl) / (osl * model.itl_s(round(kv), isl + osl / 2))
    if shape.prefill:
        rate = min(shape.prefill / model.ttft_s(2 * isl), shape.decode * per_second)
    else:
        rate = shape.decode / (model.ttft_s(2 * isl) + 1 / per_second)
    options = GeneratorOptions(
        seed=seed,
        duration=seconds,
        rate=max(2.0 / seconds, min(RATE_MAX, BUSY * rate / slower)),
        cv=1.0,
        isl=isl,
        isl_sigma=0.8,
        isl_max=max(isl, limits.context_length // 2),
        osl=osl,
        osl_sigma=0.5,
        osl_max=max(osl, min(400, limits.context_length // 4)),
    )
    return list(generate(options))


def slower_over(path: Sequence[PathFacts]) -> float:
    """So many times as long as at the engine a token takes over HTTP, 1 or more. On a host whose processors are busy
    engines that need them are fed late, and half of what their passes could do is more than the host can."""
    found = [each.itl_ms / each.engine_itl_ms for each in path if each.itl_ms and each.engine_itl_ms]
    return max(1.0, median(found)) if found else 1.0


def twin_options(target: Target, folder: Path, limits: Mapping[str, Limits], shape: FleetShape) -> TwinOptions:
    """The same graph in the twin, its engines by the profile in that folder."""
    role = AGG if target.standalone else DECODE
    config = next(s.config for s in target.spec.services if s.name == target.components[role])
    decode, told = limits[role], _underscored(config)
    block = next((size for size in (64, 32, 16, 8, 4, 2) if decode.max_kv_tokens % size == 0), 1)
    sim = SimOptions(
        profile=str(folder),
        block_size=block,
        num_gpu_blocks=decode.max_kv_tokens // block,
        max_num_seqs=decode.max_num_seqs,
        max_num_batched_tokens=decode.max_num_batched_tokens,
        max_model_len=min(decode.context_length, decode.max_kv_tokens),
        # What a hand-off takes was measured with the way over HTTP, and is added with it.
        kv_transfer_latency_s=0.0,
        kv_transfer_bytes_per_s=1e18,
    )
    settings = DisaggSettings(
        told.get("max_local_prefill_length", DisaggSettings().max_local_prefill_length),
        told.get("max_prefill_queue_size", DisaggSettings().max_prefill_queue_size),
    )
    targets = Targets.of_ms(told.get("ttft"), told.get("itl"))
    by_slo = told.get("disagg_policy") == "slo" or (targets.given and told.get("disagg_policy") is None)
    return TwinOptions(
        shape=shape,
        sim=sim,
        gpus=shape.prefill + shape.decode,
        disagg=settings,
        conditional=bool(told.get("conditional_disagg", False)),
        disagg_policy="slo" if by_slo else "threshold",
        targets=targets,
        max_inflight=MAX_INFLIGHT,
        max_num_waiting=WAITING_MAX,
    )


def _underscored(config: Mapping[str, Any]) -> dict[str, Any]:
    return {str(key).replace("-", "_"): value for key, value in config.items()}


async def check(
    graph: MeasuredGraph,
    folder: Path,
    limits: Mapping[str, Limits],
    path: Sequence[PathFacts],
    seconds: float,
    seed: int,
) -> list[Compared] | str:
    """p50 and p90 of both; as text, why there is nothing to compare."""
    target = graph.target
    if graph.frontend_url is None:
        return "the graph has no Frontend to be asked over HTTP"
    if not target.standalone and not {PREFILL, DECODE} <= target.components.keys():
        return "only one role was measured"
    prefill = 0 if target.standalone else len(graph.workers(target.components[PREFILL]))
    decode = len(graph.workers(target.components[AGG if target.standalone else DECODE]))
    shape = FleetShape(prefill, decode)
    role = AGG if target.standalone else DECODE
    trace = mixed_trace(ProfileModel.load(str(folder)), limits[role], shape, seconds, seed, slower_over(path))
    try:
        run = Simulation(twin_options(target, folder, limits, shape), trace).run()
        async with Frontend(graph.frontend_url) as frontend:
            real = await frontend.replay(trace, seed)
    except (DynamoError, BadInput) as error:
        return str(error)
    answered = [each for each in real if each is not None]
    if len(answered) < (1 - LOST_MAX) * len(trace):
        return f"{len(trace) - len(answered)} of {len(trace)} requests were lost on the engine"
    fixed_ms, per_token_ms = beyond([(each.tokens, each.ttft_ms - each.engine_ttft_ms) for each in path])
    theirs = [
        (
            job.ttft_s * 1000 + fixed_ms + per_token_ms * job.request.input_length,
            None if job.itl_s is None else job.itl_s * 1000,
        )
        for job in run.jobs
        if job.ttft_s is not None
    ]
    return compared([(each.ttft_ms, each.itl_ms) for each in answered], theirs)
