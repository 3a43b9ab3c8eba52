"""One run: a trace through a fleet on a virtual clock, with a planner or without, until all of it is worked off."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from dynamo_local.config.planner import PlannerConfig
from dynamo_local.core.routing.choice import LeastLoaded, Picker
from dynamo_local.core.types import Role
from dynamo_local.errors import DynamoError
from dynamo_local.planner.choosing import policy_of
from dynamo_local.planner.driver import PolicyDriver
from dynamo_local.planner.forecasting.answers import InlineForecaster
from dynamo_local.planner.policies.load import mean_kv
from dynamo_local.planner.policies.pools import pools_of
from dynamo_local.planner.policies.protocol import Policy
from dynamo_local.planner.scaling_times import ScalingTimes
from dynamo_local.planner.values import Decision, Needs, Observation, Reading
from dynamo_local.profile.interpolation import PerfModel, ProfileModel
from dynamo_local.simulator.fleet import FleetPoint, Scaled, VirtualFleet
from dynamo_local.simulator.flow import DECODES, Flow
from dynamo_local.simulator.observed import capabilities
from dynamo_local.simulator.options import DECODE, PREFILL, SimulationOptions
from dynamo_local.simulator.process import Agenda, Job, What
from dynamo_local.simulator.trace import TraceRequest
from dynamo_local.system.executors import process_pool


def observed(flow: Flow, needs: Needs, observation: Observation) -> Observation:
    """The pull, with traffic and passes."""
    now_s = observation.at_s
    if needs.traffic_window_s is not None:
        flow.serving(now_s, *DECODES)  # answers end within passes: bring them to now
        window_s = needs.traffic_window_s
        requests = flow.seen.requests(now_s, window_s) if needs.requests else None
        observation = replace(observation, traffic=flow.seen.window(now_s, window_s), requests=requests)
    if needs.passes and flow.observed_passes is not None:
        serving = flow.serving(now_s, Role.PREFILL, *DECODES)
        one_each = {PREFILL if each.role is Role.PREFILL else DECODE: each for each in serving}
        limits = {component: capabilities(each, flow.max_model_len) for component, each in one_each.items()}
        observation = replace(observation, engines=flow.observed_passes.engines(serving, now_s), capabilities=limits)
    return observation


STUCK_AFTER_S = 6 * 3600.0
"""Virtual time without the end of any request, after the last arrival, that is taken for a defect."""


class Stuck(DynamoError):
    """The run does not end. This is a defect of the simulator, or of the code that it drives."""

    code = "stuck"


@dataclass(frozen=True, slots=True)
class Sighting:
    """One observation of the planner: waiting entries, mean KV use of the decode workers (None: no worker)."""

    at_s: float
    queue: int | None
    kv: float | None


@dataclass(frozen=True, slots=True)
class Acted:
    """A decision and what became of its steps: `done` and `refused` by component."""

    decision: Decision
    done: tuple[str, ...] = ()
    refused: tuple[tuple[str, str], ...] = ()


@dataclass(slots=True)
class Run:
    """The result of a run. Times are seconds after the first arrival. `end_s` is the last completion."""

    jobs: list[Job]
    points: list[FleetPoint] = field(default_factory=list)
    sightings: list[Sighting] = field(default_factory=list)
    acted: list[Acted] = field(default_factory=list)
    end_s: float = 0.0
    passes: int = 0
    preemptions: int = 0
    done_by: dict[str, int] = field(default_factory=dict)
    """How many workers came by which actuator: `flips`, `wakes`, `starts`; and how many `sleeps` there were."""


class Simulation:
    """One run. Use it once. `on_acted` is told of each decision, with what it was made from, and `on_ended` how many
    requests have ended."""

    def __init__(
        self,
        options: SimulationOptions,
        trace: Sequence[TraceRequest],
        *,
        planner: PolicyDriver | None = None,
        no_operation: bool = False,
        perf: PerfModel | None = None,
        picker: Picker | None = None,
        on_acted: Callable[[Acted, Observation], None] = lambda acted, observation: None,
        on_ended: Callable[[int], None] = lambda ended: None,
    ) -> None:
        self._on_acted = on_acted
        self._on_ended = on_ended
        self._options = options
        self._planner = planner
        self._no_operation = no_operation
        self._agenda = Agenda()
        perf = perf or ProfileModel.load(options.sim.profile)
        watches = planner is not None and planner.needs.passes
        self.flow = Flow(options, perf, self._agenda, picker or LeastLoaded(), watches=watches)
        self.fleet = VirtualFleet(options, self._agenda, self.flow.make_process, 0.0)
        self.flow.attach(self.fleet)
        known = {} if options.leads is None else {"known": options.start_up_known_s}  # from earlier runs of a host
        self._times = ScalingTimes(self.fleet.now_s, lead_times=options.medians, **known)
        self.fleet.controller.subscribe(on_transition=self._times.on_transition)
        self._run = Run([Job(number, request) for number, request in enumerate(trace)])

    def run(self) -> Run:
        """Everything, to the last completion. Raises `Stuck` if that never comes."""
        run, agenda = self._run, self._agenda
        if run.jobs:
            agenda.add(run.jobs[0].request.at_s, What.ARRIVAL, 0)
        if self._planner is not None:
            agenda.add(self._planner.next_at_s, What.ROUND)
        progress_s, ended = 0.0, 0
        while self.flow.ended < len(run.jobs):
            at_s = agenda.next_at_s
            if at_s is None or at_s - progress_s > STUCK_AFTER_S:
                raise Stuck(f"{len(run.jobs) - self.flow.ended} requests have no end, {progress_s:.0f} s into the run")
            while agenda.next_at_s == at_s:
                _, what, index = agenda.pop()
                self._happen(what, index, at_s)
            self.flow.settle()
            if self.flow.ended != ended or what == What.ARRIVAL:
                progress_s, ended = at_s, self.flow.ended
                self._on_ended(ended)
        run.points = self.fleet.points
        run.end_s = max((job.last_s for job in run.jobs if job.last_s is not None), default=0.0)
        run.done_by = dict(self.fleet.done_by)
        run.passes, run.preemptions = self.flow.passes, self.flow.preemptions
        return run

    def _happen(self, what: int, index: int, now_s: float) -> None:
        if what == What.ENGINE:
            self.flow.engine_due(index, now_s)
        elif what == What.ARRIVAL:
            self._arrival(index, now_s)
        elif what == What.PULLED:
            self.flow.pulled(index, now_s)
        elif what == What.EXIT:
            self.fleet.exit_due(index, now_s)
        elif what == What.DEADLINE:
            self.fleet.due(now_s)
        elif what == What.STARTED:
            self.fleet.started(index, now_s)
        elif what == What.FLIPPED:
            self.fleet.flipped(index, now_s)
        elif what == What.ORDERED:
            self.fleet.ordered(index, now_s)
        elif what == What.PREFILL_DEADLINE:
            self.flow.prefill_deadline(index, now_s)
        elif what == What.REQUEST_DEADLINE:
            self.flow.request_deadline(index, now_s)
        elif what == What.ROUND:
            self._round(now_s)

    def _arrival(self, number: int, now_s: float) -> None:
        jobs = self._run.jobs
        self.flow.arrive(jobs[number], now_s)
        if number + 1 < len(jobs):
            self._agenda.add(jobs[number + 1].request.at_s, What.ARRIVAL, number + 1)

    # --- the planner ---------------------------------------------------------------------------

    def _round(self, now_s: float) -> None:
        """Show it what it wants to see, and carry out what it decides."""
        assert self._planner is not None
        disagg = self._options.shape.prefill > 0
        loads = self.flow.loads(now_s)
        queue = self.flow.pending if disagg else None
        reading = Reading(now_s, queue, loads)
        self._run.sightings.append(Sighting(now_s, queue, mean_kv((reading,))))
        prefill, actuators = PREFILL if disagg else None, self._options.actuators
        pools = self._times.reported(pools_of(self.fleet.view(), decode=DECODE, prefill=prefill, actuators=actuators))
        observation = observed(self.flow, self._planner.needs, Observation(reading, pools))
        decision = self._planner.tick_now(observation)
        if decision is not None:
            self._act(decision, now_s)
            self._on_acted(self._run.acted[-1], observation)
        if self._planner.next_at_s <= now_s:
            raise Stuck(f"the planner wants to be asked again at {self._planner.next_at_s:.1f} s, and that is now")
        self._agenda.add(self._planner.next_at_s, What.ROUND)

    def _act(self, decision: Decision, now_s: float) -> None:
        done: list[str] = []
        refused: list[tuple[str, str]] = []
        cause = f"planner:{len(self._run.acted) + 1}"
        answers: dict[str, Scaled] = {}
        if not self._no_operation:
            answers = self._apart(decision, now_s, cause) if decision.apart else self._whole(decision, now_s, cause)
        for component, answer in answers.items():
            if answer.refused is not None:
                refused.append((component, str(answer.refused)))
            elif answer.moves:
                done.append(component)
        self._run.acted.append(Acted(decision, tuple(done), tuple(refused)))

    def _apart(self, decision: Decision, now_s: float, cause: str) -> dict[str, Scaled]:
        return {component: self.fleet.scale(component, step, now_s, cause) for component, step in decision.acts}

    def _whole(self, decision: Decision, now_s: float, cause: str) -> dict[str, Scaled]:
        steps = dict(decision.acts)
        if not steps:
            return {}
        view = self.fleet.view()
        targets = {component: view.capacity(component) + step for component, step in steps.items()}
        return self.fleet.scale_all(targets, now_s, cause)


# --- cases
# Several runs of one trace, side by side: the planner, fixed fleets, or a sweep of options.


@dataclass(frozen=True, slots=True)
class Case:
    """One run. `planner` None: the fleet stays as it is. With `no_operation` it decides, and nothing is done.

    `make_picker` is called in the process that runs the case.
    """

    name: str
    options: SimulationOptions
    planner: PlannerConfig | None = None
    make_policy: Callable[[PlannerConfig], Policy[Any]] = policy_of
    no_operation: bool = False
    make_picker: Callable[[], Picker] = LeastLoaded


def run_case(trace: Sequence[TraceRequest], case: Case, on_ended: Callable[[int], None] = lambda ended: None) -> Run:
    """The run of one case. Raises what its options are refused with."""
    planner = None
    if case.planner is not None:
        planner = PolicyDriver(case.make_policy(case.planner), 0.0, forecaster=InlineForecaster())
    simulation = Simulation(
        case.options,
        trace,
        planner=planner,
        no_operation=case.no_operation,
        picker=case.make_picker(),
        on_ended=on_ended,
    )
    return simulation.run()


def run_cases(
    trace: Sequence[TraceRequest],
    cases: Sequence[Case],
    jobs: int | None = None,
    on_ended: Callable[[int], None] = lambda ended: None,
) -> Iterator[Run]:
    """The runs, in the order of the cases; up to `jobs` at once (None: one for each core), each in a process.

    `on_ended` is told how many requests of a run have ended, if the runs are made here, one after the other.
    """
    workers = min(len(cases), jobs or len(os.sched_getaffinity(0)))
    if workers < 2:
        yield from (run_case(trace, case, on_ended) for case in cases)
        return
    with process_pool(workers) as pool:
        yield from pool.map(partial(run_case, trace), cases)
