"""States of a worker, and what each means, in one table. A new state is one more row.

Everything else that asks "does it serve?", "is there a process?", "how is it shown?" reads this table: the machine, the
planner, `dynamo status`, `--wait`, the metrics, adoption.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from dynamo_local.core.types import Role
from dynamo_local.core.types import WorkerState as S


class HasProcess(enum.Enum):
    """Whether a worker in a state has a process."""

    NO = "no"
    YES = "yes"
    """There is one, or there will be in a moment: it is being made."""
    ENDING = "ending"
    """It is being ended, or has ended."""


@dataclass(frozen=True, slots=True)
class Traits:
    """One row.

    `serves`: requests are sent to it. `comes_up`: it will serve without anybody asking again. `registers`: it may put
    its keys into etcd, and their removal means that it leaves. `leaves`: it serves no more, unless it is called back or
    was drained only to be restarted. `killed`: its session was ended by SIGKILL, so only the end of its process is
    waited for. `failed`: its process ended unasked, or did not become ready in time. `waits`: it starts as soon as it
    has its GPUs. `take_back` orders those that do not serve when fewer workers are wanted: the lowest goes first (None:
    it serves, or there is nothing to take back). `drain_outcome` is how a drain that ends in this state is counted
    (None: a drain does not end in it). `standby`: its engine is, was or will be asleep: no request is sent to it.
    `asleep`: its engine is, so that it holds no GPU, only what its process keeps there. `colour` is for tables.
    """

    process: HasProcess
    serves: bool = False
    comes_up: bool = False
    registers: bool = False
    leaves: bool = False
    killed: bool = False
    failed: bool = False
    waits: bool = False
    take_back: int | None = None
    drain_outcome: str | None = None
    standby: bool = False
    asleep: bool = False
    colour: str = "red"

    @property
    def runs(self) -> bool:
        """It has a process that is not being ended for a failure."""
        return self.process is HasProcess.YES

    @property
    def drains(self) -> bool:
        """It finishes what it has, in its own time."""
        return self.leaves and self.runs and not self.killed

    @property
    def gone(self) -> bool:
        """It has left, and nothing of it runs."""
        return self.leaves and self.process is HasProcess.NO


TRAITS: dict[S, Traits] = {
    # `take_back`: a failed worker is the least likely to serve soon. Next comes one without a process, then one with
    # one. Last comes one that still finishes streams and is to be restarted or called back: its process is warm.
    S.PENDING: Traits(HasProcess.NO, comes_up=True, waits=True, take_back=1, colour="yellow"),
    S.STARTING: Traits(HasProcess.YES, comes_up=True, registers=True, take_back=2, colour="yellow"),
    S.READY: Traits(HasProcess.YES, serves=True, registers=True, drain_outcome="taken_back", colour="green"),
    S.DRAINING: Traits(HasProcess.YES, registers=True, leaves=True, take_back=4, colour="cyan"),
    S.DRAIN_TIMED_OUT: Traits(HasProcess.YES, leaves=True, killed=True, take_back=3, drain_outcome="timed_out"),
    S.EXITED: Traits(HasProcess.NO, leaves=True, take_back=3, drain_outcome="finished", colour="bright_black"),
    S.CRASHED: Traits(HasProcess.ENDING, comes_up=True, killed=True, failed=True, take_back=0, drain_outcome="failed"),
    S.START_TIMED_OUT: Traits(HasProcess.ENDING, comes_up=True, killed=True, failed=True, take_back=0),
    S.BACKING_OFF: Traits(HasProcess.NO, comes_up=True, failed=True, waits=True, take_back=0, colour="yellow"),
    S.FAULTED: Traits(HasProcess.NO, failed=True),
    # It serves on in the one role or the other, and counts for `Worker.target_component`.
    S.FLIPPING: Traits(HasProcess.YES, comes_up=True, registers=True, colour="magenta"),
    S.FALLING_ASLEEP: Traits(HasProcess.YES, standby=True, take_back=4, colour="blue"),
    S.SLEEPING: Traits(HasProcess.YES, standby=True, asleep=True, take_back=2, colour="blue"),
    S.WAKING: Traits(HasProcess.YES, standby=True, comes_up=True, take_back=3, colour="yellow"),
}
BY_NAME = {str(state): traits for state, traits in TRAITS.items()}
UNKNOWN = Traits(HasProcess.YES)
"""A state that this version does not know, such as in the answer of a newer arbiter: nothing is concluded from it."""


def traits_of(state: str) -> Traits:
    """Those of a state's name, as in `dynamo status --json`."""
    return BY_NAME.get(state, UNKNOWN)


def states_with(trait: str) -> frozenset[S]:
    """The states that have the trait of that name: `states_with("leaves")`. AttributeError for an unknown one."""
    return frozenset(state for state, traits in TRAITS.items() if getattr(traits, trait))


# --- roles
# Roles, and what each means for leaving and for planners, in one table. A new role is one more row.


class LeaveBy(enum.StrEnum):
    """The signal by which a worker is asked to leave. Either way it deregisters first, if it has not yet."""

    SIGTERM = "sigterm"
    REVOKE_LEASE = "revoke_lease"


@dataclass(frozen=True, slots=True)
class RoleTraits:
    """One row.

    `stage` is when a worker of that role leaves as the whole run leaves: the lowest first, each when nothing of the one
    before runs. `leave_by` is its sign. `computes`: it holds an engine, so a planner counts its GPUs, and must know its
    load. `one_port`: it listens where clients look for it, so that a component has one worker,
    unless its class says that they share the port.
    """

    stage: int
    leave_by: LeaveBy = LeaveBy.REVOKE_LEASE
    computes: bool = False
    one_port: bool = False


ROLES: dict[Role, RoleTraits] = {
    # Frontends first (they stop accepting and finish), then everything that decodes, then the prefill workers that the
    # decode workers may still be waiting for. A frontend turns its own `/health` to 503 and a prefill worker pulls from
    # a queue: both need a sign that routing does not give. All others leave routing with their lease.
    Role.FRONTEND: RoleTraits(0, LeaveBy.SIGTERM, one_port=True),
    Role.DECODE: RoleTraits(1, computes=True),
    Role.AGGREGATED: RoleTraits(1, computes=True),
    Role.OTHER: RoleTraits(1),
    Role.PREFILL: RoleTraits(2, LeaveBy.SIGTERM, computes=True),
}

STAGES: tuple[frozenset[Role], ...] = tuple(
    frozenset(role for role, traits in ROLES.items() if traits.stage == stage)
    for stage in sorted({traits.stage for traits in ROLES.values()})
)
"""In which a run leaves: roles that leave together, the first first."""
