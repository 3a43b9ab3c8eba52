"""The sections whose keys we know: `Host`, `Planner`, and each service's `ServiceArgs`."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Threshold = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Gpus = Annotated[int, Field(ge=1)]

_STRICT = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())
_ENDPOINT = re.compile(r"(https?://)?[^\s/,]+:\d{1,5}")
_NATS = re.compile(r"((nats|tls)://)?[^\s/,]+(:\d{1,5})?")


def _gpus(value: Any) -> Any:
    """`sim:8`, `"1,2,3"`, `[1, 2, 3]` or 3 (the device of index 3) -> the text of `--gpus`."""
    if value is None:
        return None
    items = value if isinstance(value, list) else [value]
    if any(isinstance(item, bool) or not isinstance(item, str | int) or str(item).strip() == "" for item in items):
        raise ValueError("must be sim:N, or indices or UUIDs of devices such as 0,1")
    return ",".join(str(item).strip() for item in items)


def _addresses(pattern: re.Pattern[str], example: str) -> Callable[[Any], Any]:
    """One address, several joined by commas, or a list -> joined by commas."""

    def check(value: Any) -> Any:
        if value is None:
            return None
        items = value if isinstance(value, list) else value.split(",") if isinstance(value, str) else [value]
        for item in items:
            if not isinstance(item, str) or not pattern.fullmatch(item.strip()):
                # The value is not shown: an address may hold a password.
                raise ValueError(f"must be addresses such as {example}")
        return ",".join(item.strip() for item in items)

    return check


def _names(value: Any) -> Any:
    """`[MY_VAR, "MY_*"]`, or `"MY_VAR,MY_*"`."""
    items = [item.strip() for item in value.split(",")] if isinstance(value, str) else value
    if not isinstance(items, list) or not all(
        isinstance(item, str) and re.fullmatch(r"[\w*?\[\]!-]+", item) for item in items
    ):
        raise ValueError("must be a list of names or globs of environment variables")
    return tuple(items)


class RestartConfig(BaseModel):
    """When a worker that died unasked is started again (`core.restarts.RestartPolicy`, whose defaults these are)."""

    model_config = _STRICT

    first_s: Seconds = 1.0
    """The first delay; each failure in a row doubles it."""
    max_s: Seconds = 60.0
    """The longest delay."""
    ran_well_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 60.0
    """A worker that was ready for so long begins with the first delay again."""
    failures_max: Annotated[int, Field(ge=1)] = 5
    """So many failures within the window and it is faulted: only `dynamo restart` starts it again."""
    window_s: Seconds = 600.0

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.first_s > self.max_s:
            raise ValueError(f"first_s ({self.first_s:g}) must not exceed max_s ({self.max_s:g})")
        return self


def _underscored(value: Any) -> Any:
    """Keys in either spelling, as everywhere."""
    if not isinstance(value, dict):
        return value
    return {key.replace("-", "_") if isinstance(key, str) else key: item for key, item in value.items()}


class CircusdConfig(BaseModel):
    """What the words of `dynamo serve` say, for the plugin under somebody's stock circusd (`docs/circusd.md`)."""

    model_config = _STRICT

    graph: str
    """`graphs.disagg:Frontend`"""
    working_dir: Path = Path(".")
    """Where the graph's modules are, and where the workers run; relative to the YAML's own folder."""
    namespace: str | None = None
    """None: the graph's own."""
    start_deadline_s: Seconds | None = None
    drain_deadline_s: Seconds | None = None
    """Of the services that have none in their `ServiceArgs`; None: as for `dynamo serve`."""


