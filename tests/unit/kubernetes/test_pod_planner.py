"""A planner by itself on a graph with an operator: a load that grows and falls, two planners, zero traffic."""

from __future__ import annotations

import asyncio
import itertools
import json
from contextlib import AsyncExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from dynamo_local.clock import AsyncioClock
from dynamo_local.core.types import Role
from dynamo_local.errors import ConfigError
from dynamo_local.kubernetes.api import KubeApi
from dynamo_local.kubernetes.connector import GraphUnfit, KubernetesConnector
from dynamo_local.kubernetes.graph import Requirements
from dynamo_local.kubernetes.observation import HeardPasses, registered
from dynamo_local.kubernetes.planner import (
    METRICS_PORT,
    Election,
    PodOptions,
    PodPlanner,
    dynamo_namespace,
    expected_of,
    lease_name,
    probes_app,
    read_config,
)
from dynamo_local.planner.forecasting.answers import InlineForecaster
from dynamo_local.planner.loop import PlannerState
from dynamo_local.planner.policies.slo import forecast as lengths
from tests.fakes.arbiter.told import Told
from tests.fakes.kubernetes.api_server import Kube
from tests.fakes.kubernetes.demand import Demand
from tests.fakes.kubernetes.graphs import DECODE, NAME, PREFILL, beta
from tests.fakes.kubernetes.planned import Planned, planned
from tests.fakes.kubernetes.workers import BLOCK, KV_BLOCKS, NAMESPACE, told_pass, worker_metadata
from tests.fakes.planner.planner_loop import on_virtual_time

SLO = {"policy": "slo", "ttft_ms": 400, "itl_ms": 10, "max_gpu_budget": 8}
THROUGHPUT_LOAD = {
    "policy": "throughput-load",
    "optimization_target": "sla",
    "ttft_ms": 400,
    "itl_ms": 12,
    "max_gpu_budget": 8,
    "load_predictor": "constant",
    "throughput_adjustment_interval_seconds": 30,
    "profile_results_dir": "dynamo_H200_TP1P_TP1D",
}


class Rig:
    """Planners of the graph of `planned`, each with its own connector and election."""

    def __init__(self, world: Planned, demand: Demand, stack: AsyncExitStack) -> None:
        self.world, self.demand, self._stack = world, demand, stack
        self.told = Told()
        self.folder = Path(stack.enter_context(TemporaryDirectory()))

    async def planner(self, options: dict[str, Any], identity: str = "a", *, engines: bool = False) -> PodPlanner:
        """Started, and stopped at the end of the test."""
        config, _ = read_config(None, {"report_interval_hours": None, **options})
        kube, clock = self.world.kube, self.world.clock
        api = KubeApi(kube.client(), "default", NAME)
        expected = expected_of(config)
        election = Election(
            api, clock, lease_name(NAME, expected.only), identity, on_change=lambda leads: planner.lead(leads)
        )
        connector = KubernetesConnector(
            api,
            clock,
            expected,
            tell=self.told,
            follows=election.follows,
            on_manual=lambda: planner.on_manual_change(),
        )
        heard = HeardPasses(clock, connector.pools) if engines else None
        logs = self.folder / identity
        logs.mkdir(exist_ok=True)
        here = InlineForecaster()  # virtual time would run away from a process
        planner = PodPlanner(
            *(config, connector, election, clock, logs),
            name=NAME,
            traffic=self.demand,
            passes=heard,
            forecaster=here,
        )
        self._stack.push_async_callback(planner.stop)
        await planner.start()
        return planner

    async def engines(self, planner: PodPlanner, *, kv: float, waits: int) -> None:
        """Each worker that is ready tells a pass a second, from now on: of so much KV, or with so many that wait."""
        heard, number = planner.passes, itertools.count(1)
        assert heard is not None
        heard.registered = registered([worker_metadata("d", 1), worker_metadata("p", 2, "prefill")], NAMESPACE)
        while True:
            now_s, n = self.world.clock.now_s(), next(number)
            for role, pool in self.world.connector.pools().by_role.items():
                for worker in range(pool.ready):
                    name, full = f"{1 if role == 'prefill' else 2}{worker}", round(kv * KV_BLOCKS * BLOCK)
                    told = told_pass(name, now_s, number=n, kv=full, waits=waits if role == "prefill" else 0)
                    heard.heard(role, told)
            await self.at(now_s + 1.0)

    async def at(self, at_s: float) -> None:
        await self.world.clock.sleep_until(at_s)


