"""`dynamo planner …`: start, stop, change and question the planner of a running graph."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from dynamo_local.cli.common import (
    FiniteRange,
    aligned,
    ask_arbiter,
    find_paths,
    json_option,
    namespace_option,
    shown,
)
from dynamo_local.cli.planner_words import history_row, status_lines
from dynamo_local.errors import BadInput, DynamoError, NotRunning
from dynamo_local.system.paths import Paths

if TYPE_CHECKING:
    from dynamo_local.config.planner import PlannerConfig
    from dynamo_local.planner.records.ticks import Decided, Replay, Replayed
    from dynamo_local.system.json_lines import Record

F = TypeVar("F", bound=Callable[..., Any])

ANSWER_TIMEOUT_S = 10.0
_COLUMNS = ("plugin", "stage", "priority", "circuit", "calls", "last", "at")
PLANNER_ANSWER_TIMEOUT_S = 30.0
"""A change waits for the tick that may be under way, and for its commit."""
EITHER_SPELLING = {"token_normalize_func": lambda token: token.replace("_", "-")}
NOT_OPTIONS = frozenset({"enabled", "namespace", "scheduling", "plugin_registration"})
"""Keys of the `Planner` section that `start` does not take: `namespace` is already an option of every command, and the
last two are whole sections."""


_LINK = re.compile(r"\[([^]]+)\]\([^)]+\)")
"""A link of Markdown. A page shows the description of an option as well."""


@click.group(context_settings=EITHER_SPELLING)
def planner() -> None:
    """The planner: it adds and removes workers, by thresholds or by targets, within a budget of GPUs.

    `dynamo serve --planner`, or a `Planner` section in the configuration, starts it with the graph.
    """


def planner_options(command: F) -> F:
    """Every option of any planner, under Dynamo's names. Their values are checked by the arbiter, as a whole."""
    from dynamo_local.config.planner import PlannerConfig, known_names

    names: dict[str, list[str]] = {}
    for alias, name in known_names().items():
        names.setdefault(name, []).append(f"--{alias.replace('_', '-')}")
    for name, field in reversed(PlannerConfig.model_fields.items()):
        if name in NOT_OPTIONS:
            continue
        default = field.get_default(call_default_factory=True)
        plain = isinstance(default, str | int | float) and not isinstance(default, bool)
        shown = f"  [default: {default}]" if plain else ""
        option = click.option(
            *names[name],
            name,
            is_flag=field.annotation is bool and not default,  # what is on by itself is switched off with =false
            default=None,
            help=_LINK.sub(r"\1", field.description or "") + shown,
        )
        command = option(command)
    return command


@planner.command(context_settings=EITHER_SPELLING)
@planner_options
@json_option
@namespace_option
def start(as_json: bool, namespace: str | None, **options: Any) -> None:
    """Start the planner of a running graph.

    With these options over those that it has.
    """
    _change(namespace, as_json, "start", options=_here(given_options(options)))


