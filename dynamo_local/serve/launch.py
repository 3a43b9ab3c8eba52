"""From the words of `dynamo serve` to a running arbiter: parse everything, refuse early, lock, run, clean up."""

from __future__ import annotations

import asyncio
import logging
import logging.handlers
import os
import shutil
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from dynamo_local.clock import AsyncioClock
from dynamo_local.config import Config, load_config, resolve
from dynamo_local.core.gpus import plan_on
from dynamo_local.core.restarts import RestartPolicy
from dynamo_local.core.types import GraphSpec
from dynamo_local.errors import EXIT_OK, ConfigError, DynamoError
from dynamo_local.sdk.loader import load_graph
from dynamo_local.serve import lock
from dynamo_local.serve.gpu_locks import GpuLocks, lock_folder
from dynamo_local.serve.gpus import GpuPool
from dynamo_local.serve.host import SupervisedHost
from dynamo_local.serve.inventory import open_inventory, pinning_disabled
from dynamo_local.serve.notify import notify
from dynamo_local.serve.paths import Paths
from dynamo_local.serve.plan import Deployment, Settings, WorkerPlanner, base_environment, gpu_asks
from dynamo_local.serve.progress import View, open_view

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """The command line of `dynamo serve`, parsed but not yet understood."""

    target: str
    file: Path | None = None
    overrides: tuple[str, ...] = ()
    namespace: str | None = None
    gpus: str | None = None
    start_deadline_s: float = 300.0
    drain_deadline_s: float = 600.0
    pass_env: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Request:
    """The command line understood: graph and configuration checked, no GPU looked at yet."""

    graph: GraphSpec
    config: Config
    settings: Settings
    paths: Paths
    gpus_option: str | None
    cwd: Path


def understand(options: ServeOptions, environ: Mapping[str, str], cwd: Path) -> Request:
    """Load the graph and its configuration. Raises `BadInput` errors; touches nothing."""
    graph = load_graph(options.target, base_dir=cwd)
    config = load_config(options.file, env=environ, overrides=options.overrides)
    spec = resolve(graph, config, namespace=options.namespace)
    return Request(
        graph=spec,
        config=config,
        settings=_settings(options, config, environ),
        paths=Paths.of(spec.namespace, environ),
        gpus_option=options.gpus if options.gpus is not None else config.host.gpus,
        cwd=cwd,
    )


def plan_deployment(request: Request, environ: Mapping[str, str]) -> tuple[Deployment, GpuPool]:
    """Assign GPUs and make the plan. The pool's ledger holds the assignment, nothing is locked yet.

    `GpuError` says who has what.
    """
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
        run_id=new_run_id(),
        cwd=request.cwd,
        service_config_json=config.service_config_json(),
        base_env=base_environment(spec, environ, settings),
    )
    given = plan_on(pool.ledger, gpu_asks(spec)) if inventory is not None else {}
    deployment = Deployment(
        graph=spec,
        run_id=planner.run_id,
        paths=request.paths,
        settings=settings,
        planner=planner,
        workers=planner.plan_all(given),
        gpus=devices,
        gpus_option=request.gpus_option or "all",
        etcd_endpoints=environ.get("ETCD_ENDPOINTS") or config.host.etcd_endpoints,
        nats_server=environ.get("NATS_SERVER") or config.host.nats_server,
        config_sections=config.masked_sections(),
        state_config_json=config.service_config_json(masked=True),
    )
    return deployment, pool


def _settings(options: ServeOptions, config: Config, environ: Mapping[str, str]) -> Settings:
    return Settings(
        start_deadline_s=options.start_deadline_s,
        drain_deadline_s=options.drain_deadline_s,
        lease_ttl_s=_lease_ttl_s(environ),
        pass_env=(*config.host.pass_env, *options.pass_env),
        pin_gpus=not pinning_disabled(environ),
        health_bound_s=config.host.health_bound_s,
        restart=RestartPolicy(**config.host.restart.model_dump()),
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
        f"`dynamo serve {options.target}` {'detached' if detached else 'in the foreground'}",
        lambda paths: open_view(detached=detached, boot_report=boot_report or paths.boot_report),
        own_arbiter,
    )


def serve_with(options: ServeOptions, who: str, make_view: Callable[[Paths], View], make_host: MakeHost) -> int:
    """`serve` with another view, or another host. `who` is how the namespace's lock names us to others."""
    os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"  # before gRPC is imported: else forked children die (circus-facts)
    request = understand(options, os.environ, Path.cwd())
    request.paths.prepare()
    with _exclusive(request.paths, who):
        deployment, pool = plan_deployment(request, os.environ)
        _log_to(request.paths.log_file(f"{request.graph.namespace}_arbiter"))
        view = make_view(request.paths)
        try:
            return asyncio.run(_run(deployment, pool, view, make_host))
        finally:
            view.close()
            pool.close()


@contextmanager
def _exclusive(paths: Paths, what: str) -> Iterator[None]:
    """The namespace is ours, and leftovers of a killed predecessor are gone, while this is open."""
    from dynamo_local.serve.leftovers import clear_leftovers

    held = lock.acquire(paths.lock, paths.namespace, what)
    try:
        clear_leftovers(paths)
        yield
    finally:
        shutil.rmtree(paths.runtime, ignore_errors=True)
        lock.release(held)


def _log_to(path: Path) -> None:
    handler = logging.handlers.RotatingFileHandler(path, maxBytes=16 * 1024 * 1024, backupCount=3, delay=True)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    logging.getLogger("circus").setLevel(logging.WARNING)
    path.touch(mode=0o600)


async def _run(deployment: Deployment, pool: GpuPool, view: View, make_host: MakeHost) -> int:
    from dynamo_local.serve.supervisor import Supervisor
    from dynamo_local.state import StateStore

    arbiter = make_host(deployment)
    store = StateStore(deployment.paths.statefile)
    supervisor = Supervisor(deployment, arbiter=arbiter, store=store, pool=pool, clock=AsyncioClock(), view=view)
    _handle_signals(supervisor.signalled, view)
    code = EXIT_OK
    try:
        await supervisor.start()
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
