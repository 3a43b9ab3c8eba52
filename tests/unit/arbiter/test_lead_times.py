"""Lead times by scaling option: measured from transitions, and shown on `/metrics`."""

from __future__ import annotations

from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from dynamo_local.arbiter.lead_times import LeadTimeMetrics, LeadTimesNow, LeadTimeWatch
from dynamo_local.core.fleet import effects as ins
from dynamo_local.core.fleet import events as st
from dynamo_local.core.fleet.events import Change
from dynamo_local.core.fleet.fleet import Fleet, StandbyFacts, Template
from dynamo_local.core.fleet.step import step
from dynamo_local.core.lead_times import LeadTimes, OptionKind
from tests.fakes.arbiter.fleet_views import DECODE, PREFILL, lease_of, name, on_ledger, pid_of, worker

D, P = DECODE.component, PREFILL.component


class Watched:
    """A fleet under a `LeadTimeWatch`; what that noted, with its seconds."""

    def __init__(self, fleet: Fleet, spares: frozenset[int] = frozenset()) -> None:
        self.fleet = fleet
        self.now_s = 100.0
        self.noted: list[tuple[str, str, float]] = []
        self.watch = LeadTimeWatch(lambda: self.now_s, lambda *note: self.noted.append(note), lambda pid: pid in spares)

    def feed(self, event: st.Event, after_s: float = 0.0) -> None:
        self.now_s += after_s
        before = self.fleet
        self.fleet, done, _ = step(before, event, self.now_s)
        for commit in (each for each in done if isinstance(each, ins.Commit)):
            for transition in commit.transitions:
                found = self.fleet.workers.get(transition.name) or before.workers[transition.name]
                self.watch.on_transition(found, transition)

    def put(self, n: int, after_s: float, facts: StandbyFacts | None = None) -> None:
        """The ready key of a decode worker."""
        key = st.KeyPut(stimulus_id="etcd", name=name(n), pid=pid_of(n), lease=lease_of(n), standby=facts)
        self.feed(key, after_s)


def fleet(*states: str) -> Fleet:
    workers = [worker(n, state) for n, state in enumerate(states)]
    return on_ledger([*workers, worker(0, "ready", PREFILL), worker(1, "ready", PREFILL)], 8)


@pytest.mark.parametrize(
    ("gives", "component", "rung"), [(DECODE, P, "flip_to_prefill"), (PREFILL, D, "flip_to_decode")]
)
def test_a_flip_is_from_the_command_to_the_new_name(gives: object, component: str, rung: str) -> None:
    watched = Watched(fleet("ready", "ready"))
    template = DECODE if gives is DECODE else PREFILL
    was = name(1, template.component)
    watched.feed(st.Flip(stimulus_id="command:1", name=was))
    target = watched.fleet.workers[was].flip
    assert target is not None
    answer = st.FlipAnswered(stimulus_id="flip", name=was, pid=pid_of(1, template), to=target.name, lease="abc")
    watched.feed(answer, 0.25)
    assert watched.noted == [(rung, component, 0.25)]


def test_a_flip_that_fails_says_nothing() -> None:
    watched = Watched(fleet("ready", "ready"))
    watched.feed(st.Flip(stimulus_id="command:1", name=name(1)))
    target = watched.fleet.workers[name(1)].flip
    assert target is not None
    watched.feed(st.FlipAnswered(stimulus_id="flip", name=name(1), pid=pid_of(1), to=target.name, error="no"), 1.0)
    assert str(watched.fleet.workers[name(1)].state) == "ready"
    assert watched.noted == []


