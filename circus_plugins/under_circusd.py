"""The supervisor's host under a stock circusd: it does what our own arbiter does besides running processes.

* It answers our commands on the namespace's own control endpoint: `dynamo status`, `scale`, `drain`, `restart` and
`down` work.

* It reads circusd's event stream: `circusctl stop NAME` becomes a drain.

* SIGTERM, from circusd's `quit` or a `stop` of the plugin, means leaving in order.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio
from tornado.ioloop import IOLoop

from dynamo_local.circus_plugins.answers import new_stimulus_id, refusal
from dynamo_local.circus_plugins.circus_client import CircusClient, CircusdError
from dynamo_local.circus_plugins.client_host import CircusClientHost
from dynamo_local.circus_plugins.controller import WorkerController
from dynamo_local.circus_plugins.gate import listen_again, socket_file
from dynamo_local.core.fleet.events import Drain, Restart
from dynamo_local.errors import BadInput, DynamoError
from dynamo_local.system.process_host import ExitCallback

log = logging.getLogger(__name__)

READY_PATIENCE_S = 600.0
"""circusd starts its watchers one after the other, with its `warmup_delay`, and refuses every command meanwhile."""
QUIT_GRACE_S = 0.25
"""`quit` stops all watchers at once. So wait this long after the event of one watcher to recognise a `quit`."""


class _AnsweredByCircusd:
    """Refuses circus's own commands on our endpoint: they belong to the circusd that runs the watchers."""

    def __init__(self, name: str, endpoint: str) -> None:
        self.name = name
        self._endpoint = endpoint

    def validate(self, props: Any) -> None:
        """Nothing to check: the answer is the same."""

    def execute(self, arbiter: Any, props: Any) -> dict[str, Any]:
        """The refusal, which names the endpoint to use instead."""
        return refusal(
            BadInput(
                f"this graph runs under a stock circusd: use `circusctl --endpoint {self._endpoint} {self.name}`, "
                "or `dynamo status`, `scale`, `drain`, `restart`, `apply`, `down`"
            )
        )


class PluginController(WorkerController):
    """Answers our commands, and names the endpoint for circus's own."""

    def __init__(self, endpoint: str, context: zmq.Context[Any], arbiter: Any, circusd_endpoint: str) -> None:
        super().__init__(endpoint, None, context, IOLoop.current(), arbiter, 0)  # 0: no timer
        for name in self.commands:
            if not name.startswith("dynamo_"):
                self.commands[name] = _AnsweredByCircusd(name, circusd_endpoint)


