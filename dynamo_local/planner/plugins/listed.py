"""Plugins of the configuration, as they would register."""

from __future__ import annotations

from dynamo_local.config.planner.plugins import ExternalPluginConfig, InProcessPluginConfig
from dynamo_local.planner.pipeline.registering import Registering
from dynamo_local.planner.pipeline.stages import HoldPolicy


def external(config: ExternalPluginConfig) -> Registering:
    """A gRPC server."""
    return _registering(config, config.endpoint, config.protocol_version)


def in_process(config: InProcessPluginConfig) -> Registering:
    """An object in this process."""
    return _registering(config, "", "1.0")


def _registering(
    config: ExternalPluginConfig | InProcessPluginConfig, endpoint: str, protocol_version: str
) -> Registering:
    return Registering(
        plugin_id=config.plugin_id,
        plugin_type=config.plugin_type,
        priority=config.priority,
        endpoint=endpoint,
        version=config.version,
        execution_interval_seconds=config.execution_interval_seconds,
        hold_policy=HoldPolicy[config.hold_policy],
        needs=config.needs,
        protocol_version=protocol_version,
        requires_produced_fields=config.requires_produced_fields,
        observation_window_seconds=config.observation_window_seconds,
    )
