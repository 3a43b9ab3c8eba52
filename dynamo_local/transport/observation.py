"""A planner's questions to the workers, on `{ns}.observe`.

A worker reports its requests (counted, and one by one), its forward passes, and its engine's limits.

One question goes to all, as for loads. 64 workers that send two hundred passes a second each would hold the
arbiter's loop all the time. An answer brings at most `MAX_PASSES` of those since the last question, evenly spread,
and its cost does not grow with their rate. Nothing is sent while nobody asks. A worker that does not answer is
absent, never idle.

A question and an answer are msgpack maps. A pass is `[age in seconds, pass in Dynamo's format (passes.fpm)]`.
"""

from __future__ import annotations

import asyncio
import logging
import math
import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import astuple, dataclass

import msgspec

from dynamo_local.clock import AsyncioClock, Clock, Turns
from dynamo_local.core.passes import ForwardPass
from dynamo_local.core.traffic import RECENT_MAX, Answered, Recent
from dynamo_local.core.types import Missing
from dynamo_local.errors import DynamoError
from dynamo_local.transport.decoding import UNREADABLE, decode
from dynamo_local.transport.fpm import decode_pass, encode_pass
from dynamo_local.transport.nats import nats_call, subscribe, unsubscribe
from dynamo_local.transport.nats_client import Client, Msg, Subscription
from dynamo_local.transport.passes import PassRecorder

# One question to all subscribers of a subject, and their answers within a deadline.

log = logging.getLogger(__name__)


async def scatter(
    nats: Client, subject: str, question: bytes, take: Callable[[Msg], bool], *, what: str, timeout_s: float
) -> None:
    """Ask, and give each answer to `take`, until that returns True, nobody listens there, or the deadline has come.

    Raises `NatsUnavailable` that says what (`what`, "ask the workers for …") could not be done.
    """
    complete, turns = asyncio.Event(), Turns()

    async def on_answer(msg: Msg) -> None:
        if (msg.headers or {}).get("Status") == "503" or take(msg):  # 503 is the server's: nobody listens
            complete.set()
        # Answers that have come together are one step of the client's: 64 with 64 passes each took 32 ms of the loop.
        await turns.next()

    with nats_call(nats, what):
        inbox = nats.new_inbox()
        subscription = await nats.subscribe(inbox, cb=on_answer)
        try:
            await nats.publish(subject, question, reply=inbox)
            async with asyncio.timeout(timeout_s):
                await complete.wait()
        except TimeoutError:
            log.debug("not everybody answered on %s within %.2f s", subject, timeout_s)
        finally:
            if not nats.is_closed:
                await subscription.unsubscribe()


MAX_PASSES = 64
"""Passes of each rank in one answer: as many as a model of 64 samples takes."""
MAX_BYTES = 512 * 1024
MAX_RANKS = 64
ASK_TIMEOUT_S = 0.5
"""Below the deadline of the pull that waits for it."""
TIMES_DECIMALS = 4
"""Decimals of a pass's end in seconds. More would fill a planner's log with digits that nobody measured."""
LIMITS = ("max_num_batched_tokens", "max_num_seqs", "max_kv_tokens", "context_length", "dp_size")

Benchmarked = tuple[ForwardPass, ...] | Missing
"""The passes of an engine's own benchmark, or why there are none."""


def no_benchmark() -> Benchmarked:
    """The answer of an engine that does not measure itself."""
    return Missing("it does not measure itself")


Counters = Mapping[str, float]
"""Numbers that only grow while a process lives, by name: `requests`, and `{isl, osl, ttft_s, …}_{sum, count}`."""


class Question(msgspec.Struct, kw_only=True, omit_defaults=True):
    """`requests_s`: list the requests of the last so many seconds. `after`: the last pass numbers that the planner has,
    by `worker id/rank`. `benchmarks`: the watchers that report the benchmark of their start."""

    counters: bool = False
    passes: bool = False
    requests_s: float = 0.0
    after: dict[str, int] = {}
    benchmarks: list[str] = []


