"""`dynamo apply -f FILE`: make what runs what the file says, worker by worker, without dropping a request."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dynamo_local.cli.common import ask_arbiter, find_paths, json_option, namespace_option
from dynamo_local.cli.waiting import COMMIT_TIMEOUT_S
from dynamo_local.core.fleet.states import traits_of
from dynamo_local.core.secrets import MASK
from dynamo_local.errors import EXIT_FAILED, EXIT_OK, BadInput, NotRunning, TimedOut
from dynamo_local.system.paths import Paths

if TYPE_CHECKING:
    from dynamo_local.arbiter.request import Request

POLL_S = 0.2
GOES_ON = "the arbiter goes on with it; `dynamo status` shows how far it is"
INTERRUPTED = 130


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": True})
@click.option("--file", "-f", type=click.Path(path_type=Path), required=True, help="Configuration, YAML.")
@click.option(
    "--unset",
    multiple=True,
    metavar="SERVICE.KEY",
    help="Forget what an earlier command line said there: the file counts again. May be repeated.",
)
@click.option("--dry-run", is_flag=True, help="Show the difference and what would be done, and do nothing.")
@click.option("--force", is_flag=True, help="Even if a component is without a ready worker for a while.")
@click.option(
    "--timeout",
    "timeout_s",
    default=3600.0,
    show_default=True,
    type=click.FloatRange(min=0, min_open=True),
    help="Seconds to wait for the end; past them exit code 5, and the arbiter goes on.",
)
@json_option
@namespace_option
@click.argument("overrides", nargs=-1, type=click.UNPROCESSED)
def apply(
    file: Path,
    unset: tuple[str, ...],
    dry_run: bool,
    force: bool,
    timeout_s: float,
    as_json: bool,
    namespace: str | None,
    overrides: tuple[str, ...],
) -> int:
    """Make the graph that runs what FILE says: options, worker counts, GPUs, components, the planner.

    Takes the same `--Service.key=value` as `dynamo serve`. Those of `serve` and of earlier applies stay, until this
    command says another value, or --unset. Only what differs is touched, one worker after the other; what cannot be
    applied is said before anything happens. Ctrl-C stops the watching, not the work.

    Exit codes: 0 it is so now, 1 a worker failed (what was not replaced by then serves on), 2 refused, nothing was
    changed, 5 not done in time.
    """
    paths = find_paths(namespace)
    deployment, kept = deployment_of(paths, file, overrides, unset)
    try:
        return _applied(paths, deployment, kept, dry_run, force, as_json, timeout_s)
    except KeyboardInterrupt:
        if not dry_run:
            click.echo(f"\ndynamo: no longer watched; {GOES_ON}", err=True)
        sys.exit(INTERRUPTED)


def _applied(
    paths: Paths,
    deployment: dict[str, Any],
    kept: Mapping[str, Any],
    dry_run: bool,
    force: bool,
    as_json: bool,
    timeout_s: float,
) -> int:
    """Have it applied, tell, and watch; the exit code."""
    reply = ask_arbiter(
        paths, "dynamo_apply", timeout_s=COMMIT_TIMEOUT_S, deployment=deployment, dry_run=dry_run, force=force
    )
    reply = {key: value for key, value in reply.items() if key not in ("id", "status", "time")}
    if not as_json:
        click.echo("\n".join([*(kept_line(name, value) for name, value in kept.items()), *words(reply)]))
    failures: list[str] = []
    if _is_due(reply) and not dry_run:
        failures = _follow(paths, reply, timeout_s, quiet=as_json)
    if as_json:
        click.echo(json.dumps({**reply, "kept": kept, "failures": failures}))
    for failure in failures:
        click.echo(f"dynamo: {failure}", err=True)
    return EXIT_FAILED if failures else EXIT_OK


def deployment_of(
    paths: Paths, file: Path, overrides: tuple[str, ...], unset: tuple[str, ...] = ()
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The deployment that `dynamo serve` would make of this file and these words, for the running graph, in its folder.

    Second: what the run's earlier command lines say otherwise than the file, by name. Raises `NotRunning`,
    `StateError`, and all that `serve` refuses.
    """
    from dynamo_local.arbiter.deployment_spec import DeploymentSpec
    from dynamo_local.arbiter.request import ServeOptions, understand
    from dynamo_local.config.loading import DEPLOYMENT_ENV, load_config
    from dynamo_local.state.store import load

    ask_arbiter(paths, "dynamo_status")  # nothing runs, or its arbiter was killed: said before anything is read
    state = load(paths.statefile)
    folder = next((Path(entry.cwd) for entry in state.components.values() if entry.cwd), Path.cwd())
    named = state.target is not None and ":" in state.target and not state.target.startswith("/")
    target = state.target if named else None  # a graph of commands has a file, or nothing, in its place
    environ = {name: value for name, value in os.environ.items() if name != DEPLOYMENT_ENV}
    before = kept_words(state.command_line or {}, overrides, unset)
    options = ServeOptions(
        target=target, file=file.resolve(), overrides=overrides, kept=before, namespace=state.namespace
    )
    request = understand(options, environ, folder)
    for note in request.notes:
        click.echo(f"dynamo: {note}", err=True)
    in_file = load_config(file.resolve(), env=environ, overrides=overrides).sections
    wish = DeploymentSpec(
        graph=request.graph,
        host=dict(request.config.sections.get("Host", {})),
        sections=json.loads(request.config.service_config_json()),
        planner=request.planner.model_dump(mode="json", exclude_unset=True) if _plans(request) else None,
        planner_starts=request.planner_starts,
        file=str(file.resolve()),
        overrides=overrides,
        command_line=dict(request.command_line),
    )
    return wish.as_json(), kept_values(before, in_file, overrides)


