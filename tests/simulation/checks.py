"""What holds of a simulated arbiter at every moment: its processes, its fleet and its statefile say the same."""

from __future__ import annotations

from dynamo_local.core.types import WorkerState
from tests.simulation.arbiter import Arbiter
from tests.simulation.world import Broken

LIVES = (WorkerState.STARTING, WorkerState.READY, WorkerState.DRAINING, WorkerState.DRAIN_TIMED_OUT)


def check(arbiter: Arbiter) -> None:
    """What holds at every moment, beside what `validate` checks after every step."""
    if arbiter.failure is not None:
        raise Broken("something was raised out of the shell") from arbiter.failure
    if arbiter.dead:
        return
    _check_processes(arbiter)
    if not arbiter.world.loop.blocking and not arbiter.statefile.unwritten and arbiter.effects.idle:
        _check_file(arbiter)


def _check_processes(arbiter: Arbiter) -> None:
    for process in arbiter.world.living():
        worker = next((w for w in arbiter.workers.values() if w.pid == process.pid), None)
        worker = worker or arbiter.workers.get(process.name)
        # It has its new name a moment before the arbiter calls it so.
        if worker is not None and worker.pid == process.pid and process.name != worker.name:
            becomes = None if worker.flip is None else worker.flip.name
            if process.name != becomes and arbiter.shell.fleet.leaving is None:
                raise Broken(f"{process.name} ({process.pid}) has the entry {worker.name}")
        if worker is None:
            raise Broken(f"{process.name} ({process.pid}) has no entry")
        if worker.pid is not None and worker.pid != process.pid:
            raise Broken(f"{process.name} is {process.pid}, its entry says {worker.pid}")
        if worker.pid is None and worker.state not in LIVES:
            raise Broken(f"{process.name} ({process.pid}) lives, its entry is {worker.state} without a pid")
        if missing := set(process.gpus) - set(worker.gpus):
            raise Broken(f"{process.name} is on {missing}, which are not booked on it")


def _check_file(arbiter: Arbiter) -> None:
    file = arbiter.world.file
    if file.edited:
        return  # `heal` looks at it soon
    state = arbiter.statefile.store.read()
    if set(state.components) != set(arbiter.workers):
        raise Broken(f"the statefile has {set(state.components)}, the fleet {set(arbiter.workers)}")
