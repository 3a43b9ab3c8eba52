"""`dynamo ls`: all graphs of this user on this host, also those whose arbiter is dead."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

import click

from dynamo_local.cli.common import DEFAULT_NAMESPACE, aligned, ask_arbiter, death_words, json_option
from dynamo_local.core.fleet.states import traits_of
from dynamo_local.core.types import namespace_fault
from dynamo_local.errors import DynamoError, StateError
from dynamo_local.state.raw import namespaces, read_raw
from dynamo_local.state.run_id import began_at
from dynamo_local.system.liveness import lives, who
from dynamo_local.system.paths import Paths, log_root

ANSWER_TIMEOUT_S = 2.0
ENDED_SHOWN_S = 86_400.0
COLUMNS = ("NAMESPACE", "STATE", "WORKERS", "GPUS", "SINCE", "FRONTEND", "NOTE")


@dataclass(frozen=True, slots=True)
class Run:
    """One namespace. `state` is the run's own (`ready`, `starting`, …), or one of the four below.

    `not_answering`: somebody holds the namespace and says nothing. `kept`: the arbiter is dead, workers serve on.
    `dead`: nothing runs, but a statefile is left. `ended`: nothing is left, because the arbiter died. `since` is in
    seconds since 1970.
    """

    namespace: str
    state: str
    run_id: str | None = None
    arbiter_pid: int | None = None
    workers_ready: int = 0
    workers: int = 0
    gpus: Sequence[str] = ()
    since: float | None = None
    frontend_url: str | None = None
    note: str | None = None


@click.command()
@json_option
def ls(as_json: bool) -> None:
    """List your graphs on this host: namespace, state, workers, GPUs, since when, frontend."""
    here = begun(os.environ)
    runs = [run for namespace in here if (run := look(Paths.found(namespace, os.environ))) is not None]
    runs += ended_lately(os.environ, but=here)
    if as_json:
        click.echo(json.dumps([asdict(run) for run in runs], indent=2 if sys.stdout.isatty() else None))
    elif runs:
        click.echo(render(runs))
    else:
        folder = Paths.of(DEFAULT_NAMESPACE, os.environ).statefile.parent
        click.echo(f"none of your graphs runs on this host (no statefile in {folder})", err=True)


def begun(env: Mapping[str, str]) -> list[str]:
    """Namespaces that have a statefile, or a control socket: one that starts has no statefile yet."""
    sockets = Paths.of(DEFAULT_NAMESPACE, env).runtime.parent.glob("*/ctl.sock")
    starting = {socket.parent.name for socket in sockets if namespace_fault(socket.parent.name) is None}
    return sorted(starting.union(namespaces(env)))


def ended_lately(env: Mapping[str, str], but: Container[str]) -> list[Run]:
    """Runs of the last day that ended with their arbiter's death, except in the namespaces `but`."""
    from dynamo_local.arbiter.event_log import ended_by_death, event_log_path

    found = []
    for folder in sorted(log_root(env).glob("*/")):
        name = folder.name
        if name in but or namespace_fault(name) is not None:
            continue
        dead = ended_by_death(event_log_path(folder), name)
        if dead is not None and 0 <= time.time() - dead["time"] < ENDED_SHOWN_S:
            found.append(Run(name, "ended", str(dead.get("run_id")), note=death_words(dead)))
    return found


def look(paths: Paths) -> Run | None:
    """The summary of one namespace. None if the folder is not one of ours."""
    if lives(paths):
        try:
            return of_status(ask_arbiter(paths, "dynamo_status", timeout_s=ANSWER_TIMEOUT_S)["graph"])
        except DynamoError:
            if lives(paths):
                note = f"held by {who(paths)}"
                return of_statefile(paths.namespace, _statefile(paths), "not_answering", note)
    if not paths.statefile.exists():
        return None
    try:
        raw = read_raw(paths.statefile)
    except StateError as error:
        return Run(paths.namespace, "dead", note=f"{error}; `dynamo down -n {paths.namespace}` clears it away")
    if not isinstance(raw.get("run_id"), str):
        return None
    from dynamo_local.arbiter.leftovers import recorded  # not needed for a graph that lives

    living = len(recorded(paths.statefile).living)
    if not living:
        return of_statefile(paths.namespace, raw, "dead", f"`dynamo down -n {paths.namespace}` clears it away")
    workers = "a worker lives" if living == 1 else f"{living} workers live"
    note = f"its arbiter is dead, {workers} on; `dynamo serve … --adopt` takes them back"
    return of_statefile(paths.namespace, raw, "kept", note)


def _statefile(paths: Paths) -> Mapping[str, Any]:
    try:
        return read_raw(paths.statefile)
    except StateError:
        return {}


def of_status(graph: Mapping[str, Any]) -> Run:
    """From the arbiter's own answer."""
    workers = [each for each in graph["workers"] if not traits_of(each["state"]).gone]
    return Run(
        graph["namespace"],
        graph["state"],
        graph["run_id"],
        graph["arbiter_pid"],
        sum(worker["state"] == "ready" for worker in workers),
        len(workers),
        _in_order(gpu for worker in workers for gpu in worker["gpus"]),
        began_at(graph["run_id"]),
        graph.get("frontend_url"),
    )


def of_statefile(namespace: str, raw: Mapping[str, Any], state: str, note: str) -> Run:
    """From what a run has written of itself: nobody answers. How its workers are now is not known."""
    components = raw.get("components")
    entries = [entry for entry in (components or {}).values() if isinstance(entry, dict)]
    entries = [entry for entry in entries if not traits_of(str(entry.get("state"))).gone]
    given = [(entry.get("resources") or {}).get("allocated_gpus") or [] for entry in entries]
    run_id, pid = raw.get("run_id"), raw.get("arbiter_pid")
    return Run(
        namespace,
        state,
        run_id if isinstance(run_id, str) else None,
        pid if isinstance(pid, int) else None,
        0,
        len(entries),
        _in_order(str(gpu) for gpus in given for gpu in gpus),
        began_at(str(run_id)),
        note=note,
    )


def _in_order(gpus: Iterator[str]) -> list[str]:
    return sorted(gpus, key=lambda index: (len(index), index))


def render(runs: Sequence[Run]) -> str:
    """The table."""
    return "\n".join("  ".join(row).rstrip() for row in aligned([COLUMNS, *map(_row, runs)]))


def _row(run: Run) -> tuple[str, ...]:
    answers = run.state not in ("not_answering", "kept", "dead", "ended")
    since = "-" if run.since is None else f"{datetime.fromtimestamp(run.since).astimezone():%Y-%m-%d %H:%M:%S}"
    return (
        run.namespace,
        run.state,
        f"{run.workers_ready}/{run.workers} ready" if answers else str(run.workers),
        ",".join(run.gpus) or "-",
        since,
        run.frontend_url or "-",
        run.note or "",
    )
