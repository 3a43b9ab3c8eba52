"""The next fleet while one step makes it: the changes so far, and the effects.

A `StepBuilder` lives for one `step.step` and is never seen outside of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from dynamo_local.core.fleet.effects import Commit, Effect, Lock, Note, Tell, Unlock
from dynamo_local.core.fleet.fleet import Fleet, Health, Intent, Leave, Process, Registration, Template, Worker
from dynamo_local.core.fleet.lifecycle import STARTS, Transition, TransitionKind, apply
from dynamo_local.core.fleet.states import TRAITS
from dynamo_local.core.gpus import GpuLedger
from dynamo_local.core.notes import Elsewhere
from dynamo_local.core.types import Missing, WorkerState, how_it_ended
from dynamo_local.core.types import WorkerState as S

EMPTY: Mapping[str, Any] = {}


class StepBuilder:
    """`fleet` is the fleet so far; `now_s` and `stimulus_id` are the step's."""

    def __init__(self, fleet: Fleet, now_s: float, stimulus_id: str) -> None:
        self.before = fleet
        self.now_s = now_s
        self.stimulus_id = stimulus_id
        self.head = False
        """Set where something else than workers is to be written down, too."""
        self._workers = dict(fleet.workers)
        self.fleet = replace(fleet, workers=self._workers)
        self._locks: list[Lock] = []
        self._acts: list[Effect] = []
        self._transitions: list[Transition] = []
        self._written: dict[str, None] = {}

    # --- reading -------------------------------------------------------------------------------

    def get(self, name: str) -> Worker | None:
        """The worker as it is so far."""
        return self._workers.get(name)

    def with_pid(self, name: str, pid: int) -> Worker | None:
        """The worker of that name if its process is `pid`, else the one whose process it is: it was called `name` when
        that was observed."""
        worker = self._workers.get(name)
        if worker is not None and worker.pid == pid:
            return worker
        return next((each for each in self._workers.values() if each.pid == pid), None)

    def worker(self, name: str) -> Worker:
        """As `get`, of one that is known to be there."""
        return self._workers[name]

    def workers(self) -> list[Worker]:
        """All of them, so far."""
        return list(self._workers.values())

    def template(self, name: str) -> Template:
        """How the worker of that name is made."""
        return self.fleet.template(self._workers[name].component)

    @property
    def transitions(self) -> tuple[Transition, ...]:
        """The events of the lifecycle table that were applied so far."""
        return tuple(self._transitions)

    # --- changing ------------------------------------------------------------------------------

    def add(self, worker: Worker) -> None:
        """A new entry, which is committed."""
        self._put(worker)
        self.write(worker.name)

    def write(self, name: str) -> None:
        """Commit the entry, though its state does not change: a successor must find it."""
        self._written[name] = None

    def change(self, name: str, **fields: Any) -> None:
        """Change fields of a worker (`Worker.changed`). The entry is written if the statefile has one of them."""
        before = self._workers[name]
        after = before.changed(**fields)
        self._put(after)
        if after.persisted != before.persisted:
            self._written[name] = None

    def apply(
        self,
        name: str,
        kind: TransitionKind,
        details: Mapping[str, Any] = EMPTY,
        *,
        by: str | None = None,
        **fields: Any,
    ) -> None:
        """Apply a transition of the lifecycle table, and change fields with it. `by` is its cause, if not the step's.

        Raises `IllegalTransition`.
        """
        worker, cause = self._workers[name], by or self.stimulus_id
        after = apply(worker.state, kind, cause)
        self._transitions.append(Transition(name, worker.component, worker.state, after, kind, cause, details))
        if after is not worker.state:
            fields = {"since_s": self.now_s, **fields}
        if after is not WorkerState.FLIPPING and worker.flip is not None:
            fields = {"flip": None, **fields}
        if TRAITS[worker.state].standby and TRAITS[after].leaves:
            fields = {"standby": replace(worker.standby, drained=True, ask_s=None), **fields}
        if kind in STARTS:
            fields = {"starts": worker.start.starts + 1, **fields}
        if TRAITS[after].serves and not worker.health.served:
            heard_s = (
                self.now_s if worker.health.heard_s is None else worker.health.heard_s
            )  # from now on its silence counts
            fields = {"served": True, "ready_s": self.now_s, "heard_s": heard_s, **fields}
        self.change(name, state=after, **fields)

    def process_began(self, name: str, process: Process, *, keep_reason: bool) -> None:
        """Note what belongs to a new process."""
        worker = self._workers[name]
        self.change(
            name,
            process=process,
            registration=Registration(),
            health=Health(),
            start=replace(worker.start, spawning=False, spawn_begun=False, spawned_as=None),
            leave=Leave(),
            ended=replace(worker.ended, exit=None),
            flip=None,
            standby=replace(worker.standby, order=0, ask_s=None, drained=False, cannot=None),
            reason=worker.reason if keep_reason else None,
        )

    def process_ended(self, name: str, code: int | None) -> None:
        """Forget what belonged to the process; what one that slept kept on its devices is gone with it."""
        sleeper = self.fleet.gpus.sleepers.get(name)
        if sleeper is not None:
            self.set(gpus=self.fleet.gpus.release(name))
            if sleeper.uuids:
                self.do(Unlock(name, sleeper.uuids))
            self.look_at_gpus(self.now_s)
        worker = self._workers[name]
        self.change(
            name,
            process=None,
            registration=Registration(),
            health=Health(Missing("it has no process"), served=worker.health.served),
            leave=replace(worker.leave, calls=0, counting=False),
            ended=replace(worker.ended, exit=None, exit_code=code),
            flip=None,
            due_s=None,
        )

    def rename(self, name: str, to: str, **fields: Any) -> None:
        """The same worker under another name, with other fields; its devices go with it."""
        uuids = self._workers[name].gpus
        worker = self._workers[name].changed(name=to, gpus=(), **fields)
        ledger = self.fleet.gpus.renamed(name, to)
        self.drop(name)
        self.add(worker)
        self._hold(to, ledger, uuids)

    def drop(self, name: str) -> None:
        """Forget the worker."""
        del self._workers[name]
        self._written[name] = None

    def set(self, **fields: Any) -> None:
        """Change fields of the fleet itself."""
        self.fleet = replace(self.fleet, **fields)

    def revoked_outside(self, worker: Worker) -> None:
        """It has left because somebody else revoked its lease, and nothing replaces it."""
        self.set(revoked={**self.fleet.revoked, worker.name: worker.component})

    def decided_anew(self, *, component: str | None = None, name: str | None = None) -> None:
        """How many workers that component has, or that the one of that name runs, is somebody's decision again."""
        left = {who: of for who, of in self.fleet.revoked.items() if of != component and who != name}
        if len(left) < len(self.fleet.revoked):
            self.set(revoked=left)

    def look_at_gpus(self, at_s: float) -> None:
        """Look at the devices then, or before."""
        before_s = self.fleet.look_s
        self.set(look_s=at_s if before_s is None else min(before_s, at_s))

    # --- GPUs ----------------------------------------------------------------------------------

    def take_gpus(self, name: str, count: int) -> None:
        """The best `count` free devices for that worker. Raises `GpuError` where there are not so many."""
        share = self.template(name).vram_share
        ledger = self.fleet.gpus.allocate(name, count, share)
        self._hold(name, ledger, ledger.held_uuids.get(name, ()))
        self.lock(name)

    def lock(self, name: str) -> None:
        """Have the devices of that worker locked, host-wide, before this step is valid."""
        if self._workers[name].gpus:
            self._locks.append(Lock(name, self._workers[name].gpus))

    def free_gpus(self, name: str, quarantined: Mapping[str, str] | None = None) -> None:
        """Its devices go back; those in `quarantined` (UUID to the reason) go to nobody, and are told of."""
        uuids = self._workers[name].gpus
        ledger = self.fleet.gpus.release(name)
        for uuid, why in (quarantined or {}).items():
            ledger = ledger.quarantine(uuid, why)
            text = f"GPU {ledger.by_uuid[uuid].index} ({uuid}) is quarantined: {why}"
            self.do(Tell(text, Elsewhere()))
        self._hold(name, ledger, ())
        if uuids:
            self.do(Unlock(name, uuids))

    def _hold(self, name: str, ledger: GpuLedger, uuids: tuple[str, ...]) -> None:
        self.set(gpus=ledger)
        self.change(name, gpus=uuids)

    # --- acting --------------------------------------------------------------------------------

    def do(self, effect: Effect) -> None:
        """Have it carried out once this step is committed."""
        self._acts.append(effect)

    def result(self, event: str) -> tuple[Fleet, tuple[Effect, ...]]:
        """The fleet, and the effects: locks, the commit, the acts.

        `event` is the kind of what the step was taken for.
        """
        out: list[Effect] = [*self._locks]
        before, now = self.before, self.fleet
        kept = (before.restarts, before.templates, before.revoked)
        head = self.head or (now.restarts, now.templates, now.revoked) != kept
        notes = tuple(self._notes(event))
        if self._written or self._transitions or head or notes:
            out.append(Commit(tuple(self._written), self.transitions, head, notes))
        out += self._acts
        return self.fleet, tuple(out)

    def _notes(self, event: str) -> Iterator[Note]:
        """Workers of which something is ordered though their state has no event."""
        named = (getattr(each, "name", None) for each in (*self._locks, *self._acts))
        with_event = {transition.name for transition in self._transitions}
        for name in dict.fromkeys(named):
            worker = None if name is None else self._workers.get(name) or self.before.workers.get(name)
            if worker is not None and name not in with_event:
                yield Note(worker.name, worker.component, worker.state, event, self.stimulus_id)

    def _put(self, worker: Worker) -> None:
        self._workers[worker.name] = worker


