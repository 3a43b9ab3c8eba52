"""`dynamo events [-f]`: what happened to the workers, and what caused it. Works when the arbiter is gone, too."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Container, Iterable
from datetime import datetime
from pathlib import Path

import click

from dynamo_local.cli.common import find_paths
from dynamo_local.errors import BadInput, NotRunning
from dynamo_local.serve.events import EventTail, Record, event_log_path, read

POLL_S = 0.1
COMMON = frozenset({"time", "seq", "watcher_name", "component", "event", "from", "to", "stimulus_id", "reason"})
"""Keys that have a place of their own in a line; the others are the event's and stand in its brackets."""

UNTOLD = frozenset({"pid_start_time"})
"""Part of a process's identity, of no interest to a person; --json has it."""


@click.command()
@click.option("--follow", "-f", is_flag=True, help="Go on as events come; Ctrl-C ends it.")
@click.option(
    "--lines", "-n", default=100, show_default=True, type=click.IntRange(min=0), help="How many to begin with."
)
@click.option("--worker", metavar="NAME", help="Of one worker only, with or without the namespace in front.")
@click.option("--json", "as_json", is_flag=True, help="JSON lines, as in the file.")
@click.option("--namespace", default=None, envvar="DYN_NAMESPACE", help="The graph's namespace (no short form here).")
def events(follow: bool, lines: int, worker: str | None, as_json: bool, namespace: str | None) -> None:
    """Show the last changes of workers' states, each with its cause."""
    paths = find_paths(namespace)
    log = event_log_path(paths.logs)
    names = None if worker is None else {worker, f"{paths.namespace}_{worker}"}
    newest = max((record["seq"] for record in read(log, last=1)), default=0)
    if not newest and not follow:
        raise NotRunning(f"no events of namespace {paths.namespace!r} in {log}")
    known = read(log, last=lines, of=names)
    if not known and lines and not follow:
        raise BadInput(f"no events of a worker named {worker!r}; there are some of: {', '.join(_names(log))}")
    _show(known, as_json)
    if follow:
        _follow(EventTail(log, max(newest, *(record["seq"] for record in known), 0)), names, as_json)


def _names(log: Path) -> list[str]:
    return sorted({record["watcher_name"] for record in read(log)})


def _follow(tail: EventTail, names: Container[str] | None, as_json: bool) -> None:
    try:
        while True:
            _show([record for record in tail.poll() if names is None or record["watcher_name"] in names], as_json)
            time.sleep(POLL_S)
    except KeyboardInterrupt:
        return


def _show(records: Iterable[Record], as_json: bool) -> None:
    today = datetime.now().astimezone().date()
    for record in records:
        if as_json:
            click.echo(json.dumps(record, ensure_ascii=False))
            continue
        at = datetime.fromtimestamp(record["time"]).astimezone()
        day = "" if at.date() == today else f"{at:%Y-%m-%d} "
        click.echo(f"{day}{at:%H:%M:%S}.{at.microsecond // 1000:03d} {in_words(record)}")


def in_words(record: Record) -> str:
    """`dynamo_VllmWorker_1 ready -> draining (DrainRequested by scale:1f0c9a3e: scale -1)`; nulls are not told."""
    before, after = record["from"], record["to"]
    change = after if before == after else f"{before} -> {after}"
    facts = [str(record["reason"])] if record.get("reason") else []
    for key, value in record.items():
        if key not in COMMON | UNTOLD and value is not None:
            facts.append(_fact(key, value))
    told = f": {', '.join(facts)}" if facts else ""
    return f"{record['watcher_name']} {change} ({record['event']} by {record.get('stimulus_id', '?')}{told})"


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
