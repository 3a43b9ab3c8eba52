"""`dynamo events [-f]`: what happened to workers and servers, and why. Works when the arbiter is gone, too."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Container, Iterable
from datetime import datetime
from pathlib import Path

import click

from dynamo_local.arbiter.event_log import (
    RUN_ADOPTED,
    RUN_ENDED,
    RUN_EVENTS,
    RUN_NOT_ADOPTED,
    RUN_STARTED,
    EventTail,
    arbiter_name,
    event_log_path,
    is_aside,
    read,
)
from dynamo_local.cli.common import complete_names, find_paths, namespace_option
from dynamo_local.errors import BadInput, NotRunning
from dynamo_local.system.json_lines import Record

POLL_S = 0.1
COMMON = frozenset({"time", "seq", "watcher_name", "component", "event", "from", "to", "stimulus_id", "reason"})
"""Keys with a fixed place in the line. All others belong to the event and are shown in its brackets."""

NOT_IN_LINE = frozenset({"pid_start_time", "instructions", "aside"})
"""Keys for which a line has no room. --json shows all, --story the instructions."""

BOUNDARIES = {
    RUN_STARTED: "begins",
    RUN_ADOPTED: "is being taken back",
    RUN_NOT_ADOPTED: "was not taken back",
    RUN_ENDED: "ends",
}


@click.command()
@click.option("--follow", "-f", is_flag=True, help="Go on as events come; Ctrl-C ends it.")
@click.option(
    "--lines", "-l", default=100, show_default=True, type=click.IntRange(min=0), help="How many to begin with."
)
@click.option(
    "--worker",
    metavar="NAME",
    shell_complete=complete_names,
    help="Only events of this worker (or of etcd, nats). The namespace prefix may be left out.",
)
@click.option(
    "--story",
    metavar="NAME",
    shell_complete=complete_names,
    help="One worker's life: each event, its cause, and what was done about it.",
)
@click.option("--json", "as_json", is_flag=True, help="JSON lines, as in the file.")
@namespace_option
def events(
    follow: bool, lines: int, worker: str | None, story: str | None, as_json: bool, namespace: str | None
) -> None:
    """Show the last changes of workers' states, each with its cause, and where runs begin and end.

    A story has each step in which something was done about the worker, also where its state stayed the same.
    """
    if story is not None and worker not in (None, story):
        raise BadInput(f"--story {story} is about that worker alone; leave --worker {worker} out")
    worker = worker if story is None else story
    show = _show if story is None else _tell_story
    paths = find_paths(namespace)
    log = event_log_path(paths.logs)
    names = None if worker is None else {worker, f"{paths.namespace}_{worker}"}
    newest = max((record["seq"] for record in read(log, last=1, asides=True)), default=0)
    if not newest and not follow:
        raise NotRunning(f"no events of namespace {paths.namespace!r} in {log}")
    known = read(log, last=lines, of=names, asides=story is not None)
    if not known and lines and not follow:
        raise BadInput(f"no events of a worker named {worker!r}; there are some of: {', '.join(_names(log))}")
    if names is not None:
        names.add(arbiter_name(paths.namespace))  # in which run it was
        since = known[0]["seq"] - 1 if known else 0
        known = read(log, since_seq=since, of=names, asides=story is not None) if known else known
    show(known, as_json)
    if follow:
        tail = EventTail(log, max(newest, *(record["seq"] for record in known), 0))
        _follow(tail, lambda record: _wanted(record, names, story is not None), lambda found: show(found, as_json))


def _names(log: Path) -> list[str]:
    return sorted({record["watcher_name"] for record in read(log)})


def _wanted(record: Record, names: Container[str] | None, asides: bool) -> bool:
    return (names is None or record["watcher_name"] in names) and (asides or not is_aside(record))


def _follow(tail: EventTail, wanted: Callable[[Record], bool], show: Callable[[Iterable[Record]], None]) -> None:
    try:
        while True:
            show([record for record in tail.poll() if wanted(record)])
            time.sleep(POLL_S)
    except KeyboardInterrupt:
        return


def _show(records: Iterable[Record], as_json: bool) -> None:
    for record in records:
        if as_json:
            click.echo(json.dumps(record, ensure_ascii=False))
        else:
            click.echo(f"{_at(record)} {in_words(record)}")


def _tell_story(records: Iterable[Record], as_json: bool) -> None:
    """Each step, and indented below it what the arbiter did about this worker in it."""
    for record in records:
        _show([record], as_json)
        if not as_json:
            for instruction in record.get("instructions") or ():
                click.echo(f"    -> {instruction}")


def _at(record: Record) -> str:
    at = datetime.fromtimestamp(record["time"]).astimezone()
    return f"{at:%Y-%m-%d %H:%M:%S}.{at.microsecond // 1000:03d}"


def in_words(record: Record) -> str:
    """`dynamo_VllmWorker_1 ready -> draining (DrainRequested by scale:1f0c9a3e: scale -1)`; nulls are left out."""
    if record["event"] in RUN_EVENTS:
        return _boundary(record)
    before, after = record["from"], record["to"]
    change = after if before == after else f"{before} -> {after}"
    facts = [str(record["reason"])] if record.get("reason") else []
    for key, value in record.items():
        if key not in COMMON | NOT_IN_LINE and value is not None:
            facts.append(_fact(key, value))
    told = f": {', '.join(facts)}" if facts else ""
    return f"{record['watcher_name']} {change} ({record['event']} by {record.get('stimulus_id', '?')}{told})"


def _boundary(record: Record) -> str:
    """`---- run 01J… begins: graphs.disagg:Frontend, arbiter pid 4711 ----`"""
    facts = [str(record.get("target") or record.get("reason") or ""), f"arbiter pid {record.get('arbiter_pid', '?')}"]
    if record.get("killed_pid"):
        facts.append(f"the one before (pid {record['killed_pid']}) wrote no end: it was killed")
    if record.get("exit_code"):
        facts.append(f"exit code {record['exit_code']}")
    listed = ", ".join(fact for fact in facts if fact)
    return f"---- run {record.get('run_id', '?')} {BOUNDARIES[record['event']]}: {listed} ----"


def _fact(key: str, value: object) -> str:
    if key == "exit_code" and isinstance(value, int) and value < 0:
        return f"killed by {_signal_name(-value)}"
    if key.endswith("_s") and isinstance(value, (int, float)):
        return f"{key.removesuffix('_s').replace('_', ' ')} {value:g} s"
    return f"{key.replace('_', ' ')} {value}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # most real-time signals have no name in Python
        return f"signal {number}"
