"""`dynamo scale COMPONENT TARGET`: more workers, or fewer."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import click

from dynamo_local.cli.common import complete_components, complete_names, find_paths, json_option, namespace_option
from dynamo_local.cli.waiting import Goal, Manner, ask_and_tell, wait_options

POLICIES = ("highest-suffix", "least-loaded", "coldest")
WORDS = {
    "spawn": "starts",
    "drain": "drains",
    "cancel_drain": "serves on: its drain is taken back",
    "take_back": "is taken back before it is ready",
    "wake": "wakes",
    "sleep": "goes on sleeping",
}
"""Move -> words that follow the worker's name."""

GOALS = {"drain": Goal.GONE, "take_back": Goal.GONE, "sleep": Goal.ASLEEP}
"""Move -> the state to wait for; all others: ready."""


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
@click.argument("component", shell_complete=complete_components)
@click.argument("target", type=Target())
@click.argument("more", nargs=-1, type=Word(), metavar="[COMPONENT TARGET]")
@click.option("--flip", is_flag=True, help="Workers of the one component change their role: `A -1 B +1 --flip`.")
@click.option("--force", is_flag=True, help="Even if it leaves the component without a ready worker.")
@click.option("--no-wake", is_flag=True, help="Start new workers, though some of the component sleep.")
@click.option("--victim-policy", type=click.Choice(POLICIES), help="Which workers leave.  [default: highest-suffix]")
@wait_options
@json_option
@namespace_option
def scale(
    component: str,
    target: str,
    more: tuple[str, ...],
    flip: bool,
    force: bool,
    no_wake: bool,
    victim_policy: str | None,
    wait: bool,
    timeout_s: float,
    as_json: bool,
    namespace: str | None,
) -> None:
    """Add workers to COMPONENT or let some finish and leave: TARGET is +1, -1, =3 or 3.

    Returns once the intent is committed. +1 while a worker of the component drains takes that drain back; else one of
    it that sleeps is woken before a new one is started. With --flip, `PrefillWorker -1 VllmWorker +1` is one decision:
    that many workers change their role, or none does.
    """
    manner, paths = Manner(as_json, wait, timeout_s), find_paths(namespace)
    properties_of_all: dict[str, Any] = {"force": force, "victim_policy": victim_policy}
    if flip:
        gives, takes, count = exchanged((component, target, *more))
        properties = {"gives": gives, "takes": takes, "count": str(count), **properties_of_all}
        ask_and_tell(paths, manner, "dynamo_scale_flip", properties, goals=traded_goals, words=describe_trade)
        return
    if more:
        raise click.UsageError("several components change together only with --flip")
    if no_wake:
        properties_of_all["no_wake"] = True  # an arbiter of an older version does not know it
    properties = {"component": component, "target": target, **properties_of_all}
    ask_and_tell(paths, manner, "dynamo_scale", properties, goals=scale_goals, words=describe_scale)


def exchanged(given: tuple[str, ...]) -> tuple[str, str, int]:
    """`A -1 B +1`, in either order -> `(component that gives, component that takes, count)`. Raises `UsageError`."""
    pairs = dict(zip(given[::2], given[1::2], strict=False))
    changes = {name: int(text) for name, text in pairs.items() if re.fullmatch(r"[+-][0-9]{1,4}", text, re.ASCII)}
    if len(given) != 4 or len(changes) != 2 or sum(changes.values()) != 0 or not all(changes.values()):
        raise click.UsageError(
            "--flip takes from one component what it gives to another: `PrefillWorker -1 VllmWorker +1 --flip`"
        )
    gives, takes = sorted(changes, key=lambda name: changes[name])
    return gives, takes, changes[takes]


def traded_goals(reply: dict[str, Any]) -> Iterator[tuple[str, Goal]]:
    """The workers that change their role."""
    for instruction in reply["instructions"]:
        yield instruction["watcher_name"], Goal.FLIPPED


def describe_trade(reply: dict[str, Any]) -> str:
    """A line on each component, and one for each worker."""
    lines = [f"{name}: {has['ready']} ready, {has['target']} wanted" for name, has in reply["components"].items()]
    lines += [f"{each['watcher_name']}: becomes {each['becomes']}" for each in reply["instructions"]]
    return "\n".join(lines)


def scale_goals(reply: dict[str, Any]) -> Iterator[tuple[str, Goal]]:
    """Which workers the reply speaks of, and what each is to become."""
    for instruction in reply["instructions"]:
        yield instruction["watcher_name"], GOALS.get(instruction["kind"], Goal.READY)


def describe_scale(reply: dict[str, Any]) -> str:
    """A line on the component, and one for each worker that something happens to."""
    nothing = "" if reply["instructions"] else "; nothing to do"
    lines = [f"{reply['component']}: {reply['ready']} ready, {reply['target']} wanted{nothing}"]
    for instruction in reply["instructions"]:
        kind = instruction["kind"]
        lines.append(f"{instruction['watcher_name']}: {WORDS.get(kind, kind.replace('_', ' '))}")
    return "\n".join(lines)


@click.command()
@click.argument("name", shell_complete=complete_names)
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


@click.command()
@click.argument("name", shell_complete=complete_names)
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
        goals=flip_goals,
        words=lambda reply: describe_flip(reply, cancel),
    )


def flip_goals(reply: dict[str, Any]) -> Iterator[tuple[str, Goal]]:
    """The workers that flip, by the names that they have still."""
    for instruction in reply["instructions"]:
        yield instruction["watcher_name"], Goal.FLIPPED
    if not reply["instructions"] and reply.get("becomes") is not None:  # it was under way already
        yield reply["watcher_name"], Goal.FLIPPED


def describe_flip(reply: dict[str, Any], cancel: bool) -> str:
    """One line: the move and its target."""
    if cancel:
        return f"{reply['watcher_name']}: {reply['state']}, its flip was taken back"
    return f"{reply['watcher_name']}: becomes {reply['becomes']}"


@click.command()
@click.argument("name", metavar="NAME|COMPONENT", shell_complete=complete_names)
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
        goals=restart_goals,
        words=describe_restart,
    )


def restart_goals(reply: dict[str, Any]) -> Iterator[tuple[str, Goal]]:
    """The state to wait for, per worker. A replaced worker leaves once its substitute is ready."""
    for name in names(reply):
        substitute = reply.get("substitutes", {}).get(name)
        if substitute is None:
            yield name, Goal.RESTARTED
        else:
            yield from ((substitute, Goal.READY), (name, Goal.REPLACED))


def describe_restart(reply: dict[str, Any]) -> str:
    """The workers in order, and who takes whose place."""
    substitutes = reply.get("substitutes", {})
    lines = ["to be restarted: " + ", ".join(names(reply))]
    lines += [f"{new} is started first, and takes the place of {old}" for old, new in substitutes.items()]
    return "\n".join([*lines, *reply.get("warnings", ())])


def names(reply: dict[str, Any]) -> list[str]:
    """The workers' names, in the order of their restart; the reply has names, or objects with a name."""
    return [worker if isinstance(worker, str) else worker["watcher_name"] for worker in reply["workers"]]


@click.command()
@click.argument("name", shell_complete=complete_names)
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
@click.argument("name", shell_complete=complete_names)
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
