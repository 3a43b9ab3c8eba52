"""A request that gave nothing goes to another worker. One that gave something is continued, if its caller can."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from dynamo_local.components.dispatcher import AGAIN_S, Dispatcher, Routed
from dynamo_local.core.routing.choice import LeastLoaded, RoundRobin
from dynamo_local.errors import (
    DeadlineExceeded,
    DynamoError,
    EngineError,
    KillsWorkers,
    NatsUnavailable,
    NotContinuable,
    NoWorkers,
    StreamGap,
    WorkerBusy,
    WorkerDraining,
    WorkerLost,
)
from dynamo_local.transport.requests.calls import GONE, SILENT
from dynamo_local.transport.requests.stream import BROKEN_OFF
from tests.drivers.eventually import eventually
from tests.fakes.data_plane.endpoints import FakeEndpointClient


async def good(payload: Any, _context: Any) -> AsyncIterator[Any]:
    """Accepts, then two tokens."""
    yield {"token_ids": []}
    yield {"token_ids": [1, 2], "finish_reason": "length"}


def failing(error: DynamoError, after: list[Any] | None = None) -> Any:
    """A handler that yields `after` and then fails."""

    async def handle(payload: Any, _context: Any) -> AsyncIterator[Any]:
        for item in after or []:
            yield item
        raise error

    return handle


def dispatcher(client: FakeEndpointClient, max_tries: int = 3) -> Dispatcher:
    return Dispatcher(client, RoundRobin(), lambda ids: {}, max_tries=max_tries)


async def collect(subject: Dispatcher, timeout_s: float | None = 5) -> list[int]:
    """All tokens of one request."""
    return await pumped(subject, {}, timeout_s)


async def pumped(subject: Dispatcher, payload: dict[str, Any], timeout_s: float | None = 5) -> list[int]:
    tokens: list[int] = []

    def take(batch: list[Any]) -> None:
        for item in batch:
            tokens.extend(item["token_ids"])

    await subject.pump(payload, take, request_id="r", tokens=9, timeout_s=timeout_s)
    return tokens


@pytest.mark.parametrize("error", [WorkerDraining("leaving"), WorkerLost("gone"), WorkerBusy("full")])
async def test_refused_call_goes_to_another_worker(error: DynamoError) -> None:
    client = FakeEndpointClient({1: good, 2: good})
    client.refuse(1, error)
    assert await collect(dispatcher(client)) == [1, 2]
    assert [call.instance_id for call in client.calls] == [1, 2]


async def test_failure_after_acceptance_but_before_tokens_is_retried() -> None:
    client = FakeEndpointClient({1: failing(WorkerLost("gone"), [{"token_ids": []}]), 2: good})
    assert await collect(dispatcher(client)) == [1, 2]


async def test_failure_after_tokens_is_the_clients() -> None:
    """A repeated request would send the same text twice."""
    client = FakeEndpointClient({1: failing(WorkerLost("gone"), [{"token_ids": [1]}]), 2: good})
    with pytest.raises(WorkerLost):
        await collect(dispatcher(client))
    assert len(client.calls) == 1


def counting(first: int, until: int | None = None, then: DynamoError | None = None) -> Any:
    """A handler whose answer to the prompt [0] is 1, 2, 3, …, up to 6: it goes on behind its prompt's last token.

    With `until`, it ends with `then` before that token.
    """

    async def handle(payload: Any, _context: Any) -> AsyncIterator[Any]:
        yield {"token_ids": []}
        assert payload["token_ids"] == list(range(first))
        for token in range(first, 7):
            if token == until and then is not None:
                raise then
            yield {"token_ids": [token], "finish_reason": "length" if token == 6 else None}

    return handle


async def counted(client: FakeEndpointClient, migration_limit: int = 3, lost: int = 0) -> list[int]:
    """The answer of `counting` workers, as the client gets it."""
    tokens: list[int] = []
    subject = Dispatcher(client, RoundRobin(), lambda ids: {}, migration_limit=migration_limit)

    def take(batch: list[Any]) -> None:
        for item in batch:
            tokens.extend(item["token_ids"])

    def resume() -> dict[str, Any]:
        return {"token_ids": [0, *tokens], "generated": len(tokens)}

    await subject.pump({"token_ids": [0]}, take, request_id="r", tokens=6, timeout_s=5, resume=resume, lost=lost)
    return tokens


LOST = WorkerLost("gone")


async def test_an_answer_goes_on_behind_its_tokens_at_other_workers() -> None:
    client = FakeEndpointClient({1: counting(1, 3, LOST), 2: counting(3, 5, StreamGap("a gap")), 3: counting(5)})
    assert await counted(client) == [1, 2, 3, 4, 5, 6]
    assert [call.instance_id for call in client.calls] == [1, 2, 3]


async def test_an_answer_goes_on_at_a_worker_that_comes_later() -> None:
    client = FakeEndpointClient({1: counting(1, 3, LOST)})
    asked = asyncio.create_task(counted(client))
    while not client.calls:
        await asyncio.sleep(0)
    client.add_instance(2, counting(3))
    assert await asked == [1, 2, 3, 4, 5, 6]


async def test_a_full_worker_is_asked_again_by_an_answer_that_has_begun() -> None:
    full = [WorkerBusy("full")]

    async def full_once(payload: Any, context: Any) -> AsyncIterator[Any]:
        if full:
            raise full.pop()
        async for item in counting(3)(payload, context):
            yield item

    client = FakeEndpointClient({1: counting(1, 3, LOST), 2: full_once})
    assert await counted(client) == [1, 2, 3, 4, 5, 6]
    assert [call.instance_id for call in client.calls] == [1, 2, 2]


async def test_a_request_waits_on_while_a_full_worker_leaves() -> None:
    client = FakeEndpointClient({1: counting(1, 3, LOST), 2: failing(WorkerBusy("full"))})
    asked = asyncio.create_task(counted(client))
    await eventually(lambda: len(client.calls) == 2)
    client.remove_instance(2)
    await asyncio.sleep(2 * AGAIN_S)
    client.add_instance(3, counting(3))
    assert await asked == [1, 2, 3, 4, 5, 6]


async def test_a_request_waits_for_nats_to_go_on() -> None:
    client = FakeEndpointClient({1: counting(1, 3, LOST), 2: counting(3)})
    client.refuse(2, NatsUnavailable("away"))
    asked = asyncio.create_task(counted(client))
    await eventually(lambda: len(client.calls) >= 3)
    client.refuse(2, None)
    assert await asked == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("reason", [GONE, SILENT])
async def test_a_worker_that_could_not_be_reached_is_asked_again_by_an_answer_that_has_begun(reason: str) -> None:
    client = FakeEndpointClient({1: counting(1, 3, LOST), 2: counting(3)})
    client.refuse(2, WorkerLost("unreachable", reason=reason))
    asked = asyncio.create_task(counted(client))
    await eventually(lambda: len(client.calls) >= 2)
    client.refuse(2, None)
    assert await asked == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("refusal", [WorkerBusy("full"), NatsUnavailable("away"), WorkerLost("gone", reason=GONE)])
async def test_a_repetition_waits_for_a_worker_too(refusal: DynamoError) -> None:
    client = FakeEndpointClient({2: counting(1)})
    client.refuse(2, refusal)
    asked = asyncio.create_task(counted(client, lost=1))
    await eventually(lambda: len(client.calls) >= 1)
    client.refuse(2, None)
    assert await asked == [1, 2, 3, 4, 5, 6]


async def test_a_repetition_waits_for_the_first_worker() -> None:
    client = FakeEndpointClient({})
    asked = asyncio.create_task(counted(client, lost=1))
    await asyncio.sleep(0)
    client.add_instance(2, counting(1))
    assert await asked == [1, 2, 3, 4, 5, 6]


async def test_dead_workers_that_are_still_registered_use_up_no_tries() -> None:
    client = FakeEndpointClient(dict.fromkeys(range(1, 6), good))
    for dead in (1, 2, 3, 4):
        client.refuse(dead, WorkerLost("nobody serves it", reason=GONE))
    assert await collect(dispatcher(client)) == [1, 2]
    assert [call.instance_id for call in client.calls] == [1, 2, 3, 4, 5]


async def test_a_process_that_dies_before_its_first_item_is_a_loss() -> None:
    died = failing(WorkerLost("died", reason=BROKEN_OFF))
    client = FakeEndpointClient({1: died})
    asked = asyncio.create_task(collect(dispatcher(client)))
    await eventually(lambda: len(client.calls) == 1)
    client.add_instance(2, good)
    assert await asked == [1, 2]
    with pytest.raises(KillsWorkers):
        await collect(dispatcher(FakeEndpointClient({1: died, 2: died, 3: good})))


async def test_migrations_are_bounded() -> None:
    client = FakeEndpointClient({n: counting(n, n + 1, WorkerLost(f"gone {n}")) for n in range(1, 6)})
    with pytest.raises(WorkerLost, match="gone 3"):
        await counted(client, migration_limit=2)
    assert len(client.calls) == 3


async def test_a_request_that_two_workers_die_of_gets_no_third() -> None:
    client = FakeEndpointClient({1: counting(1, 3, LOST), 2: counting(3, 3, LOST), 3: counting(3)})
    with pytest.raises(KillsWorkers, match="2 workers were lost one after the other"):
        await counted(client)
    assert [call.instance_id for call in client.calls] == [1, 2]


async def test_a_request_that_prefill_workers_died_of_gets_no_other_worker() -> None:
    client = FakeEndpointClient({1: failing(KillsWorkers("two"), [{"token_ids": []}]), 2: good})
    with pytest.raises(KillsWorkers):
        await collect(dispatcher(client))
    assert len(client.calls) == 1


@pytest.mark.parametrize("first", [1, 3], ids=["before its first token", "after tokens"])
async def test_a_worker_that_was_lost_before_a_repetition_counts(first: int) -> None:
    """An answer that cannot go on is repeated from its beginning."""
    client = FakeEndpointClient({1: counting(1, first, LOST), 2: failing(NotContinuable("a grammar")), 3: counting(1)})
    with pytest.raises(KillsWorkers):
        await counted(client, lost=1)
    assert 3 not in [call.instance_id for call in client.calls]


@pytest.mark.parametrize("refusal", [NotContinuable("a grammar"), EngineError("broken")])
async def test_an_engine_that_cannot_go_on_leaves_an_error(refusal: DynamoError) -> None:
    client = FakeEndpointClient({1: counting(1, 3, LOST), 2: failing(refusal), 3: counting(3)})
    with pytest.raises(WorkerLost if isinstance(refusal, NotContinuable) else EngineError):
        await counted(client)
    assert len(client.calls) == 2


async def test_an_error_of_the_engine_after_tokens_is_not_continued() -> None:
    client = FakeEndpointClient({1: counting(1, 3, EngineError("broken")), 2: counting(3)})
    with pytest.raises(EngineError):
        await counted(client)


@pytest.mark.parametrize("error", [EngineError("broken"), DeadlineExceeded("late"), NatsUnavailable("away")])
async def test_errors_that_no_other_worker_can_mend_are_not_retried(error: DynamoError) -> None:
    client = FakeEndpointClient({1: failing(error), 2: good})
    with pytest.raises(type(error)):
        await collect(dispatcher(client))
    assert len(client.calls) == 1


async def test_all_busy_is_busy_with_the_shortest_wait() -> None:
    client = FakeEndpointClient({n: failing(WorkerBusy("full", retry_after_s=n)) for n in (2, 3, 4, 5)})
    with pytest.raises(WorkerBusy) as caught:
        await collect(dispatcher(client, max_tries=1))
    assert caught.value.details["retry_after_s"] == 2
    assert sorted(call.instance_id for call in client.calls) == [2, 3, 4, 5]


async def test_tries_are_bounded() -> None:
    client = FakeEndpointClient({n: failing(WorkerLost(f"gone {n}")) for n in range(1, 6)})
    with pytest.raises(WorkerLost, match="gone 2"):
        await collect(dispatcher(client, max_tries=2))
    assert len(client.calls) == 2


async def test_workers_that_leave_refuse_however_many_they_are() -> None:
    """Four of five drain at once and the news of it is late: no request pays for that (seen on a starved host)."""
    client = FakeEndpointClient(dict.fromkeys(range(1, 6), good))
    for leaving in (1, 2, 3, 4):
        client.refuse(leaving, WorkerDraining("leaving"))
    assert await collect(dispatcher(client, max_tries=1)) == [1, 2]
    assert [call.instance_id for call in client.calls] == [1, 2, 3, 4, 5]


async def test_a_request_that_all_refuse_as_leaving_waits_for_the_next_worker() -> None:
    client = FakeEndpointClient({1: good})
    client.refuse(1, WorkerDraining("leaving"))
    sent = asyncio.ensure_future(collect(dispatcher(client)))
    while not client.calls:
        await asyncio.sleep(0)
    client.add_instance(2, good)
    assert await sent == [1, 2]


async def test_that_wait_ends_with_the_requests_deadline() -> None:
    """Nobody else comes: the refusal is the client's, which is typed and can be repeated."""
    client = FakeEndpointClient({1: good})
    client.refuse(1, WorkerDraining("leaving"))
    with pytest.raises(WorkerDraining):
        await collect(dispatcher(client), timeout_s=0.05)


