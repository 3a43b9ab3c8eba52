"""The parts of a run, made and joined: by constructor arguments, in one place.

The shell holds the fleet and executes what the machine decides; the effects are its hands; registrations and sampling
are its eyes. Whoever only looks on is an observer of the shell.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from dynamo_local.arbiter import leftovers
from dynamo_local.arbiter.arbiter_effects import ArbiterEffects
from dynamo_local.arbiter.commands import FlipOrders, Orders
from dynamo_local.arbiter.controller import Shell, Waiting
from dynamo_local.arbiter.deployment import Deployment, Launcher
from dynamo_local.arbiter.event_log import EventLog, EventRecorder, event_log_path, server_record
from dynamo_local.arbiter.exporter import Exporter, Place
from dynamo_local.arbiter.guard import Guarding
from dynamo_local.arbiter.host_system import HostSystem
from dynamo_local.arbiter.lead_times import LeadMetrics, Leads, LeadsNow, LeadWatch
from dynamo_local.arbiter.links import Links
from dynamo_local.arbiter.marks import marks
from dynamo_local.arbiter.metrics import DispatchMetrics, dispatch_now
from dynamo_local.arbiter.notes import Notes, StartWatch
from dynamo_local.arbiter.planner_control_api import ControlApi
from dynamo_local.arbiter.planner_plugins import PlannerPlugins
from dynamo_local.arbiter.planning import Planning
from dynamo_local.arbiter.prewarmed import Spared
from dynamo_local.arbiter.progress import View
from dynamo_local.arbiter.registrations import Registrations
from dynamo_local.arbiter.runtime_folder import RuntimeFolder
from dynamo_local.arbiter.sampler import Sampling
from dynamo_local.arbiter.servers import EmbeddedServers
from dynamo_local.arbiter.statefile import Statefile, head_of
from dynamo_local.arbiter.tasks import Tasks
from dynamo_local.clock import Clock
from dynamo_local.core.fleet.degraded import READY
from dynamo_local.core.fleet.events import InfraSeen
from dynamo_local.core.fleet.fleet import Fleet, Worker
from dynamo_local.errors import DynamoError
from dynamo_local.state.leads import LeadFile
from dynamo_local.state.store import StateStore
from dynamo_local.system.gpu_pool import GpuPool
from dynamo_local.system.process_host import ProcessHost, SupervisedHost


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
    guarding: Guarding
    system: HostSystem
    effects: ArbiterEffects
    shell: Shell
    waiting: Waiting
    orders: Orders
    flips: FlipOrders
    registrations: Registrations
    sampling: Sampling
    starts: StartWatch
    planning: Planning
    exporter: Exporter
    control_api: ControlApi
    runtime_folder: RuntimeFolder
    spared: Spared
    leads: Leads


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
) -> Parts:
    """Make all parts of a run; nothing runs yet. `failed` hears of workers that fail, `state` is the run's own."""
    namespace, paths, factory = deployment.graph.namespace, deployment.paths, deployment.factory
    launcher, notes = Launcher(factory), Notes(view.event, clock)
    tasks = Tasks(clock, notes.tell)
    links = Links(namespace, deployment.run_id)
    spared = Spared(deployment, launcher, host, clock, tasks, notes.tell)
    events = EventRecorder(EventLog(event_log_path(paths.logs)), clock.wall_s, notes.tell)
    statefile = Statefile(head_of(deployment), store, launcher.launch_of, notes.tell)
    system = _system(deployment)
    effects = _effects(spared.host, system, pool, launcher, links, statefile, events, clock, notes, failed)
    shell = _shell(deployment, effects, links, clock, notes)
    spared.connect(shell, lambda: effects.env)
    orders, waiting = Orders(shell, pool.look), Waiting(shell, clock.now_s)
    sampling = Sampling(namespace, shell, links, clock)
    planning = _planning(deployment, orders, shell, statefile, sampling, links, clock, tasks, notes)
    exporter = _exporter(deployment, shell, sampling, clock, state, tasks)
    exporter.watch(planning, factory.cwd, paths.logs, notes.tell)
    leads = _leads(deployment, launcher, spared, shell, clock, planning, exporter, tasks)
    control_api = _control_api(deployment, planning, state, tasks)
    servers = _servers(deployment, host, clock, lambda record: tasks.run(events.record(record)))
    return Parts(
        deployment=deployment,
        launcher=launcher,
        host=host,
        pool=pool,
        clock=clock,
        notes=notes,
        tasks=tasks,
        statefile=statefile,
        events=events,
        links=links,
        servers=servers,
        guarding=Guarding(host, deployment, clock, lambda: servers.files),
        system=system,
        effects=effects,
        shell=shell,
        waiting=waiting,
        orders=orders,
        flips=FlipOrders(shell, orders, waiting),
        registrations=Registrations(namespace, shell.feed, links),
        sampling=sampling,
        starts=StartWatch(namespace, shell, links, clock),
        planning=planning,
        exporter=exporter,
        control_api=control_api,
        runtime_folder=RuntimeFolder(paths, [host, exporter, control_api], servers, clock, notes.tell),
        spared=spared,
        leads=leads,
    )


