"""`dynamo planner …`: start, stop, change and question the load planner of a running graph."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, TypeVar

import click

from dynamo_local.cli.common import ask_arbiter, find_paths, json_option, namespace_option
from dynamo_local.cli.planner_words import history_row, status_lines
from dynamo_local.errors import NotRunning
from dynamo_local.serve.paths import Paths

F = TypeVar("F", bound=Callable[..., Any])

ANSWER_TIMEOUT_S = 30.0
"""A change waits for the tick that may be under way, and for its commit."""
EITHER_SPELLING = {"token_normalize_func": lambda token: token.replace("_", "-")}
ELSEWHERE = frozenset({"enabled", "namespace"})
"""Of the section's keys, those that are no options of `start`: the second is every command's own."""


@click.group(context_settings=EITHER_SPELLING)
def planner() -> None:
    """The load planner: it adds and removes workers by the load, within a budget of GPUs.

    `dynamo serve --planner`, or a `Planner` section in the configuration, starts it with the graph.
    """


def planner_options(command: F) -> F:
    """Every option of the planner, under Dynamo's names. Their values are checked by the arbiter, as a whole."""
    from dynamo_local.config import PlannerConfig

    for name, field in reversed(PlannerConfig.model_fields.items()):
        if name in ELSEWHERE:
            continue
        default = field.get_default()
        told = "" if default is None or isinstance(default, bool) else f"  [default: {default}]"
        option = click.option(
            f"--{name.replace('_', '-')}",
            name,
            is_flag=field.annotation is bool,
            default=None,
            help=(field.description or "") + told,
        )
        command = option(command)
    return command


@planner.command(context_settings=EITHER_SPELLING)
@planner_options
@json_option
@namespace_option
def start(as_json: bool, namespace: str | None, **options: Any) -> None:
    """Start the planner of a running graph, with these options over those it has."""
    from dynamo_local.config.planner_words import option_value

    given: dict[str, Any] = {}
    for name, value in options.items():
        if value is not None:
            given[name] = option_value(name, value) if isinstance(value, str) else value
    _change(namespace, as_json, "start", options=_here(given))


@planner.command()
@json_option
@namespace_option
def stop(as_json: bool, namespace: str | None) -> None:
    """Stop the planner; the workers stay as they are."""
    _change(namespace, as_json, "stop")


@planner.command()
@json_option
@namespace_option
def pause(as_json: bool, namespace: str | None) -> None:
    """Let the planner observe, and decide nothing."""
    _change(namespace, as_json, "pause")


@planner.command()
@json_option
@namespace_option
def resume(as_json: bool, namespace: str | None) -> None:
    """End a pause: the planner's interval begins anew."""
    _change(namespace, as_json, "resume")


@planner.command("set")
@click.argument("settings", metavar="KEY=VALUE…", nargs=-1, required=True)
@json_option
@namespace_option
def set_(settings: tuple[str, ...], as_json: bool, namespace: str | None) -> None:
    """Change options, from the next decision on: all of them, or none. Of a stopped planner: for its next start.

    For example: dynamo planner set decode-kv-scale-up-threshold=0.8 max-gpu-budget=6
    """
    from dynamo_local.config.planner_words import parse_settings

    _change(namespace, as_json, "set", options=_here(parse_settings(settings)))


@planner.command()
@json_option
@namespace_option
def status(as_json: bool, namespace: str | None) -> None:
    """Show what the planner does, its options, and its last decision."""
    _change(namespace, as_json, "status")


@planner.command()
@click.argument("count", metavar="[N]", default=1, type=click.IntRange(min=1))
@json_option
@namespace_option
def explain(count: int, as_json: bool, namespace: str | None) -> None:
    """Say in words why the last N decisions were made, and what it would have taken to decide otherwise."""
    from dynamo_local.serve.decisions import words

    logged = _logged(find_paths(namespace), count)
    if as_json:
        click.echo(json.dumps([{**record, "words": words(record)} for record in logged]))
        return
    click.echo("\n\n".join(f"{_head(record)}\n{words(record)}" for record in logged))


@planner.command()
@click.argument("count", metavar="[N]", default=20, type=click.IntRange(min=1))
@click.option("--changes", is_flag=True, help="Only of those that changed, or were to change, something.")
@json_option
@namespace_option
def history(count: int, changes: bool, as_json: bool, namespace: str | None) -> None:
    """List the last N decisions, one a line. Works when the graph is gone, too."""
    logged = _logged(find_paths(namespace), None if changes else count)
    if changes:
        moved = [record for record in logged if any(reason["step"] for reason in record["decision"]["reasons"])]
        logged = moved[-count:]
    if as_json:
        click.echo(json.dumps(logged))
        return
    for record in logged:
        click.echo(history_row(record))


def _change(namespace: str | None, as_json: bool, command: str, **properties: Any) -> None:
    answer = ask_arbiter(find_paths(namespace), f"dynamo_planner_{command}", ANSWER_TIMEOUT_S, **properties)
    told = answer["planner"]
    if as_json:
        click.echo(json.dumps(told))
    else:
        click.echo("\n".join(status_lines(told, options=command in ("status", "set", "start"))))


def _here(options: Mapping[str, Any]) -> dict[str, Any]:
    """A relative folder is one of the caller's, not of the arbiter's."""
    from pathlib import Path

    folder = options.get("log_dir")
    return {**options, "log_dir": str(Path(folder).absolute())} if folder else dict(options)


def _logged(paths: Paths, last: int | None) -> list[dict[str, Any]]:
    """Raises `NotRunning` where there is no decision."""
    from dynamo_local.serve.decisions import decision_log_path, read

    log = decision_log_path(paths.logs)
    found = [dict(record) for record in read(log, last=last)]
    if not found:
        raise NotRunning(
            f"the planner of {paths.namespace!r} has decided nothing yet (no decision in {log}); "
            "`dynamo planner status` says whether it runs, and when it decides next"
        )
    return found


def _head(record: Mapping[str, Any]) -> str:
    at = datetime.fromtimestamp(record["wall_s"]).astimezone()
    return f"decision {record['seq']}, {at:%Y-%m-%d %H:%M:%S}"