class HostConfig(BaseModel):
    """What belongs to the machine. None where the environment or a default decides."""

    model_config = _STRICT

    gpus: Annotated[str | None, BeforeValidator(_gpus, json_schema_input_type=str | int | list[str | int] | None)] = (
        None
    )
    """As for `--gpus`: `sim:8`, or indices and UUIDs joined by commas."""
    etcd_endpoints: Annotated[
        str | None,
        BeforeValidator(_addresses(_ENDPOINT, "http://127.0.0.1:2379"), json_schema_input_type=str | list[str] | None),
    ] = None
    nats_server: Annotated[
        str | None,
        BeforeValidator(_addresses(_NATS, "nats://127.0.0.1:4222"), json_schema_input_type=str | list[str] | None),
    ] = None
    pass_env: Annotated[tuple[str, ...], BeforeValidator(_names, json_schema_input_type=str | list[str])] = ()
    """Names or globs of variables that workers inherit beyond the allow-list of `core.secrets`."""
    health_bound_s: Seconds = 30.0
    """A worker that answers nothing for so long, while etcd and NATS do, is hung and treated as crashed."""
    metrics_port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Of the arbiter's own `/metrics`, on 127.0.0.1; 0 takes any free one."""
    restart: Annotated[RestartConfig, BeforeValidator(_underscored, json_schema_input_type=RestartConfig)] = (
        RestartConfig()
    )
    circusd: Annotated[CircusdConfig | None, BeforeValidator(_underscored)] = None
    """Read by `[plugin:dynamo]` of a `circus.ini` only."""


class ServiceArgs(BaseModel):
    """How many workers of a service, with what. Values of `resources` and `envs` are checked by `sdk.checks`."""

    model_config = _STRICT

    workers: Any = None
    resources: Any = None
    envs: Any = None
    start_deadline_s: Seconds | None = None
    drain_deadline_s: Seconds | None = None


class PlannerConfig(BaseModel):
    """Options of the load planner under Dynamo's names and defaults (planner-rules: options and defaults)."""

    model_config = ConfigDict(**_STRICT, use_attribute_docstrings=True)

    enabled: bool = True
    """Whether the section starts the planner with the graph; `dynamo planner start` starts it at any time."""
    namespace: str | None = None
    """Namespace that the planner looks at; the graph's own, or it is refused."""
    served_model_name: str | None = None
    """Model being served; one that differs from the Frontend's is refused."""
    environment: Literal["local", "virtual"] = "local"
    """Who carries decisions out: the arbiter itself, or another environment that reads them from etcd (`virtual`)."""
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
    adjustment_interval: Seconds = 30.0
    """Seconds between adjustments."""
    metric_pulling_interval: Seconds = 1.0
    """Seconds between samples."""
    max_gpu_budget: Gpus = 8
    """GPUs that prefill and decode hold together, at most."""
    min_gpu_budget: Gpus = 1
    """GPUs below which neither prefill nor decode goes."""
    decode_kv_scale_up_threshold: Fraction = 0.9
    """Mean KV cache use (0..1) of the decode workers above which one is added."""
    decode_kv_scale_down_threshold: Fraction = 0.5
    """Mean KV cache use below which one is taken away."""
    decode_kv_per_waiting_request: Threshold = 0.0
    """Added to a decode worker's KV use for each request that waits there (Dynamo's first planner: 0.02)."""
    prefill_queue_scale_up_threshold: Threshold = 0.5
    """Mean number of requests waiting in the prefill queue above which a prefill worker is added."""
    prefill_queue_scale_down_threshold: Threshold = 0.2
    """Mean number of waiting requests below which one is taken away."""
    decode_engine_num_gpu: Gpus | None = None
    """GPUs of a decode engine; the service's `resources.gpu`, or it is refused."""
    prefill_engine_num_gpu: Gpus | None = None
    """GPUs of a prefill engine; the same."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        for what in ("decode_kv", "prefill_queue"):
            down, up = getattr(self, f"{what}_scale_down_threshold"), getattr(self, f"{what}_scale_up_threshold")
            if down >= up:
                raise ValueError(f"{what}_scale_down_threshold ({down}) must be below {what}_scale_up_threshold ({up})")
        if self.metric_pulling_interval > self.adjustment_interval:
            raise ValueError(
                f"metric_pulling_interval ({self.metric_pulling_interval}) must not exceed "
                f"adjustment_interval ({self.adjustment_interval}): there would be intervals without a sample"
            )
        if self.min_gpu_budget > self.max_gpu_budget:
            raise ValueError(
                f"min_gpu_budget ({self.min_gpu_budget}) must not exceed max_gpu_budget ({self.max_gpu_budget})"
            )
        return self