@pytest.mark.parametrize("level", [1, 2])
def test_a_sleep_and_a_wake_are_noted_by_their_level(level: int) -> None:
    asleep = worker(1, "ready")
    base = fleet("ready")
    watched = Watched(on_ledger([*base.workers.values(), asleep], 8, templates=standby_templates()))
    watched.feed(st.Sleep(stimulus_id="command:1", name=name(1), level=level))
    watched.put(1, 0.5, StandbyFacts(1, asleep=True, level=level, vram_bytes=1024**3, host_bytes=0))
    watched.feed(st.Wake(stimulus_id="command:2", name=name(1)), 60.0)
    watched.put(1, 3.0, StandbyFacts(2))
    assert watched.noted == [(f"sleep_{level}", D, 0.5), (f"wake_{level}", D, 3.0)]


def test_a_wake_of_one_that_is_still_falling_asleep_is_none() -> None:
    base = fleet("ready", "ready")
    watched = Watched(on_ledger(list(base.workers.values()), 8, templates=standby_templates()))
    watched.feed(st.Sleep(stimulus_id="command:1", name=name(1)))
    watched.feed(st.Wake(stimulus_id="command:2", name=name(1)), 0.1)
    watched.put(1, 0.1, StandbyFacts(2))
    assert str(watched.fleet.workers[name(1)].state) == "ready"
    assert watched.noted == []


@pytest.mark.parametrize(("spare", "rung"), [(True, "spare"), (False, "cold")])
def test_a_start_is_of_a_spare_or_cold(spare: bool, rung: str) -> None:
    pid = 4711
    watched = Watched(fleet("ready"), frozenset({pid}) if spare else frozenset())
    watched.feed(st.Scale(stimulus_id="command:1", component=D, target=Change(1, relative=True)))
    watched.feed(st.GpusSeen(stimulus_id="gpus", devices=watched.fleet.gpus.devices))
    made = st.ProcessMade(stimulus_id="spawn", name=name(1), pid=pid, start_time=None, started_at=0.0)
    watched.feed(made, 1.0)
    watched.feed(st.KeyPut(stimulus_id="etcd", name=name(1), pid=pid, lease="abc"), 4.0)
    assert watched.noted == [(rung, D, 5.0)]


def test_what_an_earlier_arbiter_began_is_not_known() -> None:
    watched = Watched(fleet("ready", "starting"))
    watched.put(1, 4.0)
    assert str(watched.fleet.workers[name(1)].state) == "ready"
    assert watched.noted == []


def standby_templates() -> tuple[Template, ...]:
    return (replace(DECODE, standby=0), PREFILL)


def test_each_rung_that_was_measured_has_its_statistics_and_no_other_a_sample() -> None:
    """This run's and this host's together; what was never measured is absent, not 0."""
    leads = LeadTimes(host={"VllmWorker": {OptionKind.COLD: [30.0, 50.0]}})
    for seconds in (0.2, 0.1, 0.3):
        leads = leads.noted(OptionKind.FLIP_TO_DECODE, "VllmWorker", seconds)
    leads = leads.noted(OptionKind.COLD, "VllmWorker", 40.0)
    registry = CollectorRegistry()
    LeadTimeMetrics(registry, lambda: LeadTimesNow(leads, {("vllm", "warm"): 2}))

    def sample(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"dynamo_arbiter_{name}", labels)

    def lead(rung: str, statistic: str) -> float | None:
        return sample("lead_seconds", component="VllmWorker", rung=rung, statistic=statistic)

    assert [lead("flip_to_decode", each) for each in ("last", "median", "p90")] == [0.3, 0.2, 0.3]
    assert [lead("cold", each) for each in ("last", "median", "p90")] == [40.0, 40.0, 50.0]
    assert sample("lead_samples", component="VllmWorker", rung="cold") == 3
    assert sample("spares", engine="vllm", state="warm") == 2
    assert lead("wake_1", "median") is None
    assert b"flip_to_prefill" not in generate_latest(registry)


def test_the_families_are_there_before_anything_was_measured() -> None:
    registry = CollectorRegistry()
    LeadTimeMetrics(registry)
    assert b"# TYPE dynamo_arbiter_lead_seconds gauge" in generate_latest(registry)
    with pytest.raises(ValueError, match="Duplicated"):
        LeadTimeMetrics(registry)
