"""`dynamo planner replay`: shows a policy what was recorded, and tells where it decides as was decided then."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dynamo_local.cli.common import find_paths, json_option, namespace_option
from dynamo_local.errors import BadInput, NotRunning

if TYPE_CHECKING:
    from dynamo_local.config.planner import PlannerConfig
    from dynamo_local.planner.records.ticks import Decided, Replay, Replayed
    from dynamo_local.system.json_lines import Record

POLICIES = ("load", "sla", "slo", "throughput-load")


@click.command()
@click.argument("file", required=False, type=click.Path(path_type=Path, dir_okay=False))
@click.option("--policy", type=click.Choice(POLICIES), help="Another policy than the recorded one.")
@click.option(
    "--set",
    "settings",
    metavar="KEY=VALUE",
    multiple=True,
    help="An option of that policy; may be repeated.",
)
@json_option
@namespace_option
def replay(
    file: Path | None, policy: str | None, settings: tuple[str, ...], as_json: bool, namespace: str | None
) -> None:
    """Decide once more from what the planner was shown, and compare.

    FILE is a log of ticks (by default the namespace's `ticks.jsonl`). With `--policy`, that policy's options are its
    defaults, the log's GPU budgets, and what `--set` says. Works when the graph is gone, too.
    """
    from dynamo_local.planner.records.ticks import Replay, oldest_first, tick_log_path

    log = file or tick_log_path(find_paths(namespace).logs)
    records = iter(oldest_first(log))
    first = next(records, None)
    if first is None:
        raise NotRunning(f"there is no tick of a planner in {log}; a running planner writes them beside its decisions")
    if settings and policy is None:
        raise BadInput("say --policy, too: --set gives options to another policy than the recorded one")
    found = [first] if policy is None else list(chain([first], records))
    again = Replay(None if policy is None else _options(policy, settings, found))
    decisions = list(again.run(chain(found, records)))
    click.echo(json.dumps(_reported(again, decisions)) if as_json else "\n".join(_describe(again, decisions)))


def _options(policy: str, settings: tuple[str, ...], records: Iterable[Record]) -> PlannerConfig:
    """The budgets are those that were recorded last."""
    from dynamo_local.config.planner_section import parse_settings, planner_section

    recorded: Mapping[str, Any] = {}
    for record in records:
        recorded = record.get("options", recorded)
    budgets = {name: recorded[name] for name in ("max_gpu_budget", "min_gpu_budget") if recorded.get(name, -1) >= 0}
    given = {key.replace("-", "_"): value for key, value in parse_settings(settings).items()}
    return planner_section("replay", {**budgets, **given, "policy": policy})


def _reported(again: Replay, decisions: Iterable[Replayed]) -> dict[str, Any]:
    rows = [
        {"seq": one.seq, "at_s": one.at_s, "agrees": one.agrees, "then": _plain(one.then), "now": _plain(one.now)}
        for one in decisions
    ]
    return {
        "policies": again.policies,
        "ticks": again.ticks,
        "ticks_without_what_is_wanted": again.without,
        "whole": again.whole,
        "decisions": len(rows),
        "differ": sum(not row["agrees"] for row in rows),
        "compared": rows,
    }


def _plain(decided: Decided | None) -> dict[str, Any] | None:
    return None if decided is None else decided._asdict()


def _describe(again: Replay, decisions: list[Replayed]) -> Iterable[str]:
    others = [one for one in decisions if not one.agrees]
    for one in others:
        yield f"tick {one.seq}, at {one.at_s:.3f} s: then {_short(one.then)}; now {_short(one.now)}"
    yield (
        f"{again.ticks:,} ticks of {', '.join(again.policies) or 'nobody'}: {len(decisions):,} decisions, "
        f"{len(decisions) - len(others):,} as then, {len(others):,} other"
    )
    if again.without:
        yield f"in {again.without:,} ticks the log does not have what this policy wants to see: it held there"
    if not again.whole:
        yield "the log's beginning is gone: what the policy had learned before is not known, and it may differ at first"


def _short(decided: Decided | None) -> str:
    if decided is None:
        return "no decision"
    return ", ".join(
        f"{component} {decided.targets.get(component, '–')} ({step:+d}, {decided.rules[component]})"
        for component, step in decided.steps.items()
    )
