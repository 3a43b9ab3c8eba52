"""A small arbiter over the pure parts, driven at random: decisions, lifecycle, ledger and restart policy together.

It does what the shell must do and no more: commit what a decision says, allocate before a spawn, release when a
process is gone. Whatever happens then, in whatever order, the invariants hold.
"""

from __future__ import annotations

from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dynamo_local.core import lifecycle as lc
from dynamo_local.core.drains import at_exit
from dynamo_local.core.fleet_view import Course, FleetView, Template, WorkerView
from dynamo_local.core.gpus import GpuLedger
from dynamo_local.core.instructions import (
    BeginDrain,
    Decision,
    Instruction,
    Revive,
    SpawnWorker,
    after,
    stays_as_template,
)
from dynamo_local.core.restarts import BackOff, Fault, RestartHistory, RestartPolicy, after_exit
from dynamo_local.core.rolling import RestartPlan, next_step, plan_restart
from dynamo_local.core.scaling import Change, decide, decide_cancel, decide_drain
from dynamo_local.core.types import WorkerState as S
from dynamo_local.core.victims import VictimPolicy
from dynamo_local.errors import GpuError, NotRestartable
from dynamo_local.serve.inventory import SimInventory
from tests.fakes.fleet_views import DECODE, PREFILL, lower_names

TOTAL = 6
BIG_DECODE = replace(DECODE, gpus_per_worker=2)
TEMPLATES: tuple[Template, ...] = (BIG_DECODE, PREFILL)
COMPONENTS = [template.component for template in TEMPLATES]
POLICY = RestartPolicy(failures_max=3, window_s=100.0)
ENDS = [(S.READY, "hung"), (S.STARTING, "start deadline"), (S.DRAINING, "drain deadline"), (S.READY, "lease revoked")]


