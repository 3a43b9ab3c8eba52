"""`dynamo sleep NAME` and `dynamo wake NAME`: a worker's GPU is let go, and had again, under its process."""

from __future__ import annotations

import click

from dynamo_local.cli.common import find_paths, json_option, namespace_option
from dynamo_local.cli.workers.asking import Manner, ask_and_tell
from dynamo_local.cli.workers.waiting import Goal, wait_options


@click.command()
@click.argument("name")
@click.option(
    "--level",
    type=click.IntRange(1, 2),
    default=1,
    show_default=True,
    help="1 keeps the weights in main memory; 2 keeps none, and a wake reads them again.",
)
@click.option("--force", is_flag=True, help="Even if it is the last ready worker of its component.")
@wait_options
@json_option
@namespace_option
def sleep(
    name: str, level: int, force: bool, wait: bool, timeout_s: float, as_json: bool, namespace: str | None
) -> None:
    """Let the worker NAME finish its streams and sleep: it keeps its process, and lets go of its GPU."""
    ask_and_tell(
        find_paths(namespace),
        Manner(as_json, wait, timeout_s),
        "dynamo_sleep",
        {"name": name, "level": level, "force": force},
        goals=lambda reply: [(reply["watcher_name"], Goal.ASLEEP)],
        words=lambda reply: f"{reply['watcher_name']}: {reply['state']}",
    )


@click.command()
@click.argument("name")
@wait_options
@json_option
@namespace_option
def wake(name: str, wait: bool, timeout_s: float, as_json: bool, namespace: str | None) -> None:
    """Let the worker NAME, which sleeps, serve again. Refused while somebody else holds its GPU, unless that leaves."""
    ask_and_tell(
        find_paths(namespace),
        Manner(as_json, wait, timeout_s),
        "dynamo_wake",
        {"name": name},
        goals=lambda reply: [(reply["watcher_name"], Goal.READY)],
        words=lambda reply: f"{reply['watcher_name']}: {reply['state']}",
    )