def given_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Those of `planner_options` that were given, with their values."""
    from dynamo_local.config.planner_section import option_value

    return {
        name: option_value(name, value) if isinstance(value, str) else value
        for name, value in options.items()
        if value is not None
    }


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
    """Change options, from the next decision on: all of them, or none. On a stopped planner they apply at its next
    start.

    For example: dynamo planner set decode-kv-scale-up-threshold=0.8 max-gpu-budget=6
    """
    from dynamo_local.config.planner_section import parse_settings

    _change(namespace, as_json, "set", options=_here(parse_settings(settings)))


@planner.command()
@json_option
@namespace_option
def status(as_json: bool, namespace: str | None) -> None:
    """Show what the planner does, its options, and its last decision."""
    _change(namespace, as_json, "status")


run_option = click.option("--run", metavar="ID", help="An earlier run, or `all` of them.  [default: this run]")


@planner.command()
@click.argument("count", metavar="[N]", default=1, type=click.IntRange(min=1))
@run_option
@json_option
@namespace_option
def explain(count: int, run: str | None, as_json: bool, namespace: str | None) -> None:
    """Say why the last N decisions were made.

    In words, with what it would have taken to decide otherwise. Where models share the GPUs: what each has now, and
    what one worker more would be worth.
    """
    from dynamo_local.planner.records.decision_log import describe

    if not as_json and run is None and (lines := _models(find_paths(namespace))):
        click.echo("\n".join(lines))
        return
    logged = _logged(find_paths(namespace), count, run)
    if as_json:
        click.echo(json.dumps([{**record, "words": describe(record)} for record in logged]))
        return
    click.echo("\n\n".join(f"{_head(record)}\n{describe(record)}" for record in logged))


def _models(paths: Paths) -> list[str]:
    """A table of the models that share the GPUs; nothing where none do, or nothing runs."""
    from dynamo_local.cli.status import model_lines

    try:
        return model_lines(ask_arbiter(paths, "dynamo_status")["graph"].get("models") or ())
    except DynamoError:
        return []


@planner.command()
@click.argument("count", metavar="[N]", default=20, type=click.IntRange(min=1))
@click.option("--changes", is_flag=True, help="Only of those that changed, or were to change, something.")
@run_option
@json_option
@namespace_option
def history(count: int, changes: bool, run: str | None, as_json: bool, namespace: str | None) -> None:
    """List the last N decisions, one a line. Works when the graph is gone, too."""
    logged = _logged(find_paths(namespace), None if changes else count, run)
    if changes:
        moved = [record for record in logged if any(reason["step"] for reason in record["decision"]["reasons"])]
        logged = moved[-count:]
    if as_json:
        click.echo(json.dumps(logged))
        return
    for record in logged:
        click.echo(history_row(record))


@planner.command()
@click.option("--since", metavar="TIME", help="Only decisions after that: 2h, 1d, 14:05, 2026-03-01.")
@click.option("-o", "--output", type=click.Path(path_type=Path, dir_okay=False), help="Write it there.")
@click.option(
    "--log", type=click.Path(path_type=Path, dir_okay=False), help="Another decision log than the namespace's."
)
@run_option
@json_option
@namespace_option
def report(
    since: str | None, output: Path | None, log: Path | None, run: str | None, as_json: bool, namespace: str | None
) -> None:
    """Write a page with what the planner saw, expected and did.

    It stands alone, and reads the decision log: it works when the graph is gone, too. The default file is
    planner_report.html in this folder.
    """
    from dynamo_local.arbiter.planner_report_page import title_of, write_report
    from dynamo_local.planner.records.decision_log import decision_log_path
    from dynamo_local.system.log_files import since as time_of

    paths = find_paths(namespace)
    since_s = None if since is None else time_of(since, datetime.now().astimezone())
    to = output or Path("planner_report.html")
    title = title_of(paths.namespace) if log is None else f"Planner: {log.name}"
    file = log or decision_log_path(paths.logs)
    run = run or ("all" if log is not None else _this_run(paths, file))
    decisions = write_report(file, to, since_s=since_s, title=title, run=run)
    size = to.stat().st_size
    reported = {"report": str(to), "decisions": decisions, "bytes": size}
    line = f"report: {to} ({decisions:,} decisions, {size / 1000:,.0f} kB)"
    click.echo(json.dumps(reported) if as_json else line)


def _change(namespace: str | None, as_json: bool, command: str, **properties: Any) -> None:
    answer = ask_arbiter(find_paths(namespace), f"dynamo_planner_{command}", PLANNER_ANSWER_TIMEOUT_S, **properties)
    reported = answer["planner"]
    if as_json:
        click.echo(json.dumps(reported))
    else:
        with_options = command in ("status", "set", "start")
        click.echo("\n".join(status_lines(reported, defaults=_defaults() if with_options else None)))


def _defaults() -> dict[str, Any]:
    """Names and values of all options, as an arbiter reports them."""
    from dynamo_local.config.planner import PlannerConfig

    return PlannerConfig().model_dump(mode="json")


def _here(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options with relative paths made absolute: they are relative to the caller's folder, not the arbiter's. The
    name of a profile that ships is none."""
    from dynamo_local.profile.reading import shipped_profiles

    found = dict(options)
    for name in ("history", "log_dir", "load_predictor_warmup_trace", "profile_results_dir"):
        path = found.get(name)
        if path and not (name == "profile_results_dir" and path in shipped_profiles()):
            found[name] = str(Path(path).absolute())
    return found


