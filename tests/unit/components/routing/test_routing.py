"""A Router's answers, and a Processor's questions to it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import pytest

from dynamo_local.clock import AsyncioClock, run_virtual
from dynamo_local.components import dispatcher as router_client
from dynamo_local.components import kv_router as route_decisions
from dynamo_local.components.dispatcher import Routed, RouterClient
from dynamo_local.components.kv_router import RouteDecisions
from dynamo_local.components.messages import RouteRequest, parse_route_request
from dynamo_local.core.routing.choice import RouterSettings, Sample
from dynamo_local.core.routing.kv_index import KvIndex
from dynamo_local.core.types import Load
from dynamo_local.errors import InvalidRequest, NoWorkers, WorkerDraining
from dynamo_local.kv_hashes import block_hashes
from tests.fakes.data_plane.endpoints import FakeEndpointClient

PROMPT = list(range(64))


async def nothing(payload: Any, _context: Any) -> AsyncIterator[Any]:
    """Workers are only counted here."""
    yield {}


def idle(ids: Sequence[int]) -> Mapping[int, Sample]:
    return {worker: Sample(Load(kv_total_blocks=1000), 0.0) for worker in ids}


class Routes:
    """A RouteDecisions over four idle workers with blocks of 16 tokens."""

    def __init__(self, router: str = "kv", workers: Sequence[int] = (1, 2, 3, 4)) -> None:
        self.index = KvIndex()
        self.settings = RouterSettings(router)  # type: ignore[arg-type]
        self.sizes = dict.fromkeys(workers, 16)
        self.maker = RouteDecisions(
            FakeEndpointClient(dict.fromkeys(workers, nothing)),
            idle,
            self.index,
            lambda: self.sizes,
            lambda: self.settings,
            seed=1,
        )


async def test_a_prompt_goes_to_its_holder_with_the_hit_rate() -> None:
    routes = Routes()
    routes.index.stored(3, block_hashes(PROMPT, 16)[:3])

    answer = routes.maker.route(RouteRequest(PROMPT))

    assert (answer.worker_id, answer.prefix_hit_rate, answer.router) == (3, 0.75, "kv")


async def test_another_adapters_blocks_are_no_hit() -> None:
    routes = Routes(workers=(3,))
    routes.index.stored(3, block_hashes(PROMPT, 16))

    assert routes.maker.route(RouteRequest(PROMPT, lora_id=1)).prefix_hit_rate == 0.0
    assert routes.maker.route(RouteRequest(PROMPT)).prefix_hit_rate == 1.0


async def test_a_worker_to_avoid_is_not_chosen_however_much_it_holds() -> None:
    routes = Routes()
    routes.index.stored(3, block_hashes(PROMPT, 16))

    assert routes.maker.route(RouteRequest(PROMPT, avoid=[3])).worker_id != 3
    with pytest.raises(NoWorkers):
        routes.maker.route(RouteRequest(PROMPT, avoid=[1, 2, 3, 4]))


async def test_an_index_error_means_empty_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    routes = Routes()
    monkeypatch.setattr(routes.index, "find_matches", lambda *_: 1 / 0)

    answer = routes.maker.route(RouteRequest(PROMPT))

    assert answer.worker_id in (1, 2, 3, 4)
    assert (answer.prefix_hit_rate, routes.maker.index_errors) == (0.0, 1)


@pytest.mark.parametrize("router", ["kv", "kv-load", "round-robin", "least-loaded"])
async def test_a_burst_of_32_over_4_idle_workers_spreads(router: str) -> None:
    routes = Routes(router)
    chosen = Counter(routes.maker.route(RouteRequest([n, *PROMPT])).worker_id for n in range(32))

    assert chosen == dict.fromkeys((1, 2, 3, 4), 8)


async def test_the_policy_of_now_is_used_and_every_policy_tells_the_hit_rate() -> None:
    routes = Routes("round-robin")
    for worker in (1, 2, 3, 4):
        routes.index.stored(worker, block_hashes(PROMPT, 16)[:2])

    answers = [routes.maker.route(RouteRequest(PROMPT)) for _ in range(4)]
    routes.settings = RouterSettings("random")
    answers.append(routes.maker.route(RouteRequest(PROMPT)))

    assert [answer.worker_id for answer in answers[:4]] == [1, 2, 3, 4]
    assert {answer.prefix_hit_rate for answer in answers} == {0.5}
    assert answers[-1].router == "random"


async def test_workers_of_different_block_sizes_are_each_matched_by_their_own() -> None:
    routes = Routes()
    routes.sizes[2] = 32
    routes.index.stored(1, block_hashes(PROMPT, 16)[:1])
    routes.index.stored(2, block_hashes(PROMPT, 32)[:1])

    answer = routes.maker.route(RouteRequest(PROMPT))

    assert (answer.worker_id, answer.prefix_hit_rate) == (2, 0.5)


def test_what_was_routed_is_forgotten_after_a_while() -> None:

    async def main() -> None:
        routes = Routes()
        for n in range(100):
            routes.maker.route(RouteRequest([n]))
            await asyncio.sleep(1.0)
        assert routes.maker.num_remembered <= route_decisions.FORGET_S + 2

    run_virtual(main())


def test_a_route_request_that_cannot_be_read_names_the_field() -> None:
    with pytest.raises(InvalidRequest, match="token_ids"):
        parse_route_request({"token_ids": "text"})


# --- the Processor's side --------------------------------------------------------------------------


async def says_5(payload: Any, _context: Any) -> dict[str, Any]:
    """A Router's answer."""
    return {"worker_id": 5, "prefix_hit_rate": 0.25, "router": "kv"}


async def says_nothing(payload: Any, _context: Any) -> dict[str, Any]:
    """A Router that hangs."""
    await asyncio.Event().wait()
    return {}


async def says_nonsense(payload: Any, _context: Any) -> dict[str, Any]:
    """A Router of another release."""
    return {"worker": "five"}


async def test_the_routers_answer_is_taken_and_it_knows_whom_to_avoid() -> None:
    client = FakeEndpointClient({1: says_5})

    assert await RouterClient(client, 0.5).choose([1, 2], "r", 9, (7,)) == Routed(5, 0.25)
    assert parse_route_request(client.calls[0].payload) == RouteRequest([1, 2], "r", 9, [7])


@pytest.mark.parametrize("handlers", [{}, {1: says_nonsense}])
async def test_without_a_router_that_can_be_understood_the_answer_is_none(handlers: dict[int, Any]) -> None:
    assert await RouterClient(FakeEndpointClient(handlers), 0.5).choose([1], "r", 9, ()) is None


async def test_a_router_that_refuses_is_no_error() -> None:
    client = FakeEndpointClient({1: says_5})
    client.refuse(1, WorkerDraining("leaving"))

    assert await RouterClient(client, 0.5).choose([1], "r", 9, ()) is None


def test_a_router_that_hangs_costs_one_wait_and_is_asked_again_later() -> None:

    async def main() -> None:
        client = FakeEndpointClient({1: says_nothing})
        clock = AsyncioClock()
        link = RouterClient(client, 0.5, clock)
        assert await link.choose([1], "r", 9, ()) is None
        assert clock.now_s() == pytest.approx(0.5)
        for _ in range(10):
            assert await link.choose([1], "r", 9, ()) is None
        assert (clock.now_s(), len(client.calls)) == (pytest.approx(0.5), 1)

        client.remove_instance(1)
        client.add_instance(2, says_5)
        await asyncio.sleep(router_client.AWAY_S)
        assert await link.choose([1], "r", 9, ()) == Routed(5, 0.25)
        await client.close()

    run_virtual(main())
