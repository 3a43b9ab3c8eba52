"""From the words of `dynamo serve` to a running arbiter: parse everything, refuse early, lock, run, clean up."""

from __future__ import annotations

import asyncio
import logging
import logging.handlers
import os
import shutil
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from dynamo_local.clock import AsyncioClock
from dynamo_local.config import (
    Config,
    PlannerConfig,
    check_planner,
    load_config,
    planned_components,
    planner_config,
    planner_starts,
    resolve,
)
from dynamo_local.core.gpus import plan_on
from dynamo_local.core.restarts import RestartPolicy
from dynamo_local.core.types import GraphSpec
from dynamo_local.core.virtual import Layout
from dynamo_local.errors import EXIT_OK, BadInput, ConfigError, DynamoError
from dynamo_local.runtimes.graph import check_commands, with_commands
from dynamo_local.sdk.loader import load_graph
from dynamo_local.serve import lock, tensorboard
from dynamo_local.serve.engine_checks import check_engines
from dynamo_local.serve.gpu_locks import GpuLocks, lock_folder
from dynamo_local.serve.gpus import GpuPool
from dynamo_local.serve.host import SupervisedHost
from dynamo_local.serve.inventory import open_inventory, pinning_disabled
from dynamo_local.serve.notify import notify
from dynamo_local.serve.paths import Paths
from dynamo_local.serve.plan import Deployment, Settings, WorkerPlanner, base_environment, gpu_asks
from dynamo_local.serve.progress import View, open_view

if TYPE_CHECKING:
    from dynamo_local.serve.adoption import Found

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """The command line of `dynamo serve`, parsed but not yet understood. `on_arbiter_death` is "end" or "keep".

    `target` is None where the file says it all: a graph of commands. `planner` is None where the configuration decides.
    `follow` is "virtual" or None, `follow_keys` "v1", "v0" or None.
    """

    target: str | None
    file: Path | None = None
    overrides: tuple[str, ...] = ()
    namespace: str | None = None
    gpus: str | None = None
    start_deadline_s: float = 300.0
    drain_deadline_s: float = 600.0
    pass_env: tuple[str, ...] = ()
    on_arbiter_death: str | None = None
    adopt: bool = False
    replace: bool = False
    planner: bool | None = None
    follow: str | None = None
    follow_keys: str | None = None


@dataclass(slots=True)
class Tenure:
    """Our hold of a namespace. What lies in it is removed at our end only where it is `ours`."""

    ours: bool = False


@dataclass(frozen=True, slots=True)
class Request:
    """The command line understood: graph and configuration checked, no GPU looked at yet."""

    graph: GraphSpec
    config: Config
    settings: Settings
    paths: Paths
    gpus_option: str | None
    cwd: Path
    planner: PlannerConfig
    planner_starts: bool
    planner_flag: bool | None
    follow: Layout | None = None
    notes: tuple[str, ...] = ()


def understand(options: ServeOptions, environ: Mapping[str, str], cwd: Path, *, only_plan: bool = False) -> Request:
    """Load the graph and its configuration. Raises `BadInput` errors; touches nothing.

    `only_plan`: what this host lacks, but the plan's host may have, becomes a note.
    """
    if options.adopt and options.replace:
        raise BadInput("--adopt takes the running workers back, --replace ends them: say one of the two")
    python = load_graph(options.target, base_dir=cwd) if options.target is not None else None
    config = load_config(options.file, env=environ, overrides=options.overrides)
    graph = with_commands(python, config, options.file)
    spec = resolve(graph, config, namespace=options.namespace)
    planner, starts = planner_config(graph, config), planner_starts(graph, config, flag=options.planner)
    if starts:
        planned_components(spec)
        check_planner(planner, spec)
        tensorboard.check(planner.log_dir)
    follow = _followed(options, spec, starts)
    notes = (
        *check_engines(graph, spec, config, only_plan=only_plan),
        *check_commands(graph, config, environ, only_plan=only_plan),
    )
    return Request(
        graph=spec,
        config=config,
        settings=_settings(options, config, environ),
        paths=Paths.of(spec.namespace, environ),
        gpus_option=options.gpus if options.gpus is not None else config.host.gpus,
        cwd=cwd,
        planner=planner,
        planner_starts=starts,
        planner_flag=options.planner,
        follow=follow,
        notes=notes,
    )


