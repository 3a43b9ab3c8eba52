"""What several commands share: the namespace option, and a client for the arbiter's control endpoint."""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Mapping
from typing import Any

import click

from dynamo_local.errors import EXIT_FAILED, DynamoError, NotRunning
from dynamo_local.serve.paths import Paths

DEFAULT_NAMESPACE = "dynamo"

LOOK_EVERY_S = 0.5
"""How often a client without an answer looks whether the arbiter still lives."""

namespace_option = click.option(
    "--namespace",
    "-n",
    default=None,
    envvar="DYN_NAMESPACE",
    help=f"The graph's namespace (default: the only one that runs, else {DEFAULT_NAMESPACE}).",
)

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")


def find_paths(namespace: str | None) -> Paths:
    """Paths of the namespace; without one, of the only running graph, else of the default namespace."""
    if namespace is not None:
        return Paths.of(namespace, os.environ)
    default = Paths.of(DEFAULT_NAMESPACE, os.environ)
    if default.control_socket.exists():
        return default
    running = sorted(socket.parent.name for socket in default.runtime.parent.glob("*/ctl.sock"))
    if len(running) == 1:
        return Paths.of(running[0], os.environ)
    if len(running) > 1:
        raise NotRunning(f"no graph runs in namespace 'dynamo'; say --namespace with one of: {', '.join(running)}")
    return default


def ask_arbiter(paths: Paths, command: str, timeout_s: float = 5.0, **properties: Any) -> dict[str, Any]:
    """Send one circus command and return its answer.

    Raises `NotRunning` if the arbiter is gone or does not answer within the timeout, `DynamoError` if it refuses.
    Plain pyzmq: circus's client pulls in tornado and psutil, a third of `dynamo status`'s time.
    """
    if not paths.control_socket.exists():
        raise NotRunning(
            f"nothing runs in namespace {paths.namespace!r} (no {paths.control_socket}); try `dynamo serve`"
        )
    import zmq

    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    try:
        socket.connect(paths.circus_endpoint)
        call_id = uuid.uuid4().hex
        socket.send(json.dumps({"id": call_id, "command": command, "properties": properties}).encode())
        _wait_answer(socket, paths, timeout_s)
        answer: dict[str, Any] = json.loads(socket.recv())
    finally:
        socket.close()
        context.term()
    if answer.get("status") != "ok":
        raise ArbiterRefused(answer)
    return answer


def _wait_answer(socket: Any, paths: Paths, timeout_s: float) -> None:
    """Return when there is something to read. A killed arbiter leaves its socket, but not its lock: said at once."""
    deadline_s = time.monotonic() + timeout_s
    while not socket.poll(int(min(timeout_s, LOOK_EVERY_S) * 1000)):
        if not _is_held(paths):
            raise NotRunning(
                f"the arbiter of {paths.namespace!r} has been killed: it left {paths.control_socket}; "
                "`dynamo serve` cleans up after it (or takes back what runs, with --adopt), `dynamo down` ends it"
            )
        if time.monotonic() >= deadline_s:
            raise NotRunning(
                f"the arbiter of {paths.namespace!r} did not answer within {timeout_s:.0f} s on {paths.control_socket}"
            )


def _is_held(paths: Paths) -> bool:
    from dynamo_local.serve.lock import is_held  # not needed where the answer comes at once

    return is_held(paths.lock)


class ArbiterRefused(DynamoError):
    """The arbiter said no: its message and its exit code (`details["code"]` names its error's type)."""

    def __init__(self, answer: Mapping[str, Any]) -> None:
        reason = str(answer.get("reason") or "the arbiter refused without a reason")
        super().__init__(reason, code=answer.get("code"))
        self.exit_code = int(answer.get("exit_code", EXIT_FAILED))  # type: ignore[misc]  # of this one refusal
