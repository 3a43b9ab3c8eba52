"""Whether a plugin that wants to register may, with Dynamo's reasons in Dynamo's order."""

from __future__ import annotations

import enum
import math
import re
from collections.abc import Container
from dataclasses import dataclass, replace

from dynamo_local.planner.stages import Answer, HoldPolicy, PluginSpec, Predicted, Stage
from dynamo_local.planner.values import Override

PLUGINS_MAX = 64
ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@-]{0,127}")
"""It is a label of metrics, and stands in logs."""
PATHS_MAX = 32
INTERVAL_MAX_S = 86_400.0 * 365
ALIGNED_S = 1e-3
"""A window may miss a multiple of the scale interval by so much, because the wire has 32-bit floats."""

_VERSION = re.compile(r"\d{1,6}(\.\d{1,6}){0,3}")
_PATH = re.compile(r"[a-z][a-z_]{0,63}(\.[a-z][a-z_]{0,63}){0,3}")
_TCP = re.compile(r"grpcs?://((?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):(\d{1,5}))")


@dataclass(frozen=True, slots=True)
class Registering:
    """A registration, from the wire or from the configuration."""

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
    """The rules for registrations. `scale_interval_s` 0: the planner's ticks have no fixed grid."""

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


# --- circuit
# The circuit breaker of one plugin: after five errors in a row it is left alone for a while, then asked once.

FAILURES_MAX = 5
OPEN_S = 30.0


class CircuitState(enum.StrEnum):
    """As Dynamo names them. Open: the plugin is left alone."""

    CLOSED = "CLOSED"
    OPEN = "OPEN"
    HALF_OPEN = "HALF_OPEN"


GAUGE = {CircuitState.CLOSED: 0.0, CircuitState.HALF_OPEN: 0.5, CircuitState.OPEN: 1.0}
"""As `plugin_circuit_state` says it."""


@dataclass(frozen=True, slots=True)
class Circuit:
    """`failures` are those in a row. `opened_at_s` is of the last opening."""

    state: CircuitState = CircuitState.CLOSED
    failures: int = 0
    opened_at_s: float = 0.0


CLOSED = Circuit()


def admits(circuit: Circuit, now_s: float) -> bool:
    """Whether the plugin may be asked now. Half open means that its one probe is under way."""
    if circuit.state is CircuitState.OPEN:
        return now_s - circuit.opened_at_s >= OPEN_S
    return circuit.state is CircuitState.CLOSED


def was_called(circuit: Circuit) -> Circuit:
    """The plugin is asked, which was admitted."""
    if circuit.state is CircuitState.CLOSED:
        return circuit
    return Circuit(CircuitState.HALF_OPEN, circuit.failures, circuit.opened_at_s)


def failed(circuit: Circuit, now_s: float) -> Circuit:
    """It gave no answer that can be used."""
    failures = circuit.failures + 1
    if circuit.state is CircuitState.HALF_OPEN or failures >= FAILURES_MAX:
        return Circuit(CircuitState.OPEN, failures, now_s)
    return Circuit(CircuitState.CLOSED, failures)


# --- scheduling
# When a plugin is due, and what it contributes in between. A plugin's `Turn` is all that is remembered of it.
#
# A plugin is due one interval after its last answer, for the first time one interval after its registration. Only an
# answer moves that anchor: a tick in which the plugin was skipped, could not be asked or failed does not.

EARLY = 0.05
"""A tick may come earlier than its time by this share of a plugin's interval: timers do not fire to the microsecond."""


@dataclass(frozen=True, slots=True)
class Turn:
    """`anchor_s` is what the next turn is counted from, `held` the last answer, where it is contributed again while the
    plugin is not due, and `held_at_s` when it came."""

    anchor_s: float
    held: Override | Predicted | None = None
    held_at_s: float = 0.0


def registered(now_s: float, grid_s: float, scale_interval_s: float) -> Turn:
    """The turn of a plugin that registers now.

    The anchor is the last moment of the grid of ticks, which began at `grid_s`. Plugins of one interval that register
    shortly after each other are then due in the same tick. A grid of 0 s is none.
    """
    if scale_interval_s <= 0.0 or now_s < grid_s:
        return Turn(now_s)
    return Turn(grid_s + math.floor((now_s - grid_s) / scale_interval_s) * scale_interval_s)


def is_due(turn: Turn, spec: PluginSpec, now_s: float) -> bool:
    """Whether the plugin is to be asked in the tick of that time."""
    return now_s - turn.anchor_s >= spec.interval_s * (1 - EARLY)


def lag_s(turn: Turn, spec: PluginSpec, now_s: float) -> float:
    """For how long it has been due, in seconds."""
    return max(0.0, now_s - turn.anchor_s - spec.interval_s)


def answered(turn: Turn, spec: PluginSpec, answer: Answer, now_s: float) -> Turn:
    """The turn after an answer. A held answer is forgotten, whatever the new one is: an accept takes an override
    back."""
    if spec.hold_policy is HoldPolicy.HOLD_LAST:
        if isinstance(answer, Override):
            return Turn(now_s, replace(answer, final=False), now_s)
        if isinstance(answer, Predicted) and answer.prediction is not None:
            return Turn(now_s, replace(answer, final=False), now_s)
    return Turn(now_s)


def forgotten(turn: Turn) -> Turn:
    """Without what was held: the plugin's circuit has opened."""
    return Turn(turn.anchor_s)
