"""The `Planner` section: which policy, and its options.

Each module of options belongs to one policy or to several (`options.POLICIES`), and has the other names that people
know them by (`ALIASES`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from dynamo_local.core.secrets import parse_source
from dynamo_local.core.types import SECONDS_MAX

# --- kinds
# Kinds of values that options of planners have.

Seconds = Annotated[float, Field(gt=0, le=SECONDS_MAX, allow_inf_nan=False)]
Hours = Annotated[float, Field(gt=0, le=SECONDS_MAX / 3600, allow_inf_nan=False)]
Milliseconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Threshold = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Percent = Annotated[int, Field(ge=0, le=100)]
Count = Annotated[int, Field(ge=1)]
Gpus = Count

OPTIONS = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), use_attribute_docstrings=True)


# --- latencies
# Options of every policy that aims at latencies: targets, floor, profile. Names and defaults are Dynamo 1.6.1's.

LATENCY_ALIASES = {"ttft": "ttft_ms", "itl": "itl_ms"}
"""The first SLA planner's names."""


class LatencyFields(BaseModel):
    """Targets, and the profile of the engines."""

    model_config = OPTIONS

    ttft_ms: Milliseconds = 500.0
    """Target for the time to first token, ms (`slo`: of each request, else of the mean)."""
    itl_ms: Milliseconds = 50.0
    """Target for the mean gap between tokens, ms (`slo`: of each request, else of the mean)."""
    min_endpoint: Annotated[int, Field(ge=0)] = 1
    """Workers of each role, at least. `sla` and `slo` take no 0: they keep one of each, by which they measure."""
    profile_results_dir: Path | None = None
    """Folder of a profile of the engines (NPZ or JSON, as Dynamo's profiler writes them). Without one `slo` begins with
    the shipped one that is nearest to this host's GPUs, and corrects it by what it sees."""
    profile_anyway: bool = False
    """Take a profile that `dynamo profile` measured of other engines, GPUs or versions than these."""


# --- load
# Options of the policy `load`, under Dynamo's names and with its defaults.


class LoadFields(BaseModel):
    """Thresholds, and how often they are compared."""

    model_config = OPTIONS

    adjustment_interval: Seconds = 30.0
    """Seconds between adjustments."""
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


# --- measuring
# Options of the policies that aim at latencies: who is asked for the traffic. Names are Dynamo 1.6.1's.


def _address(text: str) -> str:
    try:
        parts = urlsplit(text)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        usable = False
    if not usable or parts.query or parts.fragment:
        raise ValueError("must be the address of a Prometheus server: http://HOST:PORT, perhaps with a path")
    if parts.username or parts.password:
        raise ValueError("must not contain credentials; put a token into a file, and give its path")
    return text


class MeasuringFields(BaseModel):
    """Where the traffic is measured, if not by the graph's own frontends."""

    model_config = OPTIONS

    metric_pulling_prometheus_endpoint: Annotated[str, AfterValidator(_address)] | None = None
    """Address of a Prometheus server, `http://HOST:PORT`, that is asked for the traffic; by default the frontends."""
    metric_pulling_prometheus_token_file: Path | None = None
    """File with the token for it, read for each request."""
    metric_pulling_prometheus_ca_bundle: Path | None = None
    """File of certificates by which it is trusted; by default the system's."""
    metric_pulling_prometheus_ssl_verify: bool = True
    """Whether its certificate is checked at all."""
    metric_pulling_prometheus_extra_query_params: dict[str, str] = Field(default_factory=dict)
    """More parameters of each query."""
    metric_pulling_prometheus_request_timeout_seconds: Seconds = 10.0
    """Seconds for one query; all of a window have 4.5 s together."""

    @model_validator(mode="after")
    def _measured_somewhere(self) -> Self:
        source = getattr(self, "throughput_metrics_source", "frontend")
        if source == "router" and self.metric_pulling_prometheus_endpoint is None:
            raise ValueError(
                "throughput_metrics_source is router, whose metrics only a Prometheus server has: give its address as "
                "metric_pulling_prometheus_endpoint"
            )
        return self


