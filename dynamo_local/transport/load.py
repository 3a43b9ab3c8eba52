"""Workers' loads over NATS: published on `{ns}.load.{component}`, and asked for on `{ns}.load`.

A picker, which needs loads at every request, subscribes (`LoadView`). The arbiter asks all workers once per pull
(`LoadSampler`): receiving 64 loads a second cost it 1.5 % of a core, one scatter request 0.14 %. A worker that does
not answer is absent, never a load of zero.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated

import msgspec

from dynamo_local.clock import AsyncioClock, Clock, Turns
from dynamo_local.core.routing.choice import MIN_CHANGE_INTERVAL_S, PUBLISH_INTERVAL_S
from dynamo_local.core.served import MAX_COUNTERS as MAX_SERVED
from dynamo_local.core.types import Load, Missing
from dynamo_local.errors import NatsUnavailable
from dynamo_local.system.executors import ended
from dynamo_local.transport.nats import nats_call, subscribe, unsubscribe
from dynamo_local.transport.nats_client import Client, Msg, Subscription

log = logging.getLogger(__name__)

STALE_AFTER_S = 3 * PUBLISH_INTERVAL_S
FORGET_AFTER_S = 60.0
SWEEP_EVERY_S = 1.0
MAX_COUNTERS = 64
"""A worker's dispatch has fewer counters. A report with more is rejected."""
MAX_INSTANCES = 4096
"""No host has so many workers. Loads of more instances are ignored."""


_CounterName = Annotated[str, msgspec.Meta(max_length=64, pattern="^[a-z_.]+$")]
_ServedName = Annotated[str, msgspec.Meta(max_length=64, pattern=r"^[a-z]+(\.[0-9]{1,3})?$")]
_Count = Annotated[float, msgspec.Meta(ge=0)]


class WireLoad(msgspec.Struct):
    """`Load` with every count required: a field that is not there is not 0."""

    request_active_slots: int
    request_total_slots: int
    kv_active_blocks: int
    kv_total_blocks: int
    num_requests_waiting: int
    gpu_cache_usage_perc: float | None
    """None: the worker does not know it."""
    gpu_prefix_cache_hit_rate: float
    remaining_tokens: int
    itl_ms: float | None
    prefills_waiting: int | None = None
    unread: int = 0
    unread_s: float = 0.0
    abandoned: int = 0


class WireReport(msgspec.Struct):
    """The message: one worker's load, measured at `published_at_s` (wall clock, seconds)."""

    watcher_name: str
    component: str
    instance_id: int
    published_at_s: float
    load: WireLoad
    dispatch: Annotated[dict[_CounterName, float], msgspec.Meta(max_length=MAX_COUNTERS)] | None = None
    """Only in answers: nobody picks a worker by it."""
    served: Annotated[dict[_ServedName, _Count], msgspec.Meta(max_length=MAX_SERVED)] | None = None
    """Only in answers, too: `core.served`."""


_decoder = msgspec.json.Decoder(WireReport)


@dataclass(frozen=True, slots=True)
class LoadReport:
    """One worker's load; `age_s` is seconds since the worker measured it. `dispatch` are counters of how it dispatches
    requests, `served` of what it served. They are None where it told none."""

    load: Load
    watcher_name: str
    component: str
    instance_id: int
    age_s: float
    dispatch: Mapping[str, float] | None = None
    served: Mapping[str, float] | None = None


def load_subject(namespace: str, component: str | None = None) -> str:
    """The NATS subject of load requests; with `component`, that of the loads it publishes."""
    return f"{namespace}.load" if component is None else f"{namespace}.load.{component}"


