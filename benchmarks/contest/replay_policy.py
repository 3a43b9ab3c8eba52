"""Our policies in Dynamo 1.6.1's replay (`dynamo.replay`), as scaling policies of it.

    policy = make(scenario)                                     # `slo`
    policy = ReplayPolicy(ThroughputLoadPolicy(options))        # any other
    run_mocker_trace_replay([trace], …, scaling_policy=policy)

A policy is asked when its own next decision is due. It is shown what Dynamo's own planner is shown there: the traffic
since the last decision that wanted it, and the last pass of each worker.

The replay knows its requests only by the means of the time since the last tick. So for a policy that wants requests one
by one (`slo`) it is asked for a tick so often that most ticks see one request. Nothing is read but what the replay
tells.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from dynamo_local.config.planner import PlannerConfig
from dynamo_local.core.passes import EngineId, ForwardPass
from dynamo_local.core.passes import Requests as PassRequests
from dynamo_local.core.types import Load, Missing
from dynamo_local.planner.driver import PolicyDriver
from dynamo_local.planner.forecasting.answers import InlineForecaster
from dynamo_local.planner.policies.protocol import Policy
from dynamo_local.planner.policies.slo.policy import SloPolicy
from dynamo_local.planner.queueing import EngineOptions
from dynamo_local.planner.queueing_task import passes_of
from dynamo_local.planner.values import (
    Capabilities,
    Ended,
    EngineSeen,
    Observation,
    Pool,
    Reading,
    Requests,
    Traffic,
    WorkerPools,
)

TARGET = 0.99
"""The one setting: what `Planner: {policy: slo}` has by default."""
TICK_MIN_S, TICK_MAX_S = 0.02, 0.25
TICKS_PER_REQUEST = 3.0
ENGINE = EngineOptions(batched_tokens=8192, max_num_seqs=256, max_kv_tokens=16384 * 64, batches=True, turns=True)
"""As the replay's engines and its round robin are: prompts share passes, and workers are taken in turn."""
CAPABILITIES = {
    role: Capabilities(ENGINE.batched_tokens, ENGINE.max_num_seqs, ENGINE.max_kv_tokens)
    for role in ("prefill", "decode")
}
"""The same limits, as `throughput-load` is told them."""

NAMES: Mapping[str, tuple[str, ...]] = {
    "start_up_s": ("start_up_s", "startup_s", "startup", "startup_time"),
    "ttft_ms": ("ttft_ms", "ttft"),
    "itl_ms": ("itl_ms", "itl"),
    "gpu_cap": ("gpu_cap", "max_gpus", "cap", "max_gpu_budget", "gpus"),
    "speed": ("speed", "engine_speed", "speedup_ratio", "speedup"),
    "profile": ("profile", "profile_folder", "profile_dir"),
}
"""The names that a scenario may give its fields."""
OPTIONAL: Mapping[str, float] = {"speed": 1.0}


def make(scenario: Any) -> ReplayPolicy:
    """`slo` for a scenario: a mapping, or an object with those attributes (`NAMES`). Its trace file is not read.
    Raises `KeyError` naming a field that is not there."""
    told = {field: _field(scenario, field) for field in NAMES}
    options = PlannerConfig(
        policy="slo",
        profile_results_dir=Path(str(told["profile"])),
        ttft_ms=float(told["ttft_ms"]),
        itl_ms=float(told["itl_ms"]),
        target=TARGET,
        max_gpu_budget=int(told["gpu_cap"]),
    )
    return ReplayPolicy(slo(options, start_up_s=float(told["start_up_s"]), speed=float(told["speed"])))


def slo(options: PlannerConfig, *, start_up_s: float, speed: float) -> SloPolicy:
    """`slo`, which knows the replay's engines."""
    profile = str(options.profile_results_dir)
    return SloPolicy(options, passes_of(profile, speed), profile, start_up_s, speed, ENGINE)