# --- plugins
# `scheduling` and `plugin_registration` of the `Planner` section, under Dynamo's names and with its defaults.
#
# Secrets never stand in a configuration: where Dynamo takes the secret itself, these take `file:PATH` or `env:NAME`.

SecondsOrNone = Annotated[float, Field(ge=0, le=SECONDS_MAX, allow_inf_nan=False)]
Version = Annotated[str, Field(pattern=r"^\d{1,6}(\.\d{1,6}){0,3}$")]
Priority = Annotated[int, Field(ge=0, lt=2**32)]
PluginType = Literal["predict", "propose", "reconcile", "constrain"]
Hold = Literal["ACCEPT_WHEN_IDLE", "HOLD_LAST"]
Subject = Annotated[str, Field(min_length=1, max_length=128)]
SecretSource = Annotated[str, AfterValidator(lambda text: str(parse_source(text)))]

_TCP = re.compile(r"(?:grpcs?://)?((?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):\d{1,5})")
_UNIX = re.compile(r"unix:(?://)?(/\S+)")


def _sources(value: Any) -> Any:
    """The keys as `file:PATH` or `env:NAME`. Checked here: pydantic would name a wrong key, which may be a secret."""
    if not isinstance(value, Mapping):
        raise ValueError("must map file:PATH or env:NAME to a name")
    return {str(parse_source(str(source))): subject for source, subject in value.items()}


class _Section(BaseModel):
    """Strict; keys in either spelling, as everywhere."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, protected_namespaces=(), use_attribute_docstrings=True, populate_by_name=True
    )

    @model_validator(mode="before")
    @classmethod
    def _either_spelling(cls, value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        return {key.replace("-", "_") if isinstance(key, str) else key: item for key, item in value.items()}


class GatewayConfig(_Section):
    """Where plugins register themselves."""

    enabled: bool = False
    """Whether there is one."""
    listen: str | None = None
    """`unix:///PATH` or `HOST:PORT`; by default `plugins.sock` in the runtime folder, which only this user can open."""
    tls: bool = False
    """A port speaks TLS, with the certificate of DYN_PLUGIN_TLS_CERT_PATH and _KEY_PATH. With _CA_CERT_PATH whoever
    registers must show one of that authority, too."""
    allow_insecure: bool = False
    """A port without TLS is not encrypted: it wants this. Any port wants a secret that whoever registers must show."""

    @property
    def tcp(self) -> str | None:
        """HOST:PORT, where it listens on a port."""
        found = None if self.listen is None else _TCP.fullmatch(self.listen)
        return None if found is None else found[1]

    @property
    def socket(self) -> str | None:
        """The path of the unix socket, where one is named."""
        found = None if self.listen is None else _UNIX.fullmatch(self.listen)
        return None if found is None else found[1]

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.listen is not None and self.tcp is None and self.socket is None:
            raise ValueError("gateway.listen must be unix:///PATH or HOST:PORT")
        if self.tcp is not None and not (self.tls or self.allow_insecure):
            raise ValueError(
                "gateway.listen is a port, which is not encrypted: set gateway.tls, gateway.allow_insecure, or a socket"
            )
        if self.tls and self.tcp is None:
            raise ValueError("gateway.tls is of a port; a socket is this user's alone")
        return self


class _PluginConfig(_Section):
    """The description of a plugin."""

    plugin_id: str
    """Its name: letters, digits and . _ : / @ -."""
    plugin_type: PluginType
    """The stage that it takes part in."""
    priority: Priority = 0
    """The smaller number wins."""
    execution_interval_seconds: SecondsOrNone = 0.0
    """Least time between two calls; 0: in each tick."""
    needs: tuple[str, ...] = ()
    """Paths of the context that are collected for it; none: all."""
    requires_produced_fields: tuple[str, ...] = ()
    """It is not called in a tick in which one of these paths is unset."""
    observation_window_seconds: SecondsOrNone = 0.0
    """The traffic's window that it wants: a multiple of the scale interval; 0: the planner's."""
    version: str = ""
    """Its own version."""


class ExternalPluginConfig(_PluginConfig):
    """A plugin that is a gRPC server, and does not register itself."""

    endpoint: str
    """`unix:///PATH`, `grpcs://HOST:PORT` (TLS), or `grpc://HOST:PORT` with `allow_insecure_grpc`."""
    auth_token: SecretSource | None = None
    """Where its token is, if it is to answer for itself at the gateway: `file:PATH` or `env:NAME`."""
    protocol_version: str = "1.0"
    """The version of `dynamo.planner.plugin`."""
    hold_policy: Hold = "HOLD_LAST"
    """Its contribution while it is not due: nothing, or its last answer again."""


class InProcessPluginConfig(_PluginConfig):
    """A plugin that is an object in the arbiter's process."""

    module: str
    """The module of its class."""
    class_name: str = Field(alias="class")
    """The class."""
    hold_policy: Hold = "ACCEPT_WHEN_IDLE"
    """As above."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the class."""


