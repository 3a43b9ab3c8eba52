"""The machine with somebody to turn it: one event at a time, every fleet validated, every instruction kept.

`Life` is one fleet and its time. Nothing happens in it by itself: a test says what is seen of the world, and reads what
the machine wants done.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from dynamo_local.core.fleet import effects as ins
from dynamo_local.core.fleet import events as st
from dynamo_local.core.fleet.effects import Effect
from dynamo_local.core.fleet.events import Event
from dynamo_local.core.fleet.fleet import Fleet, Worker
from dynamo_local.core.fleet.invariants import validate
from dynamo_local.core.fleet.step import next_due_s, step
from dynamo_local.core.gpus import GpuDevice
from dynamo_local.core.types import Load
from tests.fakes.arbiter.fleet_views import lease_of, name, pid_of

I = TypeVar("I")  # noqa: E741
CAUSE = "test"


def story(effects: tuple[Effect, ...]) -> list[str]:
    """What is done to the world, in words, each with its worker: `revoke 3e8 VllmWorker_1`. Without commits."""
    found = []
    for each in effects:
        if isinstance(each, ins.Commit | ins.WaitUntil | ins.Lock | ins.Unlock):
            continue
        who = getattr(each, "name", "").removeprefix("dynamo_")
        found.append(f"{ins.describe(each)} {who}".strip())
    return found


class Life:
    """A fleet, turned by hand. `last` are the effects of the last step, `told` all that a person was told."""

    def __init__(self, fleet: Fleet, now_s: float = 100.0) -> None:
        validate(fleet)
        self.fleet = fleet
        self.now_s = now_s
        self.last: tuple[Effect, ...] = ()
        self.told: list[str] = []

    # --- turning it ----------------------------------------------------------------------------

    def feed(self, event: Event) -> list[str]:
        """One step. Returns `story` of what follows."""
        self.fleet, self.last, self.answer = step(self.fleet, event, self.now_s)
        validate(self.fleet)
        self.told += [each.text for each in self.last if isinstance(each, ins.Tell)]
        return story(self.last)

    def after(self, seconds: float) -> list[str]:
        """So much later the clock ticks."""
        self.now_s += seconds
        return self.feed(st.Tick())

    def until_due(self) -> list[str]:
        """The clock ticks when the next thing is due."""
        due_s = next_due_s(self.fleet)
        assert due_s is not None, "nothing is due"
        self.now_s = max(self.now_s, due_s)
        return self.feed(st.Tick())

    # --- what is seen --------------------------------------------------------------------------

    def begun(self, n: int = 0) -> list[str]:
        return self.feed(st.SpawnBegun(stimulus_id="spawn", name=name(n)))

    def made(self, n: int = 0, pid: int | None = None) -> list[str]:
        pid = pid_of(n) if pid is None else pid
        return self.feed(st.ProcessMade(stimulus_id="spawn", name=name(n), pid=pid, start_time=1.0, started_at=1.8e9))

    def refused(self, n: int = 0, why: str = "no memory") -> list[str]:
        return self.feed(st.ProcessRefused(stimulus_id="spawn", name=name(n), why=why, unit=0.0))

    def gone(self, n: int = 0, code: int | None = 0, *, unit: float = 0.0, pid: int | None = None) -> list[str]:
        pid = self.worker(n).pid if pid is None else pid
        assert pid is not None, f"{name(n)} has no process"
        return self.feed(st.ProcessGone(stimulus_id=f"exit:{pid}", name=name(n), pid=pid, code=code, unit=unit))

    def looked_up(self, n: int = 0, *, removed: bool) -> list[str]:
        worker = self.worker(n)
        lease = worker.lease or lease_of(n)
        seen = st.KeyLookedUp(stimulus_id="etcd", name=name(n), pid=worker.pid or 0, lease=lease, removed=removed)
        return self.feed(seen)

    def swept(self, n: int = 0) -> list[str]:
        return self.feed(st.Swept(stimulus_id="sweep", name=name(n)))

    def registered(self, n: int = 0, lease: str | None = None, **more: Any) -> list[str]:
        pid = self.worker(n).pid or 0
        lease = lease_of(n) if lease is None else lease
        return self.feed(
            st.KeyPut(stimulus_id=f"etcd:{lease}", **{"name": name(n), "pid": pid, "lease": lease, **more})
        )

    def key_gone(self, n: int = 0, lease: str | None = None) -> list[str]:
        lease = lease_of(n) if lease is None else lease
        return self.feed(st.KeyGone(stimulus_id=f"etcd:{lease}", name=name(n), lease=lease))

    def listed(self, *ns: int) -> list[str]:
        """The registry, after etcd could not be watched: these have their keys in it."""
        keys = frozenset((name(n), self.worker(n).lease or "") for n in ns)
        return self.feed(st.RegistryListed(stimulus_id="registry", keys=keys))

    def infra(self, ok: bool) -> list[str]:
        """etcd and NATS answer, or do not."""
        return self.feed(st.InfraSeen(stimulus_id="links", ok=ok))

    def heard(self, loads: Mapping[int, Load], *, blameless: bool = False) -> list[str]:
        """These answered."""
        answers = {name(n): load for n, load in loads.items()}
        return self.feed(st.LoadsHeard(stimulus_id="sample", loads=answers, blameless=blameless))

    def called_back(self, n: int = 0, error: str | None = None, *, asked_by: str | None = None) -> list[str]:
        """What it answered when its drain was taken back."""
        pid = self.worker(n).pid or 0
        seen = st.CalledBack(stimulus_id="control", name=name(n), pid=pid, error=error, asked_by=asked_by)
        return self.feed(seen)

    def gpus(self, **more: Any) -> list[str]:
        """A look at the devices: as they were, unless `devices`, `elsewhere` or `stale` say otherwise."""
        return self.feed(st.GpusSeen(**{"stimulus_id": "gpus", "devices": self.fleet.gpus.devices, **more}))

    def up(self, n: int = 0, pid: int | None = None) -> list[str]:
        return [*self.made(n, pid), *self.registered(n, f"{self.worker(n).pid:x}")]

    def leaves(self, n: int = 0) -> list[str]:
        """Its process has ended, what it left behind too, and its devices have been looked at."""
        self.gone(n)
        self.swept(n)
        return self.gpus()

    def fails_to_start(self, n: int, *, until: Callable[[], bool]) -> None:
        """One new process after the other ends at once, each after its back-off, until that is so."""
        for pid in range(71, 80):
            self.made(n, pid)
            self.gone(n, 1)
            self.swept(n)
            if until():
                return
            self.until_due()
            self.gpus()
        raise AssertionError(f"{name(n)} is {self.state(n)} after {pid - 70} failed starts")

    # --- reading -------------------------------------------------------------------------------

    def worker(self, n: int = 0) -> Worker:
        return self.fleet.workers[name(n)]

    def state(self, n: int = 0) -> str:
        found = self.fleet.workers.get(name(n))
        if found is None:
            return "gone"
        return str(found.state) if found.intent == "steady" else f"{found.state}/{found.intent}"

    def states(self) -> list[str]:
        return [self.state(worker.n) for worker in self.fleet.of("VllmWorker")]

    def free(self) -> list[int]:
        """Indices of the devices that can be had."""
        return [device.index for device in self.fleet.gpus.free]

    def device(self, index: int) -> GpuDevice:
        return self.fleet.gpus.devices[index]

    def did(self, kind: type[I]) -> list[I]:
        return [each for each in self.last if isinstance(each, kind)]

    def events(self) -> list[str]:
        return [str(each.kind) for commit in self.did(ins.Commit) for each in commit.transitions]
