"""Sending a request to a worker, and to another one where the first gave nothing, or was lost.

The picker is pure; here are the calls. A request that has produced no token can be repeated anywhere without
the client noticing. One that has produced tokens goes on behind them at another worker, if its worker was lost and its
caller can say how. Each other error after tokens is the client's.
"""

from __future__ import annotations

import contextlib
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import msgspec

from dynamo_local.clock import AsyncioClock, Clock
from dynamo_local.components import messages
from dynamo_local.core.routing.choice import NO_HITS, LeastLoaded, Picker, RoundRobin, RouterPolicy, Sample
from dynamo_local.core.routing.decode_choice import SloPicker
from dynamo_local.core.routing.estimates import Costs, Targets, Timing
from dynamo_local.core.routing.kv_index import KvCost
from dynamo_local.core.types import Missing
from dynamo_local.engines.sim.options import SimOptions
from dynamo_local.errors import (
    DynamoError,
    InfraUnavailable,
    KillsWorkers,
    NotContinuable,
    NoWorkers,
    StreamGap,
    WorkerBusy,
    WorkerDraining,
    WorkerLost,
)
from dynamo_local.ports import EndpointClient, ResponseStream
from dynamo_local.profile.interpolation import ProfileModel
from dynamo_local.system import tracing
from dynamo_local.transport.load import LoadView
from dynamo_local.transport.requests.calls import GONE, SILENT
from dynamo_local.transport.requests.client import late_news_s
from dynamo_local.transport.requests.stream import BROKEN_OFF, Take, pump

# --- Pickers by name: those of `core.routing.choice`, and a random one. The core does not use `random`.


class Random:
    """Uniform; the generator is given, so that a seed repeats the choices."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def pick(
        self,
        candidates: Sequence[int],
        loads: Mapping[int, Sample],
        hits: Mapping[int, float] = NO_HITS,
        prompt_tokens: int = 0,
    ) -> int:
        return self._rng.choice(sorted(candidates))

    def routed(self, instance_id: int, request_id: str, tokens: int, now_s: float, prompt_tokens: int = 0) -> None:
        """Chance does not depend on load."""

    def finished(self, instance_id: int, request_id: str, now_s: float) -> None:
        """Chance does not depend on load."""


def make_picker(
    name: RouterPolicy, seed: int | None = None, *, hears_ends: bool = True, costs: Costs | None = None
) -> Picker:
    """The picker of that name; `seed` is for `random`, and for the ties of `kv` and `kv-load`. `hears_ends`: whether it
    is told when a request has ended, as soon as that is so. `slo` without `costs` is `least-loaded`."""
    if name == "slo" and costs is not None:
        return SloPicker(costs.timing, costs.targets, hears_ends=hears_ends)
    if name == "random":
        return Random(random.Random(seed))
    if name in ("kv", "kv-load"):
        return KvCost(random.Random(seed).choice, prefix=name == "kv")
    return RoundRobin() if name == "round-robin" else LeastLoaded(hears_ends=hears_ends)


def sim_picker(name: RouterPolicy, seed: int | None, sim: SimOptions, targets: Targets) -> Picker:
    """The picker of that name for engines that are simulated so: `slo` decides by their profile. Raises `ConfigError`
    for one that cannot be read."""
    costs = Costs(Timing(ProfileModel.load(sim.profile), sim.speed), targets) if name == "slo" else None
    return make_picker(name, seed, costs=costs)


def samples(view: LoadView, clock: Clock, instance_ids: Sequence[int]) -> dict[int, Sample]:
    """The view's loads as samples for the pickers; a missing one stays missing."""
    now_s = clock.now_s()
    found: dict[int, Sample] = {}
    for instance_id in instance_ids:
        report = view.get(instance_id)
        if isinstance(report, Missing):
            found[instance_id] = Sample(report, now_s)
        else:
            found[instance_id] = Sample(report.load, now_s - report.age_s)
    return found


# --- A Processor's requests to a Router.

log = logging.getLogger(__name__)

AWAY_S = 2.0
"""After a timeout, requests are routed without the Router for this long, so that not each of them waits."""


@dataclass(frozen=True, slots=True)
class Routed:
    """A worker for a request; `prefix_hit_rate` None where nobody knows it."""

    worker: int
    prefix_hit_rate: float | None = None


