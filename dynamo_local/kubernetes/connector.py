"""Writes decisions as replica counts of a DynamoGraphDeployment, which Dynamo's operator carries out.

Between `start` and `close` the graph is read every `LOOK_EVERY_S`. A decision is written at once, as a whole where the
API allows it, against the present graph. A change by a person is kept. Nothing raises into a tick: a refusal is a
value.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace

from dynamo_local.clock import Clock
from dynamo_local.core.notes import About, Over, Tell, Trouble
from dynamo_local.core.types import Role
from dynamo_local.errors import ConfigError, DynamoError
from dynamo_local.kubernetes.api import ApiAway, Conflict, KubeApi, all_texts
from dynamo_local.kubernetes.graph import (
    Fault,
    ObservedGraph,
    PatchGraph,
    Refusal,
    Requirements,
    WorkerCounter,
    Write,
    change,
    drifted,
    faults,
    gpus_of,
)
from dynamo_local.planner.connectors import Committed, Refused
from dynamo_local.planner.values import WorkerPools

log = logging.getLogger(__name__)

LOOK_EVERY_S = 2.0
BLIND_AFTER_S = 10.0
"""If the graph was last read this long ago, nothing is decided."""
TRIES = 5
FRONTEND = "frontend"
DRIFT = Trouble("a workload that somebody scaled under the operator")


class GraphUnfit(ConfigError):
    """The graph cannot be planned. `found` has every reason."""

    code = "graph_unfit"

    def __init__(self, name: str, found: tuple[Fault, ...]) -> None:
        super().__init__(f"{name} cannot be planned:\n{all_texts(fault.text for fault in found)}")
        self.found = found


def _logged(text: str, about: About = None) -> None:
    log.warning("%s", text)


class KubernetesConnector:
    """The connector of one graph, and the loop's view of it.

    `on_manual` is called when somebody else has changed the number of a component. `follows` says why this planner
    may not act, or None.
    """

    whole = True
    """Both roles go in one write, where the API allows it."""

    def __init__(
        self,
        api: KubeApi,
        clock: Clock,
        expected: Requirements,
        *,
        tell: Tell = _logged,
        follows: Callable[[], str | None] = lambda: None,
        on_manual: Callable[[], None] = lambda: None,
        counting: WorkerCounter | None = None,
    ) -> None:
        self._on_manual = on_manual
        self._follows = follows
        self._api = api
        self._clock = clock
        self._expected = expected
        self._tell = tell
        self._counting = counting or WorkerCounter()
        self._seen: ObservedGraph | None = None
        self._seen_s = 0.0
        self._gone: str | None = "the graph was not read yet"
        self._written: dict[str, int] = {}
        """The numbers that the graph had last, or was given. Any other number is somebody else's."""
        self._decided_from: Mapping[str, int] = {}
        self._drift: tuple[str, ...] = ()
        self._reading = asyncio.Lock()
        self._following: asyncio.Task[None] | None = None

    # --- with the planner --------------------------------------------------------------------------

    async def start(self) -> ObservedGraph:
        """Check the graph, and follow it. Raises `GraphUnfit` with all faults, and errors of the API server."""
        seen = await self._graph()
        found = faults(seen, self._expected)
        if found:
            raise GraphUnfit(seen.name, found)
        self._took(seen)
        self._following = asyncio.ensure_future(self._follow())
        return seen

    async def close(self) -> None:
        """Stop following it. Closing twice is no error."""
        task, self._following = self._following, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _follow(self) -> None:
        while True:
            await self._clock.sleep_until(self._clock.now_s() + LOOK_EVERY_S)
            try:
                with suppress(DynamoError):  # `blind` reports it
                    await self.look()
            except Exception:
                log.exception("looking at the graph failed, and goes on")

    async def _graph(self) -> ObservedGraph:
        return replace(await self._api.graph(), only=self._expected.only)

    async def look(self) -> ObservedGraph:
        """Read the graph now. Raises the API server's errors."""
        async with self._reading:
            try:
                seen = await self._graph()
            except DynamoError as error:
                self._gone = str(error)
                if not isinstance(error, ApiAway):
                    self._seen_s = -math.inf  # a lost answer must not overtake: this one is final until the next
                raise
            if (found := _unplannable(seen, self._expected)) is not None:
                self._gone, self._seen_s = found, -math.inf
                raise ConfigError(found)
            self._took(seen)
            return seen

    def _took(self, seen: ObservedGraph) -> None:
        self._seen, self._seen_s, self._gone = seen, self._clock.now_s(), None
        self._counting.saw(seen, self._seen_s)
        now = {one.name: seen.wanted(one) for one in seen.planned}
        others = [name for name, number in now.items() if self._written.get(name, number) != number]
        self._written = now
        if others:
            reported = ", ".join(f"{name} to {now[name]}" for name in others)
            self._tell(f"planner: somebody has set {reported}; it goes on from there")
            self._on_manual()
        drift = drifted(seen)
        if drift != self._drift:
            self._drift = drift
            self._tell(f"planner: {'; '.join(drift)}" if drift else "planner: all is as asked", _drift(drift))

    # --- what the loop sees ------------------------------------------------------------------------

    @property
    def seen(self) -> ObservedGraph:
        """As last read."""
        assert self._seen is not None, "the connector was not started"
        return self._seen

    @property
    def gpus(self) -> dict[str, int]:
        """GPUs of one replica of each planned component."""
        return gpus_of(self.seen, self._expected.gpus or {})

    def worker_pools(self) -> WorkerPools:
        """The next decision starts from these."""
        seen = self.seen
        self._decided_from = {one.name: seen.wanted(one) for one in seen.planned}
        return self.pools()

    def pools(self) -> WorkerPools:
        """The same, for observers."""
        return self._counting.pools(self.seen, self.gpus, self._clock.now_s())

    def frontends(self) -> int:
        """Replicas that the graph asks for."""
        return 1 if self._seen is None else sum(one.wanted for one in self._seen.components if one.kind == FRONTEND)

    def blind(self) -> str | None:
        if (follower := self._follows()) is not None:
            return follower
        if self._gone is not None and self._clock.now_s() - self._seen_s > BLIND_AFTER_S:
            return self._gone
        return None

    # --- deciding ----------------------------------------------------------------------------------

    async def add_component(self, component: str, *, stimulus_id: str | None = None) -> Committed | Refused:
        """One replica more than the graph asks for."""
        return await self._step(component, 1)

    async def remove_component(self, component: str, *, stimulus_id: str | None = None) -> Committed | Refused:
        """One replica less, and never less than none."""
        return await self._step(component, -1)

    async def _step(self, component: str, step: int) -> Committed | Refused:
        have = self._decided_from.get(component, 0)
        return await self.set_component_replicas({component: max(0, have + step)})

    async def set_component_replicas(
        self, targets: Mapping[str, int], *, stimulus_id: str | None = None
    ) -> Committed | Refused:
        """Set the replicas of each component.

        A graph that is not ready refuses more workers. A decision whose basis somebody else has changed is refused.
        """
        done: dict[str, int] = {}
        try:
            return await self._carried_out(targets, done)
        except DynamoError as error:
            half = f"{_committed(done)} was set before that; " if done else ""
            return Refused(f"{half}{error}", error.code, error.retryable)

    async def _carried_out(self, targets: Mapping[str, int], done: dict[str, int]) -> Committed | Refused:
        for left in reversed(range(TRIES)):
            seen = await self.look()
            targets = _own(targets, seen)
            decided_from = {**self._decided_from, **done}
            writes = change(seen, targets, decided_from, self.gpus, self._expected.max_gpus)
            if isinstance(writes, Refusal):
                half = f"{_committed(done)} was set before that; " if done else ""
                return Refused(f"{half}{writes.reason}", writes.code, writes.retryable)
            try:
                for write in writes:
                    await self._write(write)
                    done |= write.targets
                await self._look_again(writes)
                return Committed((), {name: () for name in targets})
            except Conflict:
                if not left:
                    raise
        raise AssertionError("unreachable")

    async def _look_again(self, writes: tuple[Write, ...]) -> None:
        """The next decision starts from the written numbers."""
        if writes:
            with suppress(DynamoError):
                await self.look()

    async def _write(self, write: Write) -> None:
        if (follower := self._follows()) is not None:
            raise NotLeading(follower)
        async with self._reading:
            before, self._written = self._written, {**self._written, **write.targets}
            try:
                await (self._api.patch(write) if isinstance(write, PatchGraph) else self._api.scale(write))
            except ApiAway:
                # It may have arrived: whichever of the two numbers is found next is ours.
                self._written = {name: n for name, n in before.items() if name not in write.targets}
                raise
            except DynamoError:
                self._written = before
                raise
        log.info("the graph %s is asked for %s", self.seen.name, _committed(write.targets))


