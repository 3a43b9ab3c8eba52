"""`dynamo restart NAME|COMPONENT`: drain, and start again with the current configuration."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import click

from dynamo_local.cli.common import find_paths, json_option, namespace_option
from dynamo_local.cli.workers.asking import Manner, ask_and_tell
from dynamo_local.cli.workers.waiting import Goal, wait_options


@click.command()
@click.argument("name", metavar="NAME|COMPONENT")
@click.option("--rolling", is_flag=True, help="One worker after the other (as it is without).")
@click.option("--force", is_flag=True, help="Even if it leaves the component without a ready worker.")
@wait_options
@json_option
@namespace_option
def restart(
    name: str, rolling: bool, force: bool, wait: bool, timeout_s: float, as_json: bool, namespace: str | None
) -> None:
    """Drain a worker, or those of a component, and start each again. Clears a fault.

    The only worker of a component is replaced by another one, which is started first: that needs a free GPU.
    """
    ask_and_tell(
        find_paths(namespace),
        Manner(as_json, wait, timeout_s),
        "dynamo_restart",
        {"name": name, "rolling": rolling, "force": force},
        goals=goals,
        words=words,
    )


def goals(reply: dict[str, Any]) -> Iterator[tuple[str, Goal]]:
    """What each worker is to become: one that is replaced goes when its substitute is ready."""
    for name in names(reply):
        substitute = reply.get("substitutes", {}).get(name)
        if substitute is None:
            yield name, Goal.RESTARTED
        else:
            yield from ((substitute, Goal.READY), (name, Goal.REPLACED))


def words(reply: dict[str, Any]) -> str:
    """The workers in order, and who takes whose place."""
    substitutes = reply.get("substitutes", {})
    lines = ["to be restarted: " + ", ".join(names(reply))]
    lines += [f"{new} is started first, and takes the place of {old}" for old, new in substitutes.items()]
    return "\n".join([*lines, *reply.get("warnings", ())])


def names(reply: dict[str, Any]) -> list[str]:
    """The workers' names, in the order of their restart; the reply has names, or objects with a name."""
    return [worker if isinstance(worker, str) else worker["watcher_name"] for worker in reply["workers"]]
