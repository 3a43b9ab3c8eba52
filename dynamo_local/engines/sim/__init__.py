"""The simulated engine: real scheduling and KV bookkeeping, computed tokens, modelled time. See docs/sim-engine.md."""

from __future__ import annotations

from dynamo_local.engines.sim.engine import SimEngine
from dynamo_local.engines.sim.options import SimOptions
from dynamo_local.engines.sim.scheduling.scheduler import SimScheduler
from dynamo_local.engines.sim.tokens import expected_output, expected_output_length, expected_tokens
from dynamo_local.engines.sim.transport import InMemoryTransport, KvTransport, LoopbackTransport
from dynamo_local.profiles import FixedModel, PerfModel, ProfileModel

__all__ = [
    "FixedModel",
    "InMemoryTransport",
    "KvTransport",
    "LoopbackTransport",
    "PerfModel",
    "ProfileModel",
    "SimEngine",
    "SimOptions",
    "SimScheduler",
    "expected_output",
    "expected_output_length",
    "expected_tokens",
]