def kept_words(said: Mapping[str, Any], overrides: tuple[str, ...], unset: tuple[str, ...]) -> dict[str, Any]:
    """The sections that earlier command lines say, without those that this one takes back.

    Raises `BadInput` for an `unset` that nobody said, and for a secret: it was not kept, so it must be said again.
    """
    from dynamo_local.config.loading import leaves, normalise, parse_overrides, value_at, without
    from dynamo_local.sdk.checks import listing, nearest
    from dynamo_local.sdk.service_config import underscored

    paths = {path[:end] for path, _ in leaves(said) for end in range(1, len(path) + 1)}
    names = {underscored(name_of(path)): path for path in paths}
    for name in unset:
        path = names.get(underscored(name))
        if path is None:
            known = [name_of(each) for each, _ in leaves(said)]
            there = f"the run has {listing(known)}{nearest(name, known)}" if known else "the run has no such words"
            raise BadInput(f"--unset {name}: no earlier command line said that; {there}")
        said = without(said, path)
    now = normalise(parse_overrides(overrides), "command line")
    for path, value in leaves(said):
        if MASK in str(value) and value_at(now, path) is None:
            name = name_of(path)
            raise BadInput(
                f"{name} was said on an earlier command line. It is a secret, so it was not kept: say --{name}=… "
                f"again, or --unset {name}"
            )
    return dict(said)


def kept_values(before: Mapping[str, Any], in_file: Mapping[str, Any], overrides: tuple[str, ...]) -> dict[str, Any]:
    """Values of earlier command lines that count, by name. Values that file or command say alike are left out."""
    from dynamo_local.config.loading import leaves, normalise, parse_overrides, value_at

    now = normalise(parse_overrides(overrides), "command line")
    return {
        name_of(path): value
        for path, value in leaves(before)
        if value_at(now, path) is None and value_at(in_file, path) != value
    }


def name_of(path: Sequence[str]) -> str:
    """As files and commands spell it: `Frontend.served-model-name`. Deeper keys are as they were written."""
    own = 3 if path[1:2] == ("ServiceArgs",) else 2
    return ".".join((path[0], *(key.replace("_", "-") for key in path[1:own]), *path[own:]))


def kept_line(name: str, value: Any) -> str:
    return f"kept from the command line: {name}={_value(value)} (--unset {name} takes it back)"


def _plans(request: Request) -> bool:
    """The file has a `Planner` section which is the load planner's, and not that of a service of that name."""
    return "Planner" in request.config.sections and all(spec.name != "Planner" for spec in request.graph.services)


