"""The options of one simulated run, as a value."""

from __future__ import annotations

from dataclasses import dataclass, field

from dynamo_local.core.lead_times import OptionKind
from dynamo_local.core.routing.disagg import DisaggSettings
from dynamo_local.core.routing.estimates import DisaggPolicy, Targets
from dynamo_local.core.traffic import MAX_INFLIGHT, MAX_NUM_WAITING, REQUEST_TIMEOUT_S
from dynamo_local.core.types import Actuator, Role
from dynamo_local.engines.sim.options import SimOptions
from dynamo_local.errors import ConfigError
from dynamo_local.simulator.trace import HASH_BLOCK_TOKENS

NAMESPACE = "dynamo"
PREFILL = "PrefillWorker"
DECODE = "VllmWorker"

DISAGG = DisaggSettings(max_local_prefill_length=10, max_prefill_queue_size=2)

NO_TARGETS = Targets()

LONG_AGO_S = -1e9
"""Since when what there is at the beginning has been there: no grace period protects it."""
GPU_MEMORY_BYTES = 80 * 1024**3
"""Memory of each device. It limits which workers fit beside a sleeping one."""
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
class LeadOptions:
    """From the decision until the worker serves, by the way it comes about (`core.lead_times.OptionKind`); seconds."""

    flip_s: float = 0.5
    wake_s: float = 3.0
    spare_s: float = 8.0
    cold_s: float = START_UP_S
    sleep_s: float = 0.5
    """Time from the last stream until the engine has released its GPU."""


@dataclass(frozen=True, slots=True)
class SimulationOptions:
    """The host and the graph. Defaults are those of `examples/llm/configs/disagg.yaml` and of the components.

    `spares`: the number of prewarmed processes. A start from one takes `leads.spare_s`. The next is ready a cold start
    later. Without `leads`, a cold start takes `start_up_s`, and `LeadOptions` has the other lead times.
    `flips`: prefill and decode workers can change roles. `standby`: how many prefill and decode workers sleep beside
    the serving ones, from the beginning, as far as there are GPUs. None: no worker can sleep.
    `coalesce=False` makes every pass an event of its own. Tests compare with this slow form.
    Raises `ConfigError` for an impossible shape.
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
    """The targets by which `slo` decides. `Slo` holds the targets for the verdict."""
    prefill_timeout_s: float = 15.0
    max_inflight: int = MAX_INFLIGHT
    max_num_waiting: int = MAX_NUM_WAITING
    request_timeout_s: float = REQUEST_TIMEOUT_S
    max_tries: int = 3
    drain_deadline_s: float = 600.0
    coalesce: bool = True
    spares: int = 0
    leads: LeadOptions | None = None
    flips: bool = False
    standby: FleetShape | None = None

    def __post_init__(self) -> None:
        needed = self.shape.prefill * self.prefill_gpus + self.shape.decode * self.decode_gpus
        if self.shape.decode < 1 or self.shape.prefill < 0:
            raise ConfigError(f"a fleet of {self.shape} cannot serve: it needs one decode worker or more")
        if needed > self.gpus:
            raise ConfigError(f"a fleet of {self.shape} needs {needed} GPUs, and there are {self.gpus}")
        if self.flips and self.shape.prefill and self.prefill_gpus != self.decode_gpus:
            raise ConfigError(
                f"workers of {self.prefill_gpus} and of {self.decode_gpus} GPUs cannot take over each other's role"
            )
        if HASH_BLOCK_TOKENS % self.sim.block_size:
            raise ConfigError(
                f"block_size {self.sim.block_size} does not divide {HASH_BLOCK_TOKENS}, the tokens of one id in a trace"
            )

    @property
    def lead(self) -> LeadOptions:
        """The leads of this run."""
        return self.leads if self.leads is not None else LeadOptions(cold_s=self.start_up_s)

    def start_up_known_s(self, component: str) -> float:
        """Start-up times, as a host has them after some starts."""
        return self.lead.spare_s if self.spares else self.lead.cold_s

    def medians(self, component: str) -> dict[str, float]:
        """Scaling option -> lead time, in the form of `LeadTimes.medians`."""
        lead, actuators = self.lead, self.actuators
        flip = OptionKind.FLIP_TO_PREFILL if component == PREFILL else OptionKind.FLIP_TO_DECODE
        flips = {flip: lead.flip_s} if Actuator.FLIP in actuators else {}
        wakes = {OptionKind.WAKE_1: lead.wake_s} if Actuator.WAKE in actuators else {}
        spares = {OptionKind.PREWARMED: lead.spare_s} if self.spares else {}
        options = {**flips, **wakes, **spares, OptionKind.COLD: lead.cold_s}
        return {str(option): seconds for option, seconds in options.items()}

    @property
    def actuators(self) -> frozenset[Actuator]:
        """The scaling options that a planner's targets may use."""
        flips = {Actuator.FLIP} if self.flips and self.shape.prefill else set()
        return frozenset(flips) if self.standby is None else frozenset({*flips, Actuator.WAKE})

    @property
    def decode_role(self) -> Role:
        """The role of the workers that decode."""
        return Role.DECODE if self.shape.prefill else Role.AGGREGATED
