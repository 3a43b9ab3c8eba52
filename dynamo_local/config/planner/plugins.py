"""`scheduling` and `plugin_registration` of the `Planner` section, under Dynamo's names and with its defaults.

Secrets never stand in a configuration: where Dynamo takes the secret itself, these take `file:PATH` or `env:NAME`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from dynamo_local.core.api_keys import parse_source
from dynamo_local.core.durations import SECONDS_MAX

Seconds = Annotated[float, Field(gt=0, le=SECONDS_MAX, allow_inf_nan=False)]
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
    """What every plugin says of itself."""

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
    """Of `dynamo.planner.plugin`."""
    hold_policy: Hold = "HOLD_LAST"
    """What it contributes while it is not due: nothing, or its last answer again."""


class InProcessPluginConfig(_PluginConfig):
    """A plugin that is an object in the arbiter's process."""

    module: str
    """The module of its class."""
    class_name: str = Field(alias="class")
    """The class."""
    hold_policy: Hold = "ACCEPT_WHEN_IDLE"
    """As above."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """What the class is made with."""


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
    """Who may register."""

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
    """Of what a plugin is sent; its answers may have 256 KiB."""


class AdminConfig(_Section):
    """Accepted for Dynamo's own files. `ListPlugins` is refused here as there; `dynamo planner plugins` lists them."""

    mode: Literal["allow_all", "k8s_rbac"] = "allow_all"
    """Not used."""


class PluginRegistrationConfig(_Section):
    """How plugins come in."""

    auth: AuthConfig = AuthConfig()
    """Who may register."""
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
    """What both must fulfil together. ValueError, fit for a person."""
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