def words(reply: Mapping[str, Any]) -> list[str]:
    """The difference, a line each, then what becomes of workers."""
    if not _is_due(reply):
        return ["nothing differs: nothing to do", *reply["notes"]]
    lines = [_line(change) for change in reply["changes"]]
    workers = reply["workers"]
    does = (("starts", workers["start"]), ("leaves", workers["leave"]), ("gets a new process", workers["renew"]))
    lines += [f"{name} {what}" for what, names in does for name in names]
    if not any(names for _, names in does):
        lines.append("no worker is touched")
    return [*lines, *reply["notes"]]


def _is_due(reply: Mapping[str, Any]) -> bool:
    """Something differs, or a worker has not got what was applied before."""
    return bool(reply["changes"]) or any(reply["workers"].values())


def _line(change: Mapping[str, Any]) -> str:
    what, before, after = change["what"], change["before"], change["after"]
    if before is None:
        return f"+ {what}: {_value(after)}"
    if after is None:
        return f"- {what}: {_value(before)}"
    return f"~ {what}: {_value(before)} -> {_value(after)}"


def _value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _follow(paths: Paths, reply: Mapping[str, Any], timeout_s: float, *, quiet: bool) -> list[str]:
    """Tell what becomes of each worker until all is done; what went wrong. Raises `TimedOut`, `NotRunning`."""
    deadline_s = time.monotonic() + timeout_s
    printed: dict[str, str] = {}
    known: list[Mapping[str, Any]] | None = None
    while True:
        graph = _graph(paths)
        known = graph["notes"] if known is None else known
        lines = [*_news(graph, reply, printed), *(str(note["text"]) for note in graph["notes"] if note not in known)]
        known = graph["notes"]
        for line in lines:
            click.echo(line, err=quiet)
        if _is_done(graph, reply):
            return list(_failures(graph, reply))
        if time.monotonic() >= deadline_s:
            raise TimedOut(f"not done within {timeout_s:g} s; {GOES_ON}")
        time.sleep(POLL_S)


def _graph(paths: Paths) -> dict[str, Any]:
    try:
        graph: dict[str, Any] = ask_arbiter(paths, "dynamo_status")["graph"]
    except NotRunning as error:
        raise NotRunning(
            f"{error}; what was applied is written down: `dynamo serve … --adopt` with this file goes on with it"
        ) from None
    return graph


def _touched(graph: Mapping[str, Any], reply: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    names = {*reply["components"], *reply["removed"]}
    return [row for row in graph["workers"] if row["component"] in names]


def _news(graph: Mapping[str, Any], reply: Mapping[str, Any], printed: dict[str, str]) -> Iterator[str]:
    rows = {row["watcher_name"]: row for row in _touched(graph, reply)}
    places = {new: old for change in graph["changes"] for old, new in change["substitutes"].items()}
    for name in [name for name in printed if name not in rows]:
        del printed[name]
        yield f"{name}: gone"
    for name, row in rows.items():
        state = f"{row['state']}{' with its old configuration' if row['outdated'] and row['pid'] else ''}"
        if printed.get(name) == state:
            continue
        printed[name] = state
        yield f"{name}: {state}{f', in the place of {places[name]}' if name in places else ''}"


def _is_done(graph: Mapping[str, Any], reply: Mapping[str, Any]) -> bool:
    """Nothing is under way with the apply, or with any worker of a component that it touched."""
    if any(change["stimulus_id"] == reply["stimulus_id"] for change in graph["changes"]):
        return False
    return all(_rests(row) for row in _touched(graph, reply))


def _rests(row: Mapping[str, Any]) -> bool:
    traits = traits_of(row["state"])
    return traits.serves or row["state"] == "faulted" or (traits.gone and row["pid"] is None)


def _failures(graph: Mapping[str, Any], reply: Mapping[str, Any]) -> Iterator[str]:
    rows = _touched(graph, reply)
    for row in rows:
        if row["state"] == "faulted":
            yield f"{row['watcher_name']} is faulted ({row['reason']}); its log: {row['log_file']}"
        elif row["outdated"] and traits_of(row["state"]).serves:
            yield f"{row['watcher_name']} serves on with its old configuration; `dynamo events` says why"
    for component, count in reply["components"].items():
        ready = sum(traits_of(row["state"]).serves for row in rows if row["component"] == component)
        if count is not None and ready != count and graph["planner"]["state"] == "stopped":
            yield f"{component} has {ready} ready workers, not {count}"
