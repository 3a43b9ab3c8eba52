"""Lifecycle and ledger together, driven at random: a GPU follows the process, never the state."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dynamo_local.core.fleet.lifecycle import IllegalTransition, apply
from dynamo_local.core.fleet.lifecycle import TransitionKind as K
from dynamo_local.core.fleet.states import TRAITS, HasProcess
from dynamo_local.core.gpus import GpuLedger
from dynamo_local.core.types import WorkerState as S
from dynamo_local.errors import GpuError
from dynamo_local.system.gpus import SimInventory
from tests.tools.examples import examples

TOTAL = 4
NAMES = [f"dynamo_VllmWorker_{n}" for n in range(6)]
ANY_TIME: list[K] = [
    K.REGISTERED,
    K.DRAIN_REQUESTED,
    K.LEASE_REVOKED,
    K.DRAIN_CANCELLED,
    K.HEALTH_FAILED,
    K.START_DEADLINE_PASSED,
    K.DRAIN_DEADLINE_PASSED,
]


class Host(RuleBasedStateMachine):
    """A small arbiter over the pure parts: allocate before the spawn, release after the process is gone."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = GpuLedger.of(SimInventory(TOTAL).sample())
        self.states: dict[str, S] = {}
        self.alive: set[str] = set()

    @initialize()
    def begin(self) -> None:
        """All devices are free."""
        assert len(self.ledger.free) == TOTAL

    def _apply(self, name: str, kind: K) -> bool:
        """False if it was illegal; then nothing has changed."""
        before = self.states[name]
        try:
            self.states[name] = apply(before, kind)
        except IllegalTransition:
            assert self.states[name] is before
            return False
        return True

    @rule(name=st.sampled_from(NAMES), gpus=st.integers(1, 2))
    def add(self, name: str, gpus: int) -> None:
        """A new worker, or one whose process is gone, asks for devices; a shortage changes nothing."""
        if name in self.alive:
            return
        state = self.states.setdefault(name, S.PENDING)
        if state is S.BACKING_OFF:
            kind = K.BACKOFF_ELAPSED
        elif state is S.PENDING:
            kind = K.SPAWN_REQUESTED
        else:
            return
        try:
            self.ledger = self.ledger.allocate(name, gpus)
        except GpuError:
            assert len(self.ledger.free) < gpus
            return
        assert self._apply(name, kind)
        self.alive.add(name)
        assert self._apply(name, K.SPAWNED)

    @precondition(lambda self: self.states)
    @rule(data=st.data(), kind=st.sampled_from(ANY_TIME))
    def happen(self, data: st.DataObject, kind: K) -> None:
        """Anything that does not begin or end a process, legal or not."""
        self._apply(data.draw(st.sampled_from(sorted(self.states))), kind)

    @precondition(lambda self: self.alive)
    @rule(data=st.data(), code=st.sampled_from([0, 1, -9, None]))
    def exit(self, data: st.DataObject, code: int | None) -> None:
        """A process ends: legal wherever there is one, and its devices come back."""
        name = data.draw(st.sampled_from(sorted(self.alive)))
        assert self._apply(name, K.PROCESS_EXITED)
        self.alive.remove(name)
        self.ledger = self.ledger.release(name)

    @precondition(lambda self: any(name not in self.alive for name in self.states))
    @rule(data=st.data(), choice=st.sampled_from(["back off", "fault", "restart", "remove"]))
    def decide(self, data: st.DataObject, choice: str) -> None:
        """The restart policy, given only once the process is gone."""
        name = data.draw(st.sampled_from(sorted(name for name in self.states if name not in self.alive)))
        kinds: dict[str, K] = {
            "back off": K.BACKOFF_STARTED,
            "fault": K.FAULTED,
            "restart": K.RESTART_REQUESTED,
            "remove": K.REMOVED,
        }
        self._apply(name, kinds[choice])

    @invariant()
    def devices_add_up(self) -> None:
        """free + held = total, and no device has two holders."""
        held = [device.uuid for devices in self.ledger.held.values() for device in devices]
        assert len(held) == len(set(held))
        assert len(held) + len(self.ledger.free) == TOTAL

    @invariant()
    def devices_follow_processes(self) -> None:
        """Exactly the workers with a process hold devices, whatever their state says."""
        assert set(self.ledger.held) == self.alive

    @invariant()
    def states_and_processes_agree(self) -> None:
        """A state with a process has one, a state without has none."""
        for name, state in self.states.items():
            has = TRAITS[state].process
            if has is not HasProcess.ENDING:
                assert (name in self.alive) == (has is HasProcess.YES)


TestHost = Host.TestCase
TestHost.settings = settings(max_examples=examples(100), stateful_step_count=40)
