"""Planners in Dynamo 1.6.1's own replay, where its wheels are installed (tests/dynamo1x/install.sh).

They are `slo`, and Dynamo's own planner beside `throughput-load` with the same options."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

from benchmarks.contest.measuring import OURS, REPLAY, REPLAYED, SLO, Facts, Row, here, today
from benchmarks.contest.replay_policy import CAPABILITIES, ReplayPolicy, make
from benchmarks.contest.trials import TRIALS, Fleet, Trial
from benchmarks.traces import Requests
from dynamo_local.config.planner_section import planner_section
from dynamo_local.planner.policies.throughput_load.policy import ThroughputLoadPolicy
from dynamo_local.profile.reading import DEFAULT_PROFILE
from dynamo_local.simulator.trace import TraceRequest, write_trace

BLOCK_TOKENS = 512


def installed() -> bool:
    """Whether Dynamo's replay is there."""
    return importlib.util.find_spec("dynamo") is not None and importlib.util.find_spec("dynamo._core") is not None


def replay_all(
    facts: Facts,
    names: Sequence[str],
    cases: Sequence[str],
    profile: Path,
    limit: int | None,
    until_s: float,
    say: Callable[[str], None],
) -> bool:
    """As `measuring.measure_all`. `profile` is the NPZ of passes that Dynamo's mocker goes by."""
    for trial in TRIALS:
        if trial.clairvoyant is None or (names and trial.name not in names):
            continue
        requests = trial.requests(limit)
        for case in REPLAYED:
            kept = facts.of(REPLAY, trial.name, case)
            if (cases and case not in cases) or any(row.requests == len(requests.rows) for row in kept):
                continue
            if time.monotonic() >= until_s:
                return False
            row = _row(trial, case, requests, profile)
            facts.add(row)
            told = f"{row.attainment:.2%} at {row.gpu_hours:.3f}, {row.took_s:.0f} s"
            say(f"{trial.name}, {case} in Dynamo's replay: {told}")
    return True


def _row(trial: Trial, case: str, requests: Requests, profile: Path) -> Row:
    began_s = time.monotonic()
    with _planner(trial, case) as policy:
        told = replayed(trial, trial.first, requests.rows, profile, policy).summary
    return Row(
        judge=REPLAY,
        trial=trial.name,
        case=case,
        fleet=trial.first,
        requests=len(requests.rows),
        attainment=told["goodput_completed_requests"] / told["num_requests"],
        gpu_hours=told["gpu_hours"],
        ttft_p99_ms=told["p99_ttft_ms"],
        itl_p99_ms=told["p99_tpot_ms"],
        dropped=told["num_requests"] - told["completed_requests"],
        scale_actions=policy.actions,
        took_s=time.monotonic() - began_s,
        source=requests.told,
        date=today(),
        machine=here(),
    )


def replayed(
    trial: Trial, fleet: Fleet, requests: Iterable[TraceRequest], profile: Path, policy: Any, *, each: bool = False
) -> Any:
    """The replay's report on these requests, from that fleet, which `policy` changes (None: which stays).

    `profile` is the NPZ of passes that Dynamo's mocker goes by. `each`: the report has each request.
    """
    os.environ.setdefault("DYN_LOG", "warn")  # else each engine writes a line to stdout
    from dynamo._core import _normalize_mocker_config, run_mocker_trace_replay

    def engine(role: str) -> Any:
        timing = {"type": "external", "provider": "dynamo_profile", "config": {"path": str(profile)}}
        made = {"worker_type": role, "speedup_ratio": trial.speed, "timing_model": timing}
        return _normalize_mocker_config({"startup_time": trial.start_up_s, "engine": made})

    with TemporaryDirectory() as work:
        trace = Path(work) / "trace.jsonl"
        write_trace(trace, _with_blocks(requests))
        return run_mocker_trace_replay(
            [str(trace)],
            prefill_engine_args=engine("prefill"),
            decode_engine_args=engine("decode"),
            num_prefill_workers=fleet[0],
            num_decode_workers=fleet[1],
            sla_ttft_ms=trial.slo.ttft_ms,
            sla_itl_ms=trial.slo.itl_ms,
            trace_block_size=BLOCK_TOKENS,
            scaling_policy=policy,
            capture_per_request=each,
        )