def _field(scenario: Any, field: str) -> Any:
    for name in NAMES[field]:
        value = scenario.get(name) if isinstance(scenario, Mapping) else getattr(scenario, name, None)
        if value is not None:
            return value
    if field in OPTIONAL:
        return OPTIONAL[field]
    raise KeyError(f"the scenario does not say {field}, which may be called {', '.join(NAMES[field])}")


class ReplayPolicy:
    """`initial_tick_ms` and `on_tick` of Dynamo's replay, for any policy. Use it for one run."""

    def __init__(self, policy: Policy[Any]) -> None:
        self._driver = PolicyDriver(policy, 0.0, forecaster=InlineForecaster())
        self._often = self._driver.needs.requests
        self._began: list[float] = []
        self._ended: list[Ended] = []
        self._seen_s = 0.0
        self._pulled_s = 0.0
        self._traffic: list[Mapping[str, Any]] = []
        self._new: dict[EngineId, ForwardPass] = {}
        self._last: dict[EngineId, ForwardPass] = {}
        self._numbers = count(1)

    def initial_tick_ms(self) -> float:
        """The first tick, in milliseconds of the replay's clock."""
        return 1000 * (TICK_MAX_S if self._often else self._driver.next_at_s)

    def on_tick(self, snapshot: Mapping[str, Any]) -> dict[str, float | int | None]:
        """Targets (None: as it is), and when the next tick is wanted."""
        now_s = snapshot["now_ms"] / 1000
        if traffic := snapshot.get("traffic"):
            self._traffic.append(traffic)
            self._observe(traffic, now_s)
        self._seen_s = now_s
        for role in ("prefill", "decode"):
            self._hear(role, snapshot[f"{role}_fpm_snapshots"], now_s)
        targets: Mapping[str, int] = {}
        if now_s >= self._driver.next_at_s - 1e-6:
            decision = self._driver.tick_now(self._observation(snapshot, now_s))
            targets = {} if decision is None else decision.targets
        return {
            "target_prefill": targets.get("prefill"),
            "target_decode": targets.get("decode"),
            "next_tick_ms": self._next_s(now_s) * 1000,
        }

    def _next_s(self, now_s: float) -> float:
        due_s = self._driver.next_at_s
        if not self._often:
            return due_s
        recent = len(self._began) / max(1.0, now_s - self._pulled_s)
        step_s = min(max(1.0 / (TICKS_PER_REQUEST * max(recent, 1e-6)), TICK_MIN_S), TICK_MAX_S)
        return due_s if now_s + 1.5 * step_s >= due_s > now_s else now_s + step_s

    def _observe(self, traffic: Mapping[str, Any], now_s: float) -> None:
        """Requests that began since the last tick, evenly spread over that time, and those that ended."""
        came = int(traffic.get("num_req", 0))
        step_s = (now_s - self._seen_s) / max(1, came)
        self._began += [self._seen_s + (number + 0.5) * step_s for number in range(came)]
        ended = int(traffic.get("shape_count", 0))
        if ended:
            ttft_s = traffic["avg_ttft_ms"] / 1000 if traffic.get("ttft_count") else None
            itl_s = traffic["avg_itl_ms"] / 1000 if traffic.get("itl_count") else None
            lengths = max(1, round(traffic["avg_isl"])), max(1, round(traffic["avg_osl"]))
            self._ended += [Ended(now_s, *lengths, ttft_s, itl_s)] * ended

    def _hear(self, role: str, told: Iterable[Mapping[str, Any]], now_s: float) -> None:
        """The last pass of each worker that has ended one since the last tick."""
        for each in told:
            engine = EngineId(f"{role} {each['worker_id']}", each["dp_rank"])
            number = self._new[engine].counter_id if engine in self._new else next(self._numbers)
            self._new[engine] = self._last[engine] = _pass(engine, each, number, now_s)

    def _observation(self, snapshot: Mapping[str, Any], now_s: float) -> Observation:
        needs = self._driver.needs
        pools = WorkerPools(_pool(snapshot, "prefill"), _pool(snapshot, "decode"))
        engines = {role: self._engines(snapshot, role) for role in ("prefill", "decode")}
        self._new = {}
        traffic, requests = None, None
        if needs.traffic_window_s is not None:
            traffic, self._traffic = _traffic(self._traffic, now_s), []
        if needs.requests:
            requests = Requests(self._pulled_s, now_s, tuple(self._began), tuple(self._ended))
        self._began, self._ended, self._pulled_s = [], [], now_s
        # All prompts wait at workers here. A policy that is shown the passes would count them twice.
        queued = (0 if needs.passes else _queued(each).num_prefill_requests for each in engines["prefill"].values())
        loads = {engine.worker_id: _load(each) for engine, each in engines["decode"].items()}
        seen = engines["prefill"] | engines["decode"]
        return Observation(Reading(now_s, sum(queued), loads), pools, traffic, seen, CAPABILITIES, requests=requests)

    def _engines(self, snapshot: Mapping[str, Any], role: str) -> dict[EngineId, EngineSeen]:
        """Each active worker with its last pass, which is new where the replay told of it since the last decision."""
        active = (EngineId(f"{role} {worker}") for worker in snapshot[f"active_{role}_ids"])
        unknown = Missing("it has ended no pass yet")
        return {
            engine: EngineSeen(
                role, (self._new[engine],) if engine in self._new else (), self._last.get(engine, unknown)
            )
            for engine in active
        }


