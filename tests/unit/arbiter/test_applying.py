"""`dynamo apply` in the arbiter: what is compared with what, who is told, and that a dry run tells nobody."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dynamo_local.arbiter.adoption import retired
from dynamo_local.arbiter.apply import ApplyCommand
from dynamo_local.arbiter.commands import ApplyDeployment, Commands
from dynamo_local.arbiter.deployment import Launcher
from dynamo_local.arbiter.deployment_spec import DeploymentSpec
from dynamo_local.arbiter.profile_check import with_nearest
from dynamo_local.arbiter.statefile import restart_of_entry
from dynamo_local.config.planner import PlannerConfig
from dynamo_local.config.planner_section import planner_section
from dynamo_local.core.fleet.fleet import Fleet
from dynamo_local.core.types import GraphSpec, Resources, Role, ServiceSpec
from dynamo_local.errors import BadInput, NotApplicable
from dynamo_local.planner.loop import PlannerState
from dynamo_local.state.schema import State
from dynamo_local.state.store import load
from dynamo_local.system.gpu_pool import GpuPool
from dynamo_local.system.gpus import SimInventory
from tests.fakes.arbiter.effects import shell_of
from tests.fakes.arbiter.fleet_views import on_ledger, worker
from tests.fakes.arbiter.hand_clock import HandClock
from tests.simulation.world import NoLocks, factory_for, graph

GRAPH = graph(decode=2, prefill=0, big=False)
FRONTEND, DECODE = GRAPH.services


class ArbiterPlanner:
    """The planner, as far as an apply speaks to it."""

    def __init__(self) -> None:
        self.options = PlannerConfig()
        self.state = PlannerState.STOPPED
        self.graph: GraphSpec | None = None
        self.followed: dict[str, Any] | None = None

    def follows(self) -> dict[str, Any] | None:
        return self.followed

    async def prepared(self, options: PlannerConfig) -> None:
        """Any policy can be made."""

    def reconfigure(self, graph: GraphSpec, options: PlannerConfig | None, policy: None) -> None:
        self.graph, self.options = graph, options or self.options

    async def start(self, options: dict[str, Any]) -> None:
        self.state = PlannerState.RUNNING

    async def stop(self) -> None:
        self.state = PlannerState.STOPPED


class Run:
    """Two decode workers and a frontend, on four devices; `refused` is what the host has against it."""

    def __init__(self) -> None:
        self.launcher = Launcher(factory_for(GRAPH, "01J"))
        templates = self.launcher.factory.templates()
        made = [worker(n, "ready", templates[1], launched=templates[1].fingerprint) for n in (0, 1)]
        frontend = worker(0, "ready", templates[0], launched=templates[0].fingerprint)
        self.controller = shell_of(on_ledger([frontend, *made], 4, templates))
        self.head = State(namespace="dynamo", run_id="01J")
        self.planning = ArbiterPlanner()
        self.refused: list[str] = []
        self.told: list[str] = []
        pool = GpuPool("dynamo", SimInventory(4), NoLocks())  # type: ignore[arg-type]
        began: Any = SimpleNamespace(
            graph=GRAPH,
            host={},
            load_planner=PlannerConfig(),
            load_planner_starts=False,
            load_planner_flag=None,
            gpus=SimInventory(4).sample(),
        )
        parts: Any = SimpleNamespace(
            deployment=began,
            launcher=self.launcher,
            commands=Commands(self.controller, pool.look),
            controller=self.controller,
            planning=self.planning,
            statefile=SimpleNamespace(head=self.head),
            host=SimpleNamespace(refuses_to_apply=lambda file, overrides: self.refused),
            clock=HandClock(),
            notes=SimpleNamespace(tell=self.told.append),
        )
        self.applying = ApplyCommand(parts)

    @property
    def fleet(self) -> Fleet:
        return self.controller.fleet

    async def apply(self, *services: ServiceSpec, **more: Any) -> dict[str, Any]:
        """The graph with these services, and what else the file says."""
        words = {name: more.pop(name) for name in ("dry_run", "force") if name in more}
        plain: dict[str, Any] = {"host": {}, "sections": {}, "planner": None, "planner_starts": False}
        wish = DeploymentSpec(**{"graph": replace(GRAPH, services=services or GRAPH.services), **plain, **more})
        return await self.applying.apply(ApplyDeployment(stimulus_id="apply:1", deployment=wish.as_json(), **words))


async def test_the_new_deployment_is_what_runs_from_then_on() -> None:
    run, other = Run(), replace(DECODE, config={"speed": 2})
    said = await run.apply(FRONTEND, other, sections={"VllmWorker": {"speed": 2, "api_key": "s3cret"}})

    assert said["changes"] == [{"what": "VllmWorker.speed", "before": None, "after": 2}]
    assert said["workers"] == {"start": [], "leave": [], "renew": ["dynamo_VllmWorker_1", "dynamo_VllmWorker"]}
    assert said["components"] == {"VllmWorker": None}
    assert run.launcher.factory.graph.services == (FRONTEND, other)
    assert json.loads(run.launcher.factory.service_config_json)["VllmWorker"]["api_key"] == "s3cret"
    assert json.loads(run.head.environment.DYNAMO_SERVICE_CONFIG)["VllmWorker"]["api_key"] == "****"
    assert run.planning.graph == run.launcher.factory.graph
    assert str(run.fleet.workers["dynamo_VllmWorker_1"].state) == "draining"
    with pytest.raises(NotApplicable, match="apply:1 is under way"):
        await run.apply()


async def test_the_words_of_the_command_line_are_kept_for_the_next_apply_although_nothing_else_differs() -> None:
    run, words = Run(), {"Frontend": {"port": 18030}, "VllmWorker": {"api_key": "s3cret"}}
    assert (await run.apply(command_line=words, dry_run=True))["changes"] == []
    assert run.head.command_line is None
    assert (await run.apply(command_line=words))["changes"] == []
    assert run.head.command_line == {"Frontend": {"port": 18030}, "VllmWorker": {"api_key": "****"}}
    await run.apply()
    assert run.head.command_line is None


async def test_a_dry_run_says_the_same_and_does_nothing() -> None:
    run, wanted = Run(), (FRONTEND, replace(DECODE, config={"speed": 2}, workers=3))
    factory, workers = run.launcher.factory, run.fleet.workers
    said = await run.apply(*wanted, dry_run=True)
    assert (run.launcher.factory, run.fleet.workers, run.planning.graph) == (factory, workers, None)
    done = await run.apply(*wanted)
    assert {**said, "dry_run": False} == done
    assert done["workers"]["start"] == ["dynamo_VllmWorker_2"]


async def test_every_reason_against_it_is_said_at_once() -> None:
    run = Run()
    run.refused = ["the ini names another file"]
    factory, workers = run.launcher.factory, run.fleet.workers
    with pytest.raises(NotApplicable) as refused:
        await run.apply(
            replace(FRONTEND, config={"x": 1}, max_workers=1),
            replace(DECODE, workers=9),
            host={"nats_server": "elsewhere:4222"},
        )
    assert [reason.split(" ")[0] for reason in refused.value.details["reasons"]] == [
        "Host.nats_server",
        "the",
        "VllmWorker:",
        "dynamo_Frontend",
    ]
    assert (run.launcher.factory, run.fleet.workers) == (factory, workers)


async def test_what_the_arbiter_itself_goes_by_changes_at_once() -> None:
    run = Run()
    said = await run.apply(host={"health_bound_s": 5.0, "restart": {"first_s": 0.5}})
    assert (run.fleet.health_bound_s, run.fleet.policy.first_s) == (5.0, 0.5)
    assert said["workers"] == {"start": [], "leave": [], "renew": []}
    assert run.fleet.restarts == ()


async def test_the_planner_starts_and_stops_with_its_section() -> None:
    run = Run()
    await run.apply(planner={"max_gpu_budget": 4}, planner_starts=True)
    assert (run.planning.state, run.planning.options.max_gpu_budget) == (PlannerState.RUNNING, 4)
    await run.apply()
    assert run.planning.state is PlannerState.STOPPED
    run.planning.followed = {"environment": "virtual"}
    with pytest.raises(NotApplicable, match="another planner's decisions"):
        await run.apply(planner={}, planner_starts=True)


async def test_a_section_without_a_profile_has_the_one_that_the_start_chose() -> None:
    run = Run()
    began = with_nearest(planner_section("Planner", {"ttft_ms": 500.0}), GRAPH, SimInventory(4).sample())
    assert began.profile_results_dir is not None
    run.planning.options = began
    said = await run.apply(planner={"ttft_ms": 500.0, "policy": "slo"})
    assert said["changes"] == []
    await run.apply(planner={"ttft_ms": 400.0, "policy": "slo"})
    assert run.planning.options.profile_results_dir == began.profile_results_dir


async def test_a_planner_that_plans_keeps_its_components() -> None:
    run = Run()
    run.planning.state = PlannerState.RUNNING
    prefill = ServiceSpec("Prefill", Role.PREFILL, runtime="http")
    with pytest.raises(NotApplicable, match="other components to scale"):
        await run.apply(FRONTEND, DECODE, prefill)


async def test_what_an_apply_that_had_stopped_left_is_gone_on_with() -> None:
    run, other = Run(), replace(DECODE, config={"speed": 2})
    await run.apply(FRONTEND, other)
    run.controller.fleet = replace(run.fleet, restarts=())
    said = await run.apply(FRONTEND, other)
    assert (said["changes"], said["components"]) == ([], {"VllmWorker": None})
    assert "dynamo_VllmWorker" in said["workers"]["renew"]


async def test_what_is_no_deployment_is_refused() -> None:
    with pytest.raises(BadInput, match="this is no deployment"):
        await Run().applying.apply(ApplyDeployment(stimulus_id="apply:1", deployment={"graph": 3}))


GOLDEN = Path(__file__).parents[2] / "golden" / "statefile"


def test_what_is_left_to_do_is_read_back() -> None:
    (entry,) = load(GOLDEN / "v1-apply.json").restarts or ()
    plan = restart_of_entry(entry)
    assert plan.todo == (("dynamo_VllmWorker", 1), ("dynamo_Processor", 1))
    assert plan.substitutes == {"dynamo_VllmWorker": "dynamo_VllmWorker_1"}


def test_a_component_that_was_removed_is_known_until_its_last_worker_has_left() -> None:
    gone = ServiceSpec("Exporter", Role.OTHER, 0, Resources(0), start_deadline_s=120.0, drain_deadline_s=30.0)
    assert retired(load(GOLDEN / "v1-apply.json")) == (gone,)
    assert retired(load(GOLDEN / "v1-disagg.json")) == ()
