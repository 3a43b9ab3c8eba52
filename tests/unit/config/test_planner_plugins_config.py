"""`scheduling` and `plugin_registration`: Dynamo's names and defaults, unknown fields refused, no secret in them."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from dynamo_local.config.planner import PluginRegistrationConfig, SchedulingConfig, check_plugins
from dynamo_local.config.planner_section import planner_section
from dynamo_local.errors import ConfigError

PLUGIN = {"plugin_id": "mine", "plugin_type": "propose", "endpoint": "unix:///run/p.sock"}
ON_A_PORT = {"gateway": {"enabled": True, "listen": "127.0.0.1:7777", "allow_insecure": True}}
SECRET = {"auth": {"trusted_sources": ["static_secret"], "static_secrets": {"file:/run/token": "team"}}}


def test_the_defaults_are_dynamos() -> None:
    scheduling, registration = SchedulingConfig(), PluginRegistrationConfig()
    assert (scheduling.tick_max_duration_seconds, scheduling.external_plugins) == (30.0, ())
    assert not scheduling.gateway.enabled
    transport = registration.transport
    assert (transport.request_timeout_seconds, transport.keepalive_time_ms) == (5.0, 30_000)
    assert (transport.max_message_size_bytes, transport.allow_insecure_grpc) == (10 * 1024 * 1024, False)
    assert (registration.heartbeat_timeout_seconds, registration.heartbeat_missed_threshold) == (15.0, 2)
    plugin = SchedulingConfig(external_plugins=[PLUGIN]).external_plugins[0]
    assert (plugin.execution_interval_seconds, plugin.hold_policy, plugin.protocol_version) == (0.0, "HOLD_LAST", "1.0")


def test_keys_come_in_either_spelling() -> None:
    scheduling = SchedulingConfig(
        **{
            "tick-max-duration-seconds": 3,
            "external-plugins": [{"plugin-id": "a", "plugin-type": "predict", "endpoint": "unix:///p"}],
        }
    )
    assert (scheduling.tick_max_duration_seconds, scheduling.external_plugins[0].plugin_id) == (3.0, "a")


@pytest.mark.parametrize(
    "given",
    [
        {"use_orchestrator": True},
        {"gateway": {"port": 1}},
        {"external_plugins": [{**PLUGIN, "timeout": 3}]},
        {"external_plugins": [{**PLUGIN, "plugin_type": "observe"}]},
        {"external_plugins": [{**PLUGIN, "priority": -1}]},
        {"external_plugins": [{**PLUGIN, "hold_policy": "SOMETIMES"}]},
        {"external_plugins": [{**PLUGIN, "execution_interval_seconds": -1}]},
        {"external_plugins": [{"plugin_id": "a", "plugin_type": "predict"}]},
        {"gateway": {"listen": "somewhere"}},
        {"gateway": {"listen": "127.0.0.1:7777"}},
        {"tick_max_duration_seconds": 0},
    ],
)
def test_what_is_unknown_or_wrong_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        SchedulingConfig(**given)


@pytest.mark.parametrize(
    "given",
    [
        {"auth": {"static_secrets": {"file:/run/token": ""}}},
        {"auth": {"trusted_sources": ["k8s_sa"]}},
        {"transport": {"grpc_mtls": {}}},
        {"protocol_version_min": "one"},
        {"in_process_plugins": [{"module": "m", "class": "C", "plugin_id": "a"}]},
    ],
)
def test_of_registration_too(given: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        PluginRegistrationConfig(**given)


@pytest.mark.parametrize(
    "given",
    [
        {"scheduling": {"external_plugins": [{**PLUGIN, "auth_token": "hunter2-hunter2"}]}},
        {"plugin-registration": {"auth": {"static-secrets": {"hunter2-hunter2": "team"}}}},
        {"plugin-registration": {"auth": {"static-secrets": "hunter2-hunter2"}}},
    ],
)
def test_a_secret_in_a_configuration_is_refused_without_being_shown(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as error:
        planner_section("Planner", given)
    assert "hunter2" not in str(error.value)


def test_what_the_statefile_keeps_is_read_again() -> None:
    here = {"module": "m", "class": "C", "plugin_id": "a", "plugin_type": "predict", "kwargs": {"n": 1}}
    registration = {**SECRET, "in_process_plugins": [here]}
    given = {"scheduling": {"external_plugins": [PLUGIN]}, "plugin_registration": registration}
    config = planner_section("Planner", given)
    assert planner_section("Planner", config.model_dump(mode="json", exclude_unset=True)) == config


@pytest.mark.parametrize(
    ("scheduling", "registration", "fault"),
    [
        ({}, {}, None),
        ({"gateway": {"enabled": True}}, {}, None),
        (ON_A_PORT, {}, "wants a secret"),
        (ON_A_PORT, SECRET, None),
        (
            ON_A_PORT,
            {"auth": {**SECRET["auth"], "trusted_sources": ["static_secret", "allow_unauthenticated"]}},
            "wants a secret",
        ),
        ({}, {"auth": {"trusted_sources": ["static_secret"]}}, "names none"),
        ({"external_plugins": [PLUGIN, PLUGIN]}, {}, "two plugins are called mine"),
    ],
)
def test_both_are_checked_together(scheduling: dict[str, Any], registration: dict[str, Any], fault: str | None) -> None:
    given = SchedulingConfig(**scheduling), PluginRegistrationConfig(**registration)
    if fault is None:
        check_plugins(*given)
    else:
        with pytest.raises(ValueError, match=fault):
            check_plugins(*given)