class LoadPublisher:
    """Publishes one worker's load, and answers the scatter request.

    `lease_id_getter` gives the current instance id, which changes with a new lease. `source` gives the current load.
    `changed()` returns when the load may have changed since the call. `dispatch` and `served` give
    counters for load requests.
    """

    def __init__(
        self,
        nats: Client,
        namespace: str,
        component: str,
        watcher_name: str,
        lease_id_getter: Callable[[], int],
        source: Callable[[], Load],
        changed: Callable[[], Awaitable[None]],
        clock: Clock | None = None,
        dispatch: Callable[[], Mapping[str, float] | None] = lambda: None,
        served: Callable[[], Mapping[str, float] | None] = lambda: None,
    ) -> None:
        self._nats = nats
        self._dispatch = dispatch
        self._served = served
        self._namespace = namespace
        self._component = component
        self._watcher_name = watcher_name
        self._lease_id = lease_id_getter
        self._source = source
        self._changed = changed
        self._clock = clock or AsyncioClock()
        self._once = _LogOnce()
        self._subscription: Subscription | None = None
        self._loop_task: asyncio.Task[None] | None = None
        self._answered = asyncio.Event()

    async def start(self) -> None:
        """Raises `NatsUnavailable`."""
        self._subscription = await subscribe(
            self._nats, load_subject(self._namespace), self._on_request, "listen for load requests"
        )
        self._loop_task = asyncio.create_task(self._run(), name=f"load of {self._watcher_name}")

    async def close(self) -> None:
        """Stop publishing and answering."""
        if self._loop_task is not None:
            await ended(self._loop_task)
            self._loop_task = None
        await unsubscribe(self._nats, self._subscription)
        self._subscription = None

    async def _run(self) -> None:
        while True:
            # Taken before the load is read, so that a change in between is noticed.
            change = asyncio.ensure_future(self._next_change())
            published_at_s = self._clock.now_s()
            tick = asyncio.ensure_future(self._clock.sleep_until(published_at_s + PUBLISH_INTERVAL_S))
            try:
                await self._publish()
                await asyncio.wait((change, tick), return_when=asyncio.FIRST_COMPLETED)
                await self._clock.sleep_until(published_at_s + MIN_CHANGE_INTERVAL_S)
            finally:
                for waiter in (change, tick):
                    waiter.cancel()
                await asyncio.wait((change, tick))

    async def _next_change(self) -> None:
        try:
            await self._changed()
        except Exception:  # foreign code: without it one load a second is still published
            self._once.exception("changed", "the load's change signal of %s failed", self._watcher_name)
            await asyncio.Event().wait()

    async def _publish(self) -> None:
        data = self._encode()
        # While disconnected the client would buffer it, and deliver old loads after the reconnect.
        if data is None or not self._nats.is_connected:
            return
        try:
            with nats_call(self._nats, "publish the load"):
                await self._nats.publish(load_subject(self._namespace, self._component), data)
        except NatsUnavailable as error:
            self._once.warning("publish", "%s", error)

    async def _on_request(self, msg: Msg) -> None:
        data = self._encode(with_counters=True)
        if data is None or not msg.reply:
            return
        try:
            with nats_call(self._nats, "answer the load request"):
                await self._nats.publish(msg.reply, data)
        except NatsUnavailable as error:
            self._once.warning("answer", "%s", error)
        self._answered.set()

    async def until_asked(self, timeout_s: float) -> bool:
        """Whether somebody asks for the load within that time, and gets it."""
        self._answered.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                return await self._answered.wait()
        return False

    def _encode(self, *, with_counters: bool = False) -> bytes | None:
        """None if the source fails: then nothing is published, and readers see the load as missing."""
        try:
            load = msgspec.convert(self._source().numbers(), WireLoad)
            instance_id = self._lease_id()
            dispatch, served = (self._dispatch(), self._served()) if with_counters else (None, None)
        except Exception:  # the engine's code; a failing load must not end the worker
            self._once.exception("source", "the load of %s cannot be read; it will be missing", self._watcher_name)
            return None
        report = WireReport(
            self._watcher_name,
            self._component,
            instance_id,
            self._clock.wall_s(),
            load,
            None if dispatch is None else dict(dispatch),
            None if served is None else dict(served),
        )
        return msgspec.json.encode(report)


class LoadSampler:
    """Asks all workers of a namespace at once.

    An answer that comes after its question's time is part of the next sample, with its age. Otherwise a worker on a
    starved host, whose answers all take longer, would look dead. So would all workers if the asker reads late.
    """

    def __init__(self, nats: Client, namespace: str, clock: Clock | None = None) -> None:
        self._nats = nats
        self._namespace = namespace
        self._clock = clock or AsyncioClock()
        self._once = _LogOnce()
        self._inbox: str | None = None
        self._expected: int | None = None
        self._complete = asyncio.Event()
        self._answers: dict[str, tuple[float, LoadReport]] = {}
        """Since the last sample, with when each came."""

    async def sample(self, timeout_s: float = 0.25, expected: int | None = None) -> dict[str, LoadReport]:
        """Loads by watcher name: as soon as `expected` have answered, else what came within `timeout_s`.

        A worker that did not answer is absent: treat it as `Missing`. Raises `NatsUnavailable`.
        """
        late, self._answers = self._answers, {}
        if expected == 0:
            return {}
        self._expected = expected
        self._complete.clear()
        with nats_call(self._nats, "ask the workers for their load"):
            if self._inbox is None:
                inbox = self._nats.new_inbox()
                await self._nats.subscribe(inbox, cb=self._listener())
                self._inbox = inbox
            await self._nats.publish(load_subject(self._namespace), b"", reply=self._inbox)
            try:
                async with asyncio.timeout(timeout_s):
                    await self._complete.wait()
            except TimeoutError:
                log.debug("not everybody said their load within %.2f s", timeout_s)
        heard, self._answers = {**late, **self._answers}, {}
        now_s = self._clock.now_s()
        reports = {name: replace(one, age_s=one.age_s + now_s - came_s) for name, (came_s, one) in heard.items()}
        return {name: report for name, report in reports.items() if report.age_s <= STALE_AFTER_S}

    def _listener(self) -> Callable[[Msg], Awaitable[None]]:
        turns = Turns()

        async def heard(msg: Msg) -> None:
            if (msg.headers or {}).get("Status") == "503":  # the server's: nobody listens
                self._complete.set()
            else:
                self._take(msg)
            await turns.next()  # answers that have come together are not one step of the loop

        return heard

    def _take(self, msg: Msg) -> None:
        report = _decode(msg.data, msg.subject, self._clock.wall_s(), self._once)
        if report is not None:
            now_s = self._clock.now_s()
            came_s, known = self._answers.get(report.watcher_name, (now_s, report))
            if now_s - report.age_s >= came_s - known.age_s:
                self._answers[report.watcher_name] = (now_s, report)
        if self._expected is not None and len(self._answers) >= self._expected:
            self._complete.set()