class SchedulingConfig(_Section):
    """When plugins are asked, and which there are."""

    scale_interval_seconds: Seconds | None = None
    """The grid of ticks, which windows must be multiples of; None: that of the policy."""
    tick_max_duration_seconds: Seconds = 30.0
    """A tick whose plugins take longer is given up."""
    external_plugins: tuple[ExternalPluginConfig, ...] = ()
    """gRPC servers that the planner calls."""
    gateway: GatewayConfig = GatewayConfig()
    """Where others register themselves."""


class AuthConfig(_Section):
    """Rights to register."""

    trusted_sources: tuple[Literal["static_secret", "allow_unauthenticated"], ...] = ()
    """None: whoever can reach the gateway."""
    static_secrets: Annotated[dict[str, Subject], BeforeValidator(_sources)] = Field(default_factory=dict)
    """`file:PATH` or `env:NAME` of the secrets, each with the name of whom it stands for."""


class TransportConfig(_Section):
    """How plugins are called."""

    allow_insecure_grpc: bool = False
    """Plugins may be at a port (`grpc://`): neither encrypted nor authenticated."""
    request_timeout_seconds: Seconds = 5.0
    """A call that takes longer has failed."""
    keepalive_time_ms: Annotated[int, Field(ge=1000)] = 30_000
    """Between two signs of life on a connection."""
    max_message_size_bytes: Annotated[int, Field(ge=4096, le=64 * 1024 * 1024)] = 10 * 1024 * 1024
    """Limit of a message to a plugin. Answers may have 256 KiB."""


class AdminConfig(_Section):
    """Accepted for Dynamo's own files. `ListPlugins` is refused here as there; `dynamo planner plugins` lists them."""

    mode: Literal["allow_all", "k8s_rbac"] = "allow_all"
    """Not used."""


class PluginRegistrationConfig(_Section):
    """How plugins come in."""

    auth: AuthConfig = AuthConfig()
    """Rights to register."""
    transport: TransportConfig = TransportConfig()
    """How plugins are called."""
    protocol_version_min: Version = "1.0"
    """The oldest version of the protocol that is taken."""
    protocol_version_max: Version = "1.0"
    """The newest."""
    heartbeat_timeout_seconds: Seconds = 15.0
    """A plugin that has once sent a heartbeat sends one in so much time …"""
    heartbeat_missed_threshold: Annotated[int, Field(ge=1)] = 2
    """… and is removed after so many of these without one."""
    in_process_plugins: tuple[InProcessPluginConfig, ...] = ()
    """Objects in the arbiter's process."""
    admin: AdminConfig = AdminConfig()
    """Not used."""


def check_plugins(scheduling: SchedulingConfig, registration: PluginRegistrationConfig) -> None:
    """Check both sections together. Raises `ValueError` with a message for people."""
    auth = registration.auth
    secret = auth.trusted_sources == ("static_secret",) and bool(auth.static_secrets)
    if scheduling.gateway.enabled and scheduling.gateway.tcp is not None and not secret:
        raise ValueError(
            "a gateway on a port wants a secret: plugin_registration.auth.trusted_sources: [static_secret], "
            "and static_secrets: {file:PATH: NAME}"
        )
    if "static_secret" in auth.trusted_sources and not auth.static_secrets:
        raise ValueError("static_secret is trusted, and plugin_registration.auth.static_secrets names none")
    listed = (*scheduling.external_plugins, *registration.in_process_plugins)
    ids = [plugin.plugin_id for plugin in listed]
    if doubled := sorted({each for each in ids if ids.count(each) > 1}):
        raise ValueError(f"two plugins are called {doubled[0]}")


