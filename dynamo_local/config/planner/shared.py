"""Options of every policy."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field

from dynamo_local.config.planner.kinds import OPTIONS, Gpus, Hours, Seconds
from dynamo_local.config.planner.plugins import PluginRegistrationConfig, SchedulingConfig

ALIASES = {"model_name": "served_model_name", "advisory": "no_operation"}
"""Dynamo 1.x's names for them."""


def _several(value: Any) -> Any:
    """A list, or words with commas."""
    return [item.strip() for item in value.split(",")] if isinstance(value, str) else value


class SharedFields(BaseModel):
    """Which policy, where its decisions go, and how many GPUs it may use."""

    model_config = OPTIONS

    enabled: bool = True
    """Whether the section starts the planner with the graph; `dynamo planner start` starts it at any time."""
    policy: Literal["load", "sla", "slo", "throughput-load"] = "load"
    """Who decides: `load` by thresholds, `slo`, `sla` and `throughput-load` by targets for latencies. Where `ttft` or
    `itl` is given, and no policy, it is `slo`."""
    namespace: str | None = None
    """Namespace that the planner looks at; the graph's own, or it is refused."""
    served_model_name: str | None = None
    """Model being served; one that differs from the Frontend's is refused."""
    environment: Literal["local", "virtual", "kubernetes"] = "local"
    """Who carries decisions out: the arbiter itself, another environment that reads them from etcd (`virtual`), or
    Dynamo's operator (`kubernetes`: a planner in a pod, [Kubernetes](kubernetes-planner.md))."""
    backend: Literal["vllm", "sglang"] | None = None
    """Accepted for Dynamo's own files; which engine runs, the graph says."""
    virtual_keys: Literal["v1", "v0"] = "v1"
    """Where the decisions for it stand: `v1/NAMESPACE/planner/` (Dynamo 1.x) or `/NAMESPACE/planner/` (`v0`)."""
    virtual_max_wait: Seconds = 1800.0
    """Seconds after which a decision that nobody acknowledged is given up, and new ones are made."""
    virtual_blocking: bool = False
    """Wait for the acknowledgement of a decision before anything else; else samples go on being taken meanwhile."""
    no_operation: bool = False
    """Observe, decide and log; act on nothing."""
    log_dir: Path | None = None
    """Folder of the TensorBoard files; by default `tensorboard/MMDD_HHMMSS` (of the start) beside the logs."""
    report_interval_hours: Hours | None = 24.0
    """Hours between reports (`planner_reports` beside the logs; one more when it stops); `none`: write no reports."""
    metric_pulling_interval: Seconds = 1.0
    """Seconds between samples."""
    max_gpu_budget: Gpus = 8
    """GPUs that prefill and decode hold together, at most."""
    actuators: Annotated[
        tuple[Literal["start", "wake", "flip"], ...] | None,
        BeforeValidator(_several, json_schema_input_type=str | list[str] | None),
    ] = None
    """How it may get workers: `start`, `wake` (standby) and `flip` (another role), those that are left out not. By
    default starts and wakes; flips must be asked for ([faster than a start](actuators.md))."""
    min_gpu_budget: Annotated[int, Field(ge=-1)] = 1
    """GPUs below which neither prefill nor decode goes (`throughput-load`: both together; by default -1, none)."""
    decode_engine_num_gpu: Gpus | None = None
    """GPUs of a decode engine; the service's `resources.gpu`, or it is refused."""
    prefill_engine_num_gpu: Gpus | None = None
    """GPUs of a prefill engine; the same."""
    scheduling: SchedulingConfig = SchedulingConfig()
    """Plugins that are gRPC servers, and where they register ([plugins](plugins.md))."""
    plugin_registration: PluginRegistrationConfig = PluginRegistrationConfig()
    """How plugins come in: secrets, time-outs, plugins of this process."""
