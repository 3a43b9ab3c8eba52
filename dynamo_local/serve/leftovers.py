"""What a killed arbiter left behind in our namespace, found at the next start and cleared away.

Called with the namespace's lock held: whoever the statefile names as arbiter is dead.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Iterator

import psutil

from dynamo_local.errors import DynamoError
from dynamo_local.serve.paths import Paths
from dynamo_local.serve.processes import is_alive, kill_session, session_members

log = logging.getLogger(__name__)

GONE_TIMEOUT_S = 10.0


def clear_leftovers(paths: Paths) -> list[str]:
    """End workers of dead runs of this namespace, remove their statefile and sockets; returns what was ended.

    A worker is ours if its environment says so (DYN_NAMESPACE and our statefile): a pid alone proves nothing.
    """
    ended = []
    for process in _workers_of(paths):
        ended.append(f"{process.info['name']} (pid {process.pid})")
        _end(process.pid)
    for what in ended:
        log.warning("left over from a killed run of %s, ended: %s", paths.namespace, what)
    paths.statefile.unlink(missing_ok=True)
    for socket in (paths.control_socket, paths.events_socket):
        socket.unlink(missing_ok=True)
    return ended


def _workers_of(paths: Paths) -> Iterator[psutil.Process]:
    """Live processes of ours that carry this namespace's marker in their environment."""
    marker = {"DYN_NAMESPACE": paths.namespace, "DYN_STATEFILE": str(paths.statefile)}
    for process in psutil.process_iter(["name", "uids", "environ"]):
        uids, environ = process.info["uids"], process.info["environ"]
        if uids is None or uids.real != os.getuid() or not environ or process.pid == os.getpid():
            continue
        if all(environ.get(key) == value for key, value in marker.items()) and "DYN_WATCHER_NAME" in environ:
            yield process


def _end(pid: int) -> None:
    try:
        session = os.getsid(pid)
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    if session == pid:
        kill_session(session)
    deadline_s = time.monotonic() + GONE_TIMEOUT_S
    while is_alive(pid) or (session == pid and any(session_members(session))):
        if time.monotonic() > deadline_s:
            raise DynamoError(
                f"pid {pid} of a killed run does not end {GONE_TIMEOUT_S:g} s after SIGKILL; see `ps {pid}`"
            )
        time.sleep(0.01)
