"""How each role leaves, what is left, how long it may take, and when a worker may exit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dynamo_local.core.fleet.draining import Left, cut_streams, eta_s, exit_in_s, how, leave_deadline_s, left
from dynamo_local.core.fleet.states import LeaveBy
from dynamo_local.core.types import Load, Missing, Role
from tests.fakes.arbiter.fleet_views import NO_LOAD, load


@pytest.mark.parametrize(
    ("role", "expected"),
    [
        (Role.PREFILL, LeaveBy.SIGTERM),
        (Role.FRONTEND, LeaveBy.SIGTERM),
        (Role.DECODE, LeaveBy.REVOKE_LEASE),
        (Role.AGGREGATED, LeaveBy.REVOKE_LEASE),
        (Role.OTHER, LeaveBy.REVOKE_LEASE),
    ],
)
def test_each_role_leaves_by_its_sign(role: Role, expected: LeaveBy) -> None:
    assert how(role) is expected
    assert how(role, registered=False) is LeaveBy.SIGTERM
    assert how(role, etcd_ok=False) is LeaveBy.SIGTERM


def test_a_worker_that_never_served_gets_less_time() -> None:
    """Nothing is cut by ending it; one that has served keeps its whole deadline."""
    assert leave_deadline_s(600.0, served=True) == 600.0
    assert leave_deadline_s(600.0, served=False) == 10.0
    assert leave_deadline_s(3.0, served=False) == 3.0


def test_what_a_deadline_cuts_is_counted_or_unknown() -> None:
    """Unknown is not none."""
    assert cut_streams(load(5, active=2, waiting=1)) == 3
    assert cut_streams(NO_LOAD) is NO_LOAD


def test_the_time_left_is_that_of_streams_side_by_side() -> None:
    """Four streams with 400 tokens between them at 20 ms a token: 2 s; at most 8 s, if one has them all."""
    assert eta_s(load(400, active=4, itl_ms=20.0)) == pytest.approx(2.0)
    assert left(load(400, active=4, itl_ms=20.0)) == Left(4, 0, 400, 2.0, 8.0)


def test_nothing_left_takes_no_time() -> None:
    assert eta_s(load(0, itl_ms=None)) == 0.0
    assert str(left(load(0))) == "nothing left"


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (NO_LOAD, "no answer"),
        (load(10, active=1, itl_ms=None), "no inter-token latency yet"),
        (load(0, waiting=2), "2 requests wait and none runs"),
        (replace(load(0, active=5), unread=5), "no client reads 5 of the answers"),
    ],
)
def test_an_estimate_that_cannot_be_made_is_missing(given: Load | Missing, why: str) -> None:
    assert eta_s(given) == Missing(why)


def test_what_is_left_reads_as_a_line() -> None:
    """`dynamo status` shows it; requests that wait make it a lower bound."""
    assert str(left(load(400, active=4, itl_ms=20.0))) == "4 in flight, about 2.0 s"
    assert str(left(load(400, active=4, itl_ms=20.0, waiting=2))) == "4 in flight, 2 waiting, at least 2.0 s"
    assert str(left(load(4, active=1, itl_ms=None))) == "1 in flight, no estimate (no inter-token latency yet)"
    assert left(NO_LOAD) is NO_LOAD


def test_a_worker_stays_for_who_picked_it_as_it_left() -> None:
    """Quiet since it deregistered and since the last arrival, and nothing in flight."""

    def wait(now_s: float, last_arrival_s: float | None, in_flight: int = 0) -> float | None:
        return exit_in_s(
            now_s=now_s, deregistered_s=10.0, last_arrival_s=last_arrival_s, in_flight=in_flight, quiet_s=0.25
        )

    assert wait(10.0, None) == pytest.approx(0.25)
    assert wait(10.25, None) == 0.0
    assert wait(10.25, 5.0) == 0.0
    assert wait(10.25, 10.05) == pytest.approx(0.05)
    assert wait(99.0, None, in_flight=1) is None
