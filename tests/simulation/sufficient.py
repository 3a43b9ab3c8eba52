"""What a statefile must say after a crash, whenever that was."""

from __future__ import annotations

from dynamo_local.errors import StateError
from dynamo_local.state import State
from tests.fakes.arbiter.memory_store import MemoryStore
from tests.simulation.checks import LIVES
from tests.simulation.world import NAMESPACE, Broken, World


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
        if missing := set(process.gpus) - set(entry.resources.gpu_uuids or ()):
            raise Broken(f"{process.name} is on {missing}, which the statefile does not give to it")
    return state
