"""The workers that a planner moves, counted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Pool:
    """The workers of one component, counted.

    `ready` serve. `coming` will serve without anybody asking again: some start or are called back, and of these
    others are `waiting`: for GPUs, or for the end of a back-off. `deferred` of the waiting ones (0 or 1) were
    only decided by the planner: the step is carried out when another worker's GPU is really free.
    `leaving` still drain, of these `cancellable` can be taken back and `routed` are not yet out of routing.

    `gpus_held` are all that its processes hold, those of leaving ones (`gpus_leaving`) included; `gpus_lacking` are
    those that waiting workers (not the deferred one) have not got yet and will take. `added_at_s` is when the last of
    those that serve became ready or had its drain taken back (None: none serves). `coming_since_s` and
    `leaving_since_s` are when the first of those that are on their way, or leave, entered its present state (None: no
    such worker). `start_up_s` and `drain_s` are what the last starts and drains really took, in the median; before the
    first of this run, what starts took in earlier ones on this host (None: nobody knows).

    What is quicker than a start: `flippable` of its ready workers could take over the role of the other component now,
    `asleep` could be woken (none of those that are only started to sleep); 0 also where the planner may not have that
    done. `leads` are what each way to one more worker has taken, in the median, by its rung
    (`core.lead_times.Rung`); what was never measured is not in it.
    """

    component: str
    gpus_per_worker: int
    ready: int
    coming: int = 0
    waiting: int = 0
    deferred: int = 0
    leaving: int = 0
    cancellable: int = 0
    routed: int = 0
    gpus_held: int = 0
    gpus_leaving: int = 0
    gpus_lacking: int = 0
    added_at_s: float | None = None
    coming_since_s: float | None = None
    leaving_since_s: float | None = None
    start_up_s: float | None = None
    drain_s: float | None = None
    flippable: int = 0
    asleep: int = 0
    leads: Mapping[str, float] = field(default_factory=dict, hash=False)

    @property
    def capacity(self) -> int:
        """Workers that serve or will: what a step is counted from (lesson 16)."""
        return self.ready + self.coming

    @property
    def adjusting(self) -> bool:
        """A worker starts or is called back, or a drain is not yet out of routing (rule 2)."""
        return self.coming > self.waiting or self.routed > 0

    @property
    def gpus_spoken_for(self) -> int:
        """Held, or needed by a worker that waits: what counts against the budget."""
        return self.gpus_held + self.gpus_lacking


@dataclass(frozen=True, slots=True)
class WorkerPools:
    """Both components that a planner moves. `prefill` is None in an aggregated graph.

    `pending`: another environment has yet to acknowledge a decision.
    """

    prefill: Pool | None
    decode: Pool
    pending: bool = False

    @property
    def all(self) -> tuple[Pool, ...]:
        """Prefill first, where there is one."""
        return (self.decode,) if self.prefill is None else (self.prefill, self.decode)

    @property
    def by_role(self) -> dict[str, Pool]:
        """As plugins name the components: "prefill", where there is one, and "decode" (of an aggregated graph too)."""
        prefill = {} if self.prefill is None else {"prefill": self.prefill}
        return {**prefill, "decode": self.decode}

    @property
    def adjusting(self) -> bool:
        """Whether an adjustment is under way, by the planner or a person."""
        return self.pending or any(pool.adjusting for pool in self.all)

    @property
    def gpus_spoken_for(self) -> int:
        """What counts against `max_gpu_budget`."""
        return sum(pool.gpus_spoken_for for pool in self.all)
