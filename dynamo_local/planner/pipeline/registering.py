"""Whether a plugin that wants to register may, with Dynamo's reasons in Dynamo's order."""

from __future__ import annotations

import math
import re
from collections.abc import Container
from dataclasses import dataclass

from dynamo_local.planner.pipeline.stages import HoldPolicy, PluginSpec, Stage

PLUGINS_MAX = 64
ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@-]{0,127}")
"""It is a label of metrics, and stands in logs."""
PATHS_MAX = 32
INTERVAL_MAX_S = 86_400.0 * 365
ALIGNED_S = 1e-3
"""A window may miss a multiple of the scale interval by so much; it travels as a 32-bit float."""

_VERSION = re.compile(r"\d{1,6}(\.\d{1,6}){0,3}")
_PATH = re.compile(r"[a-z][a-z_]{0,63}(\.[a-z][a-z_]{0,63}){0,3}")
_TCP = re.compile(r"grpcs?://((?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):(\d{1,5}))")


@dataclass(frozen=True, slots=True)
class Registering:
    """What a registration says, as it came over the wire or stands in the configuration."""

    plugin_id: str
    plugin_type: str
    priority: int = 0
    endpoint: str = ""
    version: str = ""
    execution_interval_seconds: float = 0.0
    hold_policy: int = 0
    needs: tuple[str, ...] = ()
    protocol_version: str = ""
    requires_produced_fields: tuple[str, ...] = ()
    observation_window_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Rules:
    """What registrations are held against. `scale_interval_s` 0: the planner's ticks have no fixed grid."""

    protocol_version_min: str = "1.0"
    protocol_version_max: str = "1.0"
    scale_interval_s: float = 0.0
    allow_insecure_grpc: bool = False


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a plugin listens, as a gRPC target. `transport` is "unix", "grpc", or "grpcs" (TLS)."""

    transport: str
    target: str


def malformed(said: Registering) -> str | None:
    """Why the request makes no sense at all, whoever sends it; None where it does."""
    if said.plugin_type not in list(Stage):
        return f"plugin_type must be {', '.join(Stage)}"
    if not ID.fullmatch(said.plugin_id):
        return "plugin_id must be 1 to 128 letters, digits or . _ : / @ -, and begin with a letter or a digit"
    if said.hold_policy not in list(HoldPolicy):
        return "hold_policy must be ACCEPT_WHEN_IDLE (0) or HOLD_LAST (1)"
    if not 0.0 <= said.execution_interval_seconds <= INTERVAL_MAX_S:  # no NaN passes this
        return "execution_interval_seconds must be 0 or more"
    if not math.isfinite(said.observation_window_seconds):
        return "observation_window_seconds must be a number"
    for name, paths in (("needs", said.needs), ("requires_produced_fields", said.requires_produced_fields)):
        if len(paths) > PATHS_MAX or not all(_PATH.fullmatch(path) for path in paths):
            return f"{name} must be at most {PATHS_MAX} paths such as observations.traffic"
    return None


def reject_reason(said: Registering, rules: Rules, *, authenticated: bool, known: Container[str]) -> str | None:
    """Why a registration that makes sense is refused; None where the plugin is taken."""
    if not authenticated:
        return "auth_failed"
    return _version_fault(said, rules) or _window_fault(said, rules) or _duplicate(said, known) or _fault(said, rules)


def endpoint_of(text: str, rules: Rules) -> Endpoint:
    """`unix:///run/plugin.sock`, `unix:/run/plugin.sock` or `grpc://127.0.0.1:9000`. ValueError with the reason."""
    if text.startswith("unix:"):
        path = "/" + text[5:].lstrip("/") if text[5:].startswith("/") else ""
        if len(path) < 2 or len(path.encode()) > 107 or not path.isprintable():
            raise ValueError("a unix socket is unix:///PATH, of at most 107 bytes")
        return Endpoint("unix", f"unix:{path}")
    if not (found := _TCP.fullmatch(text)) or not 0 < int(found[2]) < 65536:
        raise ValueError("an endpoint is unix:///PATH, grpcs://HOST:PORT or grpc://HOST:PORT")
    if text.startswith("grpcs:"):
        return Endpoint("grpcs", found[1])
    if not rules.allow_insecure_grpc:
        raise ValueError("grpc:// is neither encrypted nor authenticated: it needs allow_insecure_grpc, or grpcs://")
    return Endpoint("grpc", found[1])


def spec_of(said: Registering) -> PluginSpec:
    """The plugin that was taken."""
    return PluginSpec(
        plugin_id=said.plugin_id,
        stage=Stage(said.plugin_type),
        priority=said.priority,
        version="".join(c if c.isprintable() else "?" for c in said.version[:64]),
        protocol_version=said.protocol_version,
        interval_s=said.execution_interval_seconds,
        hold_policy=HoldPolicy(said.hold_policy),
        needs=said.needs,
        requires=said.requires_produced_fields,
        window_s=said.observation_window_seconds,
    )


def _version_fault(said: Registering, rules: Rules) -> str | None:
    if not _VERSION.fullmatch(said.protocol_version):
        return "protocol_version_malformed: it must be a version such as 1.0"
    if not _parts(rules.protocol_version_min) <= _parts(said.protocol_version) <= _parts(rules.protocol_version_max):
        supported = f"[{rules.protocol_version_min},{rules.protocol_version_max}]"
        return f"protocol_version_unsupported: requested={said.protocol_version}, supported={supported}"
    return None


def _parts(version: str) -> tuple[int, ...]:
    """1.0 and 1 are the same version, and 1.10 comes after 1.2."""
    parts = [int(part) for part in version.split(".")]
    return tuple(parts + [0] * (4 - len(parts)))


def _window_fault(said: Registering, rules: Rules) -> str | None:
    window, scale = said.observation_window_seconds, rules.scale_interval_s
    if window < 0.0 or (window > 0.0 and scale > 0.0 and not _multiple(window, scale)):
        wanted = f"0 or a multiple of scale_interval_seconds ({scale:g})" if scale > 0.0 else "0 or more"
        return f"observation_window_misaligned: observation_window_seconds={window:g} must be {wanted}"
    return None


def _multiple(window_s: float, scale_s: float) -> bool:
    times = round(window_s / scale_s)
    return times >= 1 and abs(window_s - times * scale_s) <= ALIGNED_S


def _duplicate(said: Registering, known: Container[str]) -> str | None:
    return "duplicate_plugin_id: Unregister it first" if said.plugin_id in known else None


def _fault(said: Registering, rules: Rules) -> str | None:
    if said.endpoint.startswith("inproc:"):
        return "endpoint_rejected: a plugin in the planner's own process is configured, and does not register"
    try:
        endpoint_of(said.endpoint, rules)
    except ValueError as error:
        return f"transport_build_failed: {error}"
    return None
