"""Five episodes of a fleet's life, as scripts of events; `docs/generate.py` runs them and writes what the machine did.

`step` is the machine that runs in the arbiter. The fleet is validated after each step. Time passes as in the arbiter:
deadlines before the next event of a script take effect first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from dynamo_local.core.fleet.effects import Commit, Effect, describe
from dynamo_local.core.fleet.events import (
    Change,
    Drain,
    Event,
    GpusSeen,
    KeyGone,
    KeyPut,
    ProcessGone,
    ProcessMade,
    Restart,
    Resume,
    Scale,
    StartAll,
    Swept,
    Tick,
)
from dynamo_local.core.fleet.fleet import Fleet, Template, Worker
from dynamo_local.core.fleet.invariants import validate
from dynamo_local.core.fleet.step import next_due_s, step
from dynamo_local.core.gpus import GpuDevice, GpuLedger
from dynamo_local.core.types import Role

GIB = 1024**3
ROLES = {"VllmWorker": Role.DECODE, "PrefillWorker": Role.PREFILL}
FIRST_PID = 101


@dataclass(frozen=True, slots=True)
class Row:
    """One step: time, event, state changes (`worker: before -> after, by which transition`), effects."""

    at_s: float
    event: str
    transitions: tuple[str, ...]
    effects: tuple[str, ...]


class Play:
    """A fleet of one namespace, on a host that has one GPU for each of its first workers and `extra_gpus` more.

    A method feeds the machine what the world would say next, and notes the step. Processes are numbered from 101 in
    the order in which they are made, and their leases after them; workers are named without the namespace.
    """

    def __init__(self, workers: Mapping[str, int], *, extra_gpus: int = 0) -> None:
        """A fleet in which all workers serve: `{"VllmWorker": 2}`."""
        self.rows: list[Row] = []
        self.now_s = 0.0
        self._pids: Iterator[int] = iter(range(FIRST_PID, 1000))
        self._fleet = self._pending(workers, extra_gpus)
        self.do(0.0, StartAll(stimulus_id="serve"))
        for name in map(_short, list(self._fleet.workers)):
            self.made(0.0, name)
            self.registers(0.0, name)
        self.rows = []

    def _pending(self, workers: Mapping[str, int], extra_gpus: int) -> Fleet:
        entries = {}
        for component, count in workers.items():
            for n in range(count):
                name = f"dynamo_{component}" + (f"_{n}" if n else "")
                entries[name] = Worker(name, component, ROLES[component], n)
        devices = [GpuDevice(i, f"GPU-{i}", "simulated", 80 * GIB, 0) for i in range(len(entries) + extra_gpus)]
        templates = tuple(Template(component, ROLES[component], gpus_per_worker=1) for component in workers)
        return Fleet("dynamo", templates, entries, GpuLedger.of(devices))

    # --- events --------------------------------------------------------------------------------

    def do(self, at_s: float, event: Event) -> None:
        """Feed the machine; whatever was due before then happens first."""
        while (due_s := next_due_s(self._fleet)) is not None and due_s <= at_s:
            self._step(due_s, Tick())
        self._step(at_s, event)

    def until(self, at_s: float) -> None:
        """Nothing but time comes in until then."""
        while (due_s := next_due_s(self._fleet)) is not None and due_s <= at_s:
            self._step(due_s, Tick())

    def made(self, at_s: float, name: str) -> None:
        """The process that was asked for exists."""
        pid = next(self._pids)
        made = ProcessMade(stimulus_id=f"spawn:{pid}", name=_full(name), pid=pid, start_time=None, started_at=0.0)
        self.do(at_s, made)

    def registers(self, at_s: float, name: str) -> None:
        """Its keys are in etcd."""
        pid = self._pid(name)
        self.do(at_s, KeyPut(stimulus_id=f"etcd:{_lease(pid)}", name=_full(name), pid=pid, lease=_lease(pid)))

    def deregisters(self, at_s: float, name: str) -> None:
        """Its keys have gone."""
        lease = _lease(self._pid(name))
        self.do(at_s, KeyGone(stimulus_id=f"etcd:{lease}", name=_full(name), lease=lease))

    def exits(self, at_s: float, name: str, code: int) -> None:
        """Its process ends."""
        pid = self._pid(name)
        self.do(at_s, ProcessGone(stimulus_id=f"exit:{pid}", name=_full(name), pid=pid, code=code))

    def swept(self, at_s: float, name: str) -> None:
        """Nothing is left of what the process had started."""
        self.do(at_s, Swept(stimulus_id=f"sweep:{_full(name)}", name=_full(name)))

    def gpus_observed(self, at_s: float, *, busy: tuple[int, ...] = ()) -> None:
        """The devices were looked at; those in `busy` still hold somebody's memory."""
        devices = tuple(
            replace(device, memory_used_bytes=70 * GIB if device.index in busy else 0)
            for device in self._fleet.gpus.devices
        )
        self.do(at_s, GpusSeen(stimulus_id="gpus", devices=devices))

    def succeeded(self, *, gone: tuple[str, ...]) -> dict[str, int]:
        """The arbiter was killed; its successor has read the statefile and the registry, and knows who has ended.

        Returns the pids of those that have: watcher name to pid.
        """
        pids = {_full(name): self._pid(name) for name in gone}
        self._fleet = self._fleet.with_workers(
            {name: _adopted(worker, name in pids) for name, worker in self._fleet.workers.items()}
        )
        self.rows = []
        return pids

    # --- the rest ------------------------------------------------------------------------------

    def _pid(self, name: str) -> int:
        pid = self._fleet.workers[_full(name)].pid
        if pid is None:
            raise ValueError(f"{name} has no process at {self.now_s} s: the script is wrong")
        return pid

    def _step(self, at_s: float, event: Event) -> None:
        if at_s < self.now_s:
            raise ValueError(f"{event} comes at {at_s} s, after {self.now_s} s: the script is wrong")
        before_s = next_due_s(self._fleet)
        self._fleet, effects, _ = step(self._fleet, event, at_s)
        validate(self._fleet)
        self.now_s = at_s
        row, due_s = _row(at_s, event, effects), next_due_s(self._fleet)
        if due_s is not None and due_s != before_s:  # the controller asks for a tick then
            row = replace(row, effects=(*row.effects, f"wait until {due_s:.1f} s"))
        self.rows.append(row)