def _leads(
    deployment: Deployment,
    launcher: Launcher,
    spared: Spared,
    shell: Shell,
    clock: Clock,
    planning: Planning,
    exporter: Exporter,
    tasks: Tasks,
) -> Leads:
    """What each way to a worker took, and who is told of it."""
    leads = Leads(launcher, LeadFile(deployment.paths.statefile.parent), tasks.run)
    shell.observers.append(LeadWatch(clock.now_s, leads.note, spared.host.was_spare))
    planning.times.known, planning.times.lead_times = leads.start_up_s, leads.medians
    said = planning.onlookers_say
    planning.onlookers_say = lambda: {**said(), "lead_times": leads.status()}
    LeadMetrics(exporter.metrics.registry, lambda: LeadsNow(leads.known, spared.counts()))
    return leads


def _exporter(
    deployment: Deployment, shell: Shell, sampling: Sampling, clock: Clock, state: Callable[[], str], tasks: Tasks
) -> Exporter:
    """`/metrics`, with a counter of each component from the beginning."""
    settings, components = deployment.settings, [service.name for service in deployment.graph.services]
    socket = deployment.paths.metrics_socket if settings.metrics_socket else None
    place = Place(settings.metrics_port, socket, settings.metrics_api_key)
    exporter = Exporter(shell, sampling, clock, components=components, state=state, tasks=tasks, place=place)
    DispatchMetrics(exporter.metrics.registry, lambda: dispatch_now(sampling.dispatch, shell.fleet))
    return exporter


def _control_api(deployment: Deployment, planning: Planning, state: Callable[[], str], tasks: Tasks) -> ControlApi:
    """The planner's; it answers when the graph is ready."""

    def ready() -> None:
        if state() != READY:
            raise DynamoError(f"the graph is {state()}; nothing can be changed now, see `dynamo status`")

    socket, key = deployment.paths.planner_socket, deployment.settings.metrics_api_key
    return ControlApi(planning, socket, ready=ready, api_key=key, tasks=tasks)


def _system(deployment: Deployment) -> HostSystem:
    """How what a worker, or a whole run, left behind is found and ended."""
    paths = deployment.paths
    return HostSystem(
        partial(leftovers.end_children, paths, deployment.run_id),
        partial(leftovers.end_workers, paths, leftovers.Recorded()),
    )


def _effects(
    host: ProcessHost,
    system: HostSystem,
    pool: GpuPool,
    launcher: Launcher,
    links: Links,
    statefile: Statefile,
    events: EventRecorder,
    clock: Clock,
    notes: Notes,
    failed: Callable[[Worker, str], None],
) -> ArbiterEffects:
    """What carries out the shell's instructions."""
    return ArbiterEffects(
        host=host,
        system=system,
        pool=pool,
        launcher=launcher,
        links=links,
        statefile=statefile,
        events=events,
        clock=clock,
        tell=notes.tell,
        report=failed,
    )


def _servers(
    deployment: Deployment, host: SupervisedHost, clock: Clock, record: Callable[[dict[str, Any]], None]
) -> EmbeddedServers:
    """etcd and NATS of our own, marked so that a later run finds them. `record` writes an event of theirs."""
    paths = deployment.paths
    marking = partial(marks, deployment.graph.namespace, paths.statefile, deployment.run_id)
    servers = EmbeddedServers(host, paths, clock, marking)
    servers.on_event = lambda event: record(server_record(event, clock.wall_s()))
    return servers


def _planning(
    deployment: Deployment,
    orders: Orders,
    shell: Shell,
    statefile: Statefile,
    sampling: Sampling,
    links: Links,
    clock: Clock,
    tasks: Tasks,
    notes: Notes,
) -> Planning:
    """The planner, joined to the arbiter."""
    return Planning(
        deployment.graph,
        deployment.load_planner,
        orders=orders,
        shell=shell,
        statefile=statefile,
        sampling=sampling,
        links=links,
        clock=clock,
        logs=deployment.paths.logs,
        background=tasks.run,
        tell=notes.tell,
        plugins=PlannerPlugins(clock, environ=os.environ, runtime=deployment.paths.runtime, tell=notes.tell),
    )


def _shell(deployment: Deployment, effects: ArbiterEffects, links: Links, clock: Clock, notes: Notes) -> Shell:
    """The shell and its hands know each other; that etcd and NATS answer is one more thing that it is told."""
    shell = Shell(empty_fleet(deployment), effects, clock, observers=[notes])
    effects.connect(shell.feed, shell.tick, lambda: shell.fleet)

    def answered(both: bool) -> None:
        if both is not shell.fleet.infra_ok:
            shell.feed(InfraSeen(stimulus_id="links", ok=both))

    links.on_answer = answered
    return shell


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
        infra_ok=False,
    )
