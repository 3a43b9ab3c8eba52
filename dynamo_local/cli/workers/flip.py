"""`dynamo flip NAME`: a prefill worker becomes a decode worker, or the other way round; the process stays."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import click

from dynamo_local.cli.common import find_paths, json_option, namespace_option
from dynamo_local.cli.workers.asking import Manner, ask_and_tell
from dynamo_local.cli.workers.waiting import Goal, wait_options


@click.command()
@click.argument("name")
@click.option("--cancel", is_flag=True, help="Have it stay what it is, if it is not too late.")
@click.option("--force", is_flag=True, help="Even if it is the last ready worker of its component.")
@wait_options
@json_option
@namespace_option
def flip(
    name: str, cancel: bool, force: bool, wait: bool, timeout_s: float, as_json: bool, namespace: str | None
) -> None:
    """Have the worker NAME change its role: a prefill worker decodes from now on, or the other way round.

    Process, GPUs and KV cache stay; its name changes with its component. Whose workers can: `dynamo serve --dry-run`.
    """
    ask_and_tell(
        find_paths(namespace),
        Manner(as_json, wait and not cancel, timeout_s),
        "dynamo_flip",
        {"name": name, "cancel": cancel, "force": force},
        goals=goals,
        words=lambda reply: words(reply, cancel),
    )


def goals(reply: dict[str, Any]) -> Iterator[tuple[str, Goal]]:
    """The workers that flip, by the names that they have still."""
    for instruction in reply["instructions"]:
        yield instruction["watcher_name"], Goal.FLIPPED
    if not reply["instructions"] and reply.get("becomes") is not None:  # it was under way already
        yield reply["watcher_name"], Goal.FLIPPED


def words(reply: dict[str, Any], cancel: bool) -> str:
    """What becomes of it."""
    if cancel:
        return f"{reply['watcher_name']}: {reply['state']}, its flip was taken back"
    return f"{reply['watcher_name']}: becomes {reply['becomes']}"