def _full(name: str) -> str:
    return f"dynamo_{name}"


def _lease(pid: int) -> str:
    return f"l{pid}"


def _adopted(worker: Worker, gone: bool) -> Worker:
    """The worker as adoption reads it from the statefile: facts that only the old arbiter knew are lost."""
    entry = Worker(worker.name, worker.component, worker.role, worker.n, worker.state, worker.since_s, worker.gpus)
    kept = {"intent": worker.intent, "reason": worker.reason, "history": worker.history}
    starts = {"starts": worker.start.starts, "lease": worker.lease}
    if gone:
        return entry.changed(**kept, **starts)
    health, leave = worker.health, worker.leave
    lives = {"process": worker.process, "served": health.served, "ready_s": health.ready_s}
    return entry.changed(**kept, **starts, **lives, requested_at_s=leave.requested_at_s)


def _row(at_s: float, event: Event, effects: tuple[Effect, ...]) -> Row:
    what = event.kind
    name = getattr(event, "name", None) or getattr(event, "component", None)
    details = f"{event.target}" if isinstance(event, Scale) else ""
    said = " ".join(word for word in (f"`{what}`", _short(name or ""), details) if word)
    transitions = [change for each in effects if isinstance(each, Commit) for change in each.transitions]
    moved = tuple(
        f"{_short(t.name)}: {t.before} → {t.after} (`{t.kind}`, {_short(t.stimulus_id)})" for t in transitions
    )
    shown = tuple(_short(_said(each)) for each in effects if not _only_logged(each))
    return Row(at_s, f"{said} ({_short(event.stimulus_id)})", moved, shown)


def _only_logged(effect: Effect) -> bool:
    return isinstance(effect, Commit) and not (effect.names or effect.head)


def _said(effect: Effect) -> str:
    """As `dynamo events --story` says it, and which worker is meant."""
    if isinstance(effect, Commit):
        return f"commit {', '.join(effect.names)}" + (" and the restart" if effect.head else "")
    said, name = describe(effect), getattr(effect, "name", "")
    if not name:
        return said
    return f"{said} ({name})" if " " in said else f"{said} {name}"


def _short(text: str) -> str:
    return text.replace("dynamo_", "")


# --- the episodes ----------------------------------------------------------------------------------