class UnderCircusd(CircusClientHost):
    """A `SupervisedHost` under the circusd that is our parent.

    `own_watcher` is the plugin's name there (`plugin:dynamo`), `leave_bound_s` the longest time that leaving may take,
    `deployment_file` the file that the ini names.
    """

    def __init__(
        self,
        *,
        endpoint: str,
        pubsub_endpoint: str,
        own_watcher: str,
        control_socket: Path,
        namespace: str,
        leave_bound_s: float,
        deployment_file: Path,
        supervisor: Any,
        on_exit: ExitCallback,
    ) -> None:
        super().__init__(
            endpoint,
            socket=control_socket.with_name("run.sock"),  # as long as ctl.sock, whose length is checked
            circusd_pid=os.getppid(),
            on_exit=on_exit,
            leave_bound_s=leave_bound_s,
        )
        self.supervisor = supervisor
        self._own_watcher = own_watcher
        self._deployment_file = deployment_file
        self._pubsub_endpoint = pubsub_endpoint
        self._namespace = namespace
        self._context: zmq.Context[Any] = zmq.Context()
        self._events_context = zmq.asyncio.Context()
        self._controller = PluginController(f"ipc://{control_socket}", self._context, self, endpoint)
        self._tasks: set[asyncio.Task[None]] = set()

    # --- coming and going ------------------------------------------------------------------------

    async def start(self) -> None:
        owner = os.stat(f"/proc/{self.circusd_pid}").st_uid
        if owner != os.getuid():
            raise DynamoError(
                f"circusd runs as uid {owner} and this plugin as uid {os.getuid()}: its workers would not be ours; "
                "remove `uid` from the [plugin:…] section, or run circusd as the same user"
            )
        await super().start()
        # circusd must not kill us before the last stream is finished.
        patience = {"graceful_timeout": self._leave_bound_s}
        await self.circusd.exclusive("set", patience_s=READY_PATIENCE_S, name=self._own_watcher, options=patience)
        await self.sweep(f"{self._namespace.lower()}_")
        self._controller.start()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self._stop_requested)
        self._run(self._listen())

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._controller.stop()
        self._context.destroy(linger=200)
        self._events_context.destroy(linger=0)
        await super().close()

    @property
    def socket_files(self) -> tuple[Path, ...]:
        return socket_file(self._controller.endpoint), self._tickets.path

    async def renew_sockets(self) -> None:
        listen_again(self._controller.ctrl_socket, self._controller.endpoint)
        if not self._tickets.path.exists():
            await self._tickets.close()
            self._tickets.open()

    def refuses_to_apply(self, file: str | None, overrides: Sequence[str]) -> Sequence[str]:
        if file == str(self._deployment_file) and not overrides:
            return ()
        return [
            f"circusd starts this graph from {self._deployment_file}, and would not take its workers back with "
            "anything else: write the change into that file, and apply it without overrides"
        ]

    def _stop_requested(self) -> None:
        """circusd holds its only slot until we are gone. So no watcher can be removed any more, and none need be."""
        self.hurried = True
        self.supervisor.request_down("circusd stops the plugin")

    def _run(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # --- circusd's own commands for our watchers ---------------------------------------------------

    async def _listen(self) -> None:
        """Events may be lost (pub/sub). circusd then kills the stopped watcher after `leave_bound_s`."""
        prefix = f"watcher.{self._namespace.lower()}_"
        with self._events_context.socket(zmq.SUB) as events:
            events.linger = 0
            events.subscribe(prefix.encode())
            events.connect(self._pubsub_endpoint)
            while True:
                topic, body, *_ = await events.recv_multipart()
                watcher, _, event = topic.decode().removeprefix("watcher.").rpartition(".")
                if event == "kill":
                    self._run(self._on_circusctl_stop(watcher, int(json.loads(body)["process_pid"])))

    async def _on_circusctl_stop(self, watcher: str, pid: int) -> None:
        """circusd was told to stop our watcher, and our stop signal has no effect. Drain a worker, end a server."""
        await asyncio.sleep(QUIT_GRACE_S)
        if self.hurried or pid not in {running.pid for running in self._running.values()}:
            return
        for row in self.supervisor.status()["workers"]:
            if row["pid"] == pid and await self._carried_out(row["watcher_name"]):
                return
        log.warning("circusd stops %s (pid %d), which cannot be drained now: SIGTERM", watcher, pid)
        os.kill(pid, signal.SIGTERM)

    async def _carried_out(self, name: str) -> bool:
        """Drain or restart the worker, as circusd was told. Returns False, and logs, if that is impossible now."""
        try:
            if await self._is_stopping(name):
                stimulus_id = new_stimulus_id("circusctl-stop")
                await self.supervisor.run(Drain(stimulus_id=stimulus_id, name=name, force=True))
            else:
                stimulus_id = new_stimulus_id("circusctl-reload")
                await self.supervisor.run(Restart(stimulus_id=stimulus_id, name=name, force=True))
        except DynamoError as error:
            log.warning("circusd ends %s: %s", name, error)
            return False
        return True

    async def _is_stopping(self, name: str) -> bool:
        """Whether it is stopping or gone: `stop`, `restart`, `rm`. `reload` and `kill` want a new process instead."""
        # `status` of one watcher has its status in place of the reply's own.
        statuses = (await self.circusd.call("status")).get("statuses", {})
        return bool(statuses.get(name) != "active")


async def stop_own_watcher(endpoint: str, own_watcher: str) -> None:
    """Ask circusd to stop the plugin for good, which sends us SIGTERM. A refusal is logged."""
    client = CircusClient(endpoint)
    try:
        await client.exclusive("stop", patience_s=READY_PATIENCE_S, name=own_watcher, match="simple")
    except CircusdError as error:
        log.error(
            "circusd will start the graph again, because it could not be asked to stop %s: %s", own_watcher, error
        )
    finally:
        await client.close()