class _Answer(msgspec.Struct, kw_only=True, omit_defaults=True):
    watcher: str
    component: str
    epoch: str
    up_s: float
    counters: dict[str, float] | None = None
    passes: list[tuple[float, bytes]] | None = None
    missed: dict[str, int] = {}
    limits: dict[str, int | None] = {}
    began: list[float] | None = None
    answered: list[tuple[float, int, int, float, float | None]] = []
    benchmark: list[bytes] | None = None
    no_benchmark: str | None = None


_questions = msgspec.msgpack.Decoder(Question)
_answers = msgspec.msgpack.Decoder(_Answer)


@dataclass(frozen=True, slots=True)
class Observed:
    """One worker's answer. Times are on the clock of the process that asked.

    `epoch` identifies the worker's process, which is up since `up_since_s`. `counters`, `passes` and `requests` are
    None if the worker has none, or if they were not requested. `benchmark`: the engine's own, or why it has none. None:
    not requested, or not known yet.
    """

    watcher: str
    component: str
    epoch: str
    at_s: float
    up_since_s: float
    counters: Counters | None
    passes: tuple[ForwardPass, ...] | None
    missed: Mapping[str, int]
    limits: Mapping[str, int | None]
    requests: Recent | None = None
    benchmark: Benchmarked | None = None


def observe_subject(namespace: str) -> str:
    """The NATS subject of a planner's questions."""
    return f"{namespace}.observe"


class ObservationServer:
    """A worker's side. `worker_id` gives the current instance id, decimal, for passes that have none."""

    def __init__(
        self,
        nats: Client,
        namespace: str,
        watcher_name: str,
        component: str,
        worker_id: Callable[[], str],
        *,
        counters: Callable[[], Awaitable[Counters]] | None = None,
        passes: PassRecorder | None = None,
        limits: Callable[[], Mapping[str, int | None]] = dict,
        requests: Callable[[float], Recent | None] | None = None,
        benchmark: Callable[[], Benchmarked | None] = no_benchmark,
        clock: Clock | None = None,
    ) -> None:
        self._requests = requests
        self._benchmark = benchmark
        self._nats = nats
        self._subject = observe_subject(namespace)
        self._watcher_name = watcher_name
        self._component = component
        self._worker_id = worker_id
        self._counters = counters
        self._passes = passes
        self._limits = limits
        self._clock = clock or AsyncioClock()
        self._epoch = uuid.uuid4().hex
        self._began_s = self._clock.now_s()
        self._subscription: Subscription | None = None

    async def start(self) -> None:
        """Raises `NatsUnavailable`."""
        self._subscription = await subscribe(
            self._nats, self._subject, self._on_question, "listen for a planner's questions"
        )

    async def close(self) -> None:
        """Answer no more."""
        await unsubscribe(self._nats, self._subscription)
        self._subscription = None

    async def _on_question(self, msg: Msg) -> None:
        if not msg.reply:
            return
        try:
            question = _questions.decode(msg.data[:MAX_BYTES])
        except UNREADABLE as error:
            log.warning("something that is no question came on %s: %s", msg.subject, error)
            return
        try:
            answer = await self._answer(question)
            with nats_call(self._nats, "answer a planner's question"):
                await self._nats.publish(msg.reply, msgspec.msgpack.encode(answer))
        except DynamoError as error:  # what is asked does not answer, or NATS is away: then it is missing
            log.debug("a planner's question was not answered: %s", error)
        except Exception:  # an error of the engine must not end the subscription
            log.exception("a planner's question could not be answered")

    async def _answer(self, question: Question) -> _Answer:
        counters = await self._counters() if question.counters and self._counters is not None else None
        recorder = self._passes if question.passes else None
        now_s, own = self._clock.now_s(), self._worker_id()
        answer = _Answer(
            watcher=self._watcher_name,
            component=self._component,
            epoch=self._epoch,
            up_s=now_s - self._began_s,
            counters=None if counters is None else dict(counters),
            limits=dict(self._limits()),
        )
        if question.requests_s > 0 and self._requests is not None:
            recent = self._requests(question.requests_s)
            if recent is not None:
                answer.began = list(recent.began_s)
                answer.answered = [astuple(each) for each in recent.answered]
        if self._watcher_name in question.benchmarks:
            match self._benchmark():
                case Missing(reason):
                    answer.no_benchmark = reason
                case tuple() as measured:
                    answer.benchmark = [encode_pass(passed) for passed in measured[:MAX_PASSES]]
        if recorder is not None:
            worker = recorder.worker_id or own
            prefix = f"{worker}/"
            after = {key.removeprefix(prefix): n for key, n in question.after.items() if key.startswith(prefix)}
            known = {int(rank): n for rank, n in after.items() if rank.isdecimal()}
            passes = recorder.since(known, MAX_PASSES)
            answer.passes = [(now_s - passed.at_s, encode_pass(passed, worker)) for passed in passes]
            answer.missed = {str(rank): missed for rank, missed in recorder.missed.items()}
        return answer