# --- shared
# Options of every policy.

SHARED_ALIASES = {"model_name": "served_model_name", "advisory": "no_operation"}
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
    """The policy: `load` decides by thresholds, `slo`, `sla` and `throughput-load` by targets for latencies. Where
    `ttft` or `itl` is given, and no policy, it is `slo`."""
    namespace: str | None = None
    """Namespace that the planner looks at; the graph's own, or it is refused."""
    served_model_name: str | None = None
    """Model being served; one that differs from the Frontend's is refused."""
    environment: Literal["local", "virtual", "kubernetes"] = "local"
    """Where decisions are carried out: by the arbiter itself, another environment that reads them from etcd
    (`virtual`), or Dynamo's operator (`kubernetes`: a planner in a pod, [Kubernetes](kubernetes-planner.md))."""
    backend: Literal["vllm", "sglang"] | None = None
    """For Dynamo's own files: the graph says which engine runs. `sglang` is refused where VllmWorker serves."""
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
    """How it may get workers: `start`, `wake` (standby) and `flip` (another role), others are not used. The default
    is starts and wakes; flips must be named ([faster than a start](actuators.md))."""
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


# --- sla
# Options of the policy `sla` alone.

SLA_ALIASES: dict[str, str] = {}


class SlaFields(BaseModel):
    """How the calculator corrects its model."""

    model_config = OPTIONS

    no_correction: bool = False
    """Believe the profile as it is: what is measured does not correct it."""


# --- slo
# Options of the policy `slo` alone; its targets are in `latencies`.

SLO_ALIASES = {"budget": "max_gpu_budget", "thrift": "cost_factor"}
"""`thrift` is the name of `cost_factor` before 0.15."""


class SloFields(BaseModel):
    """The share of requests to keep, and the cost of a GPU."""

    model_config = OPTIONS

    @model_validator(mode="before")
    @classmethod
    def _renamed(cls, values: Any) -> Any:
        """Statefiles before 0.15 have `thrift`."""
        if isinstance(values, Mapping) and "thrift" in values:
            return {"cost_factor" if name == "thrift" else name: value for name, value in values.items()}
        return values

    target: Annotated[float, Field(gt=0, lt=1)] = 0.99
    """Share of the requests that is to keep both targets: a tenth of the misses makes a GPU worth ten times as much."""
    cost_factor: Positive = 1.0
    """How much a GPU must do to be held, against what `target` asks of it: 2 holds fewer, 0.5 more."""
    history: Path | None = None
    """Trace (as `load-predictor-warmup-trace`) of the requests before the start: the past by which it plans at first.
    Without it that is what the planner of this namespace recorded last."""


# --- targets
# Options of `sla` and `throughput-load`, beside the targets (`latencies`). Names and defaults are Dynamo 1.6.1's.

TARGET_ALIASES = {
    "adjustment_interval": "throughput_adjustment_interval_seconds",
    "throughput_adjustment_interval": "throughput_adjustment_interval_seconds",
}
"""The first SLA planner's names, and Dynamo 1.6.1's second ones."""