def _followed(options: ServeOptions, graph: GraphSpec, planner_starts: bool) -> Layout | None:
    """Where the keys are that `--follow` names. Raises `BadInput` where it cannot be followed."""
    if options.follow is None:
        if options.follow_keys is not None:
            raise BadInput("--follow-keys says where the keys of --follow are: say --follow virtual, too")
        return None
    if planner_starts:
        ours = (
            "--planner makes its own: say one of the two"
            if options.planner
            else "the configuration's Planner section starts one here: say --no-planner, or `enabled: false` there"
        )
        raise BadInput(
            f"--follow {options.follow} carries out another planner's decisions, and two planners would undo each "
            f"other's; {ours}"
        )
    try:
        planned_components(graph)
    except ConfigError as error:
        raise ConfigError(f"--follow {options.follow}: {str(error).removeprefix('Planner: ')}") from None
    return Layout(options.follow_keys or Layout.V1)


def plan_deployment(
    request: Request, environ: Mapping[str, str], found: Found | None = None
) -> tuple[Deployment, GpuPool]:
    """Assign GPUs and make the plan. The pool's ledger holds the assignment, nothing is locked yet.

    `GpuError` says who has what. With `found`, plan for its workers, on the devices that they have; `ConfigError`
    says in what they differ from the command line.
    """
    from dynamo_local.serve import adoption
    from dynamo_local.state import new_run_id

    spec, config, settings = request.graph, request.config, request.settings
    wanted = any(service.resources.gpu for service in spec.services)
    inventory = open_inventory(request.gpus_option, environ) if wanted and settings.pin_gpus else None
    private = inventory is None or inventory.simulated
    locks = GpuLocks(lock_folder(environ, simulated_for=spec.namespace if private else None))
    pool = GpuPool(spec.namespace, inventory, locks)
    devices = pool.sample()
    planner = WorkerPlanner(
        graph=spec,
        settings=settings,
        paths=request.paths,
        run_id=new_run_id() if found is None else found.state.run_id,
        cwd=request.cwd,
        service_config_json=config.service_config_json(),
        base_env=base_environment(spec, environ, settings),
    )
    etcd = environ.get("ETCD_ENDPOINTS") or config.host.etcd_endpoints
    nats = environ.get("NATS_SERVER") or config.host.nats_server
    masked = config.service_config_json(masked=True)
    gpus_option = request.gpus_option or "all"
    if found is not None:
        adoption.check_same(found, adoption.Wish(spec, request.cwd, gpus_option, masked, etcd, nats))
        workers = adoption.adopted_plans(found, planner, adoption.hold_gpus(found, pool))
    else:
        workers = planner.plan_all(plan_on(pool.ledger, gpu_asks(spec)) if inventory is not None else {})
    deployment = Deployment(
        graph=spec,
        run_id=planner.run_id,
        paths=request.paths,
        settings=settings,
        planner=planner,
        workers=workers,
        gpus=devices,
        gpus_option=gpus_option,
        etcd_endpoints=etcd,
        nats_server=nats,
        config_sections=config.masked_sections(),
        state_config_json=masked,
        load_planner=request.planner,
        load_planner_starts=request.planner_starts,
        load_planner_flag=request.planner_flag,
        follow=request.follow,
    )
    return deployment, pool


def _settings(options: ServeOptions, config: Config, environ: Mapping[str, str]) -> Settings:
    return Settings(
        start_deadline_s=options.start_deadline_s,
        drain_deadline_s=options.drain_deadline_s,
        lease_ttl_s=_lease_ttl_s(environ),
        pass_env=(*config.host.pass_env, *options.pass_env),
        pin_gpus=not pinning_disabled(environ),
        keep_on_arbiter_death=options.on_arbiter_death == "keep",
        health_bound_s=config.host.health_bound_s,
        restart=RestartPolicy(**config.host.restart.model_dump()),
        metrics_port=config.host.metrics_port,
    )


def _lease_ttl_s(environ: Mapping[str, str]) -> int:
    text = environ.get("DYN_LEASE_TTL_S", "10")
    if not text.isdigit() or int(text) < 1:
        raise ConfigError(f"DYN_LEASE_TTL_S={text!r}: whole seconds, 1 or more")
    return int(text)


MakeHost = Callable[[Deployment], SupervisedHost]
"""Called on the running loop."""


def own_arbiter(deployment: Deployment) -> SupervisedHost:
    """The arbiter of `dynamo serve`: this process itself."""
    from dynamo_local.circus_plugins.arbiter import DynamoArbiter

    paths = deployment.paths
    return DynamoArbiter(endpoint=paths.circus_endpoint, pubsub_endpoint=f"ipc://{paths.events_socket}")


