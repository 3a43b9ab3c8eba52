"""The arbiter asks its workers for the planner's observations: requests, passes and benchmarks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from dynamo_local.arbiter.planner_observation import ObservationSources
from dynamo_local.clock import AsyncioClock, run_virtual
from dynamo_local.config.planner import PlannerConfig
from dynamo_local.core.fleet.fleet import Fleet, Registration, Worker
from dynamo_local.core.passes import EngineId
from dynamo_local.core.traffic import RecentRequests
from dynamo_local.core.types import GraphSpec, Missing, Role, ServiceSpec, WorkerState
from dynamo_local.planner.sources import SCRAPE_EVERY_S, STALE_AFTER_S
from dynamo_local.planner.values import Capabilities, Requests, Traffic
from dynamo_local.transport.observation import ObservationServer
from dynamo_local.transport.passes import PassRecorder
from tests.fakes.arbiter.told import Told
from tests.fakes.data_plane.passes import passed
from tests.fakes.infra.memory_nats import MemoryNats

LOAD, THROUGHPUT = PlannerConfig(), PlannerConfig(policy="throughput-load")
ROLES = {"Frontend": Role.FRONTEND, "Processor": Role.OTHER, "Decode": Role.DECODE, "Prefill": Role.PREFILL}
GRAPH = GraphSpec("dynamo", "disagg.yaml", tuple(ServiceSpec(name, role) for name, role in ROLES.items()))


class Graph:
    """Workers that answer, and the arbiter's view of them. Worker ids are 0x1, 0x2, … in the order of their coming."""

    def __init__(self, graph: GraphSpec = GRAPH) -> None:
        self.nats = MemoryNats()
        self.fleet = Fleet("dynamo", ())
        self.asked = 0
        self.clients: dict[str, Any] = {}
        links: Any = SimpleNamespace(nats=self.nats.client())
        controller: Any = self
        self.observing = ObservationSources(lambda: graph, controller, links, AsyncioClock(), self._background, Told())

    async def add(self, name: str, state: WorkerState = WorkerState.READY, **tells: Any) -> Any:
        """One more worker; the connection by which it answers."""
        component, _, n = name.partition("_")
        lease = f"{len(self.fleet.workers) + 1:x}"
        worker = Worker(name, component, ROLES[component], int(n or 0), state, registration=Registration(lease))
        self.fleet = Fleet("dynamo", (), {**self.fleet.workers, name: worker})
        client = self.clients[name] = self.nats.client()
        server = ObservationServer(client, "dynamo", name, component, lambda: str(int(lease, 16)), **tells)
        await server.start()
        return client

    def changed(self, name: str, **fields: Any) -> None:
        """That worker, with other values."""
        worker = self.fleet.workers[name].changed(**fields)
        self.fleet = Fleet("dynamo", (), {**self.fleet.workers, name: worker})

    def counting(self, **counters: float) -> tuple[dict[str, float], Callable[[], Any]]:
        """Counters that a test may change, and how they are told."""

        async def told() -> Mapping[str, float]:
            self.asked += 1
            return counters

        return counters, told

    def _background(self, work: Coroutine[Any, Any, None]) -> None:
        self.working = asyncio.ensure_future(work)


