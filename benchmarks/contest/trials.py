"""The trials of planners: traces with targets, a start-up, a cap, and the fleet that they begin with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from benchmarks.dispatch import BURSTS, CODE, SIN_45, azure, waves
from benchmarks.traces import Requests, conversation, generated, kept
from dynamo_local.simulator.options import Slo

Fleet = tuple[int, int]
"""Prefill and decode workers."""


@dataclass(frozen=True, slots=True)
class Trial:
    """Requests, and under what they are served. `speed`: the engine does so many times as much as its profile says.
    `file` is the recorded trace's ("": the requests are always made); `clairvoyant` the GPU-hours of a planner in
    Dynamo's replay that knew the demand (None: not measured)."""

    name: str
    requests: Callable[[int | None], Requests]
    file: str
    slo: Slo
    start_up_s: float
    cap: int
    first: Fleet
    speed: float = 1.0
    clairvoyant: float | None = None


SIN_20 = "sin_rr5-20_T150_d600_i3000o150.jsonl.gz"

WAVES = "sin,rate=15,amplitude=0.7,period=300,duration=900,isl=2000,osl=200"


def _made(word: str, limit: int | None) -> Requests:
    """Requests that every clone can make, and that no constant of `slo` was chosen on."""
    return generated(word, limit)


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
        waves,
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
    Trial("made chat", partial(_made, BURSTS), "", Slo(2000, 50), 60.0, 8, (2, 1)),
    Trial("made code", partial(_made, CODE), "", Slo(500, 20), 30.0, 8, (2, 1)),
    Trial("made sin", partial(_made, WAVES), "", Slo(300, 15), 20.0, 8, (2, 1)),
)