def _with_blocks(requests: Iterable[TraceRequest]) -> Iterator[TraceRequest]:
    """The replay wants the blocks of each prompt: those of a request without any are its own."""
    names = count()
    for request in requests:
        blocks = math.ceil(request.input_length / BLOCK_TOKENS)
        yield request if request.hash_ids else replace(request, hash_ids=tuple(islice(names, blocks)))


@contextmanager
def _planner(trial: Trial, case: str) -> Iterator[Counted]:
    """The planner of that case, with the trial's targets and cap; else with its defaults."""
    if case == SLO:
        yield Counted(
            make(
                {
                    "start_up_s": trial.start_up_s,
                    "ttft_ms": trial.slo.ttft_ms,
                    "itl_ms": trial.slo.itl_ms,
                    "gpu_cap": trial.cap,
                    "speed": trial.speed,
                    "profile": DEFAULT_PROFILE,
                }
            )
        )
        return
    options = {
        "optimization_target": "sla",
        "enable_load_scaling": True,
        "ttft_ms": trial.slo.ttft_ms,
        "itl_ms": trial.slo.itl_ms,
        "max_gpu_budget": trial.cap,
    }
    if case == OURS:
        yield Counted(ReplayPolicy(ThroughputLoadPolicy(planner_section("Planner", {"policy": OURS, **options}))))
        return
    _aisimulate()
    from dynamo.planner.config.planner_config import PlannerConfig
    from dynamo.planner.core.types import EngineCapabilities, WorkerCapabilities
    from dynamo.planner.offline.replay_adapter import create_replay_planner_adapter

    told = json.dumps({"mode": "disagg", "environment": "virtual", "advisory": True, **options})
    names = ("max_num_batched_tokens", "max_num_seqs", "max_kv_tokens")
    limits = {
        role: EngineCapabilities(num_gpu=1, **{name: getattr(each, name) for name in names})
        for role, each in CAPABILITIES.items()
    }
    adapter = create_replay_planner_adapter(
        planner_config=PlannerConfig.from_config_arg(told), capabilities=WorkerCapabilities(**limits)
    )
    with adapter:
        yield Counted(adapter)


@dataclass
class _PassModelConfig:
    """`aisimulate_core.sdk.ForwardPassPerfModelConfig`, as far as Dynamo's planner fills it."""

    model: str
    system: str
    backend: str
    worker_type: str
    estimation_mode: str
    tp: int = 1
    pp: int = 1
    estimator_config: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_legacy_engine_config(
        cls, config: Mapping[str, Any], worker_type: str, options: Mapping[str, Any]
    ) -> _PassModelConfig:
        """With these options of the regression."""
        return cls(config["model_name"], config["system_name"], config["backend"], worker_type, "", 1, 1, options)


def _aisimulate() -> None:
    """Let Dynamo's planner import `aisimulate_core` 0.13, of which registries have only a placeholder.

    The planner takes its regression over passes from there. `aiconfigurator_core` 0.12 has it under the former name.
    """
    if "aisimulate_core" not in sys.modules and importlib.util.find_spec("aisimulate_core") is None:
        from aiconfigurator_core.sdk.rust_engine_step import RustForwardPassPerfModel

        class Regression:
            @staticmethod
            def best_available(config: Mapping[str, Any]) -> Any:
                return RustForwardPassPerfModel.from_regression(dict(config["estimator_config"]))

        sdk = ModuleType("aisimulate_core.sdk")
        vars(sdk).update(RustForwardPassPerfModel=Regression, ForwardPassPerfModelConfig=_PassModelConfig)
        sys.modules |= {"aisimulate_core": ModuleType("aisimulate_core"), sdk.__name__: sdk}


class Counted:
    """A scaling policy of the replay; `actions` counts its decisions that change a number."""

    def __init__(self, policy: Any) -> None:
        self._policy = policy
        self.actions = 0

    def initial_tick_ms(self) -> float:
        """The first tick, in milliseconds of the replay's clock."""
        return float(self._policy.initial_tick_ms())

    def on_tick(self, snapshot: Mapping[str, Any]) -> Mapping[str, Any]:
        """The answer of the policy."""
        answer: Mapping[str, Any] = self._policy.on_tick(snapshot)
        wanted = ((answer[f"target_{role}"], snapshot[f"non_draining_{role}_count"]) for role in ("prefill", "decode"))
        self.actions += any(target not in (None, now) for target, now in wanted)
        return answer
