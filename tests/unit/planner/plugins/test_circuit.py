"""The circuit breaker: five errors in a row, thirty seconds of peace, one probe."""

from __future__ import annotations

from dynamo_local.planner.plugins.registration import (
    CLOSED,
    FAILURES_MAX,
    OPEN_S,
    Circuit,
    CircuitState,
    admits,
    failed,
    was_called,
)


def opened(at_s: float) -> Circuit:
    """After as many errors as it takes."""
    circuit = CLOSED
    for _ in range(FAILURES_MAX):
        assert admits(circuit, at_s)
        circuit = failed(was_called(circuit), at_s)
    return circuit


def test_the_fifth_error_in_a_row_opens_it() -> None:
    circuit = opened(100.0)
    assert circuit.state is CircuitState.OPEN
    assert failed(CLOSED, 0.0).state is CircuitState.CLOSED
    assert not admits(circuit, 100.0 + OPEN_S - 0.001)


def test_after_its_time_one_probe_decides() -> None:
    probing = was_called(opened(100.0))
    assert probing.state is CircuitState.HALF_OPEN
    assert not admits(probing, 1e9), "one probe at a time"
    again = failed(probing, 130.0)
    assert (again.state, again.opened_at_s) == (CircuitState.OPEN, 130.0)
    assert admits(again, 160.0)
