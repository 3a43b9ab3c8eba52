"""Shows what holds of a simulated arbiter at every moment: its processes, its fleet and its statefile say the same."""

from __future__ import annotations

from collections import defaultdict
from contextlib import aclosing

from dynamo_local.core.fleet.states import TRAITS, HasProcess
from dynamo_local.errors import StateError
from dynamo_local.ports import PutEvent, SnapshotEvent
from dynamo_local.state.schema import State
from tests.fakes.arbiter.memory_store import MemoryStore
from tests.simulation.arbiter import Arbiter
from tests.simulation.world import NAMESPACE, Broken, World

LIVES = tuple(state for state, traits in TRAITS.items() if traits.process is HasProcess.YES)


def check(arbiter: Arbiter) -> None:
    """What holds at every moment, beside what `validate` checks after every step."""
    if arbiter.failure is not None:
        raise Broken("something was raised out of the controller") from arbiter.failure
    if arbiter.dead:
        return
    _check_processes(arbiter)
    _check_spares(arbiter)
    if not arbiter.world.loop.blocking and not arbiter.statefile.unwritten and arbiter.effects.idle:
        _check_file(arbiter)


def _check_processes(arbiter: Arbiter) -> None:
    for process in arbiter.world.living():
        worker = next((w for w in arbiter.workers.values() if w.pid == process.pid), None)
        worker = worker or arbiter.workers.get(process.name)
        # It has its new name a moment before the arbiter calls it so.
        if worker is not None and worker.pid == process.pid and process.name != worker.name:
            becomes = None if worker.flip is None else worker.flip.name
            if process.name != becomes and arbiter.controller.fleet.leaving is None:
                raise Broken(f"{process.name} ({process.pid}) has the entry {worker.name}")
        if worker is None:
            raise Broken(f"{process.name} ({process.pid}) has no entry")
        if worker.pid is not None and worker.pid != process.pid:
            raise Broken(f"{process.name} is {process.pid}, its entry says {worker.pid}")
        if worker.pid is None and worker.state not in LIVES:
            raise Broken(f"{process.name} ({process.pid}) lives, its entry is {worker.state} without a pid")
        sleeper = arbiter.controller.fleet.gpus.sleepers.get(process.name)
        booked = worker.gpus if sleeper is None or process.standby.on_gpus else sleeper.uuids
        if missing := set(process.gpus) - set(booked):
            raise Broken(f"{process.name} is on {missing}, which are not booked on it")


def _check_spares(arbiter: Arbiter) -> None:
    """None is forgotten, and there are no more of them than are to be."""
    known = {entry.pid for entry in arbiter.spares.pool.records().values()}
    if unknown := set(arbiter.world.spares) - known:
        raise Broken(f"the spares {unknown} are known to nobody")
    if sum(arbiter.spares.pool.counts().values()) > arbiter.world.spares_wanted:
        raise Broken(f"more spares than {arbiter.world.spares_wanted}: {arbiter.spares.pool.counts()}")


def _check_file(arbiter: Arbiter) -> None:
    file = arbiter.world.file
    if file.edited:
        return  # `heal` looks at it soon
    state = arbiter.statefile.store.read()
    if set(state.components) != set(arbiter.workers):
        raise Broken(f"the statefile has {set(state.components)}, the fleet {set(arbiter.workers)}")


# --- after a crash ----------------------------------------------------------------------------------


def check_sufficient(world: World) -> State:
    """After a crash the statefile alone says what is there: each process has its entry, with its pid and its GPUs.

    Between the start of a process and the commit of its pid the entry is `starting` without one.
    """
    if world.file.text is None and not world.living():
        return State(namespace=NAMESPACE, run_id="none", circus_endpoint="ipc:///none")
    try:
        state = MemoryStore(world.file).read()
    except StateError as error:
        raise Broken(f"the statefile that a crash left is not valid: {error}") from error
    holders: dict[str, str] = {}
    for name, entry in state.components.items():
        for uuid in entry.resources.gpu_uuids or ():
            if uuid in holders:
                raise Broken(f"the statefile gives {uuid} to {holders[uuid]} and to {name}")
            holders[uuid] = name
    for process in world.living():
        own = [each for each in state.components.values() if each.pid == process.pid]
        if len(own) > 1:
            raise Broken(f"{process.pid} is in the statefile as {[each.watcher_name for each in own]}")
        entry = own[0] if own else state.components.get(process.name)  # type: ignore[assignment]
        names = () if entry is None else (entry.watcher_name, entry.born, entry.flip and entry.flip.watcher_name)
        if entry is not None and not {process.name, process.spec.name} <= set(names):
            raise Broken(f"{process.name}, made as {process.spec.name}, is in the statefile as {names}")
        if entry is None:
            raise Broken(f"{process.name} ({process.pid}) lives and is not in the statefile")
        if entry.pid not in (None, process.pid):
            raise Broken(f"{process.name} is {process.pid}, the statefile says {entry.pid}")
        if entry.pid is None and entry.state not in LIVES:
            raise Broken(f"{process.name} ({process.pid}) lives, the statefile says {entry.state}")
        booked = set(entry.resources.gpu_uuids or ())
        if entry.standby is not None and not process.standby.on_gpus:
            booked |= set(entry.standby.gpu_uuids or ())
        if missing := set(process.gpus) - booked:
            raise Broken(f"{process.name} is on {missing}, which the statefile does not give to it")
    return state


# --- in a gentle run ---------------------------------------------------------------------------------


async def always_served(arbiter: Arbiter) -> None:
    """Break the run when the last endpoint of a component goes: what clients would see, whatever the fleet says."""
    prefix = f"{NAMESPACE}/components/"
    found: dict[str, set[str]] = defaultdict(set)
    async with aclosing(arbiter.world.etcd.watch_prefix(prefix)) as events:
        async for event in events:
            if isinstance(event, SnapshotEvent):
                for kv in event.kvs:
                    found[component_of(kv.key, prefix)].add(kv.key)
                continue
            key = event.kv.key if isinstance(event, PutEvent) else event.key
            there = found[component_of(key, prefix)]
            (there.add if isinstance(event, PutEvent) else there.discard)(key)
            arbiter.world.note(f"    registry: {key.removeprefix(prefix)}: {type(event).__name__}, {len(there)} there")
            if not there:
                arbiter.broke(Broken(f"no {component_of(key, prefix)} can be found any more"))


def component_of(key: str, prefix: str) -> str:
    """`dynamo/components/VllmWorker/generate:3e8` is one of `VllmWorker`."""
    return key.removeprefix(prefix).partition("/")[0]