@pytest.fixture(autouse=True)
def _without_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread takes real time, in which virtual time would run away."""

    async def at_once(work: Any, *args: Any) -> Any:
        return work(*args)

    monkeypatch.setattr(asyncio, "to_thread", at_once)
    monkeypatch.setattr(lengths, "REQUESTS", 150)  # a demand of fewer requests: quicker, and sharp enough here


async def rig(stack: AsyncExitStack, rate: Any, *, isl: float = 2000.0, osl: float = 200.0, **operator: Any) -> Rig:
    world = await stack.enter_async_context(planned(beta(), start_s=5.0, **operator))
    return Rig(world, Demand(AsyncioClock(), rate, isl=isl, osl=osl), stack)


def up_and_down(high: float) -> Any:
    """Little, then for two minutes and a half much, then little again."""
    return lambda at_s: high if 60 <= at_s < 210 else 1.0


async def follows_the_load(options: dict[str, Any], high: float, osl: float) -> None:
    async with AsyncExitStack() as stack:
        here = await rig(stack, up_and_down(high), osl=osl)
        await here.planner(options)
        await here.at(58.0)
        assert here.world.asked() == {PREFILL: 1, DECODE: 1}
        await here.at(205.0)
        assert here.world.asked() == {PREFILL: 3, DECODE: 4}, here.world.operator.history
        await here.at(500.0)
        assert here.world.asked() == {PREFILL: 1, DECODE: 1}, here.world.operator.history
        assert here.world.operator.peak <= 8


@on_virtual_time
@pytest.mark.full
async def test_slo_takes_a_graph_from_1p1d_to_3p4d_and_back() -> None:
    await follows_the_load(SLO, 50.0, 250.0)


@on_virtual_time
async def test_slo_plans_an_aggregated_graph_and_holds_when_prefill_workers_are_added() -> None:
    async with AsyncExitStack() as stack:
        graph = beta()
        prefill = graph["spec"]["components"].pop()
        world = await stack.enter_async_context(
            planned(graph, Requirements(8, {Role.PREFILL: 1, Role.DECODE: 1}), start_s=5.0)
        )
        here = Rig(world, Demand(AsyncioClock(), up_and_down(50.0), isl=2000.0, osl=400.0), stack)
        planner = await here.planner(SLO)
        await here.at(205.0)
        assert 3 <= here.world.asked()[DECODE] <= 8
        assert planner.loop is not None
        assert planner.loop.trouble is None
        world.graph["spec"]["components"].append(prefill)
        world.person(DECODE, 2)
        await here.at(300.0)
        assert here.world.asked()[DECODE] == 2
        assert "had no prefill workers when the policy slo began" in (planner.loop.trouble or "")


@on_virtual_time
async def test_throughput_load_takes_a_graph_from_1p1d_to_3p4d_and_back() -> None:
    await follows_the_load(THROUGHPUT_LOAD, 50.0, 400.0)


@on_virtual_time
async def test_without_requests_the_least_is_kept_and_without_knowledge_what_is_there() -> None:
    """lesson: ai-dynamo #6985: a window without requests has no means, and NaN decided nothing, for ever."""
    async with AsyncExitStack() as stack:
        here = await rig(stack, lambda at_s: 50.0 if at_s < 100 else 0.0, osl=400.0)
        await here.planner(THROUGHPUT_LOAD)
        await here.at(95.0)
        assert here.world.asked() == {PREFILL: 3, DECODE: 4}
        here.demand.silent = "nobody counts"
        await here.at(160.0)
        assert here.world.asked() == {PREFILL: 3, DECODE: 4}
        here.demand.silent = None
        await here.at(260.0)
        assert here.world.asked() == {PREFILL: 1, DECODE: 1}