def drain() -> Play:
    """`dynamo drain VllmWorker_1`: the worker loses its lease, finishes its streams and exits; its GPU becomes free.

    The arbiter looks at the GPU twice, because the driver has not freed the memory at the first look.
    """
    play = Play({"VllmWorker": 2})
    play.do(1.0, Drain(stimulus_id="command:7", name="VllmWorker_1"))
    play.deregisters(1.01, "VllmWorker_1")
    play.exits(4.2, "VllmWorker_1", code=0)
    play.swept(4.25, "VllmWorker_1")
    play.gpus_observed(4.3, busy=(1,))
    play.until(4.4)
    play.gpus_observed(4.45)
    return play


def crash() -> Play:
    """A decode worker segfaults, restarts after its back-off, and serves again.

    It keeps its GPU. The new process starts after a look showed the GPU empty. A second failure would wait longer.
    """
    play = Play({"VllmWorker": 1})
    play.exits(5.0, "VllmWorker", code=-11)
    play.swept(5.05, "VllmWorker")
    play.until(6.5)
    play.gpus_observed(6.6)
    play.made(6.65, "VllmWorker")
    play.registers(9.0, "VllmWorker")
    return play


def scale_up() -> Play:
    """`dynamo scale VllmWorker +1`: the arbiter locks a free GPU, commits the new worker, and spawns its process."""
    play = Play({"VllmWorker": 1}, extra_gpus=1)
    play.do(1.0, Scale(stimulus_id="command:7", component="VllmWorker", target=Change(1, relative=True)))
    play.made(1.1, "VllmWorker_1")
    play.registers(4.0, "VllmWorker_1")
    return play


def adoption() -> Play:
    """The arbiter was killed. Its successor finds a serving worker, a worker that ended meanwhile, and a drain.

    The successor reads the registry first, and then resumes. It does not touch the serving worker. The ended worker is
    a crash like any other. The drain keeps its old deadline.
    """
    play = Play({"VllmWorker": 3})
    play.do(1.0, Drain(stimulus_id="command:7", name="VllmWorker_2"))
    play.deregisters(1.01, "VllmWorker_2")
    gone = play.succeeded(gone=("VllmWorker_1",))
    play.do(8.0, Resume(stimulus_id="adopt", gone=gone))
    play.swept(8.05, "VllmWorker_1")
    play.exits(8.6, "VllmWorker_2", code=0)
    play.swept(8.65, "VllmWorker_2")
    play.gpus_observed(8.7)
    play.until(9.2)
    play.gpus_observed(9.25)
    play.made(9.3, "VllmWorker_1")
    play.registers(12.0, "VllmWorker_1")
    return play


def rolling_restart() -> Play:
    """`dynamo restart VllmWorker --rolling`: one worker after the other, and one always serves.

    When the first one serves again, the second one drains. It goes the same way, which the table leaves out.
    """
    play = Play({"VllmWorker": 2})
    play.do(1.0, Restart(stimulus_id="command:8", name="VllmWorker"))
    play.deregisters(1.01, "VllmWorker_1")
    play.exits(3.0, "VllmWorker_1", code=0)
    play.swept(3.05, "VllmWorker_1")
    play.gpus_observed(3.1)
    play.made(3.2, "VllmWorker_1")
    play.registers(6.0, "VllmWorker_1")
    return play


def swap() -> Play:
    """A planner replaces a prefill worker by a decode worker, on a host without a free GPU.

    The arbiter commits the new decode worker at once. It starts when the prefill worker has finished and freed its GPU.
    """
    play = Play({"VllmWorker": 1, "PrefillWorker": 2})
    less, more = Change(-1, relative=True), Change(1, relative=True)
    why = "planner:17"
    play.do(1.0, Scale(stimulus_id=why, component="PrefillWorker", target=less, by_person=False))
    up = Scale(stimulus_id=why, component="VllmWorker", target=more, by_person=False, wait_for_gpus=True)
    play.do(1.0, up)
    play.deregisters(1.2, "PrefillWorker_1")
    play.until(1.5)
    play.gpus_observed(1.6)
    play.exits(1.9, "PrefillWorker_1", code=0)
    play.swept(1.95, "PrefillWorker_1")
    play.gpus_observed(2.0)
    play.made(2.1, "VllmWorker_1")
    play.registers(5.0, "VllmWorker_1")
    return play


EPISODES: Mapping[str, Callable[[], Play]] = {
    "drain": drain,
    "crash": crash,
    "scale": scale_up,
    "adoption": adoption,
    "rolling-restart": rolling_restart,
    "swap": swap,
}