def _queued(engine: EngineSeen) -> PassRequests:
    """The requests that wait there, by its last pass; none at a worker that has ended none."""
    return PassRequests() if isinstance(engine.last, Missing) else engine.last.queued


def _load(engine: EngineSeen) -> Load:
    """A decode worker's load, by its last pass; none of a worker that has ended no pass."""
    if isinstance(engine.last, Missing):
        return Load()
    used = engine.last.scheduled.sum_decode_kv_tokens / ENGINE.max_kv_tokens
    return Load(gpu_cache_usage_perc=min(1.0, used), num_requests_waiting=_queued(engine).num_decode_requests)


def _traffic(pieces: Sequence[Mapping[str, Any]], now_s: float) -> Traffic | Missing:
    """The window that these pieces of the replay's traffic are together."""
    duration_s = sum(piece["duration_s"] for piece in pieces)
    if duration_s <= 0:
        return Missing("no time is over")
    ended = sum(piece["shape_count"] for piece in pieces)
    means = {
        name: sum(piece["shape_count"] * piece[f"avg_{name}"] for piece in pieces) / ended
        for name in ("isl", "osl")
        if ended
    }
    return Traffic(now_s, duration_s, sum(piece["num_req"] for piece in pieces), **means)


def _pass(engine: EngineId, told: Mapping[str, Any], number: int, now_s: float) -> ForwardPass:
    scheduled = PassRequests(
        told["num_prefill_requests"],
        told["sum_prefill_tokens"],
        told["var_prefill_length"],
        told["sum_prefill_kv_tokens"],
        told["num_decode_requests"],
        told["sum_decode_kv_tokens"],
        told["var_decode_kv_tokens"],
    )
    queued = PassRequests(
        num_prefill_requests=told["num_queued_prefill"],
        sum_prefill_tokens=told["sum_queued_prefill_tokens"],
        num_decode_requests=told["num_queued_decode"],
        sum_decode_kv_tokens=told["sum_queued_decode_kv_tokens"],
    )
    return ForwardPass(engine, number, told["wall_time"], scheduled, queued, now_s)


def _pool(snapshot: Mapping[str, Any], role: str) -> Pool:
    coming = int(snapshot[f"starting_{role}_count"])
    leaving = int(snapshot[f"draining_{role}_count"])
    ready = int(snapshot[f"non_draining_{role}_count"]) - coming
    return Pool(role, 1, ready, coming=coming, leaving=leaving, gpus_held=ready + coming + leaving)
