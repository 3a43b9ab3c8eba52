"""Configuration: YAML, environment and command line, checked once at the edge.

graph = load_graph("graphs.disagg:Frontend", base_dir=Path.cwd())
config = load_config(path, env=os.environ, overrides=["--VllmWorker.ServiceArgs.workers=2"])
spec = resolve(graph, config, namespace=None)
"""

from __future__ import annotations

from dynamo_local.config.json_schema import config_json_schema
from dynamo_local.config.loading import Config, load_config, parse_overrides
from dynamo_local.config.planner import PlannerConfig
from dynamo_local.config.planner_section import planner_section
from dynamo_local.config.resolve import (
    check_planner,
    not_in_a_pod,
    planned_components,
    planner_config,
    planner_starts,
    resolve,
)
from dynamo_local.config.schema import HostConfig

__all__ = [
    "Config",
    "HostConfig",
    "PlannerConfig",
    "check_planner",
    "config_json_schema",
    "load_config",
    "not_in_a_pod",
    "parse_overrides",
    "planned_components",
    "planner_config",
    "planner_section",
    "planner_starts",
    "resolve",
]
