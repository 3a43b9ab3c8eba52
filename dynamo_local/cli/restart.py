"""`dynamo restart NAME|COMPONENT`: drain, and start again with the current configuration."""

from __future__ import annotations

from typing import Any

import click

from dynamo_local.cli.asking import Manner, ask_and_tell
from dynamo_local.cli.common import find_paths, json_option, namespace_option
from dynamo_local.cli.waiting import Goal, wait_options


@click.command()
@click.argument("name", metavar="NAME|COMPONENT")
@click.option("--rolling", is_flag=True, help="One worker after the other; needs no spare GPU.")
@click.option("--force", is_flag=True, help="Even if it leaves the component without a ready worker.")
@wait_options
@json_option
@namespace_option
def restart(
    name: str, rolling: bool, force: bool, wait: bool, timeout_s: float, as_json: bool, namespace: str | None
) -> None:
    """Drain a worker, or those of a component, and start each again. Clears a fault."""
    ask_and_tell(
        find_paths(namespace),
        Manner(as_json, wait, timeout_s),
        "dynamo_restart",
        {"name": name, "rolling": rolling, "force": force},
        goals=lambda reply: [(worker, Goal.RESTARTED) for worker in names(reply)],
        words=lambda reply: "to be restarted: " + ", ".join(names(reply)),
    )


def names(reply: dict[str, Any]) -> list[str]:
    """The workers' names, in the order of their restart; each is told as a name or as an object that has one."""
    return [worker if isinstance(worker, str) else worker["watcher_name"] for worker in reply["workers"]]