class RouterClient:
    """Asks a Router for workers. Where it is away, or slow, the answer is None: then the Processor picks by itself."""

    def __init__(self, client: EndpointClient, timeout_s: float, clock: Clock | None = None) -> None:
        self._client = client
        self._timeout_s = timeout_s
        self._clock = clock or AsyncioClock()
        self._away_until_s = float("-inf")
        self._away = False

    async def choose(
        self, token_ids: Sequence[int], request_id: str, tokens: int, avoid: Sequence[int], lora_id: int = 0
    ) -> Routed | None:
        """Within `timeout_s`. Raises nothing of its own."""
        if self._clock.now_s() < self._away_until_s:
            return None
        request = {"token_ids": token_ids, "request_id": request_id, "max_tokens": tokens, "avoid": list(avoid)}
        if lora_id:
            request["lora_id"] = lora_id
        began_s = self._clock.now_s()
        try:
            stream = await self._client.call(request, request_id=request_id, timeout_s=self._timeout_s)
            try:
                answers = [item async for item in stream]
            finally:
                await stream.aclose()
            answer = msgspec.convert(answers[0], messages.RouteAnswer)
        except (DynamoError, msgspec.ValidationError, IndexError) as error:
            now_s = self._clock.now_s()
            if now_s - began_s >= self._timeout_s / 2:
                self._away_until_s = now_s + AWAY_S
            if not self._away:
                log.warning("the Router gives no answer, workers are picked here until it does: %s", error)
            self._away = True
            return None
        if self._away:
            log.info("the Router answers again")
        self._away = False
        return Routed(answer.worker_id, answer.prefix_hit_rate)


Batch = list[Any]

Resume = Callable[[], Mapping[str, Any] | None]
"""The request that goes on after the tokens so far; None: it cannot be continued."""

NEW_WORKER_S: Final = 60.0
"""How long a request whose worker was lost waits for another worker that takes it."""

AGAIN_S: Final = 0.2
"""A request that waits asks a full worker again after so long, or one that could not be reached."""

LOST: Final = "lost"
"""`details` of an error: how many workers were lost one after the other with the request. A repetition begins there."""

TRIED: Final = "tried"
"""`details` of what the last worker failed with: how many have failed the request. The Frontend then asks no more."""


def has_tokens(batch: Batch) -> bool:
    """Whether a batch of a worker's items holds something that a client may have seen."""
    return any(item["token_ids"] or "core" in item for item in batch)  # such as log-probabilities of the prompt


class Chooser(Protocol):
    """Chooses a worker ahead of the picker: a Router."""

    async def choose(
        self, token_ids: Sequence[int], request_id: str, tokens: int, avoid: Sequence[int], lora_id: int = 0
    ) -> Routed | None:
        """The worker, or None if there is no answer in time. Raises nothing of its own."""
        ...


