"""The table of roles: each role has its row, and the whole run leaves through all of them."""

from __future__ import annotations

from dynamo_local.core.fleet.states import ROLES, STAGES
from dynamo_local.core.types import Role


def test_every_role_has_its_row() -> None:
    """A role without one would be a KeyError at its first drain."""
    assert set(ROLES) == set(Role)


def test_a_run_leaves_role_by_role_and_none_is_forgotten() -> None:
    """A role in no stage would be ended by nobody, and `down` would be done before it."""
    assert sorted(role for stage in STAGES for role in stage) == sorted(Role)
    assert (STAGES[0], STAGES[-1]) == ({Role.FRONTEND}, {Role.PREFILL})