class TargetFields(BaseModel):
    """Intervals and forecasts."""

    model_config = OPTIONS

    throughput_adjustment_interval_seconds: Seconds = 180.0
    """Seconds between adjustments by the traffic; also the window in which it is measured."""
    max_throughput_scaling_replicas: Count = 8
    """Workers of one role that one adjustment adds, or takes away, at most."""
    load_predictor: Literal["constant", "arima", "prophet", "kalman"] = "constant"
    """The forecast of requests and their lengths. `arima` and `prophet` need the extra `predictors`."""
    load_predictor_log1p: bool = False
    """Forecast the logarithms: relative changes count, and no forecast is negative."""
    load_predictor_warmup_trace: Path | None = None
    """Trace from which the predictor learns before the first window."""
    prophet_window_size: Count = 50
    """Windows that `prophet` is fitted to."""
    kalman_q_level: Positive = 1.0
    """`kalman`: how much the level changes by itself from window to window (variance)."""
    kalman_q_trend: Positive = 0.1
    """`kalman`: the same of the trend."""
    kalman_r: Positive = 10.0
    """`kalman`: how much a window says of the level (variance of the noise)."""
    kalman_min_points: Count = 5
    """Windows before `kalman` forecasts; until then the last one is what is expected."""
    adaptive_intervals: bool = False
    """Let what starts and drains really take be the forecast's lead, and the shortest interval."""
    throughput_metrics_source: Literal["frontend", "router"] = "frontend"
    """Where requests, lengths and latencies are measured."""


# --- throughput_load
# Options of the policy `throughput-load` alone. Names and defaults are Dynamo 1.6.1's.

THROUGHPUT_LOAD_ALIASES: dict[str, str] = {"load_adjustment_interval": "load_adjustment_interval_seconds"}
"""Dynamo 1.6.1's second name for it."""


class ThroughputLoadFields(BaseModel):
    """Which loops run, and how the load loop moves."""

    model_config = OPTIONS

    mode: Literal["disagg", "prefill", "decode", "agg"] | None = None
    """Which components are moved; by default those that the graph has (`disagg` or `agg`)."""
    optimization_target: Literal["throughput", "latency", "load", "sla"] = "throughput"
    """`sla`: by models, towards `ttft_ms` and `itl_ms`. Else the load loop alone, by a table for each target."""
    enable_throughput_scaling: bool = True
    """Under `sla`: size for the forecast of the next interval."""
    enable_load_scaling: bool = False
    """Under `sla`: also move by one, above that size, by what the engines are loaded with now."""
    load_adjustment_interval_seconds: Seconds = 5.0
    """Seconds between adjustments by the load of the engines."""
    scale_down_rule: Literal["consolidation", "flat"] = "consolidation"
    """Under `sla`, one less: if its load fits on the others, or (`flat`) if all estimates are below the sensitivity."""
    load_scaling_down_sensitivity: Percent = 80
    """Per cent of the target below which a worker may go; 0: never, 100: as soon as the target would still be kept."""
    regression_features: Literal["dynamo", "seed"] = "dynamo"
    """Features of a decode pass's duration: requests and KV (Dynamo 1.6.1), or the KV alone (its first design)."""
    load_min_observations: Annotated[int, Field(ge=3)] = 5
    """Passes that a model needs before it answers."""
    max_num_fpm_samples: Count = 64
    """Passes that a model keeps."""
    fpm_sample_bucket_size: Count = 16
    """Buckets by which kept passes are spread over the loads that were seen; a perfect square."""
    prefill_scale_up_queue_tokens: Threshold | None = None
    """Target `load`: queued prompt tokens of any prefill engine at which one is added."""
    prefill_scale_down_queue_tokens: Threshold | None = None
    """Target `load`: queued prompt tokens of all prefill engines at or below which one is taken away."""
    decode_scale_up_kv_rate: Threshold | None = None
    """Target `load`: KV of any decode engine, scheduled and queued, in per cent of its cache, at which one is added."""
    decode_scale_down_kv_rate: Threshold | None = None
    """Target `load`: the same of all decode engines, at or below which one is taken away."""
    prefill_min_endpoint: Count | None = None
    """Prefill workers, at least; by default `min_endpoint`."""
    decode_min_endpoint: Count | None = None
    """Decode workers, at least; by default `min_endpoint`."""
    speculative_nextn: Annotated[int, Field(ge=0)] = 0
    """Tokens that the engines speculate; a measured accept length counts up to one more."""

    @property
    def loads(self) -> bool:
        """Whether the load loop runs. Every target but `sla` has the load loop alone."""
        return self.optimization_target != "sla" or self.enable_load_scaling

    @property
    def predicts(self) -> bool:
        """Whether the throughput loop runs."""
        return self.optimization_target == "sla" and self.enable_throughput_scaling


