"""How a planner adds and removes workers of the arbiter in whose process it runs (Dynamo's `LocalConnector`)."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol

from dynamo_local.clock import Clock
from dynamo_local.core.fleet.events import Change, Command, Scale, ScaleAll
from dynamo_local.core.notes import About, Over, Tell, Trouble
from dynamo_local.core.types import WAKES, Actuator
from dynamo_local.core.virtual import (
    DECISION_ID,
    NOT_SET,
    NUM_DECODE_WORKERS,
    NUM_PREFILL_WORKERS,
    SCALED_DECISION_ID,
    KeysState,
    Layout,
    Stored,
    encode,
    read,
    root,
)
from dynamo_local.errors import DynamoError
from dynamo_local.ports import DeleteEvent, KeyValue, KeyValueStore, PutEvent, SnapshotEvent, WatchEvent
from dynamo_local.system.executors import ended

Run = Callable[[Command], Awaitable[dict[str, Any]]]
"""Carries a command out and returns its answer: `arbiter.commands.Commands.run`."""


@dataclass(frozen=True, slots=True)
class Committed:
    """The intent was committed to the statefile; `workers` are the workers concerned, of several components also by
    component."""

    workers: tuple[str, ...]
    by_component: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Refused:
    """Nothing was changed; `retryable` says that the same may succeed later (too few GPUs)."""

    reason: str
    code: str
    retryable: bool


class LocalConnector:
    """Scales the components of this arbiter. It never forces: the last ready worker of a component stays.

    `actuators` says at each step what may be used beside starts and drains, because the options may change.

    A refusal is a value, not an exception: the planner's tick goes on with it.
    """

    whole = False
    """Steps can also be taken one by one."""

    def __init__(self, run: Run, *, actuators: Callable[[], frozenset[Actuator]] = lambda: WAKES) -> None:
        self._run = run
        self._actuators = actuators
        self._count = itertools.count(1)

    async def add_component(self, component: str, *, stimulus_id: str | None = None) -> Committed | Refused:
        """One more: a drain is taken back before a new worker is started. It may wait for GPUs of a leaving worker."""
        return await self._scale(component, 1, stimulus_id)

    async def remove_component(self, component: str, *, stimulus_id: str | None = None) -> Committed | Refused:
        """One less: it drains, finishing its streams first."""
        return await self._scale(component, -1, stimulus_id)

    async def set_component_replicas(
        self, targets: Mapping[str, int], *, stimulus_id: str | None = None
    ) -> Committed | Refused:
        """That many workers of each component, in one commit; refused as a whole if one of them is.

        An up that needs the GPUs of a down waits in the fleet until they are really free.
        """
        command = ScaleAll(stimulus_id=self._cause(stimulus_id), targets=targets, actuators=self._actuators())
        try:
            answer = await self._run(command)
        except DynamoError as error:
            return Refused(str(error), error.code, error.retryable)
        found = {
            component: tuple(item["watcher_name"] for item in reported["instructions"])
            for component, reported in answer.items()
        }
        return Committed(tuple(dict.fromkeys(name for names in found.values() for name in names)), found)

    async def _scale(self, component: str, step: int, stimulus_id: str | None) -> Committed | Refused:
        standby = Actuator.WAKE in self._actuators()
        command = Scale(
            stimulus_id=self._cause(stimulus_id),
            component=component,
            target=Change(step, relative=True),
            by_person=False,
            wait_for_gpus=True,
            wake=standby,
            sleep=standby,
        )
        try:
            answer = await self._run(command)
        except DynamoError as error:
            return Refused(str(error), error.code, error.retryable)
        return Committed(tuple(item["watcher_name"] for item in answer["instructions"]))

    def _cause(self, stimulus_id: str | None) -> str:
        return stimulus_id or f"planner:{next(self._count)}"


# --- virtual_keys
# The virtual connector's four keys, followed and written. See `core.virtual` for the protocol.

log = logging.getLogger(__name__)

REWATCH_PAUSE_S = 0.5
"""Before a watch that failed is begun again."""


class VirtualKeys:
    """A view of the keys of one namespace. `told`: their last known values; `current` is False before the first list,
    and while etcd is away.

    `on_change` is called whenever either may have changed.
    """

    def __init__(
        self,
        kv: KeyValueStore,
        namespace: str,
        layout: Layout = Layout.V1,
        *,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self.root = root(namespace, layout)
        self.reported = KeysState()
        self.current = False
        self._on_change = on_change
        self._kv = kv
        self._stored: dict[str, Stored] = {}
        self._changed = asyncio.Event()

    async def follow(self) -> None:
        """For ever; survives restarts of etcd."""
        while True:
            try:
                # Typed as AsyncIterator by the Protocol, but every watch is a generator, which must be closed here.
                async with aclosing(self._kv.watch_prefix(self.root, self._lost)) as events:  # type: ignore[type-var]
                    async for event in events:
                        self._apply(event)
            except Exception:
                log.exception("the watch of %s failed and begins again in %g s", self.root, REWATCH_PAUSE_S)
            self._lost()
            await asyncio.sleep(REWATCH_PAUSE_S)

    async def refresh(self) -> KeysState:
        """The present values of the keys. Raises `EtcdUnavailable`."""
        kvs, revision = await self._kv.get_prefix(self.root)
        names = {kv.key.removeprefix(self.root) for kv in kvs}
        for name in [name for name, known in self._stored.items() if known.revision <= revision]:
            if name not in names:  # otherwise it was written after this list was made
                del self._stored[name]
        for kv in kvs:
            self._store(kv)
        self.current = True
        self._announce()
        return self.reported

    async def until(self, done: Callable[[KeysState], bool]) -> KeysState:
        """Wait, while `follow` runs, until `done` of the keys; returns their values then."""
        while not done(self.reported):
            await self._changed.wait()
        return self.reported

    async def decide(self, prefill: int | None, decode: int | None, decision_id: int) -> None:
        """Write a decision, its id last; None leaves a number as it is. Raises `EtcdUnavailable`, perhaps half way:
        the numbers do not count without their id."""
        for name, number in ((NUM_PREFILL_WORKERS, prefill), (NUM_DECODE_WORKERS, decode), (DECISION_ID, decision_id)):
            if number is not None:
                await self._put(name, number)

    async def acknowledge(self, decision_id: int) -> None:
        """Write that this decision, and all before it, are carried out. Raises `EtcdUnavailable`."""
        await self._put(SCALED_DECISION_ID, decision_id)

    async def _put(self, name: str, number: int) -> None:
        key, value = f"{self.root}{name}", encode(number)
        revision = await self._kv.put(key, value)  # no lease: the key outlives its writer
        self._apply(PutEvent(KeyValue(key, value, mod_revision=revision)))

    def _apply(self, event: WatchEvent) -> None:
        if isinstance(event, SnapshotEvent):
            self._stored, self.current = {}, True
            for kv in event.kvs:
                self._store(kv)
        elif isinstance(event, DeleteEvent):
            self._stored.pop(event.key.removeprefix(self.root), None)
        else:
            self._store(event.kv)
        self._announce()

    def _store(self, kv: KeyValue) -> None:
        """Store the key, unless an answer that came earlier was more recent."""
        name = kv.key.removeprefix(self.root)
        known = self._stored.get(name)
        if known is None or known.revision < kv.mod_revision:
            self._stored[name] = Stored(kv.value, kv.mod_revision)

    def _lost(self) -> None:
        if self.current:
            self.current = False
            self._announce()

    def _announce(self) -> None:
        self.reported = read(self._stored)
        self._changed.set()
        self._changed = asyncio.Event()
        self._on_change()


# --- virtual_connector
# How a planner has its decisions carried out by another environment (Dynamo's `VirtualConnector`): through etcd.
#
# It writes how many workers it wants (`core.virtual`), and whoever runs them acknowledges. While a decision waits for
# that, the planner holds: an adjustment is under way.

UNHEARD = Trouble("a decision without an acknowledgement")


def _logged(text: str, about: About = None) -> None:
    """A person reads it in the log."""
    log.warning("%s", text)


MAX_WAIT_S = 1800.0


@dataclass(frozen=True, slots=True)
class Written:
    """The decision was written to etcd under `decision_id`; None: it was there already, and nothing was written.

    `acknowledged` says whether the environment has carried it out; None where nobody waited for that.
    """

    decision_id: int | None
    acknowledged: bool | None = None


@dataclass(slots=True)
class _Waiting:
    """The decision whose acknowledgement is awaited, and since when."""

    decision_id: int
    since_s: float
    given_up: bool = False


class VirtualConnector:
    """Follows the keys between `start` and `close`. `prefill` is None in an aggregated graph.

    `counts` are the present workers by component: steps count from there if no number was decided yet.
    A decision that is not acknowledged within `max_wait_s` is given up: new ones are made all the same. `blocking`
    waits for the acknowledgement of each decision before it goes on.
    """

    whole = True
    """A decision has one number, however many steps it has."""

    def __init__(
        self,
        keys: VirtualKeys,
        clock: Clock,
        *,
        prefill: str | None,
        decode: str,
        counts: Callable[[], Mapping[str, int]],
        max_wait_s: float = MAX_WAIT_S,
        blocking: bool = False,
        tell: Tell = _logged,
    ) -> None:
        self._keys = keys
        self._clock = clock
        self._prefill = prefill
        self._decode = decode
        self._counts = counts
        self._max_wait_s = max_wait_s
        self._blocking = blocking
        self._tell = tell
        self._unheard = False
        """A decision was given up, and none has been acknowledged since."""
        self._last_id = NOT_SET
        self._waiting: _Waiting | None = None
        self._closing = asyncio.Event()
        self._following: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to follow the keys. Raises `EtcdUnavailable`."""
        await self._keys.refresh()
        self._following = asyncio.ensure_future(self._keys.follow())

    def change(self, *, max_wait_s: float, blocking: bool) -> None:
        """Other options, from now on."""
        self._max_wait_s, self._blocking = max_wait_s, blocking

    def release(self) -> None:
        """Stop waiting for an acknowledgement: the planner stops."""
        self._closing.set()

    async def close(self) -> None:
        """Stop following the keys. Closing twice is no error."""
        self.release()
        task, self._following = self._following, None
        await ended(task)

    # --- deciding ----------------------------------------------------------------------------------

    async def add_component(self, component: str, *, stimulus_id: str | None = None) -> Written | Refused:
        """One more than was decided last."""
        return await self._change(component, 1)

    async def remove_component(self, component: str, *, stimulus_id: str | None = None) -> Written | Refused:
        """One less than was decided last, and never less than none."""
        return await self._change(component, -1)

    async def set_component_replicas(
        self, targets: Mapping[str, int], *, stimulus_id: str | None = None
    ) -> Written | Refused:
        """Ask for this many workers of each component, as one decision.

        Refused while the last one waits for its acknowledgement, and while etcd does not answer.
        """
        try:
            written = await self._write(await self._keys.refresh(), targets.get(self._prefill or ""), targets)
        except DynamoError as error:
            return Refused(str(error), error.code, error.retryable)
        if isinstance(written, Refused) or written.decision_id is None or not self._blocking:
            return written
        return Written(written.decision_id, await self._acknowledged(written.decision_id))

    async def _change(self, component: str, step: int) -> Written | Refused:
        try:
            reported = await self._keys.refresh()
        except DynamoError as error:
            return Refused(str(error), error.code, error.retryable)
        decision = reported.decision
        decided = decision.num_prefill_workers if component == self._prefill else decision.num_decode_workers
        have = self._counts()[component] if decided == NOT_SET else decided
        return await self.set_component_replicas({component: max(0, have + step)})

    async def _write(self, reported: KeysState, prefill: int | None, targets: Mapping[str, int]) -> Written | Refused:
        decision, decode = reported.decision, targets.get(self._decode)
        same = prefill in (None, decision.num_prefill_workers) and decode in (None, decision.num_decode_workers)
        # Numbers without their id are no decision: a writer was interrupted between the two.
        if same and decision.decision_id != NOT_SET and not reported.half_written:
            log.info(
                "No scaling needed (prefill=%d, decode=%d), skipping ETCD update",
                decision.num_prefill_workers,
                decision.num_decode_workers,
            )
            return Written(None)
        if self.pending():
            why = f"decision {decision.decision_id} is not acknowledged yet ({self._keys.root}scaled_decision_id)"
            return Refused(why, "not_acknowledged", retryable=True)
        decision_id = max(decision.decision_id, reported.scaled_decision_id, self._last_id) + 1
        await self._keys.decide(prefill, decode, decision_id)
        self._last_id = decision_id
        self.pending()  # start waiting for it
        log.info("wrote %s below %s", self._keys.reported.decision, self._keys.root)
        return Written(decision_id)

    # --- waiting -----------------------------------------------------------------------------------

    def pending(self) -> bool:
        """Whether a decision waits for its acknowledgement, and was not given up."""
        reported, now_s = self._keys.reported, self._clock.now_s()
        if reported.acknowledged:
            if self._unheard:
                self._unheard = False
                self._tell(f"planner: decision {reported.decision.decision_id} is acknowledged", Over(UNHEARD.name))
            self._waiting = None
            return False
        decision_id = reported.decision.decision_id
        if self._waiting is None or self._waiting.decision_id != decision_id:
            self._waiting = _Waiting(decision_id, now_s)
        waiting = self._waiting
        if not waiting.given_up and now_s - waiting.since_s >= self._max_wait_s:
            waiting.given_up = self._unheard = True
            self._tell(
                f"planner: decision {decision_id} was not acknowledged within {self._max_wait_s:g} s "
                f"({self._keys.root}scaled_decision_id); new decisions are made all the same",
                UNHEARD,
            )
        return not waiting.given_up

    async def _acknowledged(self, decision_id: int) -> bool:
        """Wait for it, until it is given up or the planner stops."""
        seen = asyncio.ensure_future(self._keys.until(lambda reported: reported.scaled_decision_id >= decision_id))
        closing = asyncio.ensure_future(self._closing.wait())
        late = asyncio.ensure_future(self._clock.sleep_until(self._clock.now_s() + self._max_wait_s))
        waiters = (seen, closing, late)
        try:
            await asyncio.wait(waiters, return_when=asyncio.FIRST_COMPLETED)
            return seen.done()
        finally:
            for waiter in waiters:
                waiter.cancel()
            await asyncio.gather(*waiters, return_exceptions=True)

    def status(self) -> dict[str, Any]:
        """The fields of `dynamo planner status --json`."""
        pending, reported = self.pending(), self._keys.reported
        since_s = None if self._waiting is None else self._waiting.since_s
        return {
            "keys": self._keys.root,
            "num_prefill_workers": reported.decision.num_prefill_workers,
            "num_decode_workers": reported.decision.num_decode_workers,
            "decision_id": reported.decision.decision_id,
            "scaled_decision_id": reported.scaled_decision_id,
            "pending": pending,
            "waits_s": None if since_s is None else round(self._clock.now_s() - since_s, 3),
        }


# --- protocol
# Connectors carry the decisions of a planner out.


class Connector(Protocol):
    """`LocalConnector` or `VirtualConnector`. A refusal is a value."""

    @property
    def whole(self) -> bool:
        """Whether it takes decisions only as a whole, and no single steps."""
        ...

    async def add_component(self, component: str, *, stimulus_id: str | None = None) -> Committed | Written | Refused:
        """One more worker of it. `stimulus_id` is the decision, for the events."""
        ...

    async def remove_component(
        self, component: str, *, stimulus_id: str | None = None
    ) -> Committed | Written | Refused:
        """One worker less of it: a ready one drains, or one on its way is taken back."""
        ...

    async def set_component_replicas(
        self, targets: Mapping[str, int], *, stimulus_id: str | None = None
    ) -> Committed | Written | Refused:
        """So many workers of each of these components: all of it, or nothing."""
        ...
