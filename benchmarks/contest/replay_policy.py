"""The policy `slo` in Dynamo 1.6.1's replay (`dynamo.replay`), as a scaling policy of it.

    policy = make(scenario)
    run_mocker_trace_replay([trace], …, scaling_policy=policy)

The replay knows its requests only by the means of the time since the last tick, and its queues by the last pass of each
worker. So it is asked for a tick so often that most ticks see one request, which gives the lengths one by one. A
decision is made at every interval's end, by the same policy and driver as in the arbiter. Nothing is read but what
the replay tells.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dynamo_local.config.planner import PlannerConfig
from dynamo_local.planner.driver import PolicyDriver
from dynamo_local.planner.forecasting.answers import InlineForecaster
from dynamo_local.planner.policies.slo.policy import SloPolicy
from dynamo_local.planner.queueing import EngineOptions
from dynamo_local.planner.queueing_task import passes_of
from dynamo_local.planner.values import Decision, Ended, Observation, Pool, Reading, Requests, WorkerPools

TARGET = 0.99
"""The one setting: what `Planner: {policy: slo}` has by default."""
TICK_MIN_S, TICK_MAX_S = 0.02, 0.25
TICKS_PER_REQUEST = 3.0
ENGINE = EngineOptions(batched_tokens=8192, max_num_seqs=256, max_kv_tokens=16384 * 64, batches=True, turns=True)
"""As the replay's engines and its round robin are: prompts share passes, and workers are taken in turn."""

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
    """The policy for a scenario: a mapping, or an object with those attributes (`NAMES`). Its trace file is not read.
    Raises `KeyError` naming a field that is not there."""
    told = {field: _field(scenario, field) for field in NAMES}
    return ReplayPolicy(
        PlannerConfig(
            policy="slo",
            profile_results_dir=Path(str(told["profile"])),
            ttft_ms=float(told["ttft_ms"]),
            itl_ms=float(told["itl_ms"]),
            target=TARGET,
            max_gpu_budget=int(told["gpu_cap"]),
        ),
        start_up_s=float(told["start_up_s"]),
        speed=float(told["speed"]),
    )


def _field(scenario: Any, field: str) -> Any:
    for name in NAMES[field]:
        value = scenario.get(name) if isinstance(scenario, Mapping) else getattr(scenario, name, None)
        if value is not None:
            return value
    if field in OPTIONAL:
        return OPTIONAL[field]
    raise KeyError(f"the scenario does not say {field}, which may be called {', '.join(NAMES[field])}")


class ReplayPolicy:
    """`initial_tick_ms` and `on_tick` of Dynamo's replay. Use it for one run. `decisions` are those that were made."""

    def __init__(self, options: PlannerConfig, *, start_up_s: float, speed: float) -> None:
        self._options = options
        profile = str(options.profile_results_dir)
        policy = SloPolicy(options, passes_of(profile, speed), profile, start_up_s, speed, ENGINE)
        self._driver = PolicyDriver(policy, 0.0, forecaster=InlineForecaster())
        self._began: list[float] = []
        self._ended: list[Ended] = []
        self._seen_s = 0.0
        self._pulled_s = 0.0
        self._queued: dict[str, int] = {}
        self.decisions: list[Decision] = []

    def initial_tick_ms(self) -> float:
        """The first tick, in milliseconds of the replay's clock."""
        return TICK_MAX_S * 1000

    def on_tick(self, snapshot: Mapping[str, Any]) -> dict[str, float | int | None]:
        """Targets (None: as it is), and when the next tick is wanted."""
        now_s = snapshot["now_ms"] / 1000
        self._observe(snapshot.get("traffic") or {}, now_s)
        for told in snapshot.get("prefill_fpm_snapshots", ()):
            self._queued[str(told["worker_id"])] = told["num_queued_prefill"]
        prefill, decode = None, None
        if now_s >= self._driver.next_at_s - 1e-6:
            decision = self._driver.tick_now(self._observation(snapshot, now_s))
            if decision is not None:
                self.decisions.append(decision)
                prefill, decode = decision.targets["prefill"], decision.targets["decode"]
        return {"target_prefill": prefill, "target_decode": decode, "next_tick_ms": self._next_s(now_s) * 1000}

    def _next_s(self, now_s: float) -> float:
        recent = len(self._began) / max(1.0, now_s - self._pulled_s)
        step_s = min(max(1.0 / (TICKS_PER_REQUEST * max(recent, 1e-6)), TICK_MIN_S), TICK_MAX_S)
        due_s = self._driver.next_at_s
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
        self._seen_s = now_s

    def _observation(self, snapshot: Mapping[str, Any], now_s: float) -> Observation:
        requests = Requests(self._pulled_s, now_s, tuple(self._began), tuple(self._ended))
        self._began, self._ended, self._pulled_s = [], [], now_s
        pools = WorkerPools(_pool(snapshot, "prefill"), _pool(snapshot, "decode"))
        serving = {str(worker) for worker in snapshot.get("active_prefill_ids", ())}
        self._queued = {worker: queued for worker, queued in self._queued.items() if worker in serving}
        return Observation(Reading(now_s, sum(self._queued.values()), {}), pools, requests=requests)


def _pool(snapshot: Mapping[str, Any], role: str) -> Pool:
    coming = int(snapshot[f"starting_{role}_count"])
    leaving = int(snapshot[f"draining_{role}_count"])
    ready = int(snapshot[f"non_draining_{role}_count"]) - coming
    return Pool(role, 1, ready, coming=coming, leaving=leaving, gpus_held=ready + coming + leaving)
