"""The Grafana dashboard of examples/grafana, against the metrics of a real graph and in a real Prometheus."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.drivers.prometheus import RealPrometheus, find_prometheus
from tests.drivers.served import Served, auntil

pytestmark = pytest.mark.infra

DASHBOARD = Path(__file__).parents[3] / "examples" / "grafana" / "dynamo.json"
METRIC = re.compile(r"\bdynamo_\w+")
PLANNED = ("--planner", "--Planner.ttft-ms=2000", "--Planner.itl-ms=100")
UNTIL_IT_HAPPENS = {
    "Drains per hour",
    "Restarts per hour",
    "Requests lost or saved per hour",
    "Steps per hour",
    "Health of the planner",
}
"""Panels of counters without a sample before the first of their kind."""


def queries() -> dict[str, list[str]]:
    """The queries of each panel, for all models, as Grafana sends them."""
    panels: list[dict[str, Any]] = json.loads(DASHBOARD.read_text())["panels"]
    return {
        panel["title"]: [
            target["expr"].replace("$__rate_interval", "1m").replace("$model", ".*") for target in panel["targets"]
        ]
        for panel in panels
        if panel["type"] != "row"
    }


@pytest.fixture(scope="module")
def graph() -> Iterator[Served]:
    with Served(*PLANNED, "--gpus", "sim:4") as served:
        yield served.start()


async def ask(served: Served) -> None:
    body = {"model": "sim-tiny", "prompt": "A prompt of some length. " * 40, "max_tokens": 8, "stream": True}
    async with httpx.AsyncClient(base_url=served.url, timeout=60.0) as http:
        (await http.post("/v1/completions", json=body)).raise_for_status()


def test_panels_have_places_and_numbers_of_their_own() -> None:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert len({(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels}) == len(panels)
    assert len(queries()) == 18, "each has a title of its own"


@pytest.mark.full
async def test_each_metric_is_one_that_a_graph_has(graph: Served) -> None:
    await ask(graph)

    def declared() -> set[str]:
        pages = [httpx.get(url).text for url in (f"{graph.url}/metrics", graph.status()["metrics_url"])]
        return set(METRIC.findall("\n".join(pages)))

    named = {name for exprs in queries().values() for expr in exprs for name in METRIC.findall(expr)}
    assert len(named) > 20
    await auntil(lambda: named <= declared(), what=lambda: named - declared())


@pytest.mark.full
async def test_prometheus_answers_each_query(graph: Served, tmp_path: Path) -> None:
    find_prometheus()
    targets = [
        url.removeprefix("http://").removesuffix("/metrics") for url in (graph.url, graph.status()["metrics_url"])
    ]
    server = RealPrometheus(tmp_path, *targets)
    server.start()
    try:
        async with httpx.AsyncClient(base_url=server.url) as http:

            async def results(expr: str) -> list[Any]:
                answer = (await http.get("/api/v1/query", params={"query": expr})).json()
                assert answer["status"] == "success", answer
                return list(answer["data"]["result"])

            for title, exprs in queries().items():
                while not any([await results(expr) for expr in exprs]) and title not in UNTIL_IT_HAPPENS:
                    await ask(graph)
    finally:
        server.stop()
