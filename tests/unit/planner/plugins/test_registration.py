"""Registration of plugins: refusals in Dynamo's words and order, circuits, and when each plugin is due."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dynamo_local.planner.plugins import registration as scheduling
from dynamo_local.planner.plugins.registration import (
    Endpoint,
    Registering,
    Rules,
    Turn,
    endpoint_of,
    malformed,
    reject_reason,
    spec_of,
)
from dynamo_local.planner.stages import Answer, HoldPolicy, Nothing, PluginSpec, Predicted, Stage
from dynamo_local.planner.values import Accept, ComponentTarget, Override, Prediction, Reject

GOOD = Registering("mine", "propose", priority=5, endpoint="unix:///run/p.sock", protocol_version="1.0", hold_policy=1)
RULES = Rules(scale_interval_s=5.0)


def reason(said: Registering, *, rules: Rules = RULES, authenticated: bool = True) -> str | None:
    """Where a plugin called `taken` is already there."""
    return reject_reason(said, rules, authenticated=authenticated, known={"taken"})


def test_a_good_one_is_taken() -> None:
    assert malformed(GOOD) is None
    assert reason(GOOD) is None
    assert spec_of(GOOD) == PluginSpec("mine", Stage.PROPOSE, 5, hold_policy=HoldPolicy.HOLD_LAST)


FAULTS = [
    ("auth_failed", {}),
    ("protocol_version_malformed", {"protocol_version": "one"}),
    ("observation_window_misaligned", {"observation_window_seconds": 7.0}),
    ("duplicate_plugin_id", {"plugin_id": "taken"}),
    ("endpoint_rejected", {"endpoint": "inproc://mine"}),
]


@pytest.mark.parametrize("first", range(len(FAULTS)))
def test_of_several_faults_the_first_is_told(first: int) -> None:
    wrong = GOOD
    for _, change in FAULTS[first:]:
        wrong = replace(wrong, **change)
    found = reason(wrong, authenticated=first > 0)
    assert found is not None
    assert found.partition(":")[0] == FAULTS[first][0]


@pytest.mark.parametrize(
    ("version", "code"),
    [
        ("1.0", None),
        ("1", None),
        ("1.10", None),
        ("1.11", "protocol_version_unsupported"),
        ("0.9", "protocol_version_unsupported"),
        ("2.0", "protocol_version_unsupported"),
        ("", "protocol_version_malformed"),
        ("v1", "protocol_version_malformed"),
        ("1.0.0.0.0", "protocol_version_malformed"),
        ("9" * 5000, "protocol_version_malformed"),
    ],
)
def test_versions_are_compared_as_numbers(version: str, code: str | None) -> None:
    found = reason(replace(GOOD, protocol_version=version), rules=Rules(protocol_version_max="1.10"))
    assert (None if found is None else found.partition(":")[0]) == code


@pytest.mark.parametrize(
    ("window", "fits"), [(0.0, True), (5.0, True), (180.0, True), (7.0, False), (-5.0, False), (2.5, False)]
)
def test_a_window_is_a_multiple_of_the_scale_interval(window: float, fits: bool) -> None:
    assert (reason(replace(GOOD, observation_window_seconds=window)) is None) == fits


def test_without_a_scale_interval_any_window_fits() -> None:
    assert reason(replace(GOOD, observation_window_seconds=7.0), rules=Rules()) is None


@pytest.mark.parametrize(
    ("endpoint", "found"),
    [
        ("unix:///run/p.sock", Endpoint("unix", "unix:/run/p.sock")),
        ("unix:/run/p.sock", Endpoint("unix", "unix:/run/p.sock")),
        ("grpc://127.0.0.1:9000", Endpoint("grpc", "127.0.0.1:9000")),
        ("grpc://[::1]:9000", Endpoint("grpc", "[::1]:9000")),
    ],
)
def test_endpoints_are_sockets_and_ports(endpoint: str, found: Endpoint) -> None:
    assert endpoint_of(endpoint, Rules(allow_insecure_grpc=True)) == found


@pytest.mark.parametrize(
    "endpoint",
    [
        "",
        "unix:relative.sock",
        "unix:///" + "x" * 200,
        "unix:///a\nb",
        "http://127.0.0.1:9000",
        "127.0.0.1:9000",
        "grpc://127.0.0.1",
        "grpc://127.0.0.1:99999",
        "grpc://a/b:1",
        "dns:///somewhere:80",
        "xds:///x",
    ],
)
def test_other_endpoints_are_refused(endpoint: str) -> None:
    """gRPC itself would resolve some of them."""
    found = reason(replace(GOOD, endpoint=endpoint), rules=Rules(allow_insecure_grpc=True))
    assert (found or "").partition(":")[0] == "transport_build_failed"


def test_a_port_wants_allow_insecure_grpc() -> None:
    found = reason(replace(GOOD, endpoint="grpc://127.0.0.1:9000"))
    assert found is not None
    assert found.startswith("transport_build_failed: ")
    assert "allow_insecure_grpc" in found


@pytest.mark.parametrize(
    "change",
    [
        {"plugin_type": "observe"},
        {"plugin_type": ""},
        {"plugin_id": ""},
        {"plugin_id": "two words"},
        {"plugin_id": "x" * 129},
        {"plugin_id": "line\nbreak"},
        {"hold_policy": 7},
        {"execution_interval_seconds": float("nan")},
        {"execution_interval_seconds": -1.0},
        {"execution_interval_seconds": float("inf")},
        {"observation_window_seconds": float("nan")},
        {"needs": ("observations.traffic",) * 33},
        {"requires_produced_fields": ("__class__",)},
    ],
)
def test_what_makes_no_sense_is_malformed(change: dict[str, object]) -> None:
    assert malformed(replace(GOOD, **change)) is not None


# --- circuit
# The circuit breaker: five errors in a row, thirty seconds of peace, one probe.


# --- scheduling
# When a plugin is due, and what stands in between.

EVERY_TICK = PluginSpec("a", Stage.PROPOSE)
MINUTE = PluginSpec("a", Stage.PROPOSE, interval_s=60.0)
HOLDS = PluginSpec("a", Stage.PROPOSE, interval_s=60.0, hold_policy=HoldPolicy.HOLD_LAST)
SEVEN = Override((ComponentTarget("decode", 7),), final=True)


def test_it_fires_first_one_whole_interval_after_its_registration() -> None:
    turn = scheduling.registered(100.0, 0.0, 0.0)
    assert next(now for now in range(100, 200, 10) if scheduling.is_due(turn, MINUTE, now)) == 160
    assert scheduling.is_due(turn, EVERY_TICK, 100.0)


def test_plugins_that_come_shortly_after_each_other_are_due_together() -> None:
    anchors = {scheduling.registered(now, 1000.3, 5.0).anchor_s for now in (1010.4, 1012.0, 1015.2)}
    assert sorted(anchors) == [pytest.approx(1010.3)] * len(anchors)


def test_a_tick_that_comes_a_little_early_counts() -> None:
    """Timers do not fire to the microsecond; a plugin of one minute must not be asked every 65 s."""
    assert scheduling.is_due(Turn(0.0), MINUTE, 59.99)
    assert not scheduling.is_due(Turn(0.0), MINUTE, 55.0)


def test_an_answer_moves_the_anchor_and_a_skipped_tick_does_not() -> None:
    turn = scheduling.answered(Turn(0.0), MINUTE, Accept(), 75.0)
    assert turn.anchor_s == 75.0
    assert not scheduling.is_due(turn, MINUTE, 130.0)
    assert scheduling.is_due(turn, MINUTE, 135.0)
    assert scheduling.lag_s(turn, MINUTE, 141.0) == pytest.approx(6.0)


def test_hold_last_repeats_the_override_without_its_final() -> None:
    held = scheduling.answered(Turn(0.0), HOLDS, SEVEN, 60.0).held
    assert held == Override(SEVEN.targets)
    assert scheduling.answered(Turn(0.0), MINUTE, SEVEN, 60.0).held is None


def test_hold_last_repeats_a_prediction() -> None:
    said = Predicted(Prediction(num_req=1.0), final=True)
    assert scheduling.answered(Turn(0.0), HOLDS, said, 60.0).held == Predicted(Prediction(num_req=1.0))
    assert scheduling.answered(Turn(0.0), HOLDS, Predicted(), 60.0).held is None


@pytest.mark.parametrize("answer", [Accept(), Reject("no"), Nothing()])
def test_an_override_is_not_revived_after_a_later_answer(answer: Answer) -> None:
    """Dynamo 1.6.1 keeps it: seven, hold, seven, hold."""
    turn = scheduling.answered(Turn(0.0), HOLDS, SEVEN, 60.0)
    assert scheduling.answered(turn, HOLDS, answer, 120.0).held is None


def test_what_is_forgotten_does_not_stand_and_its_turn_does_not_move() -> None:
    turn = scheduling.forgotten(scheduling.answered(Turn(0.0), HOLDS, SEVEN, 60.0))
    assert turn == Turn(60.0)
