"""Spares and leads in the simulator."""

from __future__ import annotations

from pathlib import Path

import pytest

from dynamo_local.cli.simulate import leads_of
from dynamo_local.errors import BadInput
from dynamo_local.simulator.fleet import VirtualFleet
from dynamo_local.simulator.options import DECODE, FleetShape, LeadOptions, SimulationOptions
from dynamo_local.simulator.process import Agenda, What
from dynamo_local.state.leads import LeadFile


def starts(options: SimulationOptions, *at_s: float) -> list[float]:
    """When each of the workers that are asked for at these times is ready, from then on."""
    agenda = Agenda()
    fleet = VirtualFleet(options, agenda, lambda *about: None, 0.0)  # type: ignore[arg-type, return-value]
    for n, asked_s in enumerate(at_s):
        assert not fleet.scale(DECODE, 1, asked_s, f"test:{n}").refused
    found = []
    while agenda.next_at_s is not None:
        ready_s, what, _ = agenda.pop()
        if what == What.STARTED:
            found.append(ready_s)
    return sorted(found)


def test_a_spare_starts_a_worker_sooner_and_the_next_one_takes_a_cold_start_to_come() -> None:
    options = SimulationOptions(FleetShape(0, 1), spares=1, leads=LeadOptions(spare_s=2.0, cold_s=30.0))
    assert starts(options, 0.0, 1.0, 31.0, 33.0) == [2.0, 31.0, 35.0, 61.0]


def test_without_spares_a_start_takes_the_start_up() -> None:
    assert starts(SimulationOptions(FleetShape(0, 1), start_up_s=7.0), 0.0, 1.0) == [7.0, 8.0]


def test_leads_are_given_by_name() -> None:
    assert leads_of(["flip=0.2,cold=45"], 30.0) == LeadOptions(flip_s=0.2, cold_s=45.0)
    assert leads_of([], 12.0) == LeadOptions(cold_s=12.0)


@pytest.mark.parametrize("text", ["slow=1", "cold=x", "cold=-1", "cold=inf", "cold=nan", "cold"])
def test_a_lead_that_cannot_be_is_refused(text: str) -> None:
    with pytest.raises(BadInput, match="--lead"):
        leads_of([text], 30.0)


def test_measured_leads_are_the_medians_of_the_slowest_component(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DYN_LOCAL_STATE_DIR", str(tmp_path))
    file = LeadFile(tmp_path)
    with pytest.raises(BadInput, match="nothing was measured"):
        leads_of(["measured"], 30.0)
    for component, rung, *samples in (("VllmWorker", "cold", 20.0, 22.0, 90.0), ("PrefillWorker", "cold", 18.0)):
        for seconds in samples:
            file.add("dynamo", component, "vllm:/m:1", rung, seconds)
    file.add("dynamo", "VllmWorker", "vllm:/m:1", "spare", 2.5)
    file.add("dynamo", "Frontend", "sim:sim-tiny:0", "cold", 400.0)
    assert leads_of(["measured"], 30.0) == LeadOptions(cold_s=22.0, spare_s=2.5)
    assert leads_of(["cold=9", "measured", "wake=1"], 30.0) == LeadOptions(cold_s=9.0, spare_s=2.5, wake_s=1.0)
    with pytest.raises(BadInput, match="other"):
        leads_of(["measured:other"], 30.0)
