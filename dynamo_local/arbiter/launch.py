"""Takes the words of `dynamo serve` to a running arbiter: understand them (`request`), lock, run, clean up."""

from __future__ import annotations

import asyncio
import logging
import logging.handlers
import os
import shutil
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dynamo_local.arbiter.checks import taken_ports
from dynamo_local.arbiter.deployment import Deployment, WatcherFactory, base_environment, gpu_asks, key_environment
from dynamo_local.arbiter.event_log import ARBITER, RunRecords, arbiter_name
from dynamo_local.arbiter.profile_check import check_profile, with_nearest
from dynamo_local.arbiter.progress import View, open_view
from dynamo_local.arbiter.request import Request, ServeOptions, understand
from dynamo_local.clock import AsyncioClock
from dynamo_local.config.loading import Config
from dynamo_local.core.gpus import GpuLedger, plan_on
from dynamo_local.core.secrets import mask_config
from dynamo_local.errors import EXIT_FAILED, EXIT_OK, DynamoError
from dynamo_local.state.raw import prepare_folder
from dynamo_local.system import collector, tracing
from dynamo_local.system import liveness as living
from dynamo_local.system import liveness as lock
from dynamo_local.system.executors import end_at_the_latest
from dynamo_local.system.gpu_locks import GpuLocks, lock_folders
from dynamo_local.system.gpu_pool import GpuPool
from dynamo_local.system.gpus import Inventory, open_inventory
from dynamo_local.system.host_errors import HostRefused, ensure_descriptors, host_refused, telling
from dynamo_local.system.paths import Paths
from dynamo_local.system.process_host import ExitCallback, SupervisedHost
from dynamo_local.system.start_stages import notify
from dynamo_local.transport.access import without_access

if TYPE_CHECKING:
    from dynamo_local.arbiter.adoption import Found

log = logging.getLogger(__name__)

STARVED_S = 10
"""Without memory or threads an orderly end may hang anywhere. After so long SIGALRM ends the arbiter, and then the
guardian ends the run."""


@dataclass(slots=True)
class NamespaceHold:
    """The lock on a namespace. `before` are the paths of a run left in it, which may differ from ours.

    At the end the runtime folder is removed only if its contents are `ours`.
    """

    paths: Paths
    before: Paths
    ours: bool = False


def plan_deployment(
    request: Request, environ: Mapping[str, str], found: Found | None = None
) -> tuple[Deployment, GpuPool]:
    """Assign GPUs and make the plan. Its ledger holds the assignment. Nothing is locked yet.

    `GpuError` says which namespace holds what. With `found`, plan for its workers on their present devices.
    `ConfigError` then names the differences from the command line.
    """
    from dynamo_local.arbiter import adoption
    from dynamo_local.state.run_id import new_run_id

    spec, config, settings = request.graph, request.config, request.settings
    inventory, pool = _devices(request, environ)
    sample = pool.sample()
    if request.planner_starts:
        check_profile(request.planner, spec, [device.name for device in sample.devices], patient=True)
    ledger = GpuLedger.of(sample.devices, elsewhere=sample.elsewhere)
    etcd, nats = _servers(config, environ)
    factory = WatcherFactory(
        graph=spec,
        settings=settings,
        paths=request.paths,
        run_id=new_run_id() if found is None else found.state.run_id,
        cwd=request.cwd,
        service_config_json=config.service_config_json(),
        base_env=without_access(base_environment(spec, environ, settings), etcd=etcd is None, nats=nats is None),
        key_env=key_environment(spec, environ),
        retired=() if found is None else adoption.retired(found.state),
    )
    masked = config.service_config_json(masked=True)
    gpus_option = request.gpus_option or "all"
    if found is not None:
        adoption.check_same(found, adoption.ServeSettings(spec, request.cwd, gpus_option, masked, etcd, nats))
        ledger = adoption.hold_gpus(found, ledger, pool)
        workers = adoption.adopted_plans(found, factory, ledger)
    else:
        ledger = plan_on(ledger, gpu_asks(spec)) if inventory is not None else ledger
        workers = factory.plan_all(ledger.held)
    deployment = Deployment(
        graph=spec,
        run_id=factory.run_id,
        paths=request.paths,
        settings=settings,
        factory=factory,
        workers=workers,
        gpus=sample.devices,
        ledger=ledger,
        gpus_option=gpus_option,
        etcd_endpoints=etcd,
        nats_server=nats,
        config_sections=config.masked_sections(),
        state_config_json=masked,
        load_planner=with_nearest(request.planner, spec, sample.devices),
        load_planner_starts=request.planner_starts,
        load_planner_flag=request.planner_flag,
        follow=request.follow,
        host=config.sections.get("Host", {}),
        command_line=mask_config(request.command_line),
    )
    return deployment, pool


