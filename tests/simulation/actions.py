"""Shows what happens to a shell: each action is drawn with its weight."""

from __future__ import annotations

import signal
from collections.abc import Callable

from dynamo_local.core.fleet.events import ScaleAll, Sleep, Wake
from dynamo_local.core.types import EVERY, WAKES, Role, WorkerState
from tests.simulation.process import Fate
from tests.simulation.scenario import Scenario


def scale(it: Scenario) -> None:
    """One more, one fewer, or a number."""
    rng = it.rng
    target = rng.choice(("+1", "+1", "+2", "-1", "-1", "=1", "=2", "=3", "=0"))
    policy = rng.choice((None, "least-loaded", "coldest"))
    force = it.forces(0.2)
    it.arbiter.run(it.arbiter.scale(it.some_component(), target, force=force, policy=policy, stimulus_id=it.stimulus()))


def scale_all(it: Scenario) -> None:
    """A planner's numbers for both components, by whatever there is."""
    targets = {component: it.rng.choice((1, 1, 2, 3)) for component in ("VllmWorker", "PrefillWorker")}
    actuators = it.rng.choice((EVERY, EVERY, WAKES, frozenset()))
    work = it.arbiter.commands.run(ScaleAll(stimulus_id=it.stimulus(), targets=targets, actuators=actuators))
    it.arbiter.run(it.arbiter.command(f"scale all {targets} by {sorted(actuators)}", work))


def drain(it: Scenario) -> None:
    """One by its name."""
    force = it.forces(0.2)
    it.arbiter.run(it.arbiter.drain(it.some_name(), cancel=False, force=force, stimulus_id=it.stimulus()))


def cancel(it: Scenario) -> None:
    """Of one that drains, if one does."""
    draining = [w.name for w in it.arbiter.workers.values() if w.state is WorkerState.DRAINING]
    name = it.rng.choice(draining) if draining else it.some_name()
    it.arbiter.run(it.arbiter.drain(name, cancel=True, force=False, stimulus_id=it.stimulus()))


def restart(it: Scenario) -> None:
    """One, or all of a component."""
    target = it.rng.choice((it.some_name(), it.some_component()))
    it.arbiter.run(it.arbiter.restart(target, force=it.forces(0.2), stimulus_id=it.stimulus()))


def sleep(it: Scenario) -> None:
    """One by its name: mostly one that could, now and then any."""
    ready = [
        w.name for w in it.arbiter.workers.values() if w.state is WorkerState.READY and w.role is not Role.FRONTEND
    ]
    name = it.rng.choice(ready) if ready and it.rng.random() < 0.8 else it.some_name()
    level, force, cause = it.rng.choice((1, 1, 2)), it.forces(0.3), it.stimulus()
    if not force:
        it.arbiter.unforced.add(cause)
    work = it.arbiter.commands.run(Sleep(stimulus_id=cause, name=name, level=level, force=force))
    it.arbiter.run(it.arbiter.command(f"sleep {name} --level {level}", work))


def wake(it: Scenario) -> None:
    """Of one on standby, if one is."""
    asleep = [w.name for w in it.arbiter.workers.values() if w.stands_by]
    name = it.rng.choice(asleep) if asleep else it.some_name()
    work = it.arbiter.commands.run(Wake(stimulus_id=it.stimulus(), name=name))
    it.arbiter.run(it.arbiter.command(f"wake {name}", work))


def apply(it: Scenario) -> None:
    """Another configuration, or other numbers of workers, or both."""
    components = [spec.name for spec in it.graph.services]
    renewed = {name for name in components if it.rng.random() < 0.5}
    counts = {it.some_component(): it.rng.choice((1, 2, 3))} if it.rng.random() < 0.4 else {}
    force = it.forces(0.3)
    it.arbiter.run(it.arbiter.apply(renewed, counts, force=force, stimulus_id=it.stimulus()))


def flip(it: Scenario) -> None:
    """One by its name; how well that goes is drawn with it."""
    it.world.flip_s = it.rng.choice((0.01, 0.05, 0.5, 3.0))
    it.world.flips_fail = it.rng.random() < 0.2
    it.arbiter.run(it.arbiter.flip(it.some_name(), cancel=False, force=it.forces(0.2), stimulus_id=it.stimulus()))


def cancel_flip(it: Scenario) -> None:
    """Of one that flips, if one does."""
    turning = [w.name for w in it.arbiter.workers.values() if w.flip is not None]
    name = it.rng.choice(turning) if turning else it.some_name()
    it.arbiter.run(it.arbiter.flip(name, cancel=True, force=False, stimulus_id=it.stimulus()))


def scale_flip(it: Scenario) -> None:
    """One component gives what the other takes."""
    gives, takes = it.rng.sample(("VllmWorker", "PrefillWorker"), 2)
    force = it.forces(0.2)
    count = it.rng.choice((1, 1, 2))
    it.arbiter.run(it.arbiter.scale_flip(gives, takes, count, force=force, stimulus_id=it.stimulus()))


def crash(it: Scenario) -> None:
    """A worker dies: a signal, a code, or 0 without having been asked. One that is stopped can only be killed."""
    if (process := it.someone()) is not None:
        it.world.note(f"* {process.name} ({process.pid}) dies")
        code = it.rng.choice((-9, -11, 0, 1, 137))
        it.world.exits(process, -9 if process.stopped else code)