# --- endings
# How the end of a worker's process is judged, from what the worker was when it ended.

UNHEARD = "it had answered nothing when its lease ended"
STARTED_AGAIN = "; it is started again"
"""Said of a worker that leaves because somebody else revoked its lease, where the fleet brings such workers back."""


def was_leaving(worker: Worker, code: int | None) -> bool:
    """It ended because it was to.

    A worker that was silent when its lease ended, and then ended with an error, was not leaving. It was suspended for
    longer than its lease lives, and died of another cause.
    """
    if worker.state is S.DRAINING:
        return not worker.leave.silent_at_expiry or code in (0, None)
    return worker.state is S.DRAIN_TIMED_OUT


def comes_back_unasked(worker: Worker) -> bool:
    """Somebody else revoked its lease, and nobody here has ordered its restart: that follows the restart policy."""
    return worker.intent is Intent.RESTARTING and worker.leave.lease_gone and worker.leave.requested_at_s is None


def why_it_ended(worker: Worker, code: int | None) -> str | None:
    """In words, for a worker as it was before its process ended."""
    left = was_leaving(worker, code)
    if not left and worker.state is S.DRAINING:
        return f"{how_it_ended(code)}; {UNHEARD}"
    if not left and (worker.state in (S.STARTING, S.READY, S.FLIPPING) or TRAITS[worker.state].standby):
        return (
            how_it_ended(code)
            if worker.health.engine_said is None
            else f"{worker.health.engine_said}; {how_it_ended(code)}"
        )
    if left and code not in (0, None) and worker.state is S.DRAINING:
        return f"{worker.reason or 'was leaving'}; {how_it_ended(code)}"
    return worker.reason