class Arbiter(RuleBasedStateMachine):
    """Entries are views; `pids` are the processes there are; the ledger says who holds what."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = GpuLedger(SimInventory(TOTAL).sample())
        self.entries: dict[str, WorkerView] = {}
        self.pids: dict[str, int] = {}
        self.histories: dict[str, RestartHistory] = {}
        self.returning_pids: dict[str, tuple[int, tuple[str, ...]]] = {}
        self.now_s = 0.0
        self.next_pid = 1
        self.plan: RestartPlan | None = None
        self.hopeless = False
        """A device was lost to a quarantine, or the last hope of a component was left waiting for one."""

    # --- the shell -----------------------------------------------------------------------------

    def view(self) -> FleetView:
        """What decisions are made from."""
        held = {name: tuple(d.uuid for d in devices) for name, devices in self.ledger.holders().items()}
        workers = tuple(replace(entry, gpus=held.get(name, ())) for name, entry in self.entries.items())
        return FleetView("dynamo", TEMPLATES, workers, self.ledger.snapshot())

    def commit(self, instructions: tuple[Instruction, ...]) -> None:
        """The intent; never for a worker that is not there, never a state change that the table does not have."""
        before = self.view()
        then = after(before, instructions, self.now_s)
        self.entries = {worker.name: worker for worker in then.workers}
        for instruction in instructions:
            assert isinstance(instruction, SpawnWorker) == (before.find(instruction.name) is None)
            entry = self.entries.get(instruction.name)
            if entry is not None and entry.course is Course.RETURNING:
                self.returning_pids[entry.name] = self.pids[entry.name], entry.gpus
        for name in before.promised().keys() - then.promised().keys():
            assert name not in self.pids or name in {each.name for each in instructions}

    def happen(self, name: str, event: lc.Event, **changes: object) -> None:
        """An observation."""
        entry = self.entries[name]
        state = lc.apply(entry.state, event)
        since_s = entry.since_s if state is entry.state else self.now_s
        self.entries[name] = replace(entry, state=state, since_s=since_s, **changes)  # type: ignore[arg-type]

    def carry_out(self, decision: Decision, force: bool) -> None:
        """Check what a decision promises, then commit it."""
        view = self.view()
        if decision.refused is not None:
            assert decision.instructions == ()
            return
        self.commit(decision.instructions)
        self._names_are_the_lowest(view, decision)
        for component in COMPONENTS:
            if view.ready(component) and not force:
                assert self.view().ready(component)
        short = sum(self.view().promised().values()) > len(self.ledger.free()) + self.view().gpus_coming_back()
        self.hopeless = self.hopeless or short
        if short:
            waiting = [w for w in self.view().workers if w.name in self.view().promised() and w.state is S.PENDING]
            assert self.ledger.quarantined() or any(self.view().capacity(w.component) == 1 for w in waiting)

    def _names_are_the_lowest(self, view: FleetView, decision: Decision) -> None:
        started = {each.name for each in decision.instructions if isinstance(each, SpawnWorker | Revive)}
        for start in decision.instructions:
            if isinstance(start, SpawnWorker):
                lower = lower_names(view, start.component, start.name)
                assert all(entry is not None or name in started for name, entry in lower)

    def pick(self, data: st.DataObject, *states: S, alive: bool | None = None) -> str | None:
        """A worker in one of those states (any if none is given)."""
        names = [
            name
            for name, entry in self.entries.items()
            if (not states or entry.state in states) and alive in (None, name in self.pids)
        ]
        return data.draw(st.sampled_from(sorted(names))) if names else None

    # --- commands ------------------------------------------------------------------------------

    @rule(
        component=st.sampled_from(COMPONENTS),
        change=st.one_of(
            st.sampled_from([1, 1, 2, -1, -2]).map(lambda n: Change(n, relative=True)),
            st.integers(0, 4).map(lambda n: Change(n, relative=False)),
        ),
        force=st.booleans(),
        policy=st.sampled_from(list(VictimPolicy)),
        by_person=st.booleans(),
        wait=st.booleans(),
    )
    def scale(
        self, component: str, change: Change, force: bool, policy: VictimPolicy, by_person: bool, wait: bool
    ) -> None:
        """`dynamo scale`, or the planner."""
        decision = decide(
            self.view(),
            component,
            change,
            stimulus_id="t",
            force=force,
            victim_policy=policy,
            by_person=by_person,
            wait_for_gpus=wait,
        )
        self.carry_out(decision, force)

    @precondition(lambda self: self.entries)
    @rule(data=st.data(), force=st.booleans(), cancel=st.booleans())
    def drain(self, data: st.DataObject, force: bool, cancel: bool) -> None:
        """`dynamo drain NAME [--cancel]`"""
        name = self.pick(data)
        assert name is not None
        if cancel:
            self.carry_out(decide_cancel(self.view(), name, stimulus_id="t"), False)
        else:
            self.carry_out(decide_drain(self.view(), name, stimulus_id="t", force=force), force)

    @precondition(lambda self: self.plan is None and self.entries)
    @rule(data=st.data())
    def restart(self, data: st.DataObject) -> None:
        """`dynamo restart NAME|COMPONENT`"""
        target = data.draw(st.sampled_from([*COMPONENTS, *sorted(self.entries)]))
        try:
            self.plan = plan_restart(self.view(), target, stimulus_id="t")
        except NotRestartable:
            return

    @precondition(lambda self: self.plan is not None)
    @rule()
    def go_on_restarting(self) -> None:
        """One step of the sequence; a worker that serves goes only if a sibling serves, or none is on its way."""
        assert self.plan is not None
        view = self.view()
        step, self.plan = next_step(view, self.plan)
        if isinstance(step, BeginDrain):
            going = view.worker(step.name)
            siblings = [w for w in view.of(going.component) if w.name != going.name]
            assert not going.ready or any(w.ready for w in siblings) or not any(w.on_its_way for w in siblings)
        if isinstance(step, BeginDrain | Revive):
            self.commit((step,))
            # A person's restart of a fault may ask for devices that are gone meanwhile: it waits for them.
            self.hopeless = self.hopeless or isinstance(step, Revive)
        elif not self.plan.todo:
            self.plan = None

    # --- what happens --------------------------------------------------------------------------

    @rule(data=st.data())
    def spawn(self, data: st.DataObject) -> None:
        """A pending worker, or one whose back-off is over, gets its devices and a process; or waits on."""
        name = self.pick(data, S.PENDING, S.BACKING_OFF, alive=False)
        if name is None:
            return
        entry = self.entries[name]
        size = self.view().template(entry.component).gpus_per_worker
        try:
            self.ledger.allocate(name, size)
        except GpuError:
            assert len(self.ledger.free()) < size
            return
        backs_off = entry.state is S.BACKING_OFF
        self.happen(
            name,
            lc.BackoffElapsed(stimulus_id="t") if backs_off else lc.SpawnRequested(stimulus_id="t"),
            starts=entry.starts + 1,
            served=False,
        )
        self.pids[name] = self.next_pid
        self.next_pid += 1
        self.happen(name, lc.Spawned(stimulus_id="t", pid=self.pids[name]))

    @rule(data=st.data())
    def register(self, data: st.DataObject) -> None:
        """Ready; or again, after a drain was taken back: the same process on the same devices."""
        name = self.pick(data, S.STARTING, S.READY, S.DRAINING)
        if name is None:
            return
        entry = self.entries[name]
        if entry.course is Course.RETURNING:
            self.happen(name, lc.DrainCancelled(stimulus_id="t"), course=Course.STEADY)
            held = tuple(device.uuid for device in self.ledger.holders()[name])
            assert self.returning_pids.pop(name) == (self.pids[name], held)
        else:
            self.happen(name, lc.Registered(stimulus_id="t", lease="ab"), served=entry.state is not S.DRAINING)

    @rule(data=st.data(), what=st.sampled_from(ENDS))
    def go_wrong(self, data: st.DataObject, what: tuple[S, str]) -> None:
        """What is observed of a process that still runs."""
        name = self.pick(data, what[0])
        if name is None:
            return
        events: dict[str, lc.Event] = {
            "hung": lc.HealthFailed(stimulus_id="t", reason="hung"),
            "start deadline": lc.StartDeadlinePassed(stimulus_id="t", deadline_s=1.0),
            "drain deadline": lc.DrainDeadlinePassed(stimulus_id="t", deadline_s=1.0),
            "lease revoked": lc.LeaseRevoked(stimulus_id="t"),
        }
        self.happen(name, events[what[1]])

    @precondition(lambda self: self.pids)
    @rule(data=st.data(), seconds=st.sampled_from([0.0, 5.0, 200.0]), stuck=st.booleans())
    def exit(self, data: st.DataObject, seconds: float, stuck: bool) -> None:
        """A process ends, asked or not. Its devices are released, or one is quarantined."""
        name = self.pick(data, alive=True)
        assert name is not None
        self.now_s += seconds
        del self.pids[name]
        self.happen(name, lc.ProcessExited(stimulus_id="t", exit_code=0))
        devices = self.ledger.release(name)
        if stuck and devices and not self.ledger.quarantined():
            self.ledger.quarantine(devices[0].uuid, "memory never came back")
            self.hopeless = True
        entry = self.entries[name]
        if entry.state is S.EXITED:
            self._left(entry)
        else:
            self._died(entry)

    def _left(self, entry: WorkerView) -> None:
        revive = at_exit(entry, self.view().template(entry.component).gpus_per_worker)
        if revive is not None:
            self.commit((revive,))
        elif not stays_as_template(entry):
            del self.entries[entry.name]
        self.returning_pids.pop(entry.name, None)

    def _died(self, entry: WorkerView) -> None:
        if entry.course is Course.LEAVING:
            self.happen(entry.name, lc.Removed(stimulus_id="t"), course=Course.STEADY)
            if not stays_as_template(entry):
                del self.entries[entry.name]
            return
        history, verdict = after_exit(
            self.histories.get(entry.name, RestartHistory()),
            now_s=self.now_s,
            ran_s=0.0,
            infra_ok=True,
            unit=0.5,
            why="died",
            policy=POLICY,
        )
        self.histories[entry.name] = history
        assert isinstance(verdict, Fault) == (len(history.failures_s) >= POLICY.failures_max)
        if isinstance(verdict, BackOff):
            assert 1.0 <= verdict.delay_s <= 60.0
            self.happen(entry.name, lc.BackoffStarted(stimulus_id="t", delay_s=verdict.delay_s))
        else:
            self.happen(entry.name, lc.Faulted(stimulus_id="t", reason="died"))
            del self.histories[entry.name]

    # --- what holds ----------------------------------------------------------------------------

    @invariant()
    def each_device_is_in_one_place(self) -> None:
        """No GPU with two holders; free + held + quarantined = total."""
        held = [device.uuid for devices in self.ledger.holders().values() for device in devices]
        assert len(held) == len(set(held))
        assert len(held) + len(self.ledger.free()) + len(self.ledger.quarantined()) == TOTAL

    @invariant()
    def devices_follow_processes(self) -> None:
        """Exactly the workers with a process hold devices, as many as their template says."""
        assert set(self.ledger.holders()) == set(self.pids)
        for worker in self.view().workers:
            if worker.name in self.pids:
                assert len(worker.gpus) == self.view().template(worker.component).gpus_per_worker

    @invariant()
    def states_and_processes_agree(self) -> None:
        """A state with a process has one, a state without has none; what is crashed or late is being ended."""
        for name, entry in self.entries.items():
            assert (name in self.pids) == (entry.state not in lc.WITHOUT_PROCESS)

    @invariant()
    def names_are_unique_and_say_their_suffix(self) -> None:
        """One entry per component and suffix, under the name that belongs to it."""
        for template in TEMPLATES:
            entries = self.view().of(template.component)
            assert len({entry.n for entry in entries}) == len(entries)
            for entry, (name, _, found) in zip(
                entries,
                (found for found in self.view().names_from_lowest(template.component) if found[2] is not None),
                strict=False,
            ):
                assert (entry.name, entry) == (name, found)

    @invariant()
    def what_is_on_its_way_can_arrive(self) -> None:
        """The devices that workers on their way still need are free, or come back: nobody gave them away."""
        view = self.view()
        if not self.hopeless:
            assert sum(view.promised().values()) <= len(view.gpus.free) + view.gpus_coming_back()

    @invariant()
    def faulted_workers_hold_nothing(self) -> None:
        """A fault frees its GPUs."""
        assert not any(worker.gpus for worker in self.view().workers if worker.state is S.FAULTED)


TestArbiter = Arbiter.TestCase
TestArbiter.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)