class Observer:
    """The arbiter's side: asks all workers at once."""

    def __init__(self, nats: Client, namespace: str, clock: Clock | None = None) -> None:
        self._nats = nats
        self._subject = observe_subject(namespace)
        self._clock = clock or AsyncioClock()
        self._garbage = 0

    async def ask(
        self, question: Question, expected: frozenset[str], timeout_s: float = ASK_TIMEOUT_S
    ) -> dict[str, Observed]:
        """Answers by watcher name: as soon as all `expected` have answered, else what came within `timeout_s`.

        Raises `NatsUnavailable`.
        """
        heard: dict[str, Observed] = {}

        def take(msg: Msg) -> bool:
            answer = parse_answer(msg.data, self._clock.now_s())
            if answer is not None:
                heard[answer.watcher] = answer
            else:
                self._garbage += 1
                log.log(logging.WARNING if self._garbage == 1 else logging.DEBUG, "an answer that cannot be read came")
            return expected <= heard.keys()

        if expected:
            words = msgspec.msgpack.encode(question)
            await scatter(
                self._nats, self._subject, words, take, what="ask the workers what they did", timeout_s=timeout_s
            )
        return heard


def parse_answer(data: bytes, now_s: float) -> Observed | None:
    """A worker's answer that came at `now_s`; None for what is none. Passes in it that are none are left out."""
    if len(data) > MAX_BYTES:
        return None
    try:
        found = decode(_answers, data)
    except UNREADABLE:
        return None
    counters: dict[str, float] | None = found.counters
    numbers = [found.up_s, *(counters or {}).values(), *(age_s for age_s, _ in found.passes or ())]
    numbers += [*(found.began or ()), *(value for each in found.answered for value in each if value is not None)]
    if not all(0.0 <= number < math.inf for number in numbers):
        return None
    passes = None
    if found.passes is not None:
        of_ranks = found.passes[: MAX_RANKS * (MAX_PASSES + 1)]
        read = (decode_pass(packed, round(now_s - age_s, TIMES_DECIMALS), exact=False) for age_s, packed in of_ranks)
        passes = tuple(passed for passed in read if passed is not None)
    return Observed(
        watcher=found.watcher,
        component=found.component,
        epoch=found.epoch,
        at_s=now_s,
        up_since_s=now_s - found.up_s,
        counters=counters,
        passes=passes,
        missed=found.missed,
        limits={name: _count(found.limits.get(name)) for name in LIMITS},
        requests=_recent(found),
        benchmark=_benchmark(found),
    )


def _recent(found: _Answer) -> Recent | None:
    if found.began is None or max(len(found.began), len(found.answered)) > RECENT_MAX:
        return None
    return Recent(tuple(found.began), tuple(Answered(*each) for each in found.answered))


def _benchmark(found: _Answer) -> Benchmarked | None:
    if found.benchmark is None:
        return None if found.no_benchmark is None else Missing(found.no_benchmark)
    read = (decode_pass(packed, exact=False) for packed in found.benchmark[:MAX_PASSES])
    return tuple(passed for passed in read if passed is not None)


def _count(value: int | None) -> int | None:
    return value if value is not None and 0 < value < 2**53 else None
