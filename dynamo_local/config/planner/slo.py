"""Options of the policy `slo` alone; its targets are in `latencies`."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, Field

from dynamo_local.config.planner.kinds import OPTIONS, Positive

ALIASES = {"budget": "max_gpu_budget"}


class SloFields(BaseModel):
    """What is to be kept, and how dearly."""

    model_config = OPTIONS

    target: Annotated[float, Field(gt=0, lt=1)] = 0.99
    """Share of the requests that is to keep both targets: a tenth of the misses makes a GPU worth ten times as much."""
    thrift: Positive = 1.0
    """How much a GPU must do to be held, against what `target` asks of it: 2 holds fewer, 0.5 more."""