def serve(options: ServeOptions, *, boot_report: Path | None = None) -> int:
    """Run the graph in this process until it has left; the exit code. Raises before anything starts."""
    detached = boot_report is not None
    return serve_with(
        options,
        f"`dynamo serve {options.target or f'-f {options.file}'}` {'detached' if detached else 'in the foreground'}",
        lambda paths: open_view(detached=detached, boot_report=boot_report or paths.boot_report),
        own_arbiter,
    )


def serve_with(options: ServeOptions, who: str, make_view: Callable[[Paths], View], make_host: MakeHost) -> int:
    """`serve` with another view, or another host. `who` is how the namespace's lock names us to others."""
    os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"  # before gRPC is imported: else forked children die (circus-facts)
    # circus gives itself a title where setproctitle is installed (vLLM brings it): not over our environment, please.
    os.environ["SPT_NOENV"] = "1"
    from dynamo_local.serve.adoption import settle

    request = understand(options, os.environ, Path.cwd())
    request.paths.prepare()
    with _exclusive(request.paths, who) as tenure:
        log_file = request.paths.log_file(f"{request.graph.namespace}_arbiter")
        with _logging_to(log_file), closing(make_view(request.paths)) as view:
            found = settle(request.paths, adopt=options.adopt, replace=options.replace, tell=_tell(view))
            tenure.ours = found is None
            request.paths.prepare()
            for socket in (request.paths.control_socket, request.paths.events_socket):
                socket.unlink(missing_ok=True)  # a killed arbiter's
            if found is not None and options.on_arbiter_death is None:
                request = _with_policy(request, keep=found.state.on_arbiter_death == "keep")
            deployment, pool = plan_deployment(request, os.environ, found)
            with closing(pool):
                return asyncio.run(_run(deployment, pool, view, make_host, found, tenure))


def _with_policy(request: Request, *, keep: bool) -> Request:
    return replace(request, settings=replace(request.settings, keep_on_arbiter_death=keep))


def _tell(view: View) -> Callable[[str], None]:
    def tell(text: str) -> None:
        log.warning("%s", text)
        view.event(text)

    return tell


@contextmanager
def _exclusive(paths: Paths, what: str) -> Iterator[Tenure]:
    """The namespace's lock, and at the end nothing left of what is ours."""
    held = lock.acquire(paths.lock, paths.namespace, what)
    tenure = Tenure()
    try:
        paths.prepare()  # whoever had the namespace before us may have removed them while we waited
        yield tenure
    finally:
        if tenure.ours or not any(paths.runtime.iterdir()):
            shutil.rmtree(paths.runtime, ignore_errors=True)
        lock.release(held)


@contextmanager
def _logging_to(path: Path) -> Iterator[None]:
    handler = logging.handlers.RotatingFileHandler(path, maxBytes=16 * 1024 * 1024, backupCount=3, delay=True)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    for chatty in ("circus", "uvicorn"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    path.touch(mode=0o600)
    try:
        yield
    finally:  # the plugin under a stock circusd comes here more than once
        root.removeHandler(handler)
        handler.close()


async def _run(
    deployment: Deployment, pool: GpuPool, view: View, make_host: MakeHost, found: Found | None, tenure: Tenure
) -> int:
    from dynamo_local.serve.supervisor import Supervisor
    from dynamo_local.state import StateStore

    arbiter = make_host(deployment)
    store = StateStore(deployment.paths.statefile)
    supervisor = Supervisor(deployment, arbiter=arbiter, store=store, pool=pool, clock=AsyncioClock(), view=view)
    _handle_signals(supervisor.signalled, view)
    code = EXIT_OK
    try:
        await supervisor.start(found)
        tenure.ours = True
        notify("READY=1")
        why = await supervisor.wait_down_request()
        view.event(f"leaving ({why}): finishing what streams; a second Ctrl-C ends at once")
    except DynamoError as error:
        code = error.exit_code
        view.failed(str(error), code)
    finally:
        notify("STOPPING=1")
        await supervisor.leave()
        await arbiter.close()
    return code


def _handle_signals(ask: Callable[[str], None], view: View) -> None:
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, ask, "Ctrl-C")
    loop.add_signal_handler(signal.SIGTERM, ask, "SIGTERM")
    loop.add_signal_handler(
        signal.SIGHUP,
        view.event,
        "SIGHUP is refused: a reload would start a second copy of each GPU worker; "
        "use `dynamo down` and `dynamo serve`",
    )
