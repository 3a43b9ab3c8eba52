"""The options of the policy `slo` as a value. `config` checks what people write."""

from __future__ import annotations

from dataclasses import dataclass

from dynamo_local.planner.queueing.engine import EngineOptions

INTERVAL_S = 5.0
START_UP_S = 30.0
"""How long a start takes, until one was seen."""


@dataclass(frozen=True, slots=True)
class SloOptions:
    """`target` is the share of requests that is to have the first token within `ttft_ms` and a mean gap between tokens
    within `itl_ms`; `thrift` says how much a GPU must do to be held (`choosing.price`).

    `profile` is a profile's name or folder, `speed` how much faster these engines are, `engine` how they are used.
    Floors and budgets are those of the other policies. `start_up_s` is the lead until a start was seen.
    """

    profile: str
    ttft_ms: float = 500.0
    itl_ms: float = 50.0
    target: float = 0.99
    thrift: float = 1.0
    adjustment_interval_s: float = INTERVAL_S
    metric_pulling_interval_s: float = 1.0
    min_endpoint: int = 1
    min_gpu_budget: int = 1
    max_gpu_budget: int = 8
    start_up_s: float = START_UP_S
    speed: float = 1.0
    engine: EngineOptions = EngineOptions()  # noqa: RUF009 - frozen
