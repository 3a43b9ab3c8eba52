"""Does the profile agree with the graph? One mixed trace runs through the measured graph and through the simulator.

The simulator has no HTTP and no data plane. Their time for a single request was measured and is added.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import httpx

from dynamo_local.components.measurement import LOWEST_TOKEN, TOKENS
from dynamo_local.core.routing.disagg import DisaggSettings
from dynamo_local.core.routing.estimates import Targets
from dynamo_local.core.traffic import MAX_INFLIGHT
from dynamo_local.engines.sim.options import SimOptions
from dynamo_local.errors import BadInput, DynamoError
from dynamo_local.measuring.graph import GraphFailed, MeasuredGraph
from dynamo_local.measuring.target import AGG, DECODE, PREFILL, WAITING_MAX, Target
from dynamo_local.profile.document import PathFacts
from dynamo_local.profile.fit import beyond
from dynamo_local.profile.interpolation import ProfileModel
from dynamo_local.profile.judgement import Compared, compared
from dynamo_local.profile.points import Limits
from dynamo_local.simulator.generator import GeneratorOptions, generate
from dynamo_local.simulator.options import FleetShape, SimulationOptions
from dynamo_local.simulator.simulation import Simulation
from dynamo_local.simulator.trace import TraceRequest

# Requests as a user sends them: over HTTP, streamed, with the times at which their tokens came.

TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Answered:
    """ms until the first token, and the mean gap after it (None: there was one token)."""

    ttft_ms: float
    itl_ms: float | None


class Frontend:
    """A client of the graph's Frontend. Use it as `async with`."""

    def __init__(self, url: str) -> None:
        limits = httpx.Limits(max_connections=None)
        self._client = httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, limits=limits)
        self._model = ""

    async def __aenter__(self) -> Frontend:
        found = (await self._client.get("/v1/models")).json()["data"]
        if not found:
            raise GraphFailed("the Frontend lists no model")
        self._model = found[0]["id"]
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def ask(self, tokens: int, answer: int, random: Random) -> Answered | None:
        """One request of so many random tokens; None where it was refused or broke off."""
        prompt = [LOWEST_TOKEN + random.randrange(TOKENS) for _ in range(tokens)]
        body = {"model": self._model, "prompt": prompt, "max_tokens": answer, "min_tokens": answer, "ignore_eos": True}
        began_s, times_s = time.monotonic(), []
        try:
            async with self._client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
                if response.status_code != httpx.codes.OK:
                    return None
                async for line in response.aiter_lines():
                    if line.startswith("data: {"):
                        times_s.append(time.monotonic())
        except httpx.HTTPError:
            return None
        if not times_s:
            return None
        # A frame may hold several tokens, but the last of them ends with the last frame.
        itl_ms = (times_s[-1] - times_s[0]) / (answer - 1) * 1000 if answer > 1 and len(times_s) > 1 else None
        return Answered((times_s[0] - began_s) * 1000, itl_ms)

    async def replay(self, trace: Sequence[TraceRequest], seed: int) -> list[Answered | None]:
        """The trace at its own times, whatever becomes of each request."""
        loop, random = asyncio.get_running_loop(), Random(seed)
        began_s = loop.time()

        async def one(request: TraceRequest, own: Random) -> Answered | None:
            await asyncio.sleep(began_s + request.at_s - loop.time())
            return await self.ask(request.input_length, request.output_length, own)

        tasks = [asyncio.create_task(one(request, Random(random.getrandbits(32)))) for request in trace]
        return list(await asyncio.gather(*tasks))


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
    """The time of a token over HTTP, divided by its time at the engine; at least 1.

    On a host with busy processors, engines that need them get their work late. There, half of the engines' rate may be
    more than the host can carry.
    """
    found = [each.itl_ms / each.engine_itl_ms for each in path if each.itl_ms and each.engine_itl_ms]
    return max(1.0, median(found)) if found else 1.0


def twin_options(target: Target, folder: Path, limits: Mapping[str, Limits], shape: FleetShape) -> SimulationOptions:
    """The same graph in the simulator, its engines as the profile in that folder says."""
    role = AGG if target.standalone else DECODE
    config = next(s.config for s in target.spec.services if s.name == target.components[role])
    decode, config_of_role = limits[role], _underscored(config)
    block = next((size for size in (64, 32, 16, 8, 4, 2) if decode.max_kv_tokens % size == 0), 1)
    sim = SimOptions(
        profile=str(folder),
        block_size=block,
        num_gpu_blocks=decode.max_kv_tokens // block,
        max_num_seqs=decode.max_num_seqs,
        max_num_batched_tokens=decode.max_num_batched_tokens,
        max_model_len=min(decode.context_length, decode.max_kv_tokens),
        # The measured time of a hand-off contains HTTP, so it is added together with it.
        kv_transfer_latency_s=0.0,
        kv_transfer_bytes_per_s=1e18,
    )
    settings = DisaggSettings(
        config_of_role.get("max_local_prefill_length", DisaggSettings().max_local_prefill_length),
        config_of_role.get("max_prefill_queue_size", DisaggSettings().max_prefill_queue_size),
    )
    targets = Targets.of_ms(config_of_role.get("ttft"), config_of_role.get("itl"))
    by_slo = config_of_role.get("disagg_policy") == "slo" or (
        targets.given and config_of_role.get("disagg_policy") is None
    )
    return SimulationOptions(
        shape=shape,
        sim=sim,
        gpus=shape.prefill + shape.decode,
        disagg=settings,
        conditional=bool(config_of_role.get("conditional_disagg", False)),
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
