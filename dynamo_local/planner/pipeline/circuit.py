"""The circuit breaker of one plugin: after five errors in a row it is left alone for a while, then asked once."""

from __future__ import annotations

import enum
from dataclasses import dataclass

FAILURES_MAX = 5
OPEN_S = 30.0


class CircuitState(enum.IntEnum):
    """The numbers are those of the wire."""

    CLOSED = 0
    OPEN = 1
    HALF_OPEN = 2


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


def asked(circuit: Circuit) -> Circuit:
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
