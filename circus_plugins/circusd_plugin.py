"""`[plugin:dynamo]` for somebody's own `circus.ini`: the graph as watchers of their circusd, beside their others.

    [plugin:dynamo]
    use = dynamo_local.circus_plugins.circusd_plugin.DynamoPlugin
    deployment = /srv/llm/configs/disagg.yaml

The YAML is the one of `dynamo serve -f`; its `Host: circusd:` names the graph. The plugin is a process of its own, with
the same supervisor in it as under `dynamo serve`. `docs/circusd.md` says what this mode cannot do as well.

circusd imports this module, too (to see that it exists): nothing heavy, and nothing that starts threads, may be
imported at its top.
"""

from __future__ import annotations

import asyncio
import logging
import logging.handlers
import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from circus.plugins import CircusPlugin

from dynamo_local.core.fleet.states import STAGES
from dynamo_local.errors import BadInput, DynamoError, NamespaceBusy, NotRunning

if TYPE_CHECKING:
    from dynamo_local.arbiter.deployment import Deployment
    from dynamo_local.arbiter.progress import Row
    from dynamo_local.arbiter.request import ServeOptions
    from dynamo_local.circus_plugins.commands import Any
    from dynamo_local.circus_plugins.under_circusd import UnderCircusd
    from dynamo_local.system.process_host import ExitCallback

log = logging.getLogger(__name__)
run_log = logging.getLogger("dynamo_local.run")
"""Logs the run. `log` logs the plugin's start and end, in a file that exists before any run."""

LOG_NAME = "circusd_plugin.log"
"""In the log folder, of all namespaces: circusd sends a plugin's own output to /dev/null."""
PREDECESSOR_TIMEOUT_S = 3600.0
PREDECESSOR_POLL_S = 0.2
"""`circusctl reload` starts a new plugin before it ends the old one, which then finishes its streams."""
LEAVE_SLACK_S = 60.0


class DynamoPlugin(CircusPlugin):  # type: ignore[misc]
    """Runs one deployment under the circusd that started it."""

    name = "dynamo"

    def __init__(self, endpoint: str, pubsub_endpoint: str, check_delay: float, ssh_server: Any = None, **config: Any):
        super().__init__(endpoint, pubsub_endpoint, check_delay, ssh_server, **config)
        self.loop.close()  # circus's loop; the supervisor makes its own
        self._own_watcher = str(config.get("name", f"plugin:{self.name}"))
        self._host: UnderCircusd | None = None
        self._deployment_file = Path()

    def start(self) -> None:
        """Run the graph until `dynamo down`, or until circusd stops us. A failure is logged and not tried again."""
        from dynamo_local.circus_plugins.under_circusd import stop_own_watcher
        from dynamo_local.system.paths import log_root, private_folder
        from dynamo_local.system.prctl import set_parent_death_signal

        _log_to(private_folder(log_root(os.environ)) / LOG_NAME)
        set_parent_death_signal(signal.SIGTERM)  # circusd was killed: leave as on its request
        os.environ.pop("NOTIFY_SOCKET", None)  # circusd itself notifies systemd
        log.info("[%s] starts", self._own_watcher)
        try:
            code = self._serve()
            log.info("[%s] has left (exit code %d)", self._own_watcher, code)
        except (DynamoError, OSError) as error:
            log.error("[%s] %s; `circusctl start %s` tries again", self._own_watcher, error, self._own_watcher)
        if self._host is None or not self._host.hurried:
            asyncio.run(stop_own_watcher(self.endpoint, self._own_watcher))

    def _serve(self) -> int:
        from dynamo_local.arbiter.launch import serve_with

        if self.ssh_server is not None:
            raise BadInput("a circusd behind ssh is another host: its processes cannot be watched from here")
        if "deployment" not in self.config:
            raise BadInput(f"the [{self._own_watcher}] section needs `deployment = /path/of/a/deployment.yaml`")
        self._deployment_file = Path(self.config["deployment"]).resolve()  # now: the folder changes
        options, folder = deployment_options(self._deployment_file, os.environ)
        os.chdir(folder)
        who = f"the circusd plugin {self._own_watcher}"
        deadline_s = time.monotonic() + PREDECESSOR_TIMEOUT_S
        logged = False
        while True:
            try:
                return serve_with(options, who, lambda paths: LogView(), self._make_host)
            except NotRunning:
                if not options.adopt:
                    raise
                options = replace(options, adopt=False)  # nothing is left to adopt: start anew
            except NamespaceBusy as error:
                if time.monotonic() > deadline_s:
                    raise
                if not logged:
                    log.warning("[%s] waits: %s", self._own_watcher, error)
                logged = True
                time.sleep(PREDECESSOR_POLL_S)

    def _make_host(self, deployment: Deployment, supervisor: Any, on_exit: ExitCallback) -> UnderCircusd:
        from dynamo_local.circus_plugins.under_circusd import UnderCircusd

        drain_s = max((plan.graceful_timeout_s for plan in deployment.workers), default=0.0)
        self._host = UnderCircusd(
            endpoint=self.endpoint,
            pubsub_endpoint=self.pubsub_endpoint,
            own_watcher=self._own_watcher,
            control_socket=deployment.paths.control_socket,
            namespace=deployment.graph.namespace,
            leave_bound_s=len(STAGES) * drain_s + LEAVE_SLACK_S,
            deployment_file=self._deployment_file,
            supervisor=supervisor,
            on_exit=on_exit,
        )
        return self._host

    def stop(self) -> None:
        """When `start` has returned, everything has ended."""

    def handle_recv(self, data: Any) -> None:
        """Not called: `start` runs a loop of its own."""


