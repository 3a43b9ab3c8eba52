"""What one simulated run is made of, as a value."""

from __future__ import annotations

from dataclasses import dataclass, field

from dynamo_local.core.admission import MAX_INFLIGHT, MAX_NUM_WAITING, REQUEST_TIMEOUT_S
from dynamo_local.core.disagg import DisaggSettings
from dynamo_local.core.dispatch.targets import DisaggPolicy, Targets
from dynamo_local.core.types import Role
from dynamo_local.engines.sim.options import SimOptions
from dynamo_local.errors import ConfigError
from dynamo_local.twin.trace import HASH_BLOCK_TOKENS

NAMESPACE = "dynamo"
PREFILL = "PrefillWorker"
DECODE = "VllmWorker"

DISAGG = DisaggSettings(max_local_prefill_length=10, max_prefill_queue_size=2)

NO_TARGETS = Targets()

START_UP_S = 30.0
"""From the decision to a worker that serves, unless said otherwise."""


@dataclass(frozen=True, slots=True)
class FleetShape:
    """How many workers of each role. `prefill` 0: an aggregated graph, whose workers do both."""

    prefill: int
    decode: int

    def __str__(self) -> str:
        return f"{self.prefill}P{self.decode}D" if self.prefill else f"{self.decode} aggregated"


@dataclass(frozen=True, slots=True)
class Slo:
    """Targets, None: none. `itl_ms` holds for the mean of a request's own gaps between tokens."""

    ttft_ms: float | None = None
    itl_ms: float | None = None


@dataclass(frozen=True, slots=True)
class TwinOptions:
    """The host and the graph. Defaults are those of `examples/llm/configs/disagg.yaml` and of the components.

    `coalesce=False` runs every pass as an event of its own: the slow form that tests compare with.
    Raises `ConfigError` for a shape that cannot be.
    """

    shape: FleetShape = FleetShape(1, 1)
    sim: SimOptions = field(default_factory=SimOptions)
    gpus: int = 8
    prefill_gpus: int = 1
    decode_gpus: int = 1
    start_up_s: float = START_UP_S
    disagg: DisaggSettings = DISAGG
    conditional: bool = True
    disagg_policy: DisaggPolicy = "threshold"
    targets: Targets = NO_TARGETS
    """What `slo` decides by; what is judged by is `Slo`."""
    prefill_timeout_s: float = 15.0
    max_inflight: int = MAX_INFLIGHT
    max_num_waiting: int = MAX_NUM_WAITING
    request_timeout_s: float = REQUEST_TIMEOUT_S
    max_tries: int = 3
    drain_deadline_s: float = 600.0
    coalesce: bool = True

    def __post_init__(self) -> None:
        needed = self.shape.prefill * self.prefill_gpus + self.shape.decode * self.decode_gpus
        if self.shape.decode < 1 or self.shape.prefill < 0:
            raise ConfigError(f"a fleet of {self.shape} cannot serve: it needs one decode worker or more")
        if needed > self.gpus:
            raise ConfigError(f"a fleet of {self.shape} needs {needed} GPUs, and there are {self.gpus}")
        if HASH_BLOCK_TOKENS % self.sim.block_size:
            raise ConfigError(
                f"block_size {self.sim.block_size} does not divide {HASH_BLOCK_TOKENS}, the tokens of one id in a trace"
            )

    @property
    def decode_role(self) -> Role:
        """The role of the workers that decode."""
        return Role.DECODE if self.shape.prefill else Role.AGGREGATED
