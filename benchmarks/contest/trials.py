"""What planners are held against: traces with targets, a start-up, a cap, and the fleet that they begin with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from benchmarks.dispatch import azure
from benchmarks.traces import Requests, conversation, kept
from dynamo_local.twin.options import Slo

Fleet = tuple[int, int]
"""Prefill and decode workers."""


@dataclass(frozen=True, slots=True)
class Trial:
    """Requests, and under what they are served. `speed`: the engine does so many times as much as its profile says.
    `file` is the recorded trace's, where there is one; `clairvoyant` the GPU-hours of a planner in Dynamo's replay that
    knew the demand (None: not measured)."""

    name: str
    requests: Callable[[int | None], Requests]
    file: str
    slo: Slo
    start_up_s: float
    cap: int
    first: Fleet
    speed: float = 1.0
    clairvoyant: float | None = None


SIN_20, SIN_45 = "sin_rr5-20_T150_d600_i3000o150.jsonl.gz", "sin_rr5-45_T600_d1800_i3000o300.jsonl.gz"

TRIALS = (
    Trial(
        "sin 5–20",
        partial(kept, SIN_20, "sin,rate=12.5,amplitude=0.6,period=150,duration=600,isl=3000,osl=150"),
        SIN_20,
        Slo(200, 10),
        30.0,
        8,
        (2, 2),
    ),
    Trial(
        "sin 5–45",
        partial(kept, SIN_45, "sin,rate=25,amplitude=0.8,period=600,duration=1800,isl=3000,osl=300"),
        SIN_45,
        Slo(200, 10),
        30.0,
        8,
        (2, 2),
        clairvoyant=2.55,
    ),
    Trial(
        "conversation",
        conversation,
        "conversation_trace.jsonl.gz",
        Slo(2000, 50),
        60.0,
        8,
        (3, 1),
        clairvoyant=3.89,
    ),
    Trial(
        "Azure conversation",
        azure,
        "azure2023_conv.mooncake.jsonl.gz",
        Slo(2000, 100),
        30.0,
        16,
        (3, 4),
        speed=0.1,
        clairvoyant=7.56,
    ),
)