class Dispatcher:
    """Chooses among a component's workers. Repeats what failed before its first token, and continues what was lost
    after it.

    `loads` gives the latest sample of each instance id. `max_tries` bounds how many workers may *fail* one request
    before its first token, `migration_limit` how often an answer goes on at another worker after a token.
    A full, draining or dead worker does not take the request, which costs nothing, so all of them may be asked. If all
    known workers are draining, the dispatcher waits for others: a scale-down fails no request. A request whose worker
    was lost waits for one that takes it. A `router` is asked first. The picker decides if the Router has no answer, or
    names a worker that is not registered. `produced` says whether the client may have got a part of a batch.
    """

    def __init__(
        self,
        client: EndpointClient,
        picker: Picker,
        loads: Callable[[Sequence[int]], Mapping[int, Sample]],
        max_tries: int = 3,
        clock: Clock | None = None,
        router: Chooser | None = None,
        produced: Callable[[Batch], bool] = has_tokens,
        migration_limit: int = 3,
    ) -> None:
        self._migration_limit = migration_limit
        self._router = router
        self._produced = produced
        self._client = client
        self._picker = picker
        self._loads = loads
        self._max_tries = max_tries
        self._clock = clock or AsyncioClock()

    async def pump(
        self,
        payload: Mapping[str, Any],
        take: Take,
        *,
        request_id: str,
        tokens: int,
        timeout_s: float | None,
        max_tries: int | None = None,
        chosen: Callable[[int], None] = lambda worker: None,
        resume: Resume = lambda: None,
        lost: int = 0,
        new_worker_s: float = NEW_WORKER_S,
    ) -> None:
        """Calls `take` with the worker's items as they arrive. `tokens` bounds what the request may generate.

        `max_tries` is for this request alone. `chosen` gets each worker that is asked. `resume` is asked if a worker
        was lost after tokens. `lost` workers were lost with this request before, when it was asked first (`LOST`).
        `new_worker_s`: how long it waits for another worker after a loss.

        Raises `NoWorkers`, `WorkerBusy` (every worker refused;
        `details["retry_after_s"]` is the shortest that one of them named), what the last worker failed with, or what
        `take` raises. Cancel it to cancel the request.
        """
        now_s = self._clock.now_s()
        deadline_s = None if timeout_s is None else now_s + timeout_s
        limits = max_tries or self._max_tries, self._migration_limit, new_worker_s
        request = _PendingRequest(payload, request_id, tokens, deadline_s, *limits, resume, lost)
        request.lost_at_s = now_s if lost else None
        while (routed := await self._choose(request)) is not None:
            attempt = _Attempt(self._produced, take)
            async with self._trying(request, routed.worker, attempt):
                chosen(routed.worker)
                stream = await self._call(request, routed)
                try:
                    await pump(stream, attempt.take)
                finally:
                    await stream.aclose()
                return
        raise request.final(request.lost or _verdict(request.failures, self._client))

    async def _call(self, request: _PendingRequest, routed: Routed) -> ResponseStream:
        now_s = self._clock.now_s()
        payload = request.payload
        if routed.prefix_hit_rate is not None:
            payload = {**payload, "prefix_hit_rate": routed.prefix_hit_rate}
        left_s = None if request.deadline_s is None else request.deadline_s - now_s
        self._picker.routed(routed.worker, request.request_id, request.tokens, now_s, len(payload.get("token_ids", ())))
        return await self._client.call(
            payload, instance_id=routed.worker, request_id=request.request_id, timeout_s=left_s
        )

    @contextlib.asynccontextmanager
    async def _trying(self, request: _PendingRequest, worker: int, attempt: _Attempt) -> AsyncIterator[None]:
        """One worker's turn: a failure after which another may be asked is noted, and goes no further."""
        try:
            yield
        except DynamoError as error:
            request.failed(worker, error, attempt, self._clock.now_s())
        else:
            return
        finally:
            self._picker.finished(worker, request.request_id, self._clock.now_s())
        if worker not in request.failures:
            await self._clock.sleep_until(self._clock.now_s() + AGAIN_S)
        elif isinstance(request.failures[worker], WorkerDraining):
            await self._client.wait_for_others(request.failures, late_news_s(request.deadline_s, self._clock.now_s()))

    async def _choose(self, request: _PendingRequest) -> Routed | None:
        """The next worker, or None when nobody is left, or too many have failed."""
        if request.failed_enough():
            return None
        with tracing.span("route") as span:
            routed = await self._chosen(request)
            if routed is not None:
                span.set({"dynamo.instance_id": f"{routed.worker:x}"})
        return routed

    async def _chosen(self, request: _PendingRequest) -> Routed | None:
        payload, failures = request.payload, request.failures
        tokens = payload.get("token_ids", ())
        while untried := self._untried(failures) or await self._with_room(request):
            if self._router is not None:
                lora_id = payload.get("lora_id", 0)
                routed = await self._router.choose(tokens, request.request_id, request.tokens, tuple(failures), lora_id)
                untried = self._untried(failures)
                if routed is not None and routed.worker in untried:
                    return routed
            if untried:
                return Routed(self._picker.pick(untried, self._loads(untried), prompt_tokens=len(tokens)))
        return None

    async def _with_room(self, request: _PendingRequest) -> list[int]:
        """Workers that a request may ask whose worker was lost: new ones, or once more those that were full or could
        not be reached. None: its time is over."""
        while (left_s := request.left_s(self._clock.now_s())) > 0:
            again = [worker for worker, error in request.failures.items() if _may_take_it_later(error)]
            await self._client.wait_for_others(request.failures, min(AGAIN_S, left_s) if again else left_s)
            for worker in again:
                del request.failures[worker]
            if untried := self._untried(request.failures):
                return untried
        return []

    def _untried(self, failures: Mapping[int, DynamoError]) -> list[int]:
        return [i.instance_id for i in self._client.instances() if i.instance_id not in failures]