class LoadView:
    """The latest published load of each instance of a component, for a least-loaded picker."""

    def __init__(self, nats: Client, namespace: str, component: str, clock: Clock | None = None) -> None:
        self._nats = nats
        self._subject = load_subject(namespace, component)
        self._clock = clock or AsyncioClock()
        self._once = _LogOnce()
        self._subscription: Subscription | None = None
        self._seen: dict[int, tuple[float, LoadReport]] = {}
        self._sweep_at_s = 0.0

    async def start(self) -> None:
        """Raises `NatsUnavailable`."""
        self._subscription = await subscribe(self._nats, self._subject, self._on_load, f"listen on {self._subject}")

    async def close(self) -> None:
        """Stop listening; the known loads grow old and become missing."""
        await unsubscribe(self._nats, self._subscription)
        self._subscription = None

    def get(self, instance_id: int) -> LoadReport | Missing:
        """The instance's last load and its age (seconds since it was taken), or why there is none."""
        heard = self._seen.get(instance_id)
        if heard is None:
            return Missing(f"instance {instance_id:x} has published no load yet")
        taken_at_s, report = heard
        age_s = self._clock.now_s() - taken_at_s
        if age_s > STALE_AFTER_S:
            return Missing(f"the last load of instance {instance_id:x} is {age_s:.1f} s old")
        return LoadReport(report.load, report.watcher_name, report.component, report.instance_id, age_s)

    def loads(self) -> dict[int, LoadReport]:
        """All that are not missing, by instance id."""
        found = ((instance_id, self.get(instance_id)) for instance_id in self._seen)
        return {instance_id: report for instance_id, report in found if isinstance(report, LoadReport)}

    def forget(self, instance_id: int) -> None:
        """The instance has deregistered."""
        self._seen.pop(instance_id, None)

    async def _on_load(self, msg: Msg) -> None:
        report = _decode(msg.data, msg.subject, self._clock.wall_s(), self._once)
        if report is None:
            return
        now_s = self._clock.now_s()
        if report.instance_id not in self._seen and not self._has_room(now_s):
            return
        # Loads come late on a busy host: what counts is when it was taken. A clock set meanwhile is not believed.
        self._seen[report.instance_id] = (now_s - min(report.age_s, PUBLISH_INTERVAL_S), report)

    def _has_room(self, now_s: float) -> bool:
        """Whether one more instance is listened to. Those that nobody forgot must not pile up."""
        if now_s >= self._sweep_at_s:
            self._sweep_at_s = now_s + SWEEP_EVERY_S
            self._seen = {k: v for k, v in self._seen.items() if now_s - v[0] <= FORGET_AFTER_S}
        if len(self._seen) < MAX_INSTANCES:
            return True
        self._once.warning("many", "loads of more than %d instances come: no more are listened to", MAX_INSTANCES)
        return False


class _LogOnce:
    """Logs each kind of complaint once, so that a fault repeated every second does not fill the log."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def warning(self, kind: str, text: str, *args: object) -> None:
        if kind not in self._said:
            self._said.add(kind)
            log.warning(text + " (said once)", *args)

    def exception(self, kind: str, text: str, *args: object) -> None:
        if kind not in self._said:
            self._said.add(kind)
            log.exception(text + " (said once)", *args)


def _decode(data: bytes, subject: str, wall_s: float, once: _LogOnce) -> LoadReport | None:
    try:
        report = _decoder.decode(data)
    except msgspec.DecodeError as error:  # ValidationError is one
        once.warning("garbage", "something that is no load came on %s: %s", subject, error)
        return None
    age_s = max(0.0, wall_s - report.published_at_s)
    facts = msgspec.structs.asdict(report.load)
    if report.load.gpu_cache_usage_perc is None:  # also what a NaN becomes in JSON
        facts["gpu_cache_usage_perc"] = Missing(f"{report.watcher_name} does not know its KV use")
    load = Load(**facts)
    return LoadReport(
        load, report.watcher_name, report.component, report.instance_id, age_s, report.dispatch, report.served
    )