def virtually(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    run_virtual(scenario())


def test_requests_are_counted_while_a_policy_goes_by_them() -> None:
    async def scenario() -> None:
        graph = Graph()
        counters, told = graph.counting(requests=10.0)
        await graph.add("Frontend", counters=told)
        graph.observing.follow(THROUGHPUT)
        await asyncio.sleep(60.0)
        counters["requests"] = 25.0
        traffic = await graph.observing.traffic(30.0)
        assert isinstance(traffic, Traffic)
        assert traffic.num_req == 15.0
        assert traffic.duration_s == pytest.approx(30.0, abs=SCRAPE_EVERY_S)
        graph.observing.close()
        asked = graph.asked
        await asyncio.sleep(60.0)
        assert graph.asked == asked

    virtually(scenario)


def test_nobody_is_asked_for_a_policy_that_does_not_want_it() -> None:
    async def scenario() -> None:
        graph = Graph()
        _, told = graph.counting(requests=10.0)
        await graph.add("Frontend", counters=told)
        graph.observing.follow(LOAD)
        await asyncio.sleep(60.0)
        assert graph.asked == 0
        graph.observing.follow(THROUGHPUT)
        await asyncio.sleep(12.0)
        assert graph.asked == 3
        graph.observing.close()

    virtually(scenario)


def test_a_frontend_that_does_not_answer_is_a_hole_not_a_zero() -> None:
    async def scenario() -> None:
        graph = Graph()
        counters, told = graph.counting(requests=10.0)
        client = await graph.add("Frontend", counters=told)
        graph.observing.follow(THROUGHPUT)
        await asyncio.sleep(60.0)
        client.go.clear()
        counters["requests"] = 1000.0
        await asyncio.sleep(30.0)
        missing = await graph.observing.traffic(30.0)
        assert isinstance(missing, Missing)
        assert "Frontend did not tell" in missing.reason
        client.go.set()
        traffic = await graph.observing.traffic(60.0)
        assert isinstance(traffic, Traffic)
        assert traffic.num_req == 990.0
        graph.observing.close()

    virtually(scenario)


def test_the_requests_of_a_frontend_that_drains_count() -> None:
    async def scenario() -> None:
        graph = Graph()
        counters, told = graph.counting(requests=0.0)
        await graph.add("Frontend", counters=told)
        leaving, also = graph.counting(requests=0.0)
        await graph.add("Frontend_1", WorkerState.DRAINING, counters=also)
        graph.observing.follow(THROUGHPUT)
        await asyncio.sleep(60.0)
        counters["requests"], leaving["requests"] = 3.0, 4.0
        traffic = await graph.observing.traffic(30.0)
        assert isinstance(traffic, Traffic)
        assert traffic.num_req == 7.0
        graph.observing.close()

    virtually(scenario)


def test_hits_are_those_of_the_engines_that_prefill() -> None:
    async def scenario() -> None:
        graph = Graph()
        _, told = graph.counting(requests=0.0)
        prefill, of_prefill = graph.counting(prefix_queries=0.0, prefix_hits=0.0)
        decode, of_decode = graph.counting(prefix_queries=0.0, prefix_hits=0.0)
        await graph.add("Frontend", counters=told)
        await graph.add("Prefill", counters=of_prefill)
        await graph.add("Decode", counters=of_decode)
        graph.observing.follow(THROUGHPUT)
        await asyncio.sleep(60.0)
        prefill.update(prefix_queries=1000.0, prefix_hits=250.0)
        decode.update(prefix_queries=1000.0, prefix_hits=1000.0)
        traffic = await graph.observing.traffic(30.0)
        assert isinstance(traffic, Traffic)
        assert (traffic.kv_hit_rate, traffic.accept_length) == (0.25, 1.0)
        graph.observing.close()

    virtually(scenario)


def test_each_ready_engine_is_seen_and_one_that_stops_is_missing() -> None:
    async def scenario() -> None:
        graph = Graph()
        await graph.add("Frontend", counters=graph.counting()[1])
        recorders = {name: PassRecorder() for name in ("Decode", "Decode_1", "Prefill")}
        for name, recorder in recorders.items():
            recorder.record(passed(1, asyncio.get_running_loop().time()))
            limits = {"max_num_seqs": 16, "max_kv_tokens": 1000}
            await graph.add(name, passes=recorder, limits=lambda limits=limits: limits)
        found = await graph.observing.passes()
        assert {engine: seen.component for engine, seen in found.items()} == {
            EngineId("2"): "Decode",
            EngineId("3"): "Decode",
            EngineId("4"): "Prefill",
        }
        assert all(len(seen.passes) == 1 for seen in found.values())
        assert graph.observing.capabilities()["Decode"] == Capabilities(max_num_seqs=16, max_kv_tokens=1000)
        graph.clients["Decode_1"].go.clear()
        await asyncio.sleep(STALE_AFTER_S)
        for recorder in recorders.values():
            recorder.record(passed(2, asyncio.get_running_loop().time()))
        found = await graph.observing.passes()
        assert [engine.worker_id for engine, seen in found.items() if isinstance(seen.last, Missing)] == ["3"]
        assert [one.counter_id for one in found[EngineId("2")].passes] == [2]

    virtually(scenario)


def test_one_worker_of_each_configuration_is_asked_for_its_benchmark() -> None:
    async def scenario() -> None:
        graph, asked = Graph(), []
        answers: dict[str, Any] = {"Decode": None, "Decode_1": (passed(1),), "Decode_2": (passed(2), passed(3))}

        def telling(name: str) -> Callable[[], Any]:
            def told() -> Any:
                asked.append(name)
                return answers[name]

            return told

        async def known() -> Any:
            await graph.observing.passes()
            return graph.observing.capabilities()["Decode"].benchmark

        for name in ("Decode", "Decode_1"):
            await graph.add(name, benchmark=telling(name))
        graph.observing.follow(THROUGHPUT)  # it goes by tables, and has no models
        assert (await known(), asked) == (None, [])
        graph.observing.follow(PlannerConfig(policy="throughput-load", optimization_target="sla"))
        await asyncio.sleep(12.0)  # nobody has wanted passes yet: a first decision may be minutes away
        assert (await known(), set(asked)) == (None, {"Decode"})
        answers["Decode"] = Missing("it has none")
        assert await known() == Missing("it has none")
        asked.clear()
        await asyncio.sleep(12.0)
        assert (await known(), asked) == (Missing("it has none"), [])
        await graph.add("Decode_2", benchmark=telling("Decode_2"))
        graph.changed("Decode_2", launched="another configuration")
        await asyncio.sleep(12.0)
        assert [one.counter_id for one in await known()] == [2, 3]
        assert asked == ["Decode_2"]
        await graph.add("Prefill")
        await graph.observing.passes()
        assert graph.observing.capabilities()["Prefill"].benchmark == Missing("it does not measure itself")
        graph.observing.close()

    virtually(scenario)


def test_without_nats_everything_is_missing() -> None:
    async def scenario() -> None:
        graph = Graph()
        await graph.add("Frontend", counters=graph.counting()[1])
        await graph.add("Decode", passes=PassRecorder())
        graph.nats.up = False
        assert isinstance(await graph.observing.traffic(30.0), Missing)
        assert all(isinstance(seen.last, Missing) for seen in (await graph.observing.passes()).values())

    virtually(scenario)


def test_where_a_prometheus_server_is_named_the_frontends_are_not_asked() -> None:
    async def scenario() -> None:
        graph = Graph()
        _, told = graph.counting(requests=1.0)
        await graph.add("Frontend", counters=told)
        graph.observing.follow(
            PlannerConfig(policy="throughput-load", metric_pulling_prometheus_endpoint="http://127.0.0.1:9")
        )
        await asyncio.sleep(30.0)
        assert graph.asked == 0
        graph.observing.follow(THROUGHPUT)
        await asyncio.sleep(30.0)
        assert graph.asked > 0
        graph.observing.close()
        await asyncio.sleep(0.1)

    virtually(scenario)


def test_the_requests_of_all_frontends_come_one_by_one_and_none_if_one_is_silent() -> None:
    async def scenario() -> None:
        graph, clock = Graph(), AsyncioClock()
        await asyncio.sleep(100.0)
        now_s = clock.now_s()
        clients = []
        for name, lengths in (("Frontend", (100, 10)), ("Frontend_1", (2000, 30))):
            recent = RecentRequests()
            recent.began(now_s - 4.0)
            recent.began(now_s - 60.0)
            recent.answered(now_s - 1.0, *lengths, 0.5, 0.02)
            clients.append(await graph.add(name, requests=lambda s, of=recent: of.of(s, clock.now_s())))
        await graph.add("Decode")
        seen = await graph.observing.requests(5.0)
        assert isinstance(seen, Requests)
        assert (seen.since_s, seen.at_s) == pytest.approx((now_s - 5.0, now_s), abs=0.1)
        assert seen.began == pytest.approx((now_s - 4.0,) * 2, abs=0.1)
        assert sorted((each.isl, each.osl) for each in seen.ended) == [(100, 10), (2000, 30)]
        clients[1].go.clear()
        missing = await graph.observing.requests(5.0)
        assert isinstance(missing, Missing)
        assert "Frontend_1 told no single requests" in missing.reason

    virtually(scenario)
