"""`dynamo drain NAME`: one worker takes nothing new, finishes what it streams, and leaves."""

from __future__ import annotations

import click

from dynamo_local.cli.common import find_paths, json_option, namespace_option
from dynamo_local.cli.workers.asking import Manner, ask_and_tell
from dynamo_local.cli.workers.waiting import Goal, wait_options


@click.command()
@click.argument("name")
@click.option("--cancel", is_flag=True, help="Take the drain back: the same process serves on.")
@click.option("--force", is_flag=True, help="Even if it is the last ready worker of its component.")
@wait_options
@json_option
@namespace_option
def drain(
    name: str, cancel: bool, force: bool, wait: bool, timeout_s: float, as_json: bool, namespace: str | None
) -> None:
    """Let the worker NAME finish and leave (or, with --cancel, come back). `dynamo status` shows what is left."""
    goal = Goal.READY if cancel else Goal.GONE
    ask_and_tell(
        find_paths(namespace),
        Manner(as_json, wait, timeout_s),
        "dynamo_drain",
        {"name": name, "cancel": cancel, "force": force},
        goals=lambda reply: [(reply["watcher_name"], goal)],
        words=lambda reply: f"{reply['watcher_name']}: {reply['state']}" + (", to be taken back" if cancel else ""),
    )
