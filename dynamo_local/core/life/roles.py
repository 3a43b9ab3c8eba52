"""What each role means for leaving and for planners, in one table. A new role is one more row."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from dynamo_local.core.types import Role


class LeaveBy(enum.StrEnum):
    """The sign by which a worker is asked to leave. Either way it deregisters first, if it has not yet."""

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
