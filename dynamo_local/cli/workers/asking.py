"""What `scale`, `drain` and `restart` share: ask the arbiter, say what it began, and wait for the end if asked to."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import click

from dynamo_local.cli.common import ask_arbiter
from dynamo_local.cli.workers.waiting import Goal, Wait, Want, look
from dynamo_local.system.paths import Paths

COMMIT_TIMEOUT_S = 30.0
"""An answer comes when the intent is committed: milliseconds, or as long as a slow disk takes to fsync."""


@dataclass(frozen=True, slots=True)
class Manner:
    """How the caller wants to be answered."""

    as_json: bool
    wait: bool
    timeout_s: float


def ask_and_tell(
    paths: Paths,
    manner: Manner,
    command: str,
    properties: Mapping[str, Any],
    *,
    goals: Callable[[dict[str, Any]], Iterable[tuple[str, Goal]]],
    words: Callable[[dict[str, Any]], str],
) -> None:
    """Send `command`, print `words` of the reply (or the reply itself), and wait until all `goals` are reached.

    With --json stdout holds one object only, with each worker's end under `outcomes`; progress goes to stderr.
    Raises what the arbiter refuses, `WorkerDied` and `TimedOut`.
    """
    before = look(paths) if manner.wait else {}
    reply = ask_arbiter(paths, command, timeout_s=COMMIT_TIMEOUT_S, **properties)
    reply = {key: value for key, value in reply.items() if key not in ("id", "status", "time")}
    if not manner.as_json:
        click.echo(words(reply))
    if not manner.wait:
        if manner.as_json:
            click.echo(json.dumps(reply))
        return
    waiting = Wait(
        [Want.of(name, goal, before) for name, goal in goals(reply)],
        lambda: look(paths),
        lambda line: click.echo(line, err=manner.as_json),
    )
    try:
        waiting.run(manner.timeout_s)
    finally:
        if manner.as_json:
            outcomes = {name: outcome.text for name, outcome in waiting.outcomes.items()}
            click.echo(json.dumps({**reply, "outcomes": outcomes}))
    waiting.raise_failures(paths)