def _devices(request: Request, environ: Mapping[str, str]) -> tuple[Inventory | None, GpuPool]:
    """The GPUs that the run may take, and their pool. Without GPUs it is None and an empty pool."""
    wanted = any(service.resources.gpu for service in request.graph.services)
    inventory = open_inventory(request.gpus_option, environ) if wanted and request.settings.pin_gpus else None
    private = inventory is None or inventory.simulated
    locks = GpuLocks(request.paths.simulated_gpu_locks) if private else GpuLocks(*lock_folders(environ))
    return inventory, GpuPool(request.graph.namespace, inventory, locks)


def _servers(config: Config, environ: Mapping[str, str]) -> tuple[str | None, str | None]:
    """Addresses of the user's own etcd and NATS; None where we start one."""
    etcd = environ.get("ETCD_ENDPOINTS") or config.host.etcd_endpoints
    return etcd, environ.get("NATS_SERVER") or config.host.nats_server


MakeHost = Callable[[Deployment, Any, ExitCallback], SupervisedHost]
"""Makes the host of a deployment, whose commands a supervisor answers. Called on the running event loop.

The host is our own process for `dynamo serve`, a stock circusd for the plugin.
"""


def serve(options: ServeOptions, make_host: MakeHost, *, boot_report: Path | None = None) -> int:
    """Run the graph in this process until it has left. Returns the exit code. Raises before anything starts."""
    detached = boot_report is not None
    return serve_with(
        options,
        f"`dynamo serve {options.target or f'-f {options.file}'}` {'detached' if detached else 'in the foreground'}",
        lambda _paths: open_view(boot_report),
        make_host,
        on_left=end_at_the_latest,
    )


def serve_with(
    options: ServeOptions,
    who: str,
    make_view: Callable[[Paths], View],
    make_host: MakeHost,
    on_left: Callable[[int], None] = lambda code: None,
) -> int:
    """`serve` with another view, or another host.

    `who` names us to others that want the namespace's lock. `on_left` gets the exit code when only our own process is
    left.
    """
    os.environ["GRPC_ENABLE_FORK_SUPPORT"] = (
        "0"  # Before gRPC is imported: 21 % of children that were forked beside live gRPC channels died without it.
    )
    # circus sets a process title if setproctitle is installed (vLLM brings it). That must not overwrite our
    # environment.
    os.environ["SPT_NOENV"] = "1"
    from dynamo_local.arbiter.adoption import settle

    ensure_descriptors()
    with collector.paused():  # it imports the graph
        request = understand(options, os.environ, Path.cwd())
    with _exclusive(request.paths, who, adopt=options.adopt) as hold:
        request = replace(request, paths=hold.paths)
        log_file = request.paths.log_file(f"{request.graph.namespace}_arbiter")
        with _logging_to(log_file), closing(make_view(request.paths)) as view:
            for line in (*options.reasons, *request.notes):
                log.info("%s", line)
                view.event(line)
            found = settle(hold.before, adopt=options.adopt, replace=options.replace, tell=_tell(view))
            hold.ours = found is None
            if found is None and (taken := next(taken_ports(request.ports), None)) is not None:
                raise taken
            request.paths.prepare()
            for socket in (request.paths.control_socket, request.paths.events_socket):
                socket.unlink(missing_ok=True)  # a killed arbiter's
            if found is not None and options.on_arbiter_death is None:
                request = _with_policy(request, keep=found.state.on_arbiter_death == "keep")
            deployment, pool = plan_deployment(request, os.environ, found)
            # A ratio of requests says nothing about decisions and drains, which are few.
            namespace = request.graph.namespace
            tracing.begin(os.environ, ARBITER, namespace, arbiter_name(namespace), _tell(view), sampled=False)
            with closing(pool), closing(tracing):
                return asyncio.run(_run(deployment, pool, view, make_host, found, hold, on_left))


