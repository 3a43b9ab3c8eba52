"""Options of every policy that aims at latencies: targets, floor, profile. Names and defaults are Dynamo 1.6.1's."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, Field

from dynamo_local.config.planner.kinds import OPTIONS, Milliseconds

ALIASES = {"ttft": "ttft_ms", "itl": "itl_ms"}
"""The first SLA planner's names."""


class LatencyFields(BaseModel):
    """What is aimed at, and what the engines can do."""

    model_config = OPTIONS

    ttft_ms: Milliseconds = 500.0
    """Target for the time to first token, ms (`slo`: of each request, else of the mean)."""
    itl_ms: Milliseconds = 50.0
    """Target for the mean gap between tokens, ms (`slo`: of each request, else of the mean)."""
    min_endpoint: Annotated[int, Field(ge=0)] = 1
    """Workers of each role, at least. `sla` and `slo` take no 0: they keep one of each, by which they measure."""
    profile_results_dir: Path | None = None
    """Folder of a profile of the engines (NPZ or JSON, as Dynamo's profiler writes them). Without one `slo` begins with
    the shipped one that is nearest to this host's GPUs, and corrects it by what it sees."""
    profile_anyway: bool = False
    """Take a profile that `dynamo profile` measured of other engines, GPUs or versions than these."""