def _logged(paths: Paths, last: int | None, run: str | None) -> list[dict[str, Any]]:
    """The last logged decisions of a run (None: this one). Raises `NotRunning` if there are none."""
    from dynamo_local.planner.records.decision_log import decision_log_path, of_run, read

    log = decision_log_path(paths.logs)
    run = run or _this_run(paths, log)
    found = [dict(record) for record in of_run(read(log), run)]
    if not found:
        others = list(dict.fromkeys(str(record.get("run_id")) for record in read(log) if record.get("run_id")))
        earlier = f"; --run has those of {others[-1]}, or of all" if others else ""
        raise NotRunning(
            f"the planner of {paths.namespace!r} has decided nothing yet (no decision of this run in {log}{earlier}); "
            "`dynamo planner status` says whether it runs, and when it decides next"
        )
    return found if last is None else found[-last:]


def _this_run(paths: Paths, log: Path) -> str:
    """The run that the statefile names, else the last one that decided; `all` where that is not known."""
    from dynamo_local.errors import StateError
    from dynamo_local.planner.records.decision_log import read
    from dynamo_local.state.store import load

    try:
        return load(paths.statefile).run_id
    except StateError:
        last = read(log, last=1)
        return str(last[0].get("run_id") or "all") if last else "all"


def _head(record: Mapping[str, Any]) -> str:
    at = datetime.fromtimestamp(record["wall_s"]).astimezone()
    return f"decision {record['seq']}, {at:%Y-%m-%d %H:%M:%S}"


@planner.command()
@json_option
@namespace_option
def plugins(as_json: bool, namespace: str | None) -> None:
    """List the planner's plugins.

    Their stages, their state, and the address for registrations.
    """
    answer = ask_arbiter(find_paths(namespace), "dynamo_planner_status", ANSWER_TIMEOUT_S)
    reported = answer["planner"]["plugins"]
    click.echo(json.dumps(reported) if as_json else "\n".join(plugin_lines(reported)))


def plugin_lines(reported: Mapping[str, Any]) -> Iterator[str]:
    """A table, then what is wrong, then where plugins register."""
    rows = [_COLUMNS, *(_row(plugin) for plugin in reported["plugins"])]
    if len(rows) > 1:
        yield from ("  ".join(row).rstrip() for row in aligned(rows))
    else:
        yield "no plugins"
    for plugin in reported["plugins"]:
        if plugin["trouble"]:
            yield f"{plugin['plugin_id']}: {plugin['trouble']}"
    for name, reason in reported["not_taken"].items():
        yield f"{name}: not taken: {reason}"
    if reported["gateway"]:
        yield f"register at {reported['gateway']}"
    last = reported["last_tick"]
    if last is not None and last["why"]:
        yield f"last tick: {last['action']}: {last['why']}"


def _row(plugin: Mapping[str, Any]) -> tuple[str, ...]:
    ago = plugin["last_call_seconds_ago"]
    return (
        plugin["plugin_id"],
        plugin["plugin_type"],
        str(plugin["priority"]),
        plugin["circuit_state"].lower(),
        str(plugin["evaluations_total"]),
        "-" if ago is None else f"{ago:.1f} s ago",
        f"{plugin['endpoint']} ({plugin['origin']})",
    )


POSITIVE = FiniteRange(min=0, min_open=True, max=1e9)
ITL_MS = (10.0, 20.0, 50.0)


@planner.group()
def profile() -> None:
    """Show the engine profiles that planners size by."""


