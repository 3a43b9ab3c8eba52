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
}
"""What an instruction means, in words that follow the worker's name."""

GOING = frozenset({"drain", "take_back"})


class Word(click.ParamType):
    """A component or a target. Unknown options end up here as well, because `-1` looks like one."""

    name = "word"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The text as it is."""
        if value.startswith("--"):
            raise click.UsageError(f"Got unexpected extra argument ({value})", ctx)
        return Target().convert(value, param, ctx) if value.startswith(("-", "+", "=")) else value


class Target(click.ParamType):
    """`+1`, `-1`, `=3`, `3`."""

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
@click.argument("more", nargs=-1, type=Word(), metavar="[COMPONENT TARGET]")
@click.option("--flip", is_flag=True, help="Workers of the one component change their role: `A -1 B +1 --flip`.")
@click.option("--force", is_flag=True, help="Even if it leaves the component without a ready worker.")
@click.option("--victim-policy", type=click.Choice(POLICIES), help="Who goes (default: highest-suffix).")
@wait_options
@json_option
@namespace_option
def scale(
    component: str,
    target: str,
    more: tuple[str, ...],
    flip: bool,
    force: bool,
    victim_policy: str | None,
    wait: bool,
    timeout_s: float,
    as_json: bool,
    namespace: str | None,
) -> None:
    """Add workers to COMPONENT or let some finish and leave: TARGET is +1, -1, =3 or 3.

    Returns once the intent is committed. +1 while a worker of the component drains takes that drain back. With --flip,
    `PrefillWorker -1 VllmWorker +1` is one decision: that many workers change their role, or none does.
    """
    manner, paths = Manner(as_json, wait, timeout_s), find_paths(namespace)
    how = {"force": force, "victim_policy": victim_policy}
    if flip:
        gives, takes, count = exchanged((component, target, *more))
        asked = {"gives": gives, "takes": takes, "count": str(count), **how}
        ask_and_tell(paths, manner, "dynamo_scale_flip", asked, goals=flip_goals, words=flip_words)
        return
    if more:
        raise click.UsageError("several components change together only with --flip")
    asked = {"component": component, "target": target, **how}
    ask_and_tell(paths, manner, "dynamo_scale", asked, goals=goals, words=words)


def exchanged(given: tuple[str, ...]) -> tuple[str, str, int]:
    """Who gives workers, who takes them, and how many: of `A -1 B +1`, in any order. Raises click's `UsageError`."""
    pairs = dict(zip(given[::2], given[1::2], strict=False))
    changes = {name: int(text) for name, text in pairs.items() if re.fullmatch(r"[+-][0-9]{1,4}", text, re.ASCII)}
    if len(given) != 4 or len(changes) != 2 or sum(changes.values()) != 0 or not all(changes.values()):
        raise click.UsageError(
            "--flip takes from one component what it gives to another: `PrefillWorker -1 VllmWorker +1 --flip`"
        )
    gives, takes = sorted(changes, key=lambda name: changes[name])
    return gives, takes, changes[takes]


def flip_goals(reply: dict[str, Any]) -> Iterator[tuple[str, Goal]]:
    """The workers that change their role."""
    for instruction in reply["instructions"]:
        yield instruction["watcher_name"], Goal.FLIPPED


def flip_words(reply: dict[str, Any]) -> str:
    """A line on each component, and one for each worker."""
    lines = [f"{name}: {has['ready']} ready, {has['target']} wanted" for name, has in reply["components"].items()]
    lines += [f"{each['watcher_name']}: becomes {each['becomes']}" for each in reply["instructions"]]
    return "\n".join(lines)


def goals(reply: dict[str, Any]) -> Iterator[tuple[str, Goal]]:
    """Which workers the reply speaks of, and what each is to become."""
    for instruction in reply["instructions"]:
        yield instruction["watcher_name"], Goal.GONE if instruction["kind"] in GOING else Goal.READY


def words(reply: dict[str, Any]) -> str:
    """A line on the component, and one for each worker that something happens to."""
    nothing = "" if reply["instructions"] else "; nothing to do"
    lines = [f"{reply['component']}: {reply['ready']} ready, {reply['target']} wanted{nothing}"]
    for instruction in reply["instructions"]:
        kind = instruction["kind"]
        lines.append(f"{instruction['watcher_name']}: {WORDS.get(kind, kind.replace('_', ' '))}")
    return "\n".join(lines)
