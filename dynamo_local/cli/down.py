"""`dynamo down`: leave gracefully, and return only when all of it is done."""

from __future__ import annotations

import contextlib
import os
import signal
import time

import click

from dynamo_local.arbiter.marks import guarded_arbiter, marked
from dynamo_local.cli.common import SECONDS, ask_arbiter, await_socket, find_paths, namespace_option
from dynamo_local.cli.status import unread_note
from dynamo_local.core.fleet.states import traits_of
from dynamo_local.errors import DynamoError, NotRunning, TimedOut
from dynamo_local.state.raw import prepare_folder
from dynamo_local.system import liveness as living
from dynamo_local.system.liveness import GUARDIAN, holder, is_held, release
from dynamo_local.system.paths import Paths
from dynamo_local.system.processes import is_alive, start_time_s

POLL_S = 0.02
TELL_EVERY_S = 0.5
DEFAULT_TIMEOUT_S = 900.0
SOCKET_PATIENCE_S = 3.0
"""An arbiter whose control socket was removed makes it again within a second."""


@click.command()
@namespace_option
@click.option("--now", is_flag=True, help="End at once, cutting what streams.")
@click.option(
    "--timeout", "timeout_s", type=SECONDS, default=DEFAULT_TIMEOUT_S, show_default=True, help="Seconds to wait."
)
def down(namespace: str | None, now: bool, timeout_s: float) -> None:
    """Stop taking requests, finish what streams, end workers, NATS and etcd. Exit 0 when nothing of ours is left."""
    paths = find_paths(namespace)
    deadline_s = time.monotonic() + timeout_s
    if arbiter_is_dead(paths, timeout_s):
        end_leftovers(paths, now=now)
    else:
        try:
            _leave(paths, now=now, deadline_s=deadline_s, timeout_s=timeout_s)
        except NotRunning:
            for lock in (paths.lock, paths.runtime_lock):  # of a start that was killed before it had begun anything
                living.forget_dead_owner(lock)
            raise
    click.echo(f"{paths.namespace}: down")


def _leave(paths: Paths, *, now: bool, deadline_s: float, timeout_s: float) -> None:
    """Have the live arbiter leave, and see that nothing is left: of this run, whoever serves in its place by then."""
    run = living.recorded(paths)
    pid = _ask(paths, now=now)
    started_s = start_time_s(pid)
    printed: set[str] = set()
    tell_at_s = 0.0
    while is_alive(pid, started_s):
        if time.monotonic() > deadline_s:
            raise _too_long(paths.namespace, timeout_s, living.who(paths))
        if time.monotonic() >= tell_at_s:
            _show_progress(paths, printed)
            tell_at_s = time.monotonic() + TELL_EVERY_S
        time.sleep(POLL_S)
    after = living.recorded(paths)
    of_another_run = after is not None and run is not None and after.run_id != run.run_id
    if not of_another_run and arbiter_is_dead(paths, max(0.0, deadline_s - time.monotonic())):
        end_leftovers(paths, now=now)  # it was killed while it left


def _ask(paths: Paths, *, now: bool) -> int:
    """Ask the arbiter to leave; its pid. One that cannot be asked over its socket is asked by a signal."""
    try:
        await_socket(paths, SOCKET_PATIENCE_S)
    except NotRunning:
        pid = living.arbiter_pid(paths) or guarded_arbiter(marked(paths))
        if pid is None:
            raise
        with contextlib.suppress(ProcessLookupError):
            for _ in range(2 if now else 1):  # the second ends at once
                os.kill(pid, signal.SIGTERM)
                time.sleep(TELL_EVERY_S if now else 0.0)  # else two would count as one
        return pid
    return int(ask_arbiter(paths, "dynamo_down", now=now)["pid"])


def arbiter_is_dead(paths: Paths, timeout_s: float) -> bool:
    """Whether the arbiter is gone and left something behind. Waits for a guardian that is cleaning up."""
    deadline_s = time.monotonic() + timeout_s
    while living.lives(paths):
        if not is_held(paths.lock) or GUARDIAN not in holder(paths.lock):
            return False
        if time.monotonic() > deadline_s:
            raise _too_long(paths.namespace, timeout_s, holder(paths.lock))
        time.sleep(POLL_S)
    found = marked(paths)
    if guarded_arbiter(found) is not None:
        return False  # somebody has removed its lock and its statefile
    return bool(found) or paths.statefile.exists() or paths.control_socket.exists()


def end_leftovers(paths: Paths, *, now: bool) -> None:
    """End what a killed arbiter left. Serving workers first finish their streams, unless `now`."""
    from dynamo_local.arbiter import leftovers
    from dynamo_local.arbiter.leftovers import drain_without_arbiter

    prepare_folder(paths.statefile.parent)
    held = living.claim(paths, "`dynamo down` in place of a killed arbiter")
    try:
        click.echo(f"{paths.namespace}: its arbiter is dead; ending what it left")
        leftovers.end_guardian(paths)
        run = leftovers.recorded(paths.statefile)
        if not now:
            drain_without_arbiter(run.living, click.echo)
        for what in leftovers.end_run(paths):
            click.echo(f"ended {what}")
    finally:
        release(held)


def _show_progress(paths: Paths, printed: set[str]) -> None:
    """Print each worker's state once. Prints nothing if the arbiter is already closing its endpoint."""
    if not paths.control_socket.exists():
        return
    try:
        graph = ask_arbiter(paths, "dynamo_status", timeout_s=1.0)["graph"]
    except DynamoError:
        return
    for row in graph["workers"]:
        load = row.get("load") or {}
        active = load.get("request_active_slots")
        left = f", {active} in flight" if active else ""
        key = f"{row['watcher_name']}: {row['state']}{left}, {load.get('unread') or 0}"
        if traits_of(row["state"]).drains and key not in printed:
            printed.add(key)
            unread = unread_note(load)
            click.echo(f"{row['watcher_name']}: {row['state']}{left}{f': {unread}' if unread else ''}")


def _too_long(namespace: str, timeout_s: float, who: str) -> TimedOut:
    return TimedOut(
        f"{namespace} is still leaving after {timeout_s:.0f} s ({who}); `dynamo status` shows what it waits for, "
        "`dynamo down --now` ends it at once"
    )
