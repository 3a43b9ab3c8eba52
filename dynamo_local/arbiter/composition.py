"""Makes the parts of a run in the arbiter's process, and joins them by constructor arguments.

The controller holds the fleet and carries out what the machine decides, through its effects. Registrations and sampling
observe the workers. Metrics, notes and lead times subscribe to the controller and change nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any

from dynamo_local.arbiter import leftovers
from dynamo_local.arbiter.arbiter_effects import ArbiterEffects
from dynamo_local.arbiter.commands import Commands
from dynamo_local.arbiter.controller import FleetController, Waiting
from dynamo_local.arbiter.dashboard import DashboardProcess
from dynamo_local.arbiter.deployment import Deployment, Launcher
from dynamo_local.arbiter.event_log import EventLog, EventRecorder, event_log_path, server_record
from dynamo_local.arbiter.exporter import Exporter, Place
from dynamo_local.arbiter.fleet_spans import FleetSpans
from dynamo_local.arbiter.guard import GuardianProcess
from dynamo_local.arbiter.host_system import HostSystem
from dynamo_local.arbiter.kept_targets import TargetMetrics
from dynamo_local.arbiter.lead_times import LeadTimeMetrics, LeadTimesNow, LeadTimeWatch, RunLeadTimes
from dynamo_local.arbiter.links import Links
from dynamo_local.arbiter.marks import marks
from dynamo_local.arbiter.metrics import DispatchMetrics, dispatch_now
from dynamo_local.arbiter.model_shares import ModelMetrics, ModelShares
from dynamo_local.arbiter.notes import Notes, StartWatch
from dynamo_local.arbiter.planner_control_api import ControlApi
from dynamo_local.arbiter.planner_views import PlannerViews
from dynamo_local.arbiter.planning import ArbiterPlanner, PlannerPlugins
from dynamo_local.arbiter.prewarmed import PrewarmedPool
from dynamo_local.arbiter.progress import View
from dynamo_local.arbiter.registrations import Registrations
from dynamo_local.arbiter.runtime_folder import RuntimeFolder
from dynamo_local.arbiter.sampler import Sampling
from dynamo_local.arbiter.servers import EmbeddedServers
from dynamo_local.arbiter.statefile import Statefile, head_of
from dynamo_local.arbiter.tasks import Tasks
from dynamo_local.arbiter.worker_requests import WorkerAsks
from dynamo_local.clock import Clock
from dynamo_local.core.fleet.degraded import READY
from dynamo_local.core.fleet.events import InfraSeen
from dynamo_local.core.fleet.fleet import Fleet, Worker
from dynamo_local.errors import DynamoError
from dynamo_local.planner.scaling_times import ScalingTimes
from dynamo_local.state.leads import LeadFile
from dynamo_local.state.store import StateStore
from dynamo_local.system import tracing
from dynamo_local.system.gpu_pool import GpuPool
from dynamo_local.system.process_host import SupervisedHost


@dataclass(frozen=True, slots=True)
class Parts:
    """Everything that a run is made of. `deployment` is what it began with, `launcher` has what it is now."""

    deployment: Deployment
    launcher: Launcher
    host: SupervisedHost
    pool: GpuPool
    clock: Clock
    notes: Notes
    tasks: Tasks
    statefile: Statefile
    events: EventRecorder
    links: Links
    servers: EmbeddedServers
    guardian: GuardianProcess
    system: HostSystem
    effects: ArbiterEffects
    controller: FleetController
    waiting: Waiting
    commands: Commands
    registrations: Registrations
    sampling: Sampling
    starts: StartWatch
    planning: ArbiterPlanner
    exporter: Exporter
    control_api: ControlApi
    runtime_folder: RuntimeFolder
    views: PlannerViews
    dashboard: DashboardProcess
    prewarmed: PrewarmedPool
    lead_times: RunLeadTimes
    shares: ModelShares


@dataclass(frozen=True, slots=True)
class _Base:
    """The parts that know no other part of the run."""

    deployment: Deployment
    clock: Clock
    launcher: Launcher
    notes: Notes
    tasks: Tasks
    links: Links
    statefile: Statefile
    events: EventRecorder
    system: HostSystem


def compose(
    deployment: Deployment,
    *,
    host: SupervisedHost,
    store: StateStore,
    pool: GpuPool,
    clock: Clock,
    view: View,
    failed: Callable[[Worker, str], None],
    state: Callable[[], str],
    follows: Callable[[], dict[str, Any] | None],
    on_change: Callable[[], Coroutine[Any, Any, None]],
) -> Parts:
    """Make all parts of a run. Nothing runs yet.

    `failed` is called for each worker that fails, `on_change` when a server or a prewarmed process has another pid.
    `state` is the run's state, `follows` the status of another planner whose decisions the run carries out.
    """
    base = _base(deployment, store, clock, view, lambda: controller)
    prewarmed, effects, controller = _controller(base, host, pool, failed, on_change)
    lead_times = _lead_times(base, prewarmed, controller)
    waiting = Waiting(controller, clock.now_s)
    commands = Commands(controller, pool.look, waiting, on_manual=lambda cause: planning.on_manual_change())
    sampling = Sampling(deployment.graph.namespace, controller, base.links, clock)
    exporter = _exporter(base, controller, sampling, state)
    LeadTimeMetrics(exporter.metrics.registry, lambda: LeadTimesNow(lead_times.known, prewarmed.counts()))
    planning = _planning(base, commands, controller, sampling, lead_times, follows)
    control_api = _control_api(deployment, planning, state, base.tasks)
    servers = _servers(base, host, on_change)
    return Parts(
        deployment=deployment,
        launcher=base.launcher,
        host=host,
        pool=pool,
        clock=clock,
        notes=base.notes,
        tasks=base.tasks,
        statefile=base.statefile,
        events=base.events,
        links=base.links,
        servers=servers,
        guardian=GuardianProcess(host, deployment, clock, lambda: servers.files),
        system=base.system,
        effects=effects,
        controller=controller,
        waiting=waiting,
        commands=commands,
        registrations=Registrations(deployment.graph.namespace, controller.feed, base.links),
        sampling=sampling,
        starts=StartWatch(deployment.graph.namespace, controller, base.links, clock),
        planning=planning,
        exporter=exporter,
        control_api=control_api,
        runtime_folder=RuntimeFolder(deployment.paths, [host, exporter, control_api], servers, clock, base.notes.tell),
        views=_views(base, planning, exporter),
        dashboard=DashboardProcess(deployment.paths, deployment.settings, clock),
        prewarmed=prewarmed,
        lead_times=lead_times,
        shares=_shares(base, controller, commands, sampling, lead_times, exporter),
    )


def _base(
    deployment: Deployment, store: StateStore, clock: Clock, view: View, controller: Callable[[], FleetController]
) -> _Base:
    """The links tell the `controller`, which is made later, whether etcd and NATS both answer."""

    def answered(both: bool) -> None:
        if both is not controller().fleet.infra_ok:
            controller().feed(InfraSeen(stimulus_id="links", ok=both))

    launcher, notes, paths = Launcher(deployment.factory), Notes(view.event, clock), deployment.paths
    return _Base(
        deployment,
        clock,
        launcher,
        notes,
        Tasks(clock, notes.tell),
        Links(deployment.graph.namespace, deployment.run_id, answered),
        Statefile(head_of(deployment), store, launcher.launch_of, notes.tell),
        EventRecorder(EventLog(event_log_path(paths.logs)), clock.wall_s, notes.tell),
        HostSystem(
            partial(leftovers.end_children, paths, deployment.run_id),
            partial(leftovers.end_workers, paths, leftovers.RecordedRun()),
        ),
    )


def _controller(
    base: _Base,
    host: SupervisedHost,
    pool: GpuPool,
    failed: Callable[[Worker, str], None],
    on_change: Callable[[], Coroutine[Any, Any, None]],
) -> tuple[PrewarmedPool, ArbiterEffects, FleetController]:
    """The controller and its effects know each other: the effects look the controller up when they feed it."""
    clock, tell = base.clock, base.notes.tell
    prewarmed = PrewarmedPool(
        base.deployment,
        base.launcher,
        host,
        clock,
        base.tasks,
        tell,
        fleet=lambda: controller.fleet,
        env=lambda: effects.env,
        on_change=on_change,
    )
    effects = ArbiterEffects(
        host=prewarmed.host,
        system=base.system,
        pool=pool,
        launcher=base.launcher,
        links=base.links,
        statefile=base.statefile,
        events=base.events,
        clock=clock,
        tell=tell,
        report=failed,
        feed=lambda event: controller.feed(event),
        tick=lambda: controller.tick(),
        fleet=lambda: controller.fleet,
    )
    controller = FleetController(empty_fleet(base.deployment), effects, clock)
    controller.subscribe(on_fleet=base.notes.on_fleet)
    controller.subscribe(on_fleet=lambda _: prewarmed.wake())
    return prewarmed, effects, controller


def _lead_times(base: _Base, prewarmed: PrewarmedPool, controller: FleetController) -> RunLeadTimes:
    lead_times = RunLeadTimes(base.launcher, LeadFile(base.deployment.paths.statefile.parent), base.tasks.run)
    watch = LeadTimeWatch(base.clock.now_s, lead_times.note, prewarmed.host.was_prewarmed)
    controller.subscribe(on_transition=watch.on_transition)
    return lead_times


def _planning(
    base: _Base,
    commands: Commands,
    controller: FleetController,
    sampling: Sampling,
    lead_times: RunLeadTimes,
    follows: Callable[[], dict[str, Any] | None],
) -> ArbiterPlanner:
    paths, clock, tell = base.deployment.paths, base.clock, base.notes.tell
    planning = ArbiterPlanner(
        base.deployment.graph,
        base.deployment.load_planner,
        commands=commands,
        controller=controller,
        statefile=base.statefile,
        sampling=sampling,
        links=base.links,
        clock=clock,
        logs=paths.logs,
        background=base.tasks.run,
        tell=tell,
        times=ScalingTimes(clock.now_s, known=lead_times.start_up_s, lead_times=lead_times.medians),
        follows=follows,
        plugins=PlannerPlugins(clock, environ=os.environ, runtime=paths.runtime, tell=tell),
        beside=lambda: {"run_id": base.deployment.run_id, "targets": sampling.kept.status()},
    )
    planning.subscribe(status=lambda: {"lead_times": lead_times.status()})
    _traced(controller, planning)
    return planning


def _shares(
    base: _Base,
    controller: FleetController,
    commands: Commands,
    sampling: Sampling,
    lead_times: RunLeadTimes,
    exporter: Exporter,
) -> ModelShares:
    shares = ModelShares(
        lambda: base.launcher.factory.graph,
        controller,
        commands,
        sampling,
        base.links,
        lead_times.medians,
        base.clock,
        base.notes.tell,
        WorkerAsks(base.links, base.deployment.graph.namespace, base.clock).control,
    )
    ModelMetrics(exporter.metrics.registry, shares.status)
    return shares


def _traced(controller: FleetController, planning: ArbiterPlanner) -> None:
    if (active := tracing.active()) is not None:
        spans = FleetSpans(active)
        controller.subscribe(on_event=spans.on_event, on_transition=spans.on_transition)
        planning.subscribe(spans)


def _views(base: _Base, planning: ArbiterPlanner, exporter: Exporter) -> PlannerViews:
    return PlannerViews(
        planning,
        exporter.metrics.registry,
        gpu_hours=exporter.gpu_hours,
        base=base.deployment.factory.cwd,
        logs=base.deployment.paths.logs,
        clock=base.clock,
        tell=base.notes.tell,
    )


def _servers(base: _Base, host: SupervisedHost, on_change: Callable[[], Coroutine[Any, Any, None]]) -> EmbeddedServers:
    """Our own etcd and NATS, marked so that a later run finds them."""
    namespace, paths = base.deployment.graph.namespace, base.deployment.paths
    return EmbeddedServers(
        host,
        paths,
        base.clock,
        partial(marks, namespace, paths.statefile, base.deployment.run_id),
        on_change=on_change,
        on_event=lambda event: base.tasks.run(base.events.record(server_record(event, base.clock.wall_s()))),
    )


def _exporter(base: _Base, controller: FleetController, sampling: Sampling, state: Callable[[], str]) -> Exporter:
    """`/metrics`, with a counter of each component from the beginning."""
    deployment = base.deployment
    settings, components = deployment.settings, [service.name for service in deployment.graph.services]
    socket = deployment.paths.metrics_socket if settings.metrics_socket else None
    place = Place(settings.metrics_port, socket, settings.metrics_api_key)
    exporter = Exporter(
        controller, sampling, base.clock, components=components, state=state, tasks=base.tasks, place=place
    )
    TargetMetrics(exporter.metrics.registry, lambda: sampling.kept)
    DispatchMetrics(exporter.metrics.registry, lambda: dispatch_now(sampling.dispatch, controller.fleet))
    return exporter


def _control_api(
    deployment: Deployment, planning: ArbiterPlanner, state: Callable[[], str], tasks: Tasks
) -> ControlApi:
    """The planner's API, which answers while the graph is ready."""

    def ready() -> None:
        if state() != READY:
            raise DynamoError(f"the graph is {state()}; nothing can be changed now, see `dynamo status`")

    socket, key = deployment.paths.planner_socket, deployment.settings.metrics_api_key
    return ControlApi(planning, socket, ready=ready, api_key=key, tasks=tasks)


def empty_fleet(deployment: Deployment) -> Fleet:
    """The fleet of a run before there is a worker in it; its ledger is the deployment's."""
    settings = deployment.settings
    return Fleet(
        deployment.graph.namespace,
        deployment.factory.templates(),
        gpus=deployment.ledger,
        policy=settings.restart,
        health_bound_s=settings.health_bound_s,
        restart_revoked=settings.restart_revoked,
        pace=settings.pace,
        infra_ok=False,
    )
