"""A real graph that is scaled: `/metrics`, `dynamo status` and `dynamo top` agree."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from dynamo_local.planner.records.decision_log import decision_log_path, read
from tests.drivers.scaled import ascale, names, settled
from tests.drivers.served import Served, auntil
from tests.tools.event_files import named, read_points
from tests.tools.scraped import Samples, by_label, samples

pytestmark = [pytest.mark.infra, pytest.mark.timeout(240)]

WORKERS, GPUS = "dynamo_arbiter_workers", "dynamo_arbiter_gpus"


@pytest.fixture(scope="module")
def graph() -> Iterator[Served]:
    """One prefill and one decode worker on eight simulated GPUs."""
    with Served() as served:
        yield served.start()


async def _scrape(http: httpx.AsyncClient, url: str) -> Samples:
    page = await http.get(url)
    assert page.status_code == 200
    return samples(page.text)


def test_top_shows_each_gpu_with_its_worker(graph: Served) -> None:
    done = graph.ok("top", "--once", "--namespace", graph.namespace)
    rows = [line.split() for line in done.splitlines()]
    held = {row[0]: row[1:3] for row in rows if row and row[0].isdigit()}
    assert held["0"] == ["VllmWorker", "ready"]
    assert held["1"] == ["PrefillWorker", "ready"]
    assert [held[str(index)] for index in range(2, 8)] == [["free"]] * 6
    told = json.loads(graph.cli("top", "--json", "--namespace", graph.namespace).stdout)
    assert [gpu["worker_state"] for gpu in told["gpus"]] == ["ready", "ready", *[None] * 6]


async def _planned(graph: Served, folder: Path, *words: str) -> list[dict[str, Any]]:
    """Let the planner run until it has decided to take a decode worker; the decisions of that time, as logged."""
    log = decision_log_path(graph.paths.logs)
    before = len(read(log))
    interval = ("--adjustment-interval", "1", "--metric-pulling-interval", "0.25")
    graph.ok("planner", "start", "--log-dir", str(folder), *interval, *words)
    assert graph.status()["planner"]["tensorboard"] == str(folder)

    def stepped() -> bool:
        return any(reason["step"] for record in read(log)[before:] for reason in record["decision"]["reasons"])

    await auntil(stepped, 60.0, what=lambda: graph.status()["planner"])
    assert graph.cli("planner", "stop").returncode == 0
    return [dict(record) for record in read(log)[before:]]


def _steps(decisions: list[dict[str, Any]], component: str) -> list[float]:
    reasons = [reason for record in decisions for reason in record["decision"]["reasons"]]
    return [reason["step"] for reason in reasons if reason["component"] == component]


@pytest.mark.full
async def test_a_planner_s_actions_are_the_same_in_its_log_in_tensorboard_and_in_metrics(graph: Served) -> None:
    await ascale(graph, "VllmWorker", "=2")
    await settled(graph)
    watched, acted = graph.folder / "tb-watched", graph.folder / "tb-acted"
    decisions = [await _planned(graph, watched, "--no-operation")]
    assert names(graph, "VllmWorker") == ["VllmWorker", "VllmWorker_1"]
    assert graph.cli("planner", "set", "no-operation=false").returncode == 0
    decisions.append(await _planned(graph, acted))
    await auntil(lambda: names(graph, "VllmWorker") == ["VllmWorker"], what=graph.states)
    for folder, made in zip((watched, acted), decisions, strict=True):
        points = read_points(folder)
        for scalar, component in (("decode", "VllmWorker"), ("prefill", "PrefillWorker")):
            actions = [value for _, value in named(points, f"{scalar}_scaling_action")]
            assert actions == _steps(made, component)
        assert -1.0 in [value for _, value in named(points, "decode_scaling_action")]
        assert {value for _, value in named(points, "num_prefill_workers")} == {1.0}
        steps = [point.step for point in points]
        assert steps == sorted(steps)
        assert steps[0] == 0
    records = [record for made in decisions for record in made]
    reasons = [reason for record in records for reason in record["decision"]["reasons"]]
    rules = Counter((reason["component"], reason["rule"]) for reason in reasons)
    outcomes = Counter(step["outcome"] for record in records for step in record["outcomes"].values())
    async with httpx.AsyncClient() as http:
        found = await _scrape(http, graph.status()["metrics_url"])
    assert by_label(found, "dynamo_planner_decisions_total") == dict(rules)
    actions = by_label(found, "dynamo_planner_scale_actions_total")
    assert {labels[2]: count for labels, count in actions.items()} == dict(outcomes)
    assert by_label(found, "dynamo_planner_state") == {("stopped",): 1.0}
    assert found["dynamo_planner_ticks_total", ()] == graph.status()["planner"]["pulls"]
    last = graph.status()["planner"]["last_decision"]["stimulus_id"]
    assert f"{last} at " in graph.cli("top", "--once").stdout
