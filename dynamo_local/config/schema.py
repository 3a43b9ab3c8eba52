"""The sections whose keys we know: `Host` and each service's `ServiceArgs`. `Planner` has a folder of its own."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from dynamo_local.core.secrets import parse_source
from dynamo_local.core.traffic import UNREAD_BOUND_S
from dynamo_local.core.types import SECONDS_MAX

Seconds = Annotated[float, Field(gt=0, le=SECONDS_MAX, allow_inf_nan=False)]

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


def _services(value: Any) -> Any:
    """`[Processor, Router]`, or `"Processor,Router"`; an empty list or text is none."""
    items = [item.strip() for item in value.split(",") if item.strip()] if isinstance(value, str) else value
    if not isinstance(items, list) or not all(isinstance(item, str) and item for item in items):
        raise ValueError("must be a list of names of services")
    if len(set(items)) < len(items):
        raise ValueError("names a service twice")
    return tuple(items)


class RestartConfig(BaseModel):
    """When a worker that died unasked is started again; the defaults are `core.fleet.backoff.RestartPolicy`'s."""

    model_config = _STRICT

    first_s: Seconds = 1.0
    """The first delay; each failure in a row doubles it."""
    max_s: Seconds = 60.0
    """The longest delay."""
    ran_well_s: Annotated[float, Field(ge=0, le=SECONDS_MAX, allow_inf_nan=False)] = 60.0
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
    """The words of `dynamo serve`, for the plugin under a stock circusd (`docs/circusd.md`)."""

    model_config = _STRICT

    graph: str
    """`graphs.disagg:Frontend`"""
    working_dir: Path = Path(".")
    """Where the graph's modules are, and where the workers run; relative to the YAML's own folder."""
    namespace: str | None = None
    """None: the graph's own."""
    start_deadline_s: Seconds | None = None
    drain_deadline_s: Seconds | None = None
    """Drain deadline of services without one in their `ServiceArgs`. None: as for `dynamo serve`."""


class HostConfig(BaseModel):
    """Settings of the machine. None: the environment or a default decides."""

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
    unread_bound_s: Seconds = UNREAD_BOUND_S
    """A stream of which the client has taken no byte for so long, while its worker leaves, is ended."""
    on_foreign_revoke: Literal["leave", "restart"] = "leave"
    """The action after a worker has left because somebody else revoked its lease."""
    metrics_port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port of the arbiter's own `/metrics`, on 127.0.0.1. 0: any free one."""
    metrics_socket: bool = False
    """Serve them on a unix socket of this user's instead."""
    metrics_api_key: Annotated[str, AfterValidator(lambda text: str(parse_source(text)))] | None = None
    """Where the keys are of which a scrape must show one, as for the Frontend's `api-key`."""
    restart: Annotated[RestartConfig, BeforeValidator(_underscored, json_schema_input_type=RestartConfig)] = (
        RestartConfig()
    )
    spares: Annotated[int, Field(ge=0, le=64)] = 0
    """Processes that have an engine's modules imported, and become any worker of it; so many for each engine and
    environment of the graph (docs/actuators.md)."""
    dashboard: Annotated[int, Field(ge=0, le=65535)] | None = None
    """Serve the page on this port of 127.0.0.1 (docs/dashboard.md). 0: any free one. None: no page."""
    history: bool = False
    """Record the history without a page, too. A page always records it."""
    circusd: Annotated[CircusdConfig | None, BeforeValidator(_underscored)] = None
    """Read by `[plugin:dynamo]` of a `circus.ini` only."""

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        if self.metrics_socket and self.metrics_port:
            raise ValueError("metrics-socket and metrics-port are two places for the same metrics; keep one")
        return self


class SharingArgs(BaseModel):
    """A model's part of the GPUs that it shares with others (docs/models.md)."""

    model_config = _STRICT

    floor: Annotated[int, Field(ge=0)] = 0
    """Its fewest workers. 0: it may give all GPUs back; requests for it are held until a worker is there."""
    cap: Annotated[int, Field(ge=1)] | None = None
    """Its most workers. None: as many as the GPUs allow."""
    weight: Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)] = 1.0
    """How much one of its requests counts beside one of another model."""
    idle_s: Seconds = 300.0
    """After so long without a request it gives back what it has above its floor."""
    min_stay_s: Annotated[float, Field(ge=0, le=SECONDS_MAX, allow_inf_nan=False)] = 3.0
    """A worker stays for so long, unless a request of another model would be held longer than its max_wait_s."""
    max_wait_s: Seconds = 120.0
    """A held request gets its worker within this time; past it the answer is 503."""
    slots: Annotated[int, Field(ge=1)] | None = None
    """Requests that one worker serves at once within the targets. None: as many as its engine takes at once."""

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.cap is not None and self.cap < self.floor:
            raise ValueError(f"cap is {self.cap}, less than the floor of {self.floor}")
        return self


class ServiceSharing(SharingArgs):
    """As `ServiceArgs.sharing` says it."""

    beside: str | None = None
    """These are prefill workers of that model's component: they come and go with its workers."""
    each: Annotated[int, Field(ge=1, le=64)] = 1
    """So many for each of its workers."""


class ServiceArgs(BaseModel):
    """How many workers of a service, with what. Values of `resources` and `envs` are checked by `sdk.checks`."""

    model_config = _STRICT

    workers: Any = None
    resources: Any = None
    envs: Any = None
    standby: Annotated[int, Field(ge=0, le=64)] | None = None
    """How many workers are kept asleep beside those that serve; 0: none is, but each may be put to sleep by hand."""
    start_deadline_s: Seconds | None = None
    drain_deadline_s: Seconds | None = None
    colocate: Annotated[tuple[str, ...], BeforeValidator(_services, json_schema_input_type=str | list[str])] | None = (
        None
    )
    """Services that run in this one's processes, without workers of their own. None: those that the graph's code links
    so; an empty list: none (docs/configuration.md)."""
    flippable: bool = True
    """Its workers may change their role with those of the other side, where both have the same engine."""
    sharing: Annotated[ServiceSharing, BeforeValidator(_underscored)] | None = None
    """Its workers share the GPUs with those of other models. The section `Models` writes this."""