def wrong(config: PlannerConfig) -> str | None:
    """The conflict between these options, with the option's name; None if there is none."""
    if config.optimization_target == "sla":
        if not (config.enable_throughput_scaling or config.enable_load_scaling):
            return "enable_throughput_scaling and enable_load_scaling are both off: one of them must be on"
        if config.enable_throughput_scaling and config.enable_load_scaling:
            load_s, throughput_s = (
                config.load_adjustment_interval_seconds,
                config.throughput_adjustment_interval_seconds,
            )
            if load_s >= throughput_s:
                return (
                    f"load_adjustment_interval_seconds ({load_s:g}) must be below "
                    f"throughput_adjustment_interval_seconds ({throughput_s:g})"
                )
    return _grid(config) or _samples(config) or _thresholds(config) or _floors(config)


def _grid(config: PlannerConfig) -> str | None:
    tick_s = config.scheduling.scale_interval_seconds
    if tick_s is None:
        return None
    for name in ("load_adjustment_interval_seconds", "throughput_adjustment_interval_seconds"):
        ratio = getattr(config, name) / tick_s
        if abs(ratio - round(ratio)) > 1e-6 or round(ratio) < 1:
            return f"scheduling.scale_interval_seconds ({tick_s:g}) must divide {name} ({getattr(config, name):g})"
    return None


def _samples(config: PlannerConfig) -> str | None:
    if math.isqrt(config.fpm_sample_bucket_size) ** 2 != config.fpm_sample_bucket_size:
        return f"fpm_sample_bucket_size ({config.fpm_sample_bucket_size}) must be a perfect square, such as 16"
    if config.max_num_fpm_samples < config.load_min_observations:
        return (
            f"max_num_fpm_samples ({config.max_num_fpm_samples}) must not be below "
            f"load_min_observations ({config.load_min_observations})"
        )
    return None


def _thresholds(config: PlannerConfig) -> str | None:
    pairs = {"prefill": "queue_tokens", "decode": "kv_rate"}
    needed = {"prefill": ["prefill"], "decode": ["decode"], "agg": ["decode"]}.get(config.mode or "", list(pairs))
    for role, what in pairs.items():
        up_name, down_name = f"{role}_scale_up_{what}", f"{role}_scale_down_{what}"
        up, down = getattr(config, up_name), getattr(config, down_name)
        given = up is not None and down is not None
        if config.optimization_target == "load" and role in needed and not given:
            return f"the optimization_target is load: {up_name} and {down_name} must be given"
        if given and up <= down:
            return f"{down_name} ({down:g}) must be below {up_name} ({up:g})"
    return None


def _floors(config: PlannerConfig) -> str | None:
    without = {"prefill": ("decode",), "decode": ("prefill",), "agg": ("prefill", "decode")}.get(config.mode or "", ())
    for role in without:
        if getattr(config, f"{role}_min_endpoint") is not None:
            return f"{role}_min_endpoint has no effect: the mode is {config.mode}"
    return None


# --- options
# The options of all policies as one section, of which each policy takes its own.

POLICIES: Mapping[str, tuple[type[BaseModel], ...]] = {
    "load": (SharedFields, LoadFields),
    "sla": (SharedFields, LatencyFields, TargetFields, MeasuringFields, SlaFields),
    "slo": (SharedFields, LatencyFields, MeasuringFields, SloFields),
    "throughput-load": (SharedFields, LatencyFields, TargetFields, MeasuringFields, ThroughputLoadFields),
}
"""Whose options a policy takes."""

_ALIASES: Mapping[type[BaseModel], Mapping[str, str]] = {
    SharedFields: SHARED_ALIASES,
    LatencyFields: LATENCY_ALIASES,
    SloFields: SLO_ALIASES,
    TargetFields: TARGET_ALIASES,
    SlaFields: SLA_ALIASES,
    ThroughputLoadFields: THROUGHPUT_LOAD_ALIASES,
}


BY_TARGETS = "slo"
"""The policy if targets are given and no policy is named."""


