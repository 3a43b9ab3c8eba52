"""`dynamo planner plugins`: who else has a say in the planner's decisions."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import click

from dynamo_local.cli.common import ask_arbiter, find_paths, json_option, namespace_option

ANSWER_TIMEOUT_S = 10.0
_COLUMNS = ("plugin", "stage", "priority", "circuit", "calls", "last", "at")


@click.command()
@json_option
@namespace_option
def plugins(as_json: bool, namespace: str | None) -> None:
    """List the planner's plugins.

    What they do, how they are, and where to register more.
    """
    answer = ask_arbiter(find_paths(namespace), "dynamo_planner_status", ANSWER_TIMEOUT_S)
    told = answer["planner"]["plugins"]
    click.echo(json.dumps(told) if as_json else "\n".join(plugin_lines(told)))


def plugin_lines(told: Mapping[str, Any]) -> Iterator[str]:
    """A table, then what is wrong, then where plugins register."""
    rows = [_COLUMNS, *(_row(plugin) for plugin in told["plugins"])]
    if len(rows) > 1:
        widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
        for row in rows:
            yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
    else:
        yield "no plugins"
    for plugin in told["plugins"]:
        if plugin["trouble"]:
            yield f"{plugin['plugin_id']}: {plugin['trouble']}"
    for name, reason in told["not_taken"].items():
        yield f"{name}: not taken: {reason}"
    if told["gateway"]:
        yield f"register at {told['gateway']}"
    last = told["last_tick"]
    if last is not None and last["why"]:
        yield f"last tick: {last['action']}: {last['why']}"


def _row(plugin: Mapping[str, Any]) -> tuple[str, ...]:
    ago = plugin["last_call_seconds_ago"]
    return (
        plugin["plugin_id"],
        plugin["plugin_type"],
        str(plugin["priority"]),
        plugin["circuit_state"].lower(),
        str(plugin["evaluations_total"]),
        "-" if ago is None else f"{ago:.1f} s ago",
        f"{plugin['endpoint']} ({plugin['origin']})",
    )
