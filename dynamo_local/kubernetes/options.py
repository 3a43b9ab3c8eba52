"""What `python -m dynamo_local.planner --environment kubernetes` is told: `--config`, words over it, and the place."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dynamo_local.config.loading import parse_mapping
from dynamo_local.config.planner import PlannerConfig
from dynamo_local.config.planner_section import own_names, planner_section
from dynamo_local.core.types import Role
from dynamo_local.errors import ConfigError
from dynamo_local.kubernetes.changes import Expected

KUBERNETES = "kubernetes"
METRICS_PORT = 9085
PORT_OPTION = "metric_reporting_prometheus_port"
"""As Dynamo's configuration calls it; 0 is none."""
PORT_VARIABLE = "PLANNER_PROMETHEUS_PORT"
DYNAMOS_POLICY = "throughput-load"
"""What Dynamo's own planner does; a file for it names no policy."""


@dataclass(frozen=True, slots=True)
class PodOptions:
    """`planner` is the section `Planner`; the rest is about the pod. None: as found there; port 0: none."""

    planner: PlannerConfig
    metrics_port: int = METRICS_PORT
    system_port: int | None = None
    graph: str | None = None
    namespace: str | None = None
    kubeconfig: Path | None = None
    frontend: str | None = None
    logs: Path = Path("planner_logs")


def read_config(text: str | None, given: Mapping[str, Any]) -> tuple[PlannerConfig, int]:
    """The section, and the port of /metrics. `text` is a file (YAML, JSON) or JSON itself, as Dynamo's planner takes
    it; `given` goes over it. Raises `ConfigError` that names the option."""
    found = {} if text is None else _mapping(text)
    values = {**{key.replace("-", "_"): value for key, value in found.items()}, **given}
    port = values.pop(PORT_OPTION, os.environ.get(PORT_VARIABLE, METRICS_PORT))
    try:
        metrics_port = int(port)
    except (TypeError, ValueError):
        raise ConfigError(f"{PORT_OPTION} must be a port, or 0 for none, and not {port!r}") from None
    environment = values.setdefault("environment", KUBERNETES)
    if environment != KUBERNETES:
        raise ConfigError(
            f"environment is {environment!r}: a planner by itself plans a graph on Kubernetes; a graph of this host "
            "has its planner in its arbiter (`dynamo planner start`)"
        )
    values.setdefault("policy", DYNAMOS_POLICY)
    config = planner_section("--config", own_names("--config", values, str(values["policy"])))
    return config, metrics_port


def _mapping(text: str) -> dict[str, Any]:
    what = "--config"
    if not text.lstrip().startswith("{"):
        what = f"--config {text}"
        try:
            text = Path(text).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is no text"
            raise ConfigError(f"{what} cannot be read: {why}") from None
    found = parse_mapping(text, what, what="the planner's options by name")
    section = found.get("Planner", found)
    if not isinstance(section, dict):
        raise ConfigError(f"{what} must hold the planner's options by name")
    return section


def expected_of(config: PlannerConfig) -> Expected:
    """What the graph must have for a planner with these options."""

    def floor(own: int | None) -> int:
        return config.min_endpoint if own is None else own

    mode = config.mode if config.policy == "throughput-load" else None
    disaggregated = True if config.policy in ("sla", "slo") or mode == "disagg" else False if mode == "agg" else None
    return Expected(
        max_gpus=config.max_gpu_budget,
        floors={Role.PREFILL: floor(config.prefill_min_endpoint), Role.DECODE: floor(config.decode_min_endpoint)},
        model=config.served_model_name,
        gpus={Role.PREFILL: config.prefill_engine_num_gpu, Role.DECODE: config.decode_engine_num_gpu},
        prefill=disaggregated,
        only={"prefill": Role.PREFILL, "decode": Role.DECODE}.get(mode or ""),
    )