def deployment_options(path: Path, environ: Mapping[str, str]) -> tuple[ServeOptions, Path]:
    """The options and the folder of `dynamo serve` that the YAML's `Host: circusd:` stands for. Raises `BadInput`."""
    from dynamo_local.arbiter.request import ServeOptions
    from dynamo_local.config.loading import load_config

    wanted = load_config(path, env=environ).host.circusd
    if wanted is None:
        raise BadInput(
            f"{path} does not say which graph it configures: add `Host: {{circusd: {{graph: 'module:Service'}}}}`"
        )
    folder = (path.parent / wanted.working_dir).resolve()
    if not folder.is_dir():
        raise BadInput(f"{path}: Host: circusd: working-dir: there is no folder {folder}")
    deadlines = {
        name: value for name in ("start_deadline_s", "drain_deadline_s") if (value := getattr(wanted, name)) is not None
    }
    options = ServeOptions(
        target=wanted.graph,
        file=path.resolve(),
        namespace=wanted.namespace,
        # circusd restarts a killed plugin, which then adopts its workers: no stream is cut.
        on_arbiter_death="keep",
        adopt=True,
        **deadlines,
    )
    return options, folder


class LogView:
    """Writes the progress of start and run to the arbiter's log: nobody reads a plugin's output."""

    wants_logs = False

    def __init__(self) -> None:
        self._shown: dict[str, str] = {}

    def rows(self, title: str, rows: Sequence[Row]) -> None:
        for row in rows:
            if self._shown.get(row.name) != row.state:
                self._shown[row.name] = row.state
                run_log.info("%s: %s%s", row.name, row.state, f" on GPU {row.gpus}" if row.gpus else "")

    def event(self, text: str) -> None:
        run_log.info("%s", text)

    def log_line(self, name: str, line: str, names: Sequence[str]) -> None:
        """Not wanted: every worker has its own file."""

    def ready(self, facts: dict[str, Any]) -> None:
        run_log.info("ready: %s (in %.1f s)", facts.get("frontend_url") or facts["namespace"], facts["seconds"])

    def failed(self, message: str, exit_code: int) -> None:
        run_log.error("%s", message)

    def close(self) -> None:
        """Nothing is open."""


def _log_to(path: Path) -> None:
    handler = logging.handlers.RotatingFileHandler(path, maxBytes=4 * 1024 * 1024, backupCount=1)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    log.addHandler(handler)
    path.chmod(0o600)