class NotLeading(DynamoError):
    """Another planner of this graph acts."""

    code = "not_leading"
    retryable = True


def _own(targets: Mapping[str, int], seen: ObservedGraph) -> Mapping[str, int]:
    """The targets without the role of another planner: its number is in every decision and never changes."""
    if seen.only is None:
        return targets
    planned = {one.name for one in seen.planned}
    return {name: number for name, number in targets.items() if name in planned}


def _unplannable(seen: ObservedGraph, expected: Requirements) -> str | None:
    """The graph has lost a role, or its GPUs are unknown, so it cannot be counted."""
    needed = Role.DECODE if expected.only is None else expected.only
    if not any((one.role is Role.PREFILL) == (needed is Role.PREFILL) for one in seen.workers):
        return f"{seen.name} has no {'prefill' if needed is Role.PREFILL else 'decode'} component any more"
    given = expected.gpus or {}
    unknown = [name for name, gpus in gpus_of(seen, given).items() if not gpus]
    return f"how many GPUs a replica of {unknown[0]} holds is not known any more" if unknown else None


def _committed(targets: Mapping[str, int]) -> str:
    return " and ".join(f"{name} at {number}" for name, number in targets.items())


def _drift(drift: tuple[str, ...]) -> About:
    return DRIFT if drift else Over(DRIFT.name)