@dataclass(slots=True)
class _PendingRequest:
    """One request, and the workers that have failed or refused it."""

    payload: Mapping[str, Any]
    request_id: str
    tokens: int
    deadline_s: float | None
    max_tries: int
    migration_limit: int
    new_worker_s: float
    resume: Resume
    lost_before: int
    failures: dict[int, DynamoError] = field(default_factory=dict)
    lost: DynamoError | None = None
    """With what the last worker was lost that had the request. It is the client's if nobody else takes it."""
    lost_at_s: float | None = None
    """None: no worker was lost with it, so it waits for none."""
    migrations: int = 0
    lost_in_row: int = field(init=False)
    """Workers that were lost with this request since its last token."""

    def __post_init__(self) -> None:
        self.lost_in_row = self.lost_before

    def left_s(self, now_s: float) -> float:
        """How long it may still wait for another worker, after its own was lost."""
        return 0.0 if self.lost_at_s is None else self.lost_at_s + self.new_worker_s - now_s

    def failed_enough(self) -> bool:
        """Whether it is not repeated any more. Workers that did not take it count only if they are silent, and only
        until one was lost with it: then time bounds the waiting."""
        if self.migrations:
            return False
        mild = (WorkerBusy, WorkerDraining)
        reasons = (GONE,) if self.lost_at_s is None else (GONE, SILENT)
        failed = [
            e for e in self.failures.values() if not isinstance(e, mild) and e.details.get("reason") not in reasons
        ]
        return len(failed) >= self.max_tries

    def final(self, error: DynamoError) -> DynamoError:
        """An error that the caller gets, with the count of lost workers."""
        if self.lost_in_row:
            error.details[LOST] = self.lost_in_row
        return error

    def failed(self, worker: int, error: DynamoError, attempt: _Attempt, now_s: float) -> None:
        """Remember it; raises it where the request cannot be repeated or continued."""
        if isinstance(error, InfraUnavailable) and not attempt.taken and self.left_s(now_s) > 0:
            log.info("request %s waits to go on: %s", self.request_id, error)
            return
        self.failures[worker] = error
        if isinstance(error, KillsWorkers):
            raise error
        if isinstance(error, NotContinuable):
            log.warning("request %s cannot be continued: %s", self.request_id, error)
            raise self.final(self.lost or error)
        if attempt.of_taker or not error.retryable or isinstance(error, InfraUnavailable):
            raise error
        gone = isinstance(error, WorkerLost | StreamGap)
        # Before a first item only the transport knows that a process died: a proxy may say the same of its server.
        had_it = gone and (attempt.taken or error.details.get("reason") == BROKEN_OFF)
        self.lost_in_row = (self.lost_before if attempt.produced else self.lost_in_row) + had_it
        if had_it:
            self.lost, self.lost_at_s = error, now_s
        if self.lost_in_row >= KillsWorkers.AFTER:
            raise KillsWorkers.of(self.lost_in_row, "workers", error.message)
        if attempt.produced:
            if not gone:
                raise error
            self._resume(worker, error)
        else:
            about = {"dynamo.instance_id": f"{worker:x}", "error.type": type(error).__name__}
            tracing.current().event("worker gave nothing", about)
            log.info("request %s: worker %x gave nothing: %s", self.request_id, worker, error)

    def _resume(self, worker: int, error: DynamoError) -> None:
        """Let another worker go on after the tokens so far. Raises `error` where none may or can."""
        if (exhausted := self.migrations >= self.migration_limit) or (payload := self.resume()) is None:
            log.warning("request %s ends with worker %x, and is not continued: %s", self.request_id, worker, error)
            if exhausted and self.migrations:
                error.details[TRIED] = len(self.failures)
            raise self.final(error)
        count = len(payload["token_ids"]) - len(self.payload["token_ids"])
        self.payload, self.tokens = payload, self.tokens - count
        self.migrations += 1
        about = {"dynamo.instance_id": f"{worker:x}", "error.type": type(error).__name__}
        tracing.current().event("goes on at another worker", about)
        log.warning("request %s goes on at another worker, %x was lost: %s", self.request_id, worker, error)


class _Attempt:
    """One worker's attempt. `taken`: the worker gave a first item. `produced`: the client may have got a part of the
    answer. `of_taker`: what was raised is no failure of the worker."""

    __slots__ = ("_produced", "_take", "of_taker", "produced", "taken")

    def __init__(self, produced: Callable[[Batch], bool], take: Take) -> None:
        self.taken = self.produced = self.of_taker = False
        self._produced = produced
        self._take = take

    def take(self, batch: Batch) -> Awaitable[None] | None:
        self.of_taker = self.taken = True
        until_free = self._take(batch)
        self.of_taker = False
        self.produced = self.produced or self._produced(batch)
        return until_free


def _may_take_it_later(error: DynamoError) -> bool:
    """Whether a worker that did not take a request may do so a moment later. After a restart of NATS each is without a
    listener for a moment. A worker of a starved host may be silent for some seconds."""
    return isinstance(error, WorkerBusy) or error.details.get("reason") in (GONE, SILENT)


def _verdict(failures: Mapping[int, DynamoError], client: EndpointClient) -> DynamoError:
    """The error after the last worker: "busy" if a worker was, otherwise the last failure."""
    if not failures:
        return NoWorkers("no worker is registered that could take the request; `dynamo status` shows the workers")
    busy = [error for error in failures.values() if isinstance(error, WorkerBusy)]
    if not busy:
        last = list(failures.values())[-1]
        last.details[TRIED] = len(failures)
        return last
    waits = [float(error.details["retry_after_s"]) for error in busy if "retry_after_s" in error.details]
    return WorkerBusy(
        f"all {len(client.instances())} workers are full or unable; try again shortly",
        **{**busy[-1].details, "retry_after_s": min(waits, default=1.0)},
    )