@on_virtual_time
async def test_of_two_planners_one_acts_and_the_other_goes_on_where_it_ends() -> None:
    """The second one observes. It takes over at once where the lease is given back, and later where it expires."""
    async with AsyncExitStack() as stack:
        here = await rig(stack, lambda at_s: 50.0, osl=400.0)
        first = await here.planner(THROUGHPUT_LOAD, "a")
        second = await here.planner(THROUGHPUT_LOAD, "b")
        assert first.loop is not None
        assert second.loop is not None
        await here.at(20.0)
        assert (first.loop.state, second.loop.state) == (PlannerState.RUNNING, PlannerState.PAUSED)
        await first.stop()
        await here.at(30.0)
        assert second.loop.state is PlannerState.RUNNING
        await here.at(75.0)
        assert here.world.asked() == {PREFILL: 3, DECODE: 4}


@on_virtual_time
async def test_a_planner_that_cannot_renew_stops_acting_before_another_one_may_begin() -> None:
    async with AsyncExitStack() as stack:
        here = await rig(stack, lambda at_s: 1.0)
        kube, clock = here.world.kube, here.world.clock
        cut_off = Kube(kube.versions, kube.objects, kube.counter)
        old = Election(KubeApi(cut_off.client(), "default", NAME), clock, "lease", "old")
        new = Election(KubeApi(kube.client(), "default", NAME), clock, "lease", "new")
        await old.start()
        await new.start()
        stack.push_async_callback(old.close)
        stack.push_async_callback(new.close)
        cut_off.away = True
        led = set[tuple[bool, bool]]()
        for _ in range(300):
            led.add((old.follows() is None, new.follows() is None))
            await here.at(clock.now_s() + 0.1)
        assert led == {(True, False), (False, False), (False, True)}


@on_virtual_time
async def test_a_planner_that_ends_while_it_renews_gives_its_lease_back() -> None:
    async with AsyncExitStack() as stack:
        here = await rig(stack, lambda at_s: 1.0)
        api, clock = KubeApi(here.world.kube.client(), "default", NAME), here.world.clock
        election, renewal = (Election(api, clock, "lease", "me") for _ in range(2))
        await election.start()
        await renewal.renew()
        await election.close()
        assert (await api.lease("lease"))["spec"]["holderIdentity"] == ""


ROLES = {"prefill": PREFILL, "decode": DECODE}


@on_virtual_time
async def test_each_role_can_have_a_planner_of_its_own() -> None:
    """`mode: prefill` and `mode: decode`, as of Dynamo's: each has its lease, and what the other one writes is no
    person's change."""
    async with AsyncExitStack() as stack:
        here = await rig(stack, lambda at_s: 50.0, osl=400.0)
        for mode in ROLES:
            await here.planner({**THROUGHPUT_LOAD, "mode": mode}, mode)
        await here.at(95.0)
        assert here.world.asked() == {PREFILL: 3, DECODE: 4}
        assert not any("somebody has set" in text for text in here.told)
        leases = {key[2] for key in here.world.kube.objects if key[1] == "leases"}
        assert leases == {f"{NAME}-dynamo-local-planner-{mode}" for mode in ROLES}