def options_of(policy: str) -> tuple[str, ...]:
    """The names of the options that a policy takes."""
    return tuple(name for group in POLICIES[policy] for name in group.model_fields)


def aliases_of(policy: str) -> dict[str, str]:
    """Other names of a policy's options."""
    return {alias: name for group in POLICIES[policy] for alias, name in _ALIASES.get(group, {}).items()}


# The first base has the last fields.
class PlannerConfig(
    ThroughputLoadFields, SloFields, SlaFields, MeasuringFields, TargetFields, LatencyFields, LoadFields, SharedFields
):
    """The section `Planner`. An option of another policy than the chosen one is refused."""

    @property
    def gpus_floor(self) -> int:
        """`min_gpu_budget` of `throughput-load`, 0 unless it is given: Dynamo's own is off by default, too."""
        return max(0, self.min_gpu_budget) if "min_gpu_budget" in self.model_fields_set else 0

    @property
    def tick_s(self) -> float:
        """Seconds between two ticks of `throughput-load`: each interval is a whole number of them."""
        if self.scheduling.scale_interval_seconds is not None:
            return self.scheduling.scale_interval_seconds
        intervals = []
        if self.loads:
            intervals.append(self.load_adjustment_interval_seconds)
        if self.predicts:
            intervals.append(self.throughput_adjustment_interval_seconds)
        return math.gcd(*(max(1, round(seconds * 1000)) for seconds in intervals)) / 1000

    def floor(self, role: str) -> int:
        """The fewest replicas of `prefill` or `decode` under `throughput-load`."""
        own = self.prefill_min_endpoint if role == "prefill" else self.decode_min_endpoint
        return self.min_endpoint if own is None else own

    @property
    def named(self) -> dict[str, Any]:
        """The options of the chosen policy, by name."""
        return {name: getattr(self, name) for name in options_of(self.policy)}

    @model_validator(mode="after")
    def _of_its_policy(self) -> Self:
        known = options_of(self.policy)
        for name in type(self).model_fields:
            if name in self.model_fields_set and name not in known:
                owners = " and ".join(policy for policy in POLICIES if name in options_of(policy))
                raise ValueError(
                    f"{name} is an option of the policy {owners}, and the policy is {self.policy} (without `policy` it "
                    f"is {BY_TARGETS} where ttft or itl is given, else load)"
                )
        return self

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        for what in ("decode_kv", "prefill_queue"):
            down, up = getattr(self, f"{what}_scale_down_threshold"), getattr(self, f"{what}_scale_up_threshold")
            if down >= up:
                raise ValueError(f"{what}_scale_down_threshold ({down}) must be below {what}_scale_up_threshold ({up})")
        interval = "adjustment_interval" if self.policy == "load" else "throughput_adjustment_interval_seconds"
        if self.policy != "slo" and self.metric_pulling_interval > getattr(self, interval):
            raise ValueError(
                f"metric_pulling_interval ({self.metric_pulling_interval}) must not exceed "
                f"{interval} ({getattr(self, interval)}): there would be intervals without a sample"
            )
        if self.min_gpu_budget > self.max_gpu_budget:
            raise ValueError(
                f"min_gpu_budget ({self.min_gpu_budget}) must not exceed max_gpu_budget ({self.max_gpu_budget})"
            )
        if self.policy in ("sla", "slo") and self.min_endpoint == 0:
            raise ValueError(
                f"min_endpoint 0: the policy {self.policy} keeps one worker of each role, because its corrections are "
                "measured on workers that serve. Say 1, or take throughput-load: its throughput loop goes to 0 "
                "and back"
            )
        if self.policy == "throughput-load" and (why := wrong(self)) is not None:
            raise ValueError(why)
        check_plugins(self.scheduling, self.plugin_registration)
        return self


def known_names() -> dict[str, str]:
    """Every name that an option may be given by, with the option; of any policy."""
    fields = {name: name for name in PlannerConfig.model_fields}
    aliases = {alias: name for policy in POLICIES for alias, name in aliases_of(policy).items()}
    return fields | {alias: name for alias, name in aliases.items() if alias not in fields}
