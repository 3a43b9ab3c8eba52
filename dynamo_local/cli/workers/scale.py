"""`dynamo scale COMPONENT TARGET`: more workers, or fewer."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import click

from dynamo_local.cli.common import find_paths, json_option, namespace_option
from dynamo_local.cli.workers.asking import Manner, ask_and_tell
from dynamo_local.cli.workers.waiting import Goal, wait_options

POLICIES = ("highest-suffix", "least-loaded", "coldest")
WORDS = {
    "spawn": "starts",
    "drain": "drains",
    "cancel_drain": "serves on: its drain is taken back",
    "take_back": "is taken back before it is ready",
    "wake": "wakes",
    "sleep": "goes on sleeping",
}
"""What an instruction means, in words that follow the worker's name."""

GOALS = {"drain": Goal.GONE, "take_back": Goal.GONE, "sleep": Goal.ASLEEP}
"""What it is to become; else ready."""


class Target(click.ParamType):
    """`+1`, `-1`, `=3`, `3`. Unknown options end up here as well, because `-1` looks like one."""

    name = "target"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The text as it is: the arbiter knows the current number of workers and computes the target."""
        if not re.fullmatch(r"[+\-=]?[0-9]+", value, re.ASCII):
            unknown = f"no such option {value!r}; " if value.startswith("-") else ""
            self.fail(f"{unknown}how many workers is said as +1, -1, =3 or 3, not {value!r}", param, ctx)
        return value


@click.command(context_settings={"ignore_unknown_options": True})  # else click takes -1 for an option
@click.argument("component")
@click.argument("target", type=Target())
@click.option("--force", is_flag=True, help="Even if it leaves the component without a ready worker.")
@click.option("--no-wake", is_flag=True, help="Start new workers, though some of the component sleep.")
@click.option("--victim-policy", type=click.Choice(POLICIES), help="Who goes (default: highest-suffix).")
@wait_options
@json_option
@namespace_option
def scale(
    component: str,
    target: str,
    force: bool,
    no_wake: bool,
    victim_policy: str | None,
    wait: bool,
    timeout_s: float,
    as_json: bool,
    namespace: str | None,
) -> None:
    """Add workers to COMPONENT or let some finish and leave: TARGET is +1, -1, =3 or 3.

    Returns once the intent is committed. +1 while a worker of the component drains takes that drain
    back; else one of it that sleeps is woken before a new one is started.
    """
    more = {"no_wake": True} if no_wake else {}  # what an arbiter of an older version does not know
    ask_and_tell(
        find_paths(namespace),
        Manner(as_json, wait, timeout_s),
        "dynamo_scale",
        {"component": component, "target": target, "force": force, "victim_policy": victim_policy, **more},
        goals=goals,
        words=words,
    )


def goals(reply: dict[str, Any]) -> Iterator[tuple[str, Goal]]:
    """Which workers the reply speaks of, and what each is to become."""
    for instruction in reply["instructions"]:
        yield instruction["watcher_name"], GOALS.get(instruction["kind"], Goal.READY)


def words(reply: dict[str, Any]) -> str:
    """A line on the component, and one for each worker that something happens to."""
    nothing = "" if reply["instructions"] else "; nothing to do"
    lines = [f"{reply['component']}: {reply['ready']} ready, {reply['target']} wanted{nothing}"]
    for instruction in reply["instructions"]:
        kind = instruction["kind"]
        lines.append(f"{instruction['watcher_name']}: {WORDS.get(kind, kind.replace('_', ' '))}")
    return "\n".join(lines)