@profile.command()
@click.argument("folder", metavar="DIR")
@click.option("--itl", "itl_ms", type=POSITIVE, multiple=True, help="Targets, ms.  [default: 10, 20 and 50]")
@click.option("--isl", type=POSITIVE, help="Also for requests with prompts of so many tokens …")
@click.option("--osl", type=POSITIVE, help="… and answers of so many.")
@click.option("--report", type=click.Path(path_type=Path, dir_okay=False), help="Write an HTML page (extra `report`).")
@json_option
def show(
    folder: str, itl_ms: tuple[float, ...], isl: float | None, osl: float | None, report: Path | None, as_json: bool
) -> None:
    """Show what was measured, the curves that planners go by, and where they guess.

    DIR is a folder as Dynamo's profiler writes it, or the name of a profile that ships.
    """
    from dynamo_local.profile.reading import read_profile
    from dynamo_local.profile.summary import facts_of
    from dynamo_local.system.pages import check_plots

    if osl is not None and isl is None:
        raise BadInput("--osl says how long answers are to prompts of --isl tokens; give both")
    if report is not None:
        check_plots()
    read = read_profile(folder)
    facts = facts_of(read, itl_ms or ITL_MS, isl, osl)
    if report is not None:
        from dynamo_local.profile.report import write_report

        write_report(report, read, facts)
    if as_json:
        click.echo(json.dumps(facts, indent=2))
        return
    _print(facts)
    if report is not None:
        click.echo(f"report: {report}")


def _print(facts: Mapping[str, Any]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    # A fixed width, so that the same command always prints the same bytes.
    console = Console(width=120, highlight=False)
    isl, context = facts["measured"]["isl"], facts["measured"]["context_length"]
    console.print(
        f"{facts['profile']}: KV cache of {facts['max_kv_tokens']:,} tokens; measured with prompts of {isl[0]:g} to "
        f"{isl[1]:g} tokens, contexts of {context[0]:g} to {context[1]:g}",
        markup=False,
    )
    prefill = Table("prompt", box=box.SIMPLE, title="prefill", title_justify="left")
    for label in ("TTFT measured, ms", "TTFT, ms", "tokens/s/GPU measured", "tokens/s/GPU"):
        prefill.add_column(label, justify="right")
    for row in facts["prefill"]:
        mark = "*" if row["extrapolated"] else ""
        measured = (_number(row["measured_ttft_ms"], ".2f"), _number(row["measured_thpt_per_gpu"], ",.0f"))
        taken = (f"{row['ttft_ms']:.2f}{mark}", f"{row['thpt_per_gpu']:,.0f}{mark}")
        prefill.add_row(f"{row['isl']:g}", measured[0], taken[0], measured[1], taken[1])
    decode = Table("context", box=box.SIMPLE, title="decode", title_justify="left")
    for label in ("KV use", "requests", "ITL measured, ms", "ITL, ms", "tokens/s/GPU measured", "tokens/s/GPU"):
        decode.add_column(label, justify="right")
    for row in facts["decode"]:
        load = (f"{row['context_length']:g}", f"{row['kv_usage']:.4f}", f"{row['concurrency']:,.1f}")
        itl = (f"{row['measured_itl_ms']:.2f}", f"{row['itl_ms']:.2f}")
        decode.add_row(*load, *itl, f"{row['measured_thpt_per_gpu']:,.0f}", f"{row['thpt_per_gpu']:,.0f}")
    best = Table("context", box=box.SIMPLE, title="the most that a GPU decodes within an ITL", title_justify="left")
    for label in ("ITL target, ms", "tokens/s/GPU", "requests at once", "ITL, ms"):
        best.add_column(label, justify="right")
    for row in facts["best"]:
        mark = "!" if not row["attainable"] else "*" if row["extrapolated"] else ""
        found = (f"{row['thpt_per_gpu']:,.0f}{mark}", f"{row['concurrency']:,.1f}", f"{row['itl_ms']:.2f}")
        best.add_row(f"{row['context_length']:g}", f"{row['itl_target_ms']:g}", *found)
    for table in (prefill, decode, best):
        console.print(table)
    for note in facts["notes"]:
        console.print(f"note: {note}", markup=False)
    console.print("* extrapolated   ! not attainable: what a single request gets", markup=False)


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


POLICIES = ("load", "sla", "slo", "throughput-load")


@planner.command()
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
    decisions = list(shown("decisions", again.run(chain(found, records))))
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
