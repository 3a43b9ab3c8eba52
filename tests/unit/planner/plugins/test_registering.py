"""Tests who may register, and the reason of a refusal: Dynamo's words, in Dynamo's order."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dynamo_local.planner.plugins.registration import (
    Endpoint,
    Registering,
    Rules,
    endpoint_of,
    malformed,
    reject_reason,
    spec_of,
)
from dynamo_local.planner.stages import HoldPolicy, PluginSpec, Stage

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