@on_virtual_time
async def test_a_graph_of_prefill_workers_alone_can_be_planned() -> None:
    """Dynamo's pools of one role are such graphs."""
    async with AsyncExitStack() as stack:
        graph = beta()
        graph["spec"]["components"] = [one for one in graph["spec"]["components"] if one["name"] != DECODE]
        world = await stack.enter_async_context(
            planned(graph, Requirements(max_gpus=8, floors={}, only=Role.PREFILL), start_s=5.0)
        )
        here = Rig(world, Demand(AsyncioClock(), lambda at_s: 50.0, isl=2000.0, osl=400.0), stack)
        await here.planner({**THROUGHPUT_LOAD, "mode": "prefill"})
        await here.at(95.0)
        assert here.world.asked() == {PREFILL: 3}


@on_virtual_time
async def test_a_mode_that_the_graph_is_not_is_refused() -> None:
    for mode, why in (("prefill", "no prefill component"), ("agg", "mode is agg")):
        async with AsyncExitStack() as stack:
            graph = beta()
            if mode == "prefill":
                graph["spec"]["components"] = graph["spec"]["components"][:2]
            world = await stack.enter_async_context(planned(graph, Requirements(max_gpus=8, floors={})))
            here = Rig(world, Demand(AsyncioClock(), lambda at_s: 1.0, isl=2000.0, osl=400.0), stack)
            with pytest.raises(GraphUnfit, match=why):
                await here.planner({**THROUGHPUT_LOAD, "mode": mode})


LOAD = {"policy": "load", "max_gpu_budget": 8, "adjustment_interval": 10, "metric_pulling_interval": 1}


@on_virtual_time
async def test_the_policy_load_goes_by_the_engines_passes() -> None:
    """Decode workers that are full, and prompts that wait, get one more each; idle ones go again. Nothing changes
    while nobody is heard."""
    async with AsyncExitStack() as stack:
        here = await rig(stack, lambda at_s: 0.0)
        planner = await here.planner(LOAD, engines=True)
        await here.at(40.0)
        assert here.world.asked() == {PREFILL: 1, DECODE: 1}
        full = asyncio.ensure_future(here.engines(planner, kv=0.95, waits=9))
        await here.world.until(lambda: here.world.asked() == {PREFILL: 3, DECODE: 3}, 120.0)
        full.cancel()
        idle = asyncio.ensure_future(here.engines(planner, kv=0.01, waits=0))
        await here.world.until(lambda: here.world.asked() == {PREFILL: 1, DECODE: 1}, 240.0)
        idle.cancel()


@on_virtual_time
async def test_without_nats_the_policy_load_is_refused() -> None:
    async with AsyncExitStack() as stack:
        here = await rig(stack, lambda at_s: 0.0)
        with pytest.raises(ConfigError, match="NATS_SERVER"):
            await here.planner(LOAD)


@on_virtual_time
async def test_a_planner_is_healthy_from_its_start_to_its_end() -> None:
    async with AsyncExitStack() as stack:
        here = await rig(stack, lambda at_s: 1.0)
        planner = await here.planner(THROUGHPUT_LOAD)
        assert planner.unhealthy() is None
        await planner.stop()
        assert planner.unhealthy() is not None


# --- pod options
# The options of a planner in a pod: `--config`, words over it, and the environment.

PROFILE = "dynamo_H200_TP1P_TP1D"
TEXTS = {
    "yaml": f"policy: slo\nttft-ms: 300\nitl_ms: 10\nmax_gpu_budget: 4\nprofile_results_dir: {PROFILE}\n",
    "section": "Common: {model: m}\nPlanner: {policy: slo, ttft_ms: 300, itl_ms: 10, max_gpu_budget: 4}\n",
    "json": '{"policy": "slo", "ttft_ms": 300, "itl_ms": 10, "max_gpu_budget": 4}',
}


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PLANNER_PROMETHEUS_PORT", "DYN_NAMESPACE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(("kind", "as_file"), [("yaml", True), ("section", True), ("json", True), ("json", False)])
def test_options_are_read_by_name(kind: str, as_file: bool, tmp_path: Path) -> None:
    """Dynamo's own files are JSON or YAML; JSON may also be the word itself."""
    file = tmp_path / "planner"
    file.write_text(TEXTS[kind])
    config, port = read_config(str(file) if as_file else TEXTS[kind], {})
    assert (config.policy, config.ttft_ms, config.max_gpu_budget) == ("slo", 300, 4)
    assert (config.environment, port) == ("kubernetes", METRICS_PORT)


