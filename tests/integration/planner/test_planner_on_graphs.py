"""Planners on real graphs: loads, adoption, diagnostics, metrics, plugins, replay, and servers that go away."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from dynamo_local.arbiter.planner_report_schedule import reports_folder
from dynamo_local.errors import EXIT_BAD_INPUT
from dynamo_local.planner.records.decision_log import decision_log_path, read
from dynamo_local.planner.records.figures import (
    DECODE_SCALING_ACTION,
    NUM_DECODE_WORKERS,
    NUM_GPU,
    NUM_PREFILL_WORKERS,
    PREFILL_SCALING_ACTION,
)
from tests.drivers.planned import (
    DECODE,
    PREFILL,
    audited,
    capacity,
    committed,
    decided,
    one_period,
    open_loop,
    planner,
    steady,
)
from tests.drivers.plugin_processes import EXAMPLE, process, ready
from tests.drivers.scaled import ascale, events, names, settled
from tests.drivers.served import AGG, Served, auntil, stream_chat
from tests.drivers.servers import RealEtcd, RealNats
from tests.tools.alone import alone
from tests.tools.event_files import named, read_points
from tests.tools.scraped import Samples, by_label, samples

pytestmark = [pytest.mark.infra, pytest.mark.timeout(400)]


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


WORKERS, GPUS = "dynamo_arbiter_workers", "dynamo_arbiter_gpus"


@pytest.fixture(scope="module")
def plain_graph() -> Iterator[Served]:
    with Served() as served:
        yield served.start()


def test_top_shows_each_gpu_with_its_worker(plain_graph: Served) -> None:
    done = plain_graph.ok("top", "--once", "--namespace", plain_graph.namespace)
    rows = [line.split() for line in done.splitlines()]
    held = {row[0]: row[1:3] for row in rows if row and row[0].isdigit()}
    assert held["0"] == ["VllmWorker", "ready"]
    assert held["1"] == ["PrefillWorker", "ready"]
    assert [held[str(index)] for index in range(2, 8)] == [["free"]] * 6
    told = json.loads(plain_graph.cli("top", "--json", "--namespace", plain_graph.namespace).stdout)
    assert [gpu["worker_state"] for gpu in told["gpus"]] == ["ready", "ready", *[None] * 6]


async def _planned(plain_graph: Served, folder: Path, *words: str) -> list[dict[str, Any]]:
    """Let the planner run until it has decided to take a decode worker; the decisions of that time, as logged."""
    log = decision_log_path(plain_graph.paths.logs)
    before = len(read(log))
    interval = ("--adjustment-interval", "1", "--metric-pulling-interval", "0.25")
    plain_graph.ok("planner", "start", "--log-dir", str(folder), *interval, *words)
    assert plain_graph.status()["planner"]["tensorboard"] == str(folder)

    def stepped() -> bool:
        return any(reason["step"] for record in read(log)[before:] for reason in record["decision"]["reasons"])

    await auntil(stepped, 60.0, what=lambda: plain_graph.status()["planner"])
    assert plain_graph.cli("planner", "stop").returncode == 0
    return [dict(record) for record in read(log)[before:]]


def _steps(decisions: list[dict[str, Any]], component: str) -> list[float]:
    reasons = [reason for record in decisions for reason in record["decision"]["reasons"]]
    return [reason["step"] for reason in reasons if reason["component"] == component]


@pytest.mark.full
async def test_a_planner_s_actions_are_the_same_in_its_log_in_tensorboard_and_in_metrics(plain_graph: Served) -> None:
    await ascale(plain_graph, "VllmWorker", "=2")
    await settled(plain_graph)
    watched, acted = plain_graph.folder / "tb-watched", plain_graph.folder / "tb-acted"
    decisions = [await _planned(plain_graph, watched, "--no-operation")]
    assert names(plain_graph, "VllmWorker") == ["VllmWorker", "VllmWorker_1"]
    assert plain_graph.cli("planner", "set", "no-operation=false").returncode == 0
    decisions.append(await _planned(plain_graph, acted))
    await auntil(lambda: names(plain_graph, "VllmWorker") == ["VllmWorker"], what=plain_graph.states)
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
    found = await _scraped(plain_graph)
    assert by_label(found, "dynamo_planner_decisions_total") == dict(rules)
    actions = by_label(found, "dynamo_planner_scale_actions_total")
    assert {labels[2]: count for labels, count in actions.items()} == dict(outcomes)
    assert by_label(found, "dynamo_planner_state") == {("stopped",): 1.0}
    assert found["dynamo_planner_ticks_total", ()] == plain_graph.status()["planner"]["pulls"]
    last = plain_graph.status()["planner"]["last_decision"]["stimulus_id"]
    assert f"{last} at " in plain_graph.cli("top", "--once").stdout


GPUS_MAX = 5
AWAY_S = 30.0
BASE = {PREFILL: 1, DECODE: 1}
WORDS = (
    "--VllmWorker.conditional-disagg=false",
    "--VllmWorker.sim.speed=0.1",
    "--VllmWorker.sim.num-gpu-blocks=120",
    "--PrefillWorker.sim.speed=0.15",
    "--Planner.adjustment-interval=1.5",
    "--Planner.metric-pulling-interval=0.25",
    f"--Planner.max-gpu-budget={GPUS_MAX}",
    "--Planner.decode-kv-scale-up-threshold=0.5",
    "--Planner.decode-kv-scale-down-threshold=0.2",
    "--Planner.prefill-queue-scale-up-threshold=1.0",
    "--Planner.prefill-queue-scale-down-threshold=0.3",
)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RealEtcd, RealNats]]:
    """An etcd and a NATS of this module's own, free to be killed and started again."""
    with RealEtcd(tmp_path_factory.mktemp("etcd")) as etcd, RealNats(tmp_path_factory.mktemp("nats")) as nats:
        yield etcd, nats