async def test_no_worker_is_said_at_once() -> None:
    with pytest.raises(NoWorkers):
        await collect(dispatcher(FakeEndpointClient({})))


async def test_deadline_reaches_the_worker_and_shrinks() -> None:
    client = FakeEndpointClient({1: failing(WorkerLost("gone")), 2: good})
    await collect(dispatcher(client), timeout_s=5)
    first, second = (call.timeout_s for call in client.calls)
    assert first is not None
    assert second is not None
    assert 0 < second <= first <= 5


async def test_a_cancelled_request_ends_its_handler_and_frees_its_place() -> None:
    ended = asyncio.Event()

    async def endless(payload: Any, _context: Any) -> AsyncIterator[Any]:
        try:
            while True:
                yield {"token_ids": [1]}
                await asyncio.sleep(0.001)
        finally:
            ended.set()

    client, picker = FakeEndpointClient({1: endless}), LeastLoaded()
    subject = Dispatcher(client, picker, lambda ids: {})
    begun = asyncio.Event()
    pumping = asyncio.create_task(subject.pump({}, lambda _: begun.set(), request_id="r", tokens=9, timeout_s=None))
    await begun.wait()
    assert picker.in_flight(1) == (1, 9)
    pumping.cancel()
    await asyncio.wait([pumping])
    assert ended.is_set()
    assert picker.in_flight(1) == (0, 0)


