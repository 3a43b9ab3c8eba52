"""Back-off, fault, or wait: the restart policy on a clock that is an argument."""

from __future__ import annotations

import pytest

from dynamo_local.core.fleet.backoff import (
    BackOff,
    Fault,
    RestartHistory,
    RestartPolicy,
    Verdict,
    WaitForInfra,
    after_exit,
    back_after_outage_s,
    forgive,
)

NEW = RestartHistory()
PATIENT = RestartPolicy(failures_max=1000)


def fail(
    history: RestartHistory,
    now_s: float,
    *,
    ran_s: float = 0.0,
    infra_ok: bool = True,
    unit: float = 0.0,
    policy: RestartPolicy = PATIENT,
) -> tuple[RestartHistory, Verdict]:
    """One unasked exit."""
    return after_exit(
        history, now_s=now_s, ran_s=ran_s, infra_ok=infra_ok, unit=unit, why="exited with code 1", policy=policy
    )


def test_delays_double_up_to_a_minute() -> None:
    history, delays = NEW, []
    for now_s in range(8):
        history, verdict = fail(history, now_s)
        assert isinstance(verdict, BackOff)
        delays.append(verdict.delay_s)
    assert delays == [1, 2, 4, 8, 16, 32, 48, 48]
    assert RestartPolicy().delay_s(7, 1.0) == 60.0


def test_jitter_spreads_every_delay() -> None:
    policy = RestartPolicy()
    for streak in (0, 3, 6, 100, 10_000):
        low_s, high_s = policy.delay_s(streak, 0.0), policy.delay_s(streak, 1.0)
        assert high_s == pytest.approx(low_s * 1.25)
        assert low_s < policy.delay_s(streak, 0.5) < high_s


def test_a_good_run_resets_the_delay_and_a_short_one_does_not() -> None:
    history, _ = fail(NEW, 0.0)
    history, _ = fail(history, 10.0)
    assert fail(history, 100.0, ran_s=59.9)[1] == BackOff(4.0)
    assert fail(history, 100.0, ran_s=60.0)[1] == BackOff(1.0)


def test_failures_in_a_window_are_a_fault() -> None:
    history = NEW
    for now_s in (0.0, 10.0, 20.0, 30.0):
        history, verdict = fail(history, now_s, policy=RestartPolicy())
        assert isinstance(verdict, BackOff)
    _, verdict = fail(history, 599.0, policy=RestartPolicy())
    assert verdict == Fault("5 failures within 600 s, the last: exited with code 1")


def test_failures_leave_the_window() -> None:
    history = NEW
    for now_s in (0.0, 150.0, 300.0, 450.0, 601.0):
        history, verdict = fail(history, now_s, policy=RestartPolicy())
        assert isinstance(verdict, BackOff)
    assert history.failures_s == (150.0, 300.0, 450.0, 601.0)


def test_a_worker_that_runs_well_and_dies_again_and_again_is_faulted() -> None:
    history = NEW
    for now_s in (120.0, 240.0, 360.0, 480.0):
        history, verdict = fail(history, now_s, ran_s=119.0, policy=RestartPolicy())
        assert verdict == BackOff(1.0)
    assert isinstance(fail(history, 600.0, ran_s=119.0, policy=RestartPolicy())[1], Fault)


def test_failures_without_etcd_or_nats_do_not_count() -> None:
    history = NEW
    for now_s in range(100):
        history, verdict = fail(history, now_s, infra_ok=False, policy=RestartPolicy())
        assert verdict == WaitForInfra(1.0)
    assert history == NEW


def test_workers_that_died_with_the_servers_come_back_spread() -> None:
    back_s = [back_after_outage_s(unit, PATIENT) for unit in (0.0, 0.25, 0.5, 1.0)]
    assert back_s == [1.0, 2.25, 3.5, 6.0]
    assert fail(NEW, 0.0, infra_ok=False, unit=0.5)[1] == WaitForInfra(3.5)


def test_a_good_run_before_an_outage_still_resets_the_delay() -> None:
    history, _ = fail(NEW, 0.0)
    history, _ = fail(history, 100.0, ran_s=90.0, infra_ok=False)
    assert fail(history, 101.0)[1] == BackOff(1.0)


def test_failures_are_forgiven_when_an_outage_is_noticed_late() -> None:
    """The first to die of it is seen before it."""
    history, _ = fail(NEW, 1.0)
    history, _ = fail(history, 100.0)
    assert forgive(history, since_s=100.0) == RestartHistory((1.0,), 1), "counted at that moment"
    assert forgive(history, since_s=99.0) == RestartHistory((1.0,), 1)
    assert forgive(history, since_s=200.0) == history
    assert forgive(RestartHistory((1.0,), 0), since_s=0.0) == NEW


def test_one_failure_may_be_enough() -> None:
    _, verdict = fail(NEW, 0.0, policy=RestartPolicy(failures_max=1))
    assert verdict == Fault("1 failure within 600 s, the last: exited with code 1")


def test_a_policy_without_growth_keeps_its_delay() -> None:
    assert RestartPolicy(factor=1.0).delay_s(10_000, 0.0) == 1.0
    assert RestartPolicy(first_s=5.0, max_s=5.0).delay_s(3, 1.0) == 5.0


@pytest.mark.parametrize(
    "wrong",
    [
        {"first_s": 0.0},
        {"first_s": 61.0},
        {"factor": 0.5},
        {"jitter": -1.0},
        {"window_s": 0.0},
        {"failures_max": 0},
        {"ran_well_s": -1.0},
    ],
)
def test_a_policy_that_makes_no_sense_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"needed|must be"):
        RestartPolicy(**wrong)  # type: ignore[arg-type]


def test_a_unit_is_a_fraction() -> None:
    with pytest.raises(ValueError, match="fraction"):
        RestartPolicy().delay_s(0, 1.5)