def test_words_go_over_the_file() -> None:
    config, _ = read_config(TEXTS["json"], {"max_gpu_budget": 16})
    assert (config.max_gpu_budget, config.ttft_ms) == (16, 300)


def test_a_file_of_dynamos_planner_names_no_policy_and_gets_what_that_does() -> None:
    told = {"environment": "kubernetes", "optimization_target": "sla", "ttft_ms": 300, "itl_ms": 10}
    config, _ = read_config(json.dumps({**told, "metric_reporting_prometheus_port": 9000}), {})
    assert config.policy == "throughput-load"


@pytest.mark.parametrize(
    ("options", "variable", "port"),
    [
        ({"metric_reporting_prometheus_port": 9000}, None, 9000),
        ({"metric_reporting_prometheus_port": 0}, "9100", 0),
        ({}, "9100", 9100),
    ],
)
def test_the_port_of_its_metrics(
    options: dict[str, Any], variable: str | None, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if variable is not None:
        monkeypatch.setenv("PLANNER_PROMETHEUS_PORT", variable)
    assert read_config(json.dumps({**json.loads(TEXTS["json"]), **options}), {})[1] == port


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("/away/planner.yaml", "--config /away/planner.yaml cannot be read: No such file"),
        ('{"policy": "slo", "environment": "global-planner"}', "environment is 'global-planner'"),
        ('{"policy": "slo", "environment": "local"}', "has its planner in its arbiter"),
        ('{"metric_reporting_prometheus_port": "many"}', "must be a port"),
        ('{"Planner": 5}', "must hold the planner's options"),
        ('{"policy": "slo", "strange": 1}', "strange"),
        ('{"policy": "slo", "max_gpu_budget": -3}', "max_gpu_budget"),
    ],
)
def test_what_cannot_be_is_refused_by_name(text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        read_config(text, {})


def test_what_a_graph_must_have_follows_from_the_options() -> None:
    config, _ = read_config('{"policy": "throughput-load", "mode": "decode", "decode_min_endpoint": 2}', {})
    expected = expected_of(config)
    assert (expected.only, expected.floors[Role.DECODE], expected.prefill) == (Role.DECODE, 2, None)
    assert lease_name("g", expected.only) == "g-dynamo-local-planner-decode"


def test_the_graphs_namespace_within_dynamo_is_the_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it tells its pods, else as it makes it."""
    options = PodOptions(read_config(TEXTS["json"], {})[0])
    assert dynamo_namespace(options, "graph", "team") == "team-graph"
    monkeypatch.setenv("DYN_NAMESPACE", "told")
    assert dynamo_namespace(options, "graph", "team") == "told"


# --- probes
# The answers of a planner's pod to the kubelet.


async def asked(path: str, why: str | None, method: str = "GET") -> tuple[int, Any]:
    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    await probes_app(lambda: why)({"path": path, "method": method}, None, send)
    body = sent[1]["body"]
    return sent[0]["status"], json.loads(body) if body else None


@pytest.mark.parametrize(
    ("path", "why", "status"),
    [
        ("/live", None, 200),
        ("/live", "it has not begun yet", 200),
        ("/health", None, 200),
        ("/health", "it has not begun yet", 503),
        ("/metrics", None, 404),
    ],
)
async def test_live_answers_always_and_health_while_it_plans(path: str, why: str | None, status: int) -> None:
    assert (await asked(path, why))[0] == status


async def test_the_reason_is_told_and_nothing_is_written() -> None:
    assert await asked("/health", "no") == (503, {"status": "unhealthy", "reason": "no"})
    assert (await asked("/live", None, "POST"))[0] == 405
    assert await asked("/live", None, "HEAD") == (200, None)
