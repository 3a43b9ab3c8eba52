"""Dynamo 1.6.1's replay as a judge: its engines take the requests in turn, and know no dispatch by targets.

It runs where Dynamo's wheels are installed (tests/dynamo1x/install.sh).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

from benchmarks.contest.replay_policy import ReplayPolicy
from benchmarks.contest.replaying import replayed
from benchmarks.contest.trials import Fleet
from benchmarks.regret.families import Load
from benchmarks.regret.frontier import Maker, Outcome, by_window
from dynamo_local.profile.reading import DEFAULT_PROFILE, read_profile

ROLES = ("prefill", "decode")
LOOK_MS = 1000.0


def in_replay(load: Load, fleet: Fleet, policy: Maker | None) -> Outcome:
    """A `Simulator`."""
    profile = Path(read_profile(DEFAULT_PROFILE).folder) / "mocker_exact.npz"
    held = None if policy is None else Held(ReplayPolicy(policy()), sum(fleet))
    report = replayed(load, fleet, load.requests, profile, held, each=True)
    kept = [each["arrival_time_ms"] / 1000 for each in report.per_request if _within(load, each)]
    return Outcome(kept, by_window((lambda end_s: sum(fleet) * end_s) if held is None else held.gpu_s, load))


def _within(load: Load, told: Mapping[str, Any]) -> bool:
    """Whether the request was answered within both targets. One token has no gaps."""
    ttft_ms, itl_ms = told["ttft_ms"], told["itl_ms"]
    slo = load.slo
    return (
        told["terminal_status"] == "completed"
        and (slo.ttft_ms is None or ttft_ms <= slo.ttft_ms)
        and (slo.itl_ms is None or itl_ms is None or itl_ms <= slo.itl_ms)
    )


class Scaling(Protocol):
    """A scaling policy, as the replay asks it."""

    def initial_tick_ms(self) -> float:
        """The first tick, in milliseconds of the replay's clock."""
        ...

    def on_tick(self, snapshot: Mapping[str, Any]) -> Mapping[str, Any]:
        """Targets (None: as it is), and when the next tick is wanted."""
        ...


class Held:
    """A scaling policy of the replay, and the GPUs that are held under it.

    The end of a drain is seen `LOOK_MS` late at most.
    """

    def __init__(self, policy: Scaling, gpus: int) -> None:
        self._policy = policy
        self._steps: list[tuple[float, int]] = [(0.0, gpus)]

    def initial_tick_ms(self) -> float:
        """The policy's."""
        return self._policy.initial_tick_ms()

    def on_tick(self, snapshot: Mapping[str, Any]) -> Mapping[str, Any]:
        """The policy's answer."""
        answer = self._policy.on_tick(snapshot)
        held = 0
        for role in ROLES:
            ordered = (answer[f"target_{role}"] or 0) - snapshot[f"non_draining_{role}_count"]
            held += snapshot[f"total_{role}_count"] + max(0, ordered)
        self._steps.append((snapshot["now_ms"] / 1000, held))
        return {**answer, "next_tick_ms": min(answer["next_tick_ms"] or math.inf, snapshot["now_ms"] + LOOK_MS)}

    def gpu_s(self, end_s: float) -> float:
        """GPU-seconds until then."""
        steps = [*((min(at_s, end_s), gpus) for at_s, gpus in self._steps), (end_s, 0)]
        return sum(gpus * (until_s - at_s) for (at_s, gpus), (until_s, _) in pairwise(steps))
