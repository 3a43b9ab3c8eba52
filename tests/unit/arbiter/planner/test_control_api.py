"""`/v1/min-endpoints`: the floors and budgets of now, and changes that are done whole or not at all."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any, cast

import httpx
import pytest

from dynamo_local.arbiter import planner_control_api as control_api
from dynamo_local.arbiter.planner_control_api import ControlApi
from dynamo_local.config.planner import PlannerConfig
from dynamo_local.config.planner_section import planner_section
from dynamo_local.core.types import GraphSpec, Resources, Role, ServiceSpec
from dynamo_local.errors import DynamoError
from tests.fakes.planner.planned_arbiter import GRAPH, Arbiter

AGGREGATED = GraphSpec(
    "dynamo", "agg:Frontend", (ServiceSpec("VllmWorker", Role.AGGREGATED, resources=Resources(gpu=2)),)
)
OWN: dict[str, Any] = {"policy": "throughput-load", "max_gpu_budget": 6, "min_endpoint": 1, "decode_min_endpoint": 2}
STATE = {
    "mode": "disagg",
    "prefill_min_endpoint": 1,
    "decode_min_endpoint": 2,
    "min_gpu_budget": -1,
    "max_gpu_budget": 6,
}


class Api:
    """The API of a planner that is stopped, asked as over HTTP."""

    def __init__(self, folder: Path, graph: GraphSpec = GRAPH, **options: Any) -> None:
        self.arbiter = Arbiter(folder)
        self.planning = self.arbiter.made(planner_section("Planner", options))
        self.planning.reconfigure(graph)
        self.unready: str | None = None
        nobody: Any = None
        self.api = ControlApi(self.planning, folder / "planner.sock", ready=self._ready, api_key=None, tasks=nobody)

    def _ready(self) -> None:
        if self.unready is not None:
            raise DynamoError(self.unready)

    @property
    def options(self) -> PlannerConfig:
        return self.planning.options

    async def ask(self, method: str, body: bytes | None = None, path: str = "/v1/min-endpoints") -> tuple[int, Any]:
        """Status and body."""
        transport = httpx.ASGITransport(app=self.api)
        async with httpx.AsyncClient(transport=transport, base_url="http://arbiter") as http:
            answer = await http.request(method, path, content=body)
        return answer.status_code, answer.json()

    async def patch(self, **values: Any) -> tuple[int, Any]:
        """Change these."""
        return await self.ask("PATCH", json.dumps(values).encode())


@pytest.mark.parametrize(
    ("graph", "options", "state"),
    [
        (GRAPH, OWN, STATE),
        (
            GRAPH,
            {**OWN, "mode": "decode"},
            {"mode": "decode", "decode_min_endpoint": 2, "min_gpu_budget": -1, "max_gpu_budget": 6},
        ),
        (
            AGGREGATED,
            {"policy": "throughput-load"},
            {"mode": "agg", "min_endpoint": 1, "min_gpu_budget": -1, "max_gpu_budget": 8},
        ),
        (
            GRAPH,
            {"policy": "sla", "min_endpoint": 2},
            {"mode": "disagg", "min_endpoint": 2, "min_gpu_budget": 1, "max_gpu_budget": 8},
        ),
        (GRAPH, {}, {"mode": "disagg", "min_gpu_budget": 1, "max_gpu_budget": 8}),
    ],
    ids=["disaggregated", "one role", "aggregated", "sla", "load"],
)
async def test_the_state_has_the_floors_that_count(tmp_path: Path, graph: GraphSpec, options: Any, state: Any) -> None:
    assert await Api(tmp_path, graph, **options).ask("GET") == (200, state)


async def test_a_change_is_answered_with_the_new_state_and_kept(tmp_path: Path) -> None:
    api = Api(tmp_path, **OWN)
    assert await api.patch(prefill_min_endpoint=2, max_gpu_budget=7) == (
        200,
        {**STATE, "prefill_min_endpoint": 2, "max_gpu_budget": 7},
    )
    kept = api.arbiter.statefile.head.planner
    assert kept is not None
    assert (kept.options["prefill_min_endpoint"], kept.options["max_gpu_budget"]) == (2, 7)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "no JSON"),
        (b"{", "no JSON"),
        (b"[" * 10_000, "no JSON"),
        (b"[]", "an object with any of"),
        (b"{}", "an object with any of"),
        (b'{"floor": 1}', "there is no 'floor'"),
        (b'{"max_gpu_budget": 7, "min_endpoints": 1}', "there is no 'min_endpoints'"),
    ],
)
async def test_what_is_no_request_is_a_400(tmp_path: Path, body: bytes, said: str) -> None:
    api = Api(tmp_path, **OWN)
    status, answer = await api.ask("PATCH", body)
    assert status == 400
    assert said in answer["error"]
    assert api.options.max_gpu_budget == 6


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"max_gpu_budget": "7"}, "whole number"),
        ({"max_gpu_budget": None}, "whole number"),
        ({"max_gpu_budget": True}, "whole number"),
        ({"max_gpu_budget": 7.5}, "whole number"),
        ({"max_gpu_budget": -2}, "max_gpu_budget"),
        ({"min_gpu_budget": 7}, "must not exceed max_gpu_budget"),
        ({"min_endpoint": 1}, "no effect"),
        ({"decode_min_endpoint": 0}, "decode_min_endpoint"),
        ({"max_gpu_budget": 7, "decode_min_endpoint": 9}, "need 10 GPUs"),
    ],
)
async def test_what_cannot_be_is_a_422_and_nothing_is_changed(tmp_path: Path, values: Any, said: str) -> None:
    api = Api(tmp_path, **OWN)
    status, answer = await api.patch(**values)
    assert status == 422
    assert said in answer["error"]
    assert await api.ask("GET") == (200, STATE)


async def test_a_graph_that_is_not_ready_is_a_503(tmp_path: Path) -> None:
    api = Api(tmp_path, **OWN)
    api.unready = "the graph is leaving"
    assert await api.ask("GET") == (503, {"error": "the graph is leaving"})
    assert await api.patch(max_gpu_budget=7) == (503, {"error": "the graph is leaving"})


async def test_a_change_that_cannot_begin_is_a_503_and_is_not_done_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_api, "DEADLINE_S", 0.05)
    api, hangs = Api(tmp_path, **OWN), asyncio.Event()
    prepared = api.planning.prepared

    async def never(options: PlannerConfig) -> Any:
        await hangs.wait()
        return await prepared(options)

    api.planning.prepared = never  # type: ignore[method-assign]
    status, answer = await api.patch(max_gpu_budget=7)
    assert (status, api.options.max_gpu_budget) == (503, 6)
    assert "nothing is changed" in answer["error"]
    hangs.set()
    assert (await api.patch(max_gpu_budget=7))[0] == 200


async def test_there_is_one_path_with_two_methods_and_a_small_body(tmp_path: Path) -> None:
    api = Api(tmp_path, **OWN)
    assert (await api.ask("GET", path="/metrics"))[0] == 404
    assert (await api.ask("POST", b"{}"))[0] == 405
    assert (await api.ask("PATCH", b" " * 20_000 + b"{}"))[0] == 413


async def test_the_socket_is_this_user_s_and_goes_with_the_server(tmp_path: Path) -> None:
    api = Api(tmp_path, **OWN)
    await api.api.start()
    socket = tmp_path / "planner.sock"
    assert socket.stat().st_mode & 0o777 == 0o600
    async with httpx.AsyncClient(transport=httpx.AsyncHTTPTransport(uds=str(socket))) as http:
        assert (await http.get("http://arbiter/v1/min-endpoints")).json() == STATE
    await api.api.stop()
    assert not socket.exists()


async def test_a_request_shows_a_key_where_there_are_some(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLANNER_KEYS", "a-key-that-is-long-enough-to-be-one")
    api, nobody, socket = Api(tmp_path, **OWN), cast(Any, None), tmp_path / "planner.sock"
    served = ControlApi(api.planning, socket, ready=lambda: None, api_key="env:PLANNER_KEYS", tasks=nobody)
    await served.start()
    async with httpx.AsyncClient(transport=httpx.AsyncHTTPTransport(uds=str(socket))) as http:
        url = "http://arbiter/v1/min-endpoints"
        assert (await http.patch(url, json={"max_gpu_budget": 7})).status_code == 401
        headers = {"Authorization": "Bearer a-key-that-is-long-enough-to-be-one"}
        assert (await http.get(url, headers=headers)).json() == STATE
    await served.stop()
