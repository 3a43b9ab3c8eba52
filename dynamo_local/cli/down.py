"""`dynamo down`: leave gracefully, and return only when all of it is done."""

from __future__ import annotations

import time

import click

from dynamo_local.cli.common import ask_arbiter, find_paths, namespace_option
from dynamo_local.errors import DynamoError, TimedOut
from dynamo_local.serve.lock import GUARDIAN, acquire, holder, is_held, release
from dynamo_local.serve.paths import Paths
from dynamo_local.serve.processes import is_alive, start_time_s

POLL_S = 0.02
TELL_EVERY_S = 0.5
DEFAULT_TIMEOUT_S = 900.0


@click.command()
@namespace_option
@click.option("--now", is_flag=True, help="End at once, cutting what streams.")
@click.option("--timeout", "timeout_s", default=DEFAULT_TIMEOUT_S, show_default=True, help="Seconds to wait.")
def down(namespace: str | None, now: bool, timeout_s: float) -> None:
    """Stop taking requests, finish what streams, end workers, NATS and etcd. Exit 0 when nothing of ours is left."""
    paths = find_paths(namespace)
    if arbiter_is_dead(paths, timeout_s):
        end_leftovers(paths, now=now)
        return
    pid = ask_arbiter(paths, "dynamo_down", now=now)["pid"]
    started_s = start_time_s(pid)
    told: set[str] = set()
    deadline_s = time.monotonic() + timeout_s
    tell_at_s = 0.0
    while is_held(paths.lock) or is_alive(pid, started_s):
        if time.monotonic() > deadline_s:
            raise _too_long(paths.namespace, timeout_s, holder(paths.lock))
        if time.monotonic() >= tell_at_s:
            _show_progress(paths, told)
            tell_at_s = time.monotonic() + TELL_EVERY_S
        time.sleep(POLL_S)
    click.echo(f"{paths.namespace}: down")


def arbiter_is_dead(paths: Paths, timeout_s: float) -> bool:
    """Nobody answers for the namespace, and something of it is left. A guardian that is at work is waited for."""
    deadline_s = time.monotonic() + timeout_s
    while is_held(paths.lock):
        if GUARDIAN not in holder(paths.lock):
            return False
        if time.monotonic() > deadline_s:
            raise _too_long(paths.namespace, timeout_s, holder(paths.lock))
        time.sleep(POLL_S)
    return paths.statefile.exists() or paths.control_socket.exists()


def end_leftovers(paths: Paths, *, now: bool) -> None:
    """What a killed arbiter left: workers that serve finish what streams (unless `now`), then all of it is ended."""
    from dynamo_local.serve import leftovers
    from dynamo_local.serve.leaving import drain_without_arbiter

    paths.prepare()
    held = acquire(paths.lock, paths.namespace, "`dynamo down` in place of a killed arbiter")
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
    click.echo(f"{paths.namespace}: down")


def _show_progress(paths: Paths, told: set[str]) -> None:
    """Say once per state what each worker is doing; an arbiter that is closing its endpoint has nothing to say."""
    try:
        graph = ask_arbiter(paths, "dynamo_status", timeout_s=1.0)["graph"]
    except DynamoError:
        return
    for row in graph["workers"]:
        load = row.get("load") or {}
        active = load.get("request_active_slots")
        left = f", {active} in flight" if active else ""
        line = f"{row['watcher_name']}: {row['state']}{left}"
        if row["state"] == "draining" and line not in told:
            told.add(line)
            click.echo(line)


def _too_long(namespace: str, timeout_s: float, who: str) -> TimedOut:
    return TimedOut(
        f"{namespace} is still leaving after {timeout_s:.0f} s ({who}); `dynamo status` shows what it waits for, "
        "`dynamo down --now` ends it at once"
    )
