"""A small world under the arbiter's controller: processes, keys, memory, locks; all that happens is told to happen.

It sees to what must never be: two processes on one device, a process on memory that was not returned, two of one name.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from dynamo_local.arbiter.controller import FleetController
from dynamo_local.core.fleet import effects as ins
from dynamo_local.core.fleet import events as st
from dynamo_local.core.fleet.fleet import Fleet
from dynamo_local.core.gpus import GpuDevice
from dynamo_local.core.types import Missing, lease_hex
from tests.fakes.arbiter.effects import Begun, FakeEffects
from tests.fakes.arbiter.fleet_views import load
from tests.fakes.arbiter.hand_clock import HandClock

BUSY_BYTES = 2**36


@dataclass(eq=False)
class Proc:
    """A process. `lease` is the one that its key is under; `asked`: it is leaving; `stuck`: SIGKILL does not end it.

    `born` is its name when it was made; `stays`: its next change of role was called off.
    """

    pid: int
    name: str
    gpus: tuple[str, ...]
    lease: str | None = None
    asked: bool = False
    hung: bool = False
    stuck: bool = False
    killed: bool = False
    born: str = ""
    stays: bool = False


class MachineWorld:
    """The controller of `fleet`, and what it acts upon. `etcd_ok` and `nats_ok` say whether they answer."""

    def __init__(self, fleet: Fleet) -> None:
        self.clock = HandClock()
        self.effects = FakeEffects()
        self.controller = FleetController(fleet, self.effects, self.clock, validates=True)
        self.procs: dict[int, Proc] = {}
        self.registry: dict[str, str] = {}
        self.memory: set[str] = set()
        self.lost: set[str] = set()
        self.unswept: set[str] = set()
        self.etcd_ok = self.nats_ok = True
        self.exits: deque[st.Event] = deque()
        self.news: deque[st.Event] = deque()
        self._numbers = count(1)

    @property
    def fleet(self) -> Fleet:
        return self.controller.fleet

    # --- what can be seen ------------------------------------------------------------------------

    def devices(self) -> tuple[GpuDevice, ...]:
        """As the driver shows them."""
        busy = self.memory | {uuid for proc in self.procs.values() for uuid in proc.gpus}
        return tuple(
            replace(device, memory_used_bytes=BUSY_BYTES if device.uuid in busy else 0)
            for device in self.fleet.gpus.devices
        )

    def unlocked_devices(self) -> list[str]:
        """On which nobody is, and of which nobody holds a lock."""
        used = {uuid for proc in self.procs.values() for uuid in proc.gpus}
        mine = self.effects.locked | used | self.effects.elsewhere.keys()
        return [device.uuid for device in self.fleet.gpus.devices if device.uuid not in mine]

    # --- acts --------------------------------------------------------------------------------------

    def carry_out(self, begun: Begun, *, well: bool = True) -> None:
        """An act comes to its end; where not `well`, a start is refused, a look or a question fails."""
        act = begun.act
        match act:
            case ins.Spawn():
                begun.finish(self._spawned(act) if well else self._refused(act))
            case ins.Revoke(name=name, lease=lease, tells=tells):
                if self.etcd_ok:
                    self.revoke(lease)
                    begun.finish()
                else:
                    failed = st.RevokeFailed(stimulus_id="etcd", name=name, lease=lease, why="away")
                    begun.finish(failed if tells else None)
            case ins.Signal(pid=pid):
                if pid in self.procs:
                    self.procs[pid].asked = True
                begun.finish()
            case ins.EndSession(pid=pid):
                proc = self.procs.get(pid)
                if proc is not None:
                    proc.killed = True
                    if not proc.stuck:
                        self.end(proc, -9)
                begun.finish()
            case ins.CallBack():
                begun.finish(self._called_back(act, well))
            case ins.CountRequests(name=name, pid=pid):
                alive = well and pid in self.procs and not self.procs[pid].hung
                left = 2 if alive else Missing("no answer")
                begun.finish(st.RequestsCounted(stimulus_id="count", name=name, pid=pid, in_flight=left))
            case ins.LookUpKey(name=name, pid=pid, lease=lease):
                removed = self.etcd_ok and lease not in self.registry
                begun.finish(st.KeyLookedUp(stimulus_id="etcd", name=name, pid=pid, lease=lease, removed=removed))
            case ins.FlipRole():
                begun.finish(self._flipped(act, well))
            case ins.CallOffFlip(pid=pid):
                if pid in self.procs:
                    self.procs[pid].stays = True
                begun.finish()
            case ins.Sweep(name=name, spawned_as=spawned_as):
                born = spawned_as or name
                spared = [proc for proc in self.procs.values() if proc.born == born and proc.name != name]
                assert not spared, f"the sweep of {born} ends a live one"
                self.unswept.discard(born)
                begun.finish(st.Swept(stimulus_id="sweep", name=name))
            case ins.LookAtGpus():
                seen = {"devices": self.devices(), "elsewhere": dict(self.effects.elsewhere)}
                begun.finish(st.GpusSeen(stimulus_id="gpus", **(seen if well else {"stale": "hangs"})))  # type: ignore[arg-type]
            case _:
                begun.finish()

    def _refused(self, act: ins.Spawn) -> st.Event:
        return st.ProcessRefused(stimulus_id=act.stimulus_id, name=act.name, why="no memory")

    def _spawned(self, act: ins.Spawn) -> st.Event:
        worker = self.fleet.workers[act.name]
        assert worker.start.starts == 1 or not act.first
        pid = next(self._numbers)
        for other in self.procs.values():
            assert act.name not in (other.name, other.born), f"{act.name} has a second process, or one that was made so"
            assert not set(other.gpus) & set(worker.gpus), f"{act.name} is started on a device that {other.name} is on"
        assert act.name not in self.unswept, f"{act.name} is started beside what its last process left behind"
        assert not set(worker.gpus) & self.memory, f"{act.name} is started on memory that was not returned"
        assert set(worker.gpus) <= self.effects.locked, f"{act.name} is started on a device that is not locked"
        self.procs[pid] = Proc(pid, act.name, worker.gpus, born=act.name)
        return st.ProcessMade(stimulus_id=act.stimulus_id, name=act.name, pid=pid, start_time=1.0, started_at=1.0)

    def _called_back(self, act: ins.CallBack, well: bool) -> st.Event:
        proc, error = self.procs.get(act.pid), None
        if proc is None or proc.hung or not well or not self.nats_ok or not self.etcd_ok:
            error = "no answer"
        else:
            proc.asked = False
            self.revoke(proc.lease)
            self.register(proc)
        return st.CalledBack(stimulus_id="control", name=act.name, pid=act.pid, error=error, asked_by=act.asked_by)

    def _flipped(self, act: ins.FlipRole, well: bool) -> st.Event:
        """Its new key may be seen before its answer, after it, or instead of it."""
        proc = self.procs.get(act.pid)
        reached = proc is not None and not proc.hung and self.nats_ok
        if proc is None or not reached:
            return self._answer(act, error="no answer", unknown=True)
        if proc.name == act.to:
            return self._answer(act, lease=proc.lease, unknown=not well, error=None if proc.lease else "it drains")
        if proc.asked or proc.stays or not self.etcd_ok:
            proc.stays = False
            return self._answer(act, error="it stays what it is", unknown=not well)
        old, proc.name = proc.lease, act.to
        self.register(proc)
        if old is not None:
            self.revoke(old)
        return self._answer(act, lease=proc.lease, error=None if well else "no answer", unknown=not well)

    @staticmethod
    def _answer(act: ins.FlipRole, **more: Any) -> st.Event:
        return st.FlipAnswered(stimulus_id="control", name=act.name, pid=act.pid, to=act.to, **more)

    # --- what happens ------------------------------------------------------------------------------

    def register(self, proc: Proc) -> None:
        """Its key is in etcd; who watches hears of it."""
        proc.lease, proc.asked = lease_hex(0xABC000 + next(self._numbers)), False
        self.registry[proc.lease] = proc.name
        if self.etcd_ok:
            self.news.append(self._key(proc))

    def _key(self, proc: Proc, *, failed: bool = False) -> st.KeyPut:
        return st.KeyPut(stimulus_id="etcd", name=proc.name, pid=proc.pid, lease=proc.lease or "", failed=failed)

    def revoke(self, lease: str | None) -> None:
        """The lease ends, whoever ended it: the key goes, and its process leaves."""
        name = self.registry.pop(lease, None) if lease is not None else None
        if name is None or lease is None:
            return
        for proc in self.procs.values():
            if proc.lease == lease:
                proc.asked, proc.lease = True, None
        if self.etcd_ok:
            self.news.append(st.KeyGone(stimulus_id=f"etcd:{lease}", name=name, lease=lease))

    def engine_dies(self, proc: Proc) -> None:
        """It says so before its key goes and it ends."""
        self.news.append(self._key(proc, failed=True))
        self.revoke(proc.lease)
        self.end(proc, 1)

    def end(self, proc: Proc, code: int) -> None:
        """The process is gone; its memory is not back yet."""
        del self.procs[proc.pid]
        self.memory.update(proc.gpus)
        self.unswept.add(proc.born)
        gone = st.ProcessGone(stimulus_id=f"exit:{proc.pid}", name=proc.name, pid=proc.pid, code=code, unit=0.25)
        self.exits.append(gone)

    def memory_returns(self, *, all_of_it: bool = False) -> None:
        self.memory &= set() if all_of_it else self.lost

    def etcd_goes(self) -> None:
        """What was on its way from it is lost."""
        self.etcd_ok = False
        self.news.clear()
        self._see_infra()

    def etcd_returns(self) -> None:
        """Who watches is given all keys that there are."""
        self.etcd_ok = True
        self._see_infra()
        for proc in list(self.procs.values()):
            if proc.lease is not None:
                self.controller.feed(self._key(proc))
        keys = frozenset((name, lease) for lease, name in self.registry.items())
        self.controller.feed(st.RegistryListed(stimulus_id="registry", keys=keys))

    def nats(self, ok: bool) -> None:
        """It goes, or returns."""
        self.nats_ok = ok
        self._see_infra()

    def _see_infra(self) -> None:
        self.controller.feed(st.InfraSeen(stimulus_id="links", ok=self.etcd_ok and self.nats_ok))

    def sample(self) -> None:
        """Whoever can answers."""
        answers = [proc for proc in self.procs.values() if not proc.hung] if self.nats_ok else []
        loads = {proc.name: load(active=1) for proc in answers}
        blameless = not (self.nats_ok and self.etcd_ok)
        self.controller.feed(st.LoadsHeard(stimulus_id="sample", loads=loads, blameless=blameless))

    def pass_s(self, seconds: float) -> None:
        """Time passes; an arbiter that was asked to be woken is."""
        self.clock.at_s += seconds
        self.controller.tick()

    def hear(self) -> None:
        """Everything that is on its way arrives."""
        while self.exits or self.news:
            self.controller.feed((self.exits or self.news).popleft())

    # --- calm --------------------------------------------------------------------------------------

    def calm(self, seconds: int = 7200) -> None:
        """From now on nothing goes wrong: etcd and NATS answer, memory returns, who was asked to leaves, others serve.

        So many seconds pass, or as many as it takes until nothing is waited for.
        """
        self.effects.elsewhere.clear()
        self.nats(ok=True)
        if not self.etcd_ok:
            self.etcd_returns()
        quiet = 0
        for _ in range(seconds):
            self.settle()
            waits = self.effects.begun or self.effects.writes or self.exits or self.news
            quiet = 0 if waits or any(proc.hung or proc.asked for proc in self.procs.values()) else quiet + 1
            if quiet > 80:
                return
            self.pass_s(1.0)
            self.sample()
            self.leases_expire()

    def leases_expire(self) -> None:
        """Those of processes that are gone, if nobody has revoked them."""
        kept = {proc.lease for proc in self.procs.values()}
        for lease in self.registry.keys() - kept:
            self.revoke(lease)

    def settle(self) -> None:
        """One round of everything that was begun, or is to come."""
        self.effects.write()
        self.hear()
        self.memory_returns(all_of_it=True)
        for begun in list(self.effects.begun):
            if begun in self.effects.begun:
                self.carry_out(begun)
        for proc in list(self.procs.values()):
            if proc.killed:
                self.end(proc, -9)
            elif proc.asked and not proc.hung and not self.effects.acts(ins.CallBack, proc.name):
                self.end(proc, 0)
            elif proc.lease is None and not proc.asked and not proc.hung:
                self.register(proc)
        self.hear()
