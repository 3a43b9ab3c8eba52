"""What one sees of a planner on a real graph: gauges under Dynamo's names, the control API on its socket, the report
that is written when the graph goes."""

from __future__ import annotations

import json

import httpx
import pytest

from dynamo_local.arbiter.planner_report_schedule import reports_folder
from tests.drivers.planned import DECODE, PREFILL, decided, planner
from tests.drivers.served import Served, auntil
from tests.tools.scraped import Samples, by_label, samples

pytestmark = [pytest.mark.infra, pytest.mark.timeout(240)]

WORDS = (
    "--planner",
    "--Planner.policy=throughput-load",
    "--Planner.optimization-target=throughput",
    "--Planner.load-adjustment-interval-seconds=1",
    "--Planner.metric-pulling-interval=0.5",
    "--Planner.max-gpu-budget=4",
)
GAUGES = ("num_prefill_replicas", "num_decode_replicas", "predicted_num_decode_replicas", "gpu_hours")


async def _scraped(served: Served) -> Samples:
    async with httpx.AsyncClient() as http:
        page = await http.get(served.status()["metrics_url"])
    return samples(page.text)


@pytest.mark.full
async def test_gauges_the_control_api_and_the_report_of_the_end() -> None:
    with Served(*WORDS) as served:
        served.start()
        await auntil(lambda: len(decided(served)) >= 3, what=lambda: planner(served, "status"))
        found = await _scraped(served)
        assert found["dynamo_planner_num_decode_replicas", ()] == 1
        assert not [name for name in GAUGES if (f"dynamo_planner_{name}", ()) not in found]
        states = by_label(found, "dynamo_planner_load_scaling_decision")
        assert {component for component, _ in states} == {PREFILL, DECODE}
        assert not [name for name, _ in found if name.startswith("dynamo_planner_observed")]  # it asks for no traffic

        socket = httpx.AsyncHTTPTransport(uds=str(served.paths.planner_socket))
        async with httpx.AsyncClient(transport=socket, base_url="http://arbiter") as http:
            state = (await http.get("/v1/min-endpoints")).json()
            assert state == {
                "mode": "disagg",
                "prefill_min_endpoint": 1,
                "decode_min_endpoint": 1,
                "min_gpu_budget": -1,
                "max_gpu_budget": 4,
            }
            assert (await http.patch("/v1/min-endpoints", json={"decode_min_endpoint": 9})).status_code == 422
            changed = await http.patch("/v1/min-endpoints", json={"decode_min_endpoint": 2})
            assert (changed.status_code, changed.json()) == (200, {**state, "decode_min_endpoint": 2})
        assert planner(served, "status")["options"]["decode_min_endpoint"] == 2
        done = served.cli("planner", "report", "-o", str(served.folder / "now.html"), "--json")
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["decisions"] >= 3
        logs = served.paths.logs
        socket_file = served.paths.planner_socket
        assert served.cli("down").returncode == 0
        assert not socket_file.exists()
        (report,) = reports_folder(logs).iterdir()
        assert "policy</th><td>throughput-load" in report.read_text()
        done = served.cli("planner", "report", "-o", str(served.folder / "then.html"))
        assert done.returncode == 0, done.stderr  # nothing runs any more