def stop(it: Scenario) -> None:
    """SIGSTOP, and SIGCONT some time later, perhaps past its lease."""
    if (process := it.someone()) is not None:
        it.world.note(f"* {process.name} ({process.pid}) is stopped")
        process.signal(signal.SIGSTOP)
        it.later(lambda: process.signal(signal.SIGCONT), 40.0)


def hang(it: Scenario) -> None:
    """It answers nothing; its lease lives."""
    if (process := it.someone()) is not None:
        it.world.note(f"* {process.name} ({process.pid}) hangs")
        process.hang(True)
        it.later(lambda: process.hang(False), 60.0)


def revoke(it: Scenario) -> None:
    """Somebody revokes a lease by hand."""
    process = it.someone()
    if process is not None and process.lease_id and it.world.etcd.available:
        it.world.note(f"* the lease of {process.name} ({process.pid}) is revoked from outside")
        it.world.revoked_outside.add(process.pid)
        it.arbiter.run(it.world.etcd.revoke(process.lease_id))


def etcd_away(it: Scenario) -> None:
    """etcd is killed, and comes back with its data, or without."""
    lost = it.rng.random() < 0.3
    it.world.note(f"* etcd goes away{', and loses its data' * lost}")
    it.world.etcd.available = False
    it.later(lambda: it.world.etcd.restart(lose_data=lost), 25.0)


def nats_away(it: Scenario) -> None:
    """NATS is killed, and comes back."""
    it.world.note("* NATS goes away")
    it.world.nats.up = False

    def back() -> None:
        it.world.nats.up = True

    it.later(back, 25.0)


def disk_full(it: Scenario) -> None:
    """No room for the statefile, for a while."""
    it.world.note("* the disk is full")
    it.world.file.full = True

    def room() -> None:
        it.world.file.full = False

    it.later(room)


def edit(it: Scenario) -> None:
    """Somebody edits, cuts or removes the statefile."""
    file = it.world.file
    if file.text is None:
        return
    kind = it.rng.choice(("cut", "garbage", "removed", "entries", "run", "pid"))
    it.world.note(f"* the statefile: {kind}")
    if kind == "cut":
        file.text = file.text[: len(file.text) // 2]
    elif kind == "garbage":
        file.text = "\x00\x01 not a statefile"
    elif kind == "removed":
        file.text = None
    elif kind == "entries":
        file.text = file.text.replace('"dynamo_VllmWorker"', '"dynamo_Vllm"')
    elif kind == "run":
        file.text = file.text.replace('"run-', '"walk-')
    else:
        file.text = file.text.replace('"pid": ', '"pid": 1')
    file.edited = True
    file.version += 1


def refuse(it: Scenario) -> None:
    """The next processes cannot be made."""
    it.world.refusals += [OSError(12, "Cannot allocate memory")] * it.rng.choice((1, 1, 2, 6))


def slow_spawn(it: Scenario) -> None:
    """Making a process takes long."""
    it.world.spawn_s = it.rng.choice((0.003, 0.5, 5.0))


def fates(it: Scenario) -> None:
    """How the next processes behave."""
    rng = it.rng
    bad = (
        Fate(start_code=1, start_s=0.2),
        Fate(start_code=0, start_s=1.0),
        Fate(start_s=None),
        Fate(work_s=40.0),
        Fate(work_s=8.0, dies_in_s=4.0),
        Fate(memory_s=3.0),
        Fate(memory_s=60.0),
        Fate(memory_s=None),
        Fate(start_s=9.0),
        Fate(wake_s=None),
        Fate(wake_s=5.0),
        Fate(wakes_badly=True),
        Fate(recycles_after=1),
        Fate(cannot_sleep="it has no sleep mode"),
        Fate(work_s=200.0),
    )
    it.world.fates += rng.choices(bad, k=rng.choice((1, 2, 2, 7)))


def many(it: Scenario) -> None:
    """Commands without end, all at once."""
    for _ in range(it.rng.choice((5, 12))):
        it.rng.choice((scale, drain, cancel, restart, flip, cancel_flip, sleep, wake))(it)


def clock_jumps(it: Scenario) -> None:
    """Somebody sets the wall clock."""
    it.world.clock.ahead_s += it.rng.choice((-86_400.0, -3.0, 3.0, 86_400.0))


ACTIONS: dict[Callable[[Scenario], None], int] = {
    scale: 26,
    scale_all: 10,
    drain: 12,
    cancel: 12,
    restart: 8,
    sleep: 18,
    wake: 12,
    apply: 8,
    flip: 16,
    cancel_flip: 5,
    scale_flip: 6,
    crash: 14,
    stop: 6,
    hang: 4,
    revoke: 5,
    etcd_away: 6,
    nats_away: 5,
    disk_full: 5,
    edit: 5,
    refuse: 4,
    slow_spawn: 4,
    fates: 12,
    many: 4,
    clock_jumps: 2,
}

GENTLE = {
    action: ACTIONS[action]
    for action in (scale, scale_all, drain, cancel, restart, sleep, wake, apply, flip, cancel_flip, scale_flip)
}
"""Commands alone: nothing dies, hangs or is away."""
