"""A planner and those who look on, joined as in the arbiter: what it decides is scraped, and reported when it stops."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from dynamo_local.arbiter.exporter import Exporter, Place
from dynamo_local.arbiter.links import Links
from dynamo_local.arbiter.planner_report_schedule import reports_folder
from dynamo_local.arbiter.planner_views import PlannerViews
from dynamo_local.arbiter.sampler import Sampling
from dynamo_local.arbiter.tasks import Tasks
from dynamo_local.clock import AsyncioClock
from tests.drivers.served import auntil
from tests.fakes.planner.planned_arbiter import QUICK, Arbiter
from tests.tools.scraped import Samples, by_label, samples


@pytest.mark.full
async def test_gauges_follow_it_and_its_end_writes_a_report(tmp_path: Path) -> None:
    arbiter, clock = Arbiter(tmp_path), AsyncioClock()
    await arbiter.statefile.create()
    tasks, socket = Tasks(clock, arbiter.told), tmp_path / "m.sock"
    exporter = Exporter(
        arbiter.controller,
        Sampling("dynamo", arbiter.controller, Links("dynamo", "01J"), clock),
        clock,
        components=("VllmWorker", "PrefillWorker"),
        state=lambda: "ready",
        tasks=tasks,
        place=Place(socket=socket),
    )
    views = PlannerViews(
        arbiter.planning,
        exporter.metrics.registry,
        gpu_hours=exporter.gpu_hours,
        base=tmp_path,
        logs=tmp_path,
        clock=clock,
        tell=arbiter.told,
    )
    await exporter.start()

    async def scraped() -> Samples:
        async with httpx.AsyncClient(transport=httpx.AsyncHTTPTransport(uds=str(socket))) as http:
            return samples((await http.get("http://arbiter/metrics")).text)

    assert ("dynamo_planner_num_decode_replicas", ()) not in await scraped()
    status = await arbiter.planning.start(QUICK)
    assert status["reports"] == str(reports_folder(tmp_path))
    await arbiter.decisions(2)
    found = await scraped()
    assert found["dynamo_planner_num_decode_replicas", ()] == 1
    assert found["dynamo_planner_predicted_num_decode_replicas", ()] == 1
    assert found["dynamo_planner_gpu_hours", ()] > 0
    assert {labels[0] for labels in by_label(found, "dynamo_planner_load_scaling_decision")} == {
        "VllmWorker",
        "PrefillWorker",
    }
    await arbiter.planning.stop()
    assert ("dynamo_planner_num_decode_replicas", ()) not in await scraped()
    await views.reports.close()
    await exporter.stop()
    await auntil(lambda: not arbiter.tasks, what=lambda: arbiter.tasks)
    (report,) = reports_folder(tmp_path).iterdir()
    assert "dynamo" in report.read_text()
    assert not [text for text in arbiter.told if "report" in text]
    await tasks.close()
