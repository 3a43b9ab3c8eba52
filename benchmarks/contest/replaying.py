"""`slo` in Dynamo 1.6.1's own replay, where its wheels are installed (tests/dynamo1x/install.sh)."""

from __future__ import annotations

import gzip
import importlib.util
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.contest.measuring import REPLAY, Facts, Row, here, today
from benchmarks.contest.replay_policy import make
from benchmarks.contest.trials import TRIALS, Trial
from benchmarks.traces import folder
from dynamo_local.profile.reading import DEFAULT_PROFILE
from dynamo_local.simulator.trace import write_trace

BLOCK_TOKENS = 512


def installed() -> bool:
    """Whether Dynamo's replay is there."""
    return importlib.util.find_spec("dynamo") is not None and importlib.util.find_spec("dynamo._core") is not None


def replay_all(
    facts: Facts, names: Sequence[str], profile: Path, limit: int | None, until_s: float, say: Callable[[str], None]
) -> bool:
    """As `measuring.measure_all`. `profile` is the NPZ of passes that Dynamo's mocker goes by."""
    for trial in TRIALS:
        if trial.clairvoyant is None or (names and trial.name not in names):
            continue
        requests = trial.requests(limit)
        if any(row.requests == len(requests.rows) for row in facts.of(REPLAY, trial.name)):
            continue
        if time.monotonic() >= until_s:
            return False
        with TemporaryDirectory() as work:
            trace = Path(work) / "trace.jsonl"
            _unpacked(trial, trace, limit)
            began_s = time.monotonic()
            told = _replayed(trial, trace, profile)
        row = Row(
            judge=REPLAY,
            trial=trial.name,
            case="slo",
            fleet=trial.first,
            requests=len(requests.rows),
            attainment=told["goodput_completed_requests"] / told["num_requests"],
            gpu_hours=told["gpu_hours"],
            ttft_p99_ms=told["p99_ttft_ms"],
            itl_p99_ms=told["p99_tpot_ms"],
            dropped=told["num_requests"] - told["completed_requests"],
            scale_actions=told["actions"],
            took_s=time.monotonic() - began_s,
            source=requests.told,
            date=today(),
            machine=here(),
        )
        facts.add(row)
        say(f"{trial.name} in Dynamo's replay: {row.attainment:.2%} at {row.gpu_hours:.3f}, {row.took_s:.0f} s")
    return True


def _unpacked(trial: Trial, trace: Path, limit: int | None) -> None:
    """The trace as a plain file: the replay reads no gzip."""
    import os

    recorded = folder(os.environ) / trial.file
    if recorded.exists() and limit is None:
        trace.write_bytes(gzip.decompress(recorded.read_bytes()))
        return
    write_trace(trace, trial.requests(limit).rows)


def _replayed(trial: Trial, trace: Path, profile: Path) -> dict[str, Any]:
    from dynamo._core import _normalize_mocker_config, run_mocker_trace_replay

    def engine(role: str) -> Any:
        timing = {"type": "external", "provider": "dynamo_profile", "config": {"path": str(profile)}}
        made = {"worker_type": role, "speedup_ratio": trial.speed, "timing_model": timing}
        return _normalize_mocker_config({"startup_time": trial.start_up_s, "engine": made})

    policy = make(
        {
            "start_up_s": trial.start_up_s,
            "ttft_ms": trial.slo.ttft_ms,
            "itl_ms": trial.slo.itl_ms,
            "gpu_cap": trial.cap,
            "speed": trial.speed,
            "profile": DEFAULT_PROFILE,
        }
    )
    report = run_mocker_trace_replay(
        [str(trace)],
        prefill_engine_args=engine("prefill"),
        decode_engine_args=engine("decode"),
        num_prefill_workers=trial.first[0],
        num_decode_workers=trial.first[1],
        sla_ttft_ms=trial.slo.ttft_ms,
        sla_itl_ms=trial.slo.itl_ms,
        trace_block_size=BLOCK_TOKENS,
        scaling_policy=policy,
        capture_per_request=False,
    )
    return {**report.summary, "actions": sum(bool(decision.acts) for decision in policy.decisions)}