def _with_policy(request: Request, *, keep: bool) -> Request:
    return replace(request, settings=replace(request.settings, keep_on_arbiter_death=keep))


def _tell(view: View) -> Callable[[str], None]:
    def tell(text: str) -> None:
        log.warning("%s", text)
        view.event(text)

    return tell


@contextmanager
def _exclusive(wanted: Paths, what: str, *, adopt: bool) -> Iterator[NamespaceHold]:
    """Hold the namespace's lock. At the end remove what is ours. An adopted run stays."""
    prepare_folder(wanted.statefile.parent)
    with ExitStack() as stack, telling(f"namespace {wanted.namespace!r} cannot be locked"):
        stack.callback(lock.release, living.claim(wanted, what))
        before = Paths.found(wanted.namespace, os.environ)
        hold = NamespaceHold(before if adopt else wanted, before)
        stack.callback(_remove_empty, hold.paths.runtime)
        hold.paths.prepare()
        stack.callback(lock.release, lock.acquire(hold.paths.runtime_lock, wanted.namespace, what))
        held = stack.pop_all()
    with held:
        try:
            yield hold
        finally:
            if hold.ours:
                shutil.rmtree(hold.paths.runtime, ignore_errors=True)


def _remove_empty(folder: Path) -> None:
    with suppress(OSError):
        folder.rmdir()


class _ArbiterLog(logging.handlers.RotatingFileHandler):
    """Drops a line on a full disk without a traceback on stderr. The code that needs the disk reports the fault."""

    def handleError(self, record: logging.LogRecord) -> None:
        """The line is lost."""


@contextmanager
def _logging_to(path: Path) -> Iterator[None]:
    handler = _ArbiterLog(path, maxBytes=16 * 1024 * 1024, backupCount=3, delay=True)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    for chatty in ("circus", "uvicorn"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    with telling("the arbiter cannot log"):
        path.touch(mode=0o600)
    try:
        yield
    finally:  # the plugin under a stock circusd comes here more than once
        root.removeHandler(handler)
        handler.close()


async def _run(
    deployment: Deployment,
    pool: GpuPool,
    view: View,
    make_host: MakeHost,
    found: Found | None,
    hold: NamespaceHold,
    on_left: Callable[[int], None],
) -> int:
    with collector.paused():
        from dynamo_local.arbiter.supervisor import Supervisor
        from dynamo_local.state.store import StateStore

        store = StateStore(deployment.paths.statefile)
        supervisor = Supervisor(
            deployment, partial(make_host, deployment), store=store, pool=pool, clock=AsyncioClock(), view=view
        )
    _handle_signals(supervisor.signalled, view)
    records = RunRecords(deployment, supervisor.parts.events, supervisor.clock.wall_s)
    code, why = EXIT_OK, ""
    ours, hold.ours = hold.ours, False  # until the run has ended in order, its guardian needs the folder
    try:
        await records.began(adopted=found is not None)
        await supervisor.start(found)
        ours = True
        notify("READY=1")
        why = await supervisor.wait_down_request()
        view.event(f"leaving ({why}): finishing what streams; a second Ctrl-C ends at once")
    except Exception as error:
        failure = error if isinstance(error, DynamoError) else host_refused(error, "the graph cannot be started")
        if failure is None:
            code, why = EXIT_FAILED, f"{type(error).__name__}: {error}"
            raise
        if isinstance(failure, HostRefused) and failure.starved:
            signal.alarm(STARVED_S)
        log.error("%s", failure, exc_info=None if failure is error else error)
        code, why = failure.exit_code, str(failure)
        view.failed(why, code)
    finally:
        notify("STOPPING=1")
        try:
            await supervisor.leave()
            hold.ours = ours
        except Exception:
            if code == EXIT_OK:
                raise
            log.exception("the arbiter cannot end its run, and leaves that to the guardian")
        await records.ended(why, code, ours=ours)
        await supervisor.parts.host.close()
        signal.alarm(0)
        on_left(code)
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
