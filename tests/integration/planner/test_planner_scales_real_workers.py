"""The load planner on real processes: up and down again with the load, within the budget, and no request lost."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dynamo_local.planner.records.figures import (
    DECODE_SCALING_ACTION,
    NUM_DECODE_WORKERS,
    NUM_GPU,
    NUM_PREFILL_WORKERS,
    PREFILL_SCALING_ACTION,
)
from tests.drivers.planned import DECODE, PREFILL, audited, capacity, committed, decided, one_period, open_loop, planner
from tests.drivers.scaled import ascale, events, settled
from tests.drivers.served import Served, auntil
from tests.drivers.servers import RealEtcd, RealNats
from tests.tools.event_files import named, read_points

pytestmark = [pytest.mark.infra, pytest.mark.timeout(400)]

BUDGET = 5
AWAY_S = 30.0
BASE = {PREFILL: 1, DECODE: 1}
WORDS = (
    "--VllmWorker.conditional-disagg=false",
    "--VllmWorker.sim.speed=0.1",
    "--VllmWorker.sim.num-gpu-blocks=120",
    "--PrefillWorker.sim.speed=0.15",
    "--Planner.adjustment-interval=1.5",
    "--Planner.metric-pulling-interval=0.25",
    f"--Planner.max-gpu-budget={BUDGET}",
    "--Planner.decode-kv-scale-up-threshold=0.5",
    "--Planner.decode-kv-scale-down-threshold=0.2",
    "--Planner.prefill-queue-scale-up-threshold=1.0",
    "--Planner.prefill-queue-scale-down-threshold=0.3",
)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RealEtcd, RealNats]]:
    """An etcd and a NATS of this module's own, free to be killed and started again."""
    etcd, nats = RealEtcd(tmp_path_factory.mktemp("etcd")), RealNats(tmp_path_factory.mktemp("nats"))
    for server in (etcd, nats):
        server.start_now()
    yield etcd, nats
    for server in (etcd, nats):
        server.stop_now()


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
    assert audit.held_max <= BUDGET
    for number, component, _step in audit.steps():
        caused = [event for event in events(graph) if event["stimulus_id"] == f"planner:{number}"]
        assert component in {event["component"] for event in caused}, "the event log names the decision"


async def test_tensorboard_tells_what_the_decision_log_tells(graph: Served) -> None:
    folder = Path(planner(graph, "status")["tensorboard"])
    planner(graph, "stop")
    points = read_points(folder)
    logged = [reason for record in decided(graph) for reason in record["decision"]["reasons"]]
    for component, action in ((PREFILL, PREFILL_SCALING_ACTION), (DECODE, DECODE_SCALING_ACTION)):
        steps = [r["step"] for r in logged if r["component"] == component and r["rule"] != "gpu_freed"]
        assert [value for _, value in named(points, action)] == steps
    assert max(value for _, value in named(points, NUM_GPU)) <= BUDGET
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