@pytest.fixture(scope="module")
def shared(servers: tuple[RealEtcd, RealNats]) -> Iterator[Served]:
    """The example graph, 1P1D on eight simulated GPUs, with its planner."""
    etcd, nats = servers
    with Served(*WORDS, env={"ETCD_ENDPOINTS": etcd.endpoint, "NATS_SERVER": nats.address}) as served:
        yield served.start()


@pytest.fixture
async def graph(shared: Served) -> Served:
    await at_base(shared)
    return shared


async def at_base(served: Served) -> None:
    await auntil(lambda: capacity(served) == BASE and len(served.pids()) == 3, 60.0, what=served.states)


async def test_workers_come_and_go_with_the_load_and_no_request_is_lost(graph: Served) -> None:
    """One period of the trace of Dynamo's own benchmark, six times as fast, every tenth request."""
    load = one_period(thinning=10, speed=6.0, answer_max=48)
    async with audited(graph) as audit:
        answers = await open_loop(graph, load)
        await at_base(graph)
    assert answers.wrong == []
    assert answers.right == len(load)
    assert audit.most[PREFILL] + audit.most[DECODE] > 2
    assert audit.held_max <= GPUS_MAX
    for number, component, _step in audit.steps():
        caused = [event for event in events(graph) if event["stimulus_id"] == f"planner:{number}"]
        assert component in {event["component"] for event in caused}, "the event log names the decision"


@pytest.mark.full
async def test_tensorboard_tells_what_the_decision_log_tells(graph: Served) -> None:
    folder = Path(planner(graph, "status")["tensorboard"])
    await auntil(lambda: decided(graph), 60.0)
    planner(graph, "stop")
    points = read_points(folder)
    logged = [reason for record in decided(graph) for reason in record["decision"]["reasons"]]
    for component, action in ((PREFILL, PREFILL_SCALING_ACTION), (DECODE, DECODE_SCALING_ACTION)):
        steps = [r["step"] for r in logged if r["component"] == component and r["rule"] != "gpu_freed"]
        assert [value for _, value in named(points, action)] == steps
    assert max(value for _, value in named(points, NUM_GPU)) <= GPUS_MAX
    for workers in (NUM_PREFILL_WORKERS, NUM_DECODE_WORKERS):
        assert named(points, workers)[-1][1] == 1
    planner(graph, "start")


@pytest.mark.full
@pytest.mark.parametrize("name", ["nats", "etcd"])
async def test_while_a_server_is_away_it_holds_and_says_so_and_goes_on(
    graph: Served, name: str, servers: tuple[RealEtcd, RealNats]
) -> None:
    server = servers[0] if name == "etcd" else servers[1]
    planner(graph, "pause")
    await ascale(graph, DECODE, "+1")
    await settled(graph, 60.0)
    planner(graph, "resume")
    await server.kill()
    killed_s = time.monotonic()
    try:
        await auntil(lambda: (planner(graph, "status")["trouble"] or "").startswith("holds:"), 30.0)
        before = len(decided(graph))
        await auntil(lambda: len(decided(graph)) >= before + 6 and time.monotonic() > killed_s + AWAY_S, 60.0)
        held = decided(graph)[before:]
    finally:
        await server.start()
    assert {reason["rule"] for record in held for reason in record["decision"]["reasons"]} == {"missing"}
    assert committed(held) == []
    await auntil(lambda: planner(graph, "status")["trouble"] is None, 30.0)
    await at_base(graph)
    assert committed(decided(graph))[-1][1:] == (DECODE, -1)
