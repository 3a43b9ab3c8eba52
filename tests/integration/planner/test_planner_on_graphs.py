"""A planner on real graphs: adoption, diagnostics, aggregated graphs, plugins, and the replay of its log."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from dynamo_local.arbiter.planner_report import reports_folder
from dynamo_local.errors import EXIT_BAD_INPUT
from tests.drivers.planned import DECODE, PREFILL, audited, capacity, decided, open_loop, planner, steady
from tests.drivers.plugin_processes import EXAMPLE, process, ready
from tests.drivers.served import AGG, Served, auntil, stream_chat
from tests.tools.alone import alone
from tests.tools.scraped import Samples, by_label, samples

pytestmark = [pytest.mark.infra, pytest.mark.timeout(240)]


@pytest.mark.full
def test_the_planner_of_an_adopted_run_goes_on_as_it_was() -> None:
    with alone("--on-arbiter-death", "keep").started() as served:
        assert planner(served, "status")["state"] == "stopped"
        planner(served, "start", options={"max_gpu_budget": 6})
        planner(served, "set", options={"adjustment_interval": 7})
        planner(served, "pause")
        served.kill_arbiter()
        served.adopt()
        status = planner(served, "status")
        assert status["state"] == "paused"
        assert (status["options"]["max_gpu_budget"], status["options"]["adjustment_interval"]) == (6, 7.0)
        planner(served, "resume")
        assert served.statefile()["planner"]["state"] == "running"
        served.kill_arbiter()
        served.adopt()
        assert planner(served, "status")["state"] == "running"
        served.kill_arbiter()
        served.adopt("--no-planner")
        assert planner(served, "status")["state"] == "stopped"
        assert served.statefile()["planner"]["state"] == "stopped"


def test_a_planner_for_a_graph_without_a_decode_worker_is_refused_before_anything_starts() -> None:
    with alone("--planner", name="Alone") as served:
        done = served.cli(*served.serve_words("--detach"))
    assert done.returncode == EXIT_BAD_INPUT
    assert "Planner: it scales a graph with one decode (or aggregated) component; it has none" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


DIAGNOSED = (
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
    with Served(*DIAGNOSED).started() as served:
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
        done = served.ok("planner", "report", "-o", str(served.folder / "now.html"), "--json")
        assert json.loads(done)["decisions"] >= 3
        logs = served.paths.logs
        socket_file = served.paths.planner_socket
        assert served.cli("down").returncode == 0
        assert not socket_file.exists()
        (report,) = reports_folder(logs).iterdir()
        assert "policy</th><td>throughput-load" in report.read_text()
        served.ok("planner", "report", "-o", str(served.folder / "then.html"))


BUDGET = 3
AGGREGATED = (
    "--VllmWorker.sim.speed=0.1",
    "--VllmWorker.sim.num-gpu-blocks=30",
    "--Planner.adjustment-interval=1.5",
    "--Planner.metric-pulling-interval=0.25",
    f"--Planner.max-gpu-budget={BUDGET}",
    "--Planner.decode-kv-scale-up-threshold=0.5",
    "--Planner.decode-kv-scale-down-threshold=0.2",
)


@pytest.mark.full
async def test_an_aggregated_graph_grows_and_shrinks_with_its_load() -> None:
    load = steady(rate=2, seconds=12, prompt_words=8, tokens=100)
    with Served(*AGGREGATED, target=AGG).started() as served:
        async with audited(served) as audit:
            answers = await open_loop(served, load)
            await auntil(lambda: capacity(served)[DECODE] == 1 and len(served.pids()) == 2, 60.0, what=served.states)
        assert answers.wrong == []
        assert answers.right == len(load)
        assert audit.most[DECODE] >= 2
        assert audit.most[PREFILL] == 0
        assert audit.held_max <= BUDGET
        assert {component for _, component, _ in audit.steps()} == {DECODE}


PLUGINS = (
    "--planner",
    "--Planner.scheduling.gateway.enabled=true",
    "--Planner.adjustment-interval=1.5",
    "--Planner.metric-pulling-interval=0.25",
    "--Planner.min-gpu-budget=1",
)


def plugins(served: Served) -> dict[str, Any]:
    """`dynamo planner plugins --json`."""
    done = served.ok("planner", "plugins", "--json")
    found: dict[str, Any] = json.loads(done)
    return found


@pytest.mark.full
async def test_a_plugin_has_a_say_while_it_is_there() -> None:
    with Served(*PLUGINS).started() as served:
        gateway = plugins(served)["gateway"]
        words = ("--listen", f"unix://{served.folder}/p.sock", "--gateway", gateway, "--first", "0", "--last", "24")
        async with process(str(EXAMPLE), *words, "--workers", "3") as plugin:
            await ready(plugin)
            await auntil(lambda: capacity(served)[DECODE] == 3, 60.0, what=served.states)
            (row,) = plugins(served)["plugins"]
            assert (row["plugin_id"], row["circuit_state"], row["trouble"]) == ("office-hours", "CLOSED", None)
            assert "office-hours" in served.cli("planner", "plugins").stdout
            rules = {reason["rule"] for record in decided(served) for reason in record["decision"]["reasons"]}
            assert "overridden" in rules
            plugin.terminate()
            assert await asyncio.wait_for(plugin.wait(), 30.0) == 0
        assert plugins(served)["plugins"] == []
        await auntil(lambda: capacity(served)[DECODE] == 1, 60.0, what=served.states)


POLICIES = {
    "load": ("--Planner.policy=load", "--Planner.adjustment-interval=2"),
    "sla": (
        "--Planner.policy=sla",
        "--Planner.profile-results-dir=dynamo_H200_TP1P_TP1D",
        "--Planner.throughput-adjustment-interval=2",
    ),
    "throughput-load": (
        "--Planner.policy=throughput-load",
        "--Planner.optimization-target=sla",
        "--Planner.enable-load-scaling=true",
        "--Planner.profile-results-dir=dynamo_H200_TP1P_TP1D",
        "--Planner.throughput-adjustment-interval=4",
        "--Planner.load-adjustment-interval=2",
    ),
}
LIBRARIES = ("statsforecast", "prophet", "scipy", "sklearn", "pandas", "statsmodels", "numba")
"""With code of their own in each, which shows in the process's memory. (grpc is the etcd client's, so always there.)"""


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.full
async def test_a_log_of_a_real_arbiter_decides_the_same(policy: str) -> None:
    words = ("--planner", "--Planner.metric-pulling-interval=0.5", *POLICIES[policy])
    with Served(*words).started() as served:
        async with served.client() as client:
            await asyncio.gather(*(stream_chat(client, f"Tell me of {n}.", 40) for n in range(8)))
        planner(served, "set", options={"max-gpu-budget": 6})
        await auntil(lambda: planner(served, "status")["decisions"] >= 4, 60.0)
        if policy == "load":
            assert mapped(served.status()["arbiter_pid"]) == set()
        served.down()
        told: dict[str, Any] = json.loads(served.cli("planner", "replay", "--json").stdout)
    assert told["decisions"] >= 4
    assert (told["differ"], told["whole"], told["policies"]) == (0, True, [policy]), told


def mapped(pid: int) -> set[str]:
    """Those of the `LIBRARIES` whose code the process has loaded."""
    maps = Path(f"/proc/{pid}/maps").read_text()
    return {name for name in LIBRARIES if f"site-packages/{name}/" in maps}
