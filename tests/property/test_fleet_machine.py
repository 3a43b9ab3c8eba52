"""The machine under the arbiter's own controller, in a small world where everything may go wrong, driven at random.

Commands, exits, hangs, outages of etcd and NATS, memory that returns late or never, devices that another process locks,
refused starts, a suspended arbiter. In every order, `validate` holds after each step, and `MachineWorld` checks the
processes. Once the world is calm, everything comes to rest.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dynamo_local.core.fleet import events as stimuli
from dynamo_local.core.fleet.backoff import RestartPolicy
from dynamo_local.core.fleet.draining import has_left
from dynamo_local.core.fleet.events import Change, VictimPolicy
from dynamo_local.core.fleet.fleet import Fleet, Intent, StartPace, Template
from dynamo_local.core.fleet.moves import MoveKind
from dynamo_local.core.fleet.scaling import decide
from dynamo_local.core.fleet.states import TRAITS
from dynamo_local.core.gpus import GpuLedger
from dynamo_local.core.types import EVERY, WAKES, Actuator, Role
from dynamo_local.core.types import WorkerState as S
from dynamo_local.errors import DynamoError
from dynamo_local.system.gpus import SimInventory
from tests.fakes.arbiter.decided import decided
from tests.fakes.arbiter.fleet_views import DECODE, FRONTEND, PREFILL, lower_names
from tests.fakes.arbiter.machine_world import MachineWorld, Proc
from tests.tools.examples import examples

TOTAL = 8
ROUTER = Template("Router", Role.OTHER, gpus_per_worker=1)
TEMPLATES: tuple[Template, ...] = (
    replace(DECODE, gpus_per_worker=2),
    replace(PREFILL, gpus_per_worker=2),
    ROUTER,
    FRONTEND,
)
COMPONENTS = [template.component for template in TEMPLATES]
POLICY = RestartPolicy(failures_max=3, window_s=1000.0)
CHANGES = st.one_of(
    st.sampled_from([1, 1, 2, -1, -2]).map(lambda n: Change(n, relative=True)),
    st.integers(0, 4).map(lambda n: Change(n, relative=False)),
)


class Arbiter(RuleBasedStateMachine):
    """`hopeless`: a device was lost or taken by somebody, or a person asked for one that may not come."""

    def __init__(self) -> None:
        super().__init__()
        ledger = GpuLedger.of(SimInventory(TOTAL).sample())
        self.world = MachineWorld(Fleet("dynamo", TEMPLATES, gpus=ledger, policy=POLICY, pace=StartPace(2, 0.5)))
        self.hopeless = False
        self.leaves: bool | None = None

    @initialize(leaves=st.sampled_from([None, None, False, True]))
    def begin(self, leaves: bool | None) -> None:
        """One of each. `leaves`: how the run ends, by `down` (True: `--now`) or not at all."""
        self.leaves = leaves
        for component in COMPONENTS:
            self.command(stimuli.Scale(stimulus_id="up", component=component, target=Change(1, relative=True)))
        for _ in range(4):
            self.world.settle()

    @property
    def fleet(self) -> Fleet:
        return self.world.fleet

    # --- commands ----------------------------------------------------------------------------------

    def command(self, order: stimuli.Event, *, force: bool = True) -> None:
        """Refusals are answers, and change nothing. Unforced, who serves goes on being served."""
        before = self.fleet
        try:
            self.world.controller.feed(order)
        except DynamoError:
            assert self.fleet.workers == before.workers or self.world.effects.elsewhere
            return
        if not force and not before.restarts:  # one that is under way may take the only worker there is
            for component in COMPONENTS:
                assert bool(self.fleet.ready(component)) >= bool(before.ready(component))
                assert bool(self.fleet.capacity(component)) >= bool(before.capacity(component))

    @rule(
        component=st.sampled_from(COMPONENTS),
        change=CHANGES,
        force=st.booleans(),
        policy=st.sampled_from(list(VictimPolicy)),
        by_person=st.booleans(),
        wait=st.booleans(),
    )
    def scale(
        self, component: str, change: Change, force: bool, policy: VictimPolicy, by_person: bool, wait: bool
    ) -> None:
        """`dynamo scale`, or the planner. New workers have the lowest names that are free."""
        order = stimuli.Scale(
            stimulus_id="scale",
            component=component,
            target=change,
            force=force,
            victim_policy=policy,
            by_person=by_person,
            wait_for_gpus=wait,
        )
        moves = decided(decide, self.fleet, order).moves
        started = {each.name for each in moves if each.kind is MoveKind.SPAWN}
        for each in moves:
            if each.kind is MoveKind.SPAWN and each.name not in self.fleet.workers:
                lower = lower_names(self.fleet, component, each.name)
                kept = self.fleet.reserved()
                assert all(entry is not None or name in started or name in kept for name, entry in lower)
        self.command(order, force=force)

    @rule(
        wanted=st.dictionaries(st.sampled_from(COMPONENTS), st.integers(0, 4), min_size=1),
        policy=st.sampled_from(list(VictimPolicy)),
        actuators=st.sampled_from([EVERY, WAKES, frozenset()]),
    )
    def scale_all(self, wanted: dict[str, int], policy: VictimPolicy, actuators: frozenset[Actuator]) -> None:
        """A planner's whole decision: every component that it names has its number then, or nothing has changed.

        One that it does not name may lose a worker that waited for the GPUs of a drain which is taken back, and one
        that an `apply` removes all of them, where the worker goes that it waited for.
        """
        kept = [each.component for each in self.fleet.templates if not each.retired]
        before = {component: self.fleet.capacity(component) for component in kept}
        order = stimuli.ScaleAll(stimulus_id="planner:1", targets=wanted, victim_policy=policy, actuators=actuators)
        self.command(order, force=False)
        after = {component: self.fleet.capacity(component) for component in kept}
        assert after == before or all(
            count == wanted[component] if component in wanted else count <= before[component]
            for component, count in after.items()
        )

    @precondition(lambda self: self.fleet.workers)
    @rule(data=st.data(), force=st.booleans(), cancel=st.booleans())
    def drain(self, data: st.DataObject, force: bool, cancel: bool) -> None:
        """`dynamo drain NAME [--cancel]`"""
        name = data.draw(st.sampled_from(sorted(self.fleet.workers)))
        if cancel:
            self.command(stimuli.Drain(cancel=True, stimulus_id="cancel", name=name), force=False)
        else:
            self.command(stimuli.Drain(stimulus_id="drain", name=name, force=force), force=force)

    @precondition(lambda self: self.fleet.workers)
    @rule(data=st.data(), force=st.booleans(), cancel=st.booleans())
    def flip(self, data: st.DataObject, force: bool, cancel: bool) -> None:
        """`dynamo flip NAME [--cancel]`: who counted counts, in one component or the other."""
        ready = sorted(name for name, worker in self.fleet.workers.items() if worker.ready or worker.flip is not None)
        name = data.draw(st.sampled_from(ready or sorted(self.fleet.workers)))
        before = {template.component: self.fleet.capacity(template.component) for template in self.fleet.templates}
        if cancel:
            self.command(stimuli.Flip(cancel=True, stimulus_id="cancel-flip", name=name), force=False)
        else:
            self.command(stimuli.Flip(stimulus_id="flip", name=name, force=force), force=force)
        after = {template.component: self.fleet.capacity(template.component) for template in self.fleet.templates}
        assert sum(after.values()) == sum(before.values())

    @rule(
        pair=st.permutations(["VllmWorker", "PrefillWorker"]),
        count=st.integers(1, 2),
        force=st.booleans(),
        policy=st.sampled_from(list(VictimPolicy)),
    )
    def scale_flip(self, pair: list[str], count: int, force: bool, policy: VictimPolicy) -> None:
        """`dynamo scale A -1 B +1 --flip`: both numbers change, or none does."""
        gives, takes = pair
        before = {name: self.fleet.capacity(name) for name in (gives, takes) if self._has(name)}
        order = stimuli.ScaleFlip(
            stimulus_id="scale-flip", gives=gives, takes=takes, count=count, force=force, victim_policy=policy
        )
        self.command(order, force=force)
        after = {name: self.fleet.capacity(name) for name in (gives, takes) if self._has(name)}
        assert after == before or after == {gives: before[gives] - count, takes: before[takes] + count}

    def _has(self, component: str) -> bool:
        return any(template.component == component for template in self.fleet.templates)

    @precondition(lambda self: self.fleet.workers)
    @rule(data=st.data(), force=st.booleans())
    def restart(self, data: st.DataObject, force: bool) -> None:
        """`dynamo restart NAME|COMPONENT`; of a fault it may ask for devices that are gone meanwhile."""
        target = data.draw(st.sampled_from([*COMPONENTS, *sorted(self.fleet.workers)]))
        self.command(stimuli.Restart(stimulus_id="restart", name=target, force=force), force=force)
        self.hopeless = True

    @rule(
        renewed=st.sets(st.sampled_from(COMPONENTS)),
        there=st.sets(st.sampled_from(COMPONENTS), min_size=2),
        counts=st.dictionaries(st.sampled_from(COMPONENTS), st.integers(1, 3), max_size=2),
        force=st.booleans(),
        fingerprint=st.sampled_from(["a", "b"]),
    )
    def apply(self, renewed: set[str], there: set[str], counts: dict[str, int], force: bool, fingerprint: str) -> None:
        """`dynamo apply`: components go and come, get other options, other numbers of workers."""
        now = {each.component: each.fingerprint for each in self.fleet.templates}
        templates = tuple(
            replace(each, fingerprint=fingerprint if each.component in renewed else now.get(each.component, ""))
            for each in TEMPLATES
            if each.component in there
        )
        counts = {component: count for component, count in counts.items() if component in there}
        order = stimuli.Apply(stimulus_id="apply", templates=templates, counts=counts, policy=POLICY, force=force)
        self.command(order, force=force or there != set(COMPONENTS))
        self.hopeless = True

    # --- the world goes on ---------------------------------------------------------------------------

    @rule()
    def write(self) -> None:
        """The statefile is written."""
        self.world.effects.write()

    @precondition(lambda self: self.world.effects.begun)
    @rule(data=st.data(), well=st.sampled_from([True, True, True, False]))
    def act(self, data: st.DataObject, well: bool) -> None:
        begun = data.draw(st.sampled_from(range(len(self.world.effects.begun))))
        self.world.carry_out(self.world.effects.begun[begun], well=well)

    @precondition(lambda self: self.world.exits or self.world.news)
    @rule(first=st.booleans())
    def hear(self, first: bool) -> None:
        """Something that happened is seen. Exits and keys come by different ways, and overtake each other."""
        queues = [queue for queue in (self.world.exits, self.world.news) if queue]
        self.world.controller.feed(queues[0 if first else -1].popleft())

    @rule()
    def settle(self) -> None:
        """A quiet second, in which all that was begun comes to its end."""
        self.world.settle()

    @rule(seconds=st.sampled_from([0.1, 1.0, 5.0, 12.0, 40.0, 700.0]))
    def time_passes(self, seconds: float) -> None:
        """Deadlines are for this."""
        self.world.pass_s(seconds)

    @rule(times=st.sampled_from([1, 12]))
    def sample(self, times: int) -> None:
        """Workers are asked for their loads."""
        for _ in range(times):
            self.world.pass_s(3.0)
            self.world.sample()

    # --- what goes wrong -------------------------------------------------------------------------------

    def proc(self, data: st.DataObject) -> Proc:
        """One of those that run."""
        return self.world.procs[data.draw(st.sampled_from(sorted(self.world.procs)))]

    @precondition(lambda self: self.world.procs)
    @rule(data=st.data(), how=st.sampled_from(["crash", "hang", "stick", "engine", "revoked", "register", "leave"]))
    def process(self, data: st.DataObject, how: str) -> None:
        """What a process may do, or have done to it from outside."""
        proc = self.proc(data)
        if how == "crash":
            self.world.end(proc, 1)
        elif how == "hang":
            proc.hung = True
        elif how == "stick":
            proc.stuck = True
        elif how == "engine" and proc.lease is not None and self.world.etcd_ok:
            self.world.engine_dies(proc)
        elif how == "revoked" and self.world.etcd_ok:
            self.world.revoke(proc.lease)
        elif how == "register" and proc.lease is None and not proc.asked and self.world.etcd_ok:
            self.world.register(proc)
        elif how == "leave" and proc.asked and not proc.hung:
            self.world.end(proc, 0)

    @rule(which=st.sampled_from(["etcd", "nats"]))
    def outage(self, which: str) -> None:
        """It goes away, or comes back."""
        if which == "nats":
            self.world.nats(not self.world.nats_ok)
        elif self.world.etcd_ok:
            self.world.etcd_goes()
        else:
            self.world.etcd_returns()

    @precondition(lambda self: not self.world.etcd_ok and self.world.registry)
    @rule(data=st.data())
    def revoked_unseen(self, data: st.DataObject) -> None:
        """A lease ends while etcd cannot be watched."""
        self.world.revoke(data.draw(st.sampled_from(sorted(self.world.registry))))

    @rule(never=st.booleans())
    def memory(self, never: bool) -> None:
        """What ended processes held comes back, or stays for good."""
        if never:
            self.world.lost |= self.world.memory
            self.hopeless = self.hopeless or bool(self.world.memory)
        self.world.memory_returns()

    @rule(data=st.data(), take=st.booleans())
    def somebody_else(self, data: st.DataObject, take: bool) -> None:
        """Another namespace locks a device that nobody holds, or lets go of it."""
        there = self.world.unlocked_devices() if take else sorted(self.world.effects.elsewhere)
        if not there:
            return
        uuid = data.draw(st.sampled_from(there))
        if take:
            self.world.effects.elsewhere[uuid] = "namespace other"
            self.hopeless = True
        else:
            del self.world.effects.elsewhere[uuid]

    @rule(for_s=st.sampled_from([4.0, 42.0, 3600.0]))
    def stall(self, for_s: float) -> None:
        """The arbiter itself stood still: nobody is to blame for that time."""
        silent = {name: worker.health.silent_s for name, worker in self.fleet.workers.items()}
        self.world.clock.at_s += for_s
        self.world.controller.feed(stimuli.Stalled(stimulus_id="stall", for_s=for_s))
        assert silent == {name: worker.health.silent_s for name, worker in self.fleet.workers.items()}

    # --- what holds --------------------------------------------------------------------------------------

    @invariant()
    def every_process_is_somebodys(self) -> None:
        """On the devices that are booked on it. One that has no entry any more has ended, and is only not heard of."""
        for proc in self.world.procs.values():
            named = self.fleet.workers.get(proc.name)
            own = [each for each in self.fleet.workers.values() if each.pid == proc.pid]
            assert named is not None or own, f"{proc.name} ({proc.pid}) has no entry"
            worker = own[0] if own else named
            assert worker is not None
            assert worker.pid == proc.pid, f"{proc.name} is {proc.pid}, its entry says {worker.pid}"
            # A change of role is heard of later than it happens. Nobody asks for it any more in a run that leaves, or
            # where the worker's end is decided, or where it has lost its new registration at once, and so leaves.
            to = None if worker.flip is None else worker.flip.name
            ends = worker.state is S.DRAINING or TRAITS[worker.state].killed or proc.lease is None
            assert proc.name in (worker.name, to) or ends or self.fleet.leaving is not None
            assert set(proc.gpus) <= set(worker.gpus)

    @invariant()
    def what_is_held_is_locked(self) -> None:
        """A device with a process on it is locked; one that nobody holds is not, once that is written."""
        held = self.fleet.gpus.holder_of
        assert {uuid for proc in self.world.procs.values() for uuid in proc.gpus} <= self.world.effects.locked
        if not self.world.effects.writes:
            assert self.world.effects.locked <= held.keys()

    @invariant()
    def what_is_on_its_way_can_arrive(self) -> None:
        """The devices that workers on their way still need are free, or come back: nobody gave them away."""
        if self.hopeless or self.fleet.gpus.quarantined:
            self.hopeless = True
            return
        taken = len(self.fleet.gpus.taken)  # their memory is on its way
        hoped = len(self.fleet.gpus.free) + self.fleet.gpus_coming_back() + taken
        waiting = [self.fleet.workers[name] for name in self.fleet.promised()]
        assert sum(self.fleet.promised().values()) <= hoped or any(
            self.fleet.capacity(worker.component) == 1 for worker in waiting
        )

    def teardown(self) -> None:
        """After the storm: everything comes to rest, or the run leaves."""
        if self.leaves is not None:
            self.world.controller.feed(stimuli.Leave(stimulus_id="down", now=self.leaves))
            self.world.calm()
            assert has_left(self.fleet)
            assert not self.world.procs
            return
        self.world.calm()
        self.everything_rests()

    def everything_rests(self) -> None:
        """Whoever is wanted serves, or waits for devices that are not there; nobody else has anything."""
        fleet, free = self.fleet, len(self.fleet.gpus.free)
        for worker in fleet.workers.values():
            lacks = fleet.template_of(worker).gpus_per_worker > free
            rests = worker.state in (S.READY, S.FAULTED) or (worker.state is S.EXITED and worker.n == 0)
            waits = worker.state in (S.PENDING, S.BACKING_OFF) and lacks
            assert rests or waits, f"{worker.name} is {worker.state}/{worker.intent}: {worker.reason}"
            assert worker.intent is Intent.STEADY or waits
            assert worker.state is S.READY or not (worker.gpus or worker.runs), f"{worker.name} holds {worker.gpus}"
        ready = [worker for worker in fleet.workers.values() if worker.state is S.READY]
        assert {worker.pid for worker in ready} == self.world.procs.keys()
        assert {worker.lease: worker.name for worker in ready} == self.world.registry
        assert self.world.effects.locked == fleet.gpus.holder_of.keys()
        waiting = any(worker.state not in (S.READY, S.FAULTED, S.EXITED) for worker in fleet.workers.values())
        assert not fleet.restarts or waiting


TestArbiter = pytest.mark.timeout(300)(Arbiter.TestCase)  # a failure is made smaller for minutes
TestArbiter.settings = settings(max_examples=examples(100), stateful_step_count=50)