class Noted:
    """A Router that gives these answers, in turn."""

    def __init__(self, *answers: Routed | None) -> None:
        self.answers = list(answers)
        self.avoided: list[tuple[int, ...]] = []
        self.adapters: list[int] = []

    async def choose(self, token_ids: Any, request_id: str, tokens: int, avoid: Any, lora_id: int = 0) -> Routed | None:
        self.avoided.append(tuple(avoid))
        self.adapters.append(lora_id)
        return self.answers.pop(0)


async def routed(client: FakeEndpointClient, router: Noted) -> list[int]:
    """Tokens of one request through a dispatcher with that Router."""
    subject = Dispatcher(client, RoundRobin(), lambda ids: {}, router=router)
    return await pumped(subject, {"token_ids": [1]})


async def test_the_routers_worker_gets_the_request_with_its_hit_rate() -> None:
    client = FakeEndpointClient({1: good, 2: good})

    assert await routed(client, Noted(Routed(2, 0.75))) == [1, 2]
    (call,) = client.calls
    assert (call.instance_id, call.payload) == (2, {"token_ids": [1], "prefix_hit_rate": 0.75})


async def test_the_router_is_told_the_adapter_whose_blocks_count() -> None:
    client, router = FakeEndpointClient({1: good}), Noted(Routed(1, 0.5))
    subject = Dispatcher(client, RoundRobin(), lambda ids: {}, router=router)
    assert await pumped(subject, {"token_ids": [1], "lora_id": 3}) == [1, 2]
    assert router.adapters == [3]


@pytest.mark.parametrize("answer", [None, Routed(9, 0.75)])
async def test_without_a_usable_answer_the_picker_decides(answer: Routed | None) -> None:
    """The Router is away, or names a worker that is not there: nothing is said of a hit rate."""
    client = FakeEndpointClient({1: good, 2: good})

    assert await routed(client, Noted(answer)) == [1, 2]
    assert client.calls[0].payload == {"token_ids": [1]}


async def test_the_router_is_told_who_has_failed_the_request() -> None:
    client = FakeEndpointClient({1: good, 2: good})
    client.refuse(2, WorkerLost("gone"))
    router = Noted(Routed(2, 0.75), Routed(1, 0.0))

    assert await routed(client, router) == [1, 2]
    assert router.avoided == [(), (2,)]
    assert [call.payload["prefix_hit_rate"] for call in client.calls] == [0.75, 0.0]
