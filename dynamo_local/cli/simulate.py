"""`dynamo simulate`: a trace through the twin, as a table, JSON, or an HTML page."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dynamo_local.cli.common import json_option
from dynamo_local.errors import BadInput

if TYPE_CHECKING:
    from dynamo_local.twin.cases import Case
    from dynamo_local.twin.metrics import Metrics

DEFAULT_INITIAL = "1,1"


class Shape(click.ParamType):
    """`P,D`: that many prefill and decode workers; `0,D`: aggregated ones."""

    name = "P,D"

    def convert(
        self, value: str | tuple[int, int], param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, int]:
        """Two whole numbers."""
        if isinstance(value, tuple):
            return value
        match = re.fullmatch(r"\s*([0-9]{1,3})\s*,\s*([0-9]{1,3})\s*", value, re.ASCII)
        if match is None or int(match[2]) < 1:
            self.fail(
                f"{value!r} is no P,D, such as 2,2 (prefill, decode) or 0,4 (four aggregated workers)", param, ctx
            )
        return int(match[1]), int(match[2])


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": True})
@click.option("--trace", required=True, type=click.Path(path_type=Path), help="Requests, in Mooncake's format.")
@click.option("--limit", type=click.IntRange(min=1), help="Only the first so many requests.")
@click.option(
    "--trace-speed", type=click.FloatRange(min=0, min_open=True), default=1.0, help="The trace's times, divided by it."
)
@click.option("--profile", default=None, help="Engine profile: a shipped one's name, or a folder.")
@click.option("--gpus", default="sim:8", show_default=True, help="sim:N, the GPUs of the host.")
@click.option("--ttft", "ttft_ms", type=click.FloatRange(min=0), help="Target for the time to first token, ms.")
@click.option("--itl", "itl_ms", type=click.FloatRange(min=0), help="Target for a request's mean gap of tokens, ms.")
@click.option("--initial", type=Shape(), help="Workers at the beginning of a planned run.  [default: 1,1]")
@click.option("--static", "statics", type=Shape(), multiple=True, help="A run with this fleet and no planner.")
@click.option("--sweep", "sweeps", multiple=True, metavar="KEY=A,B,…", help="One run for each value (or combination).")
@click.option("--start-up-s", type=click.FloatRange(min=0), default=30.0, show_default=True, help="Of a new worker.")
@click.option(
    "--max-local-prefill-length", type=click.IntRange(min=0), default=10, show_default=True, help="As the worker's."
)
@click.option("--max-prefill-queue-size", type=click.IntRange(min=0), default=2, show_default=True, help="The same.")
@click.option("--always-remote", is_flag=True, help="Every prefill goes to prefill workers (no conditional-disagg).")
@click.option("--router", type=click.Choice(["least-loaded", "round-robin", "random"]), default="least-loaded")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the random router.")
@click.option("--jobs", type=click.IntRange(min=1), help="Runs at once.  [default: one for each core]")
@click.option("--report", type=click.Path(path_type=Path, dir_okay=False), help="Write an HTML page (extra `report`).")
@json_option
@click.argument("overrides", nargs=-1, type=click.UNPROCESSED, metavar="[--planner.KEY=VALUE …] [--sim.KEY=VALUE …]")
def simulate(trace: Path, as_json: bool, report: Path | None, jobs: int | None, **words: Any) -> None:
    """Run a trace through this graph's engine, queue, router and planner on a virtual clock, without processes.

    Any planner option: --planner.adjustment-interval=10. Any option of the simulated engine: --sim.max-num-seqs=64.
    With --static and no option of the planner there is no planned run; with both they are compared.
    """
    from dynamo_local.twin.cases import run_cases
    from dynamo_local.twin.metrics import measure
    from dynamo_local.twin.options import Slo
    from dynamo_local.twin.report import Told, check_report, write_report
    from dynamo_local.twin.trace import read_trace

    if report is not None:
        check_report()
    cases = cases_of(words)
    requests = read_trace(trace, limit=words["limit"], speed=words["trace_speed"])
    slo = Slo(words["ttft_ms"], words["itl_ms"])
    runs = run_cases(requests, cases, jobs)
    rows = [(case.name, measure(run, slo)) for case, run in zip(cases, runs, strict=True)]
    if report is not None:
        told = [Told(case.name, run, row[1]) for case, run, row in zip(cases, runs, rows, strict=True)]
        write_report(report, f"dynamo simulate: {trace.name}", _facts(trace, words), told, slo)
    if as_json:
        found = [_json(name, metrics) for name, metrics in rows]
        click.echo(json.dumps(found if len(found) > 1 or words["sweeps"] else found[0], indent=2))
        return
    _print_tables(_facts(trace, words), rows)
    if report is not None:
        click.echo(f"report: {report}")


# --- what is to be run -------------------------------------------------------------------------


def cases_of(words: Mapping[str, Any]) -> list[Case]:
    """The planned runs, then the fixed ones. Raises `BadInput` for whatever cannot be."""
    given = _overrides(words["overrides"])
    if words["profile"] is not None:
        given["sim"]["profile"] = words["profile"]
    combinations = _combinations(words["sweeps"])
    planned = not words["statics"] or bool(given["planner"] or words["sweeps"] or words["initial"])
    shape = words["initial"] or Shape().convert(DEFAULT_INITIAL, None, None)
    cases = []
    for name, changes in combinations if planned else []:
        merged = {section: {**given[section], **changes.get(section, {})} for section in given}
        cases.append(_case(name or f"planner from {_shape(shape)}", words, merged, shape, planned=True))
    for fixed in words["statics"]:
        cases.append(_case(f"static {_shape(fixed)}", words, given, fixed, planned=False))
    return cases


def _shape(shape: tuple[int, int]) -> str:
    return f"{shape[0]}P{shape[1]}D" if shape[0] else f"{shape[1]} aggregated"


def _case(
    name: str,
    words: Mapping[str, Any],
    given: Mapping[str, Mapping[str, Any]],
    shape: tuple[int, int],
    *,
    planned: bool,
) -> Case:
    from functools import partial

    from dynamo_local.components.picker import make_picker
    from dynamo_local.config import PlannerConfig
    from dynamo_local.core.disagg import DisaggSettings
    from dynamo_local.engines.sim.options import SimOptions
    from dynamo_local.sdk.settings import validate_section
    from dynamo_local.serve.planner_options import load_options
    from dynamo_local.twin.cases import Case
    from dynamo_local.twin.options import FleetShape, TwinOptions

    config: PlannerConfig = validate_section(PlannerConfig, "--planner", dict(given["planner"]))
    options = TwinOptions(
        shape=FleetShape(*shape),
        sim=SimOptions.from_mapping(given["sim"]),
        gpus=_gpus(words["gpus"]),
        prefill_gpus=config.prefill_engine_num_gpu or 1,
        decode_gpus=config.decode_engine_num_gpu or 1,
        start_up_s=words["start_up_s"],
        disagg=DisaggSettings(words["max_local_prefill_length"], words["max_prefill_queue_size"]),
        conditional=not words["always_remote"],
    )
    return Case(
        name,
        options,
        planner=load_options(config) if planned and config.enabled else None,
        no_operation=config.no_operation,
        make_picker=partial(make_picker, words["router"], words["seed"]),
    )


def _gpus(option: str) -> int:
    match = re.fullmatch(r"sim:([0-9]{1,4})", option, re.ASCII)
    if match is None or int(match[1]) < 1:
        raise BadInput(f"--gpus {option}: the twin has simulated GPUs only; write sim:<number>, for example sim:8")
    return int(match[1])


SECTIONS = ("planner", "sim")


def _overrides(words: Sequence[str]) -> dict[str, dict[str, Any]]:
    """`--planner.KEY=VALUE` and `--sim.KEY=VALUE`, keys with underscores."""
    from dynamo_local.config.overrides import parse_overrides
    from dynamo_local.sdk.checks import nearest

    for word in words:
        section = word.removeprefix("--").partition(".")[0] if word.startswith("--") else None
        if section is not None and section not in SECTIONS:
            known = [name.lstrip("-") for option in simulate.params for name in option.opts]
            near = nearest(word.removeprefix("--").partition("=")[0], [*known, *(f"{name}.KEY" for name in SECTIONS)])
            raise BadInput(f"unknown option {word!r}{near}; see dynamo simulate --help")
    found: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    for section, keys in parse_overrides(words).items():
        for key, value in keys.items():
            found[section][_known(section, key)] = value
    return found


def _known(section: str, key: str) -> str:
    """The option's name with underscores. Raises `BadInput` with the nearest one."""
    import dataclasses

    from dynamo_local.config import PlannerConfig
    from dynamo_local.engines.sim.options import SimOptions
    from dynamo_local.sdk.checks import nearest

    fields = {"planner": list(PlannerConfig.model_fields), "sim": [f.name for f in dataclasses.fields(SimOptions)]}
    name = key.replace("-", "_")
    if name not in fields[section]:
        near = nearest(name.replace("_", "-"), [field.replace("_", "-") for field in fields[section]])
        raise BadInput(f"--{section}.{key} is no option of {'the planner' if section == 'planner' else section}{near}")
    return name


def _combinations(sweeps: Sequence[str]) -> list[tuple[str, dict[str, dict[str, Any]]]]:
    """`(name, changes by section)` for the product of all sweeps, the last one changing fastest."""
    from dynamo_local.config.overrides import parse_value

    found: list[tuple[str, dict[str, dict[str, Any]]]] = [("", {})]
    for sweep in sweeps:
        path, equals, texts = sweep.partition("=")
        values = [text.strip() for text in texts.split(",")]
        if not equals or not path or not all(values):
            raise BadInput(f"--sweep {sweep!r} is no KEY=A,B,…, such as adjustment-interval=10,20,30")
        section, dot, key = path.removeprefix("--").partition(".")
        if not dot:
            section, key = "planner", section
        if section not in SECTIONS:
            raise BadInput(f"--sweep {sweep!r}: a key is one of the planner's (adjustment-interval) or sim.KEY")
        name = _known(section, key)
        found = [
            (f"{label}, {key}={text}".removeprefix(", "), _with(changes, section, name, parse_value(text)))
            for label, changes in found
            for text in values
        ]
    return found


def _with(changes: dict[str, dict[str, Any]], section: str, name: str, value: Any) -> dict[str, dict[str, Any]]:
    return {**changes, section: {**changes.get(section, {}), name: value}}


# --- what is told ------------------------------------------------------------------------------


def _json(name: str, metrics: Metrics) -> dict[str, Any]:
    return {**metrics.to_dict(), "name": name}


def _facts(trace: Path, words: Mapping[str, Any]) -> list[tuple[str, str]]:
    def target(value: float | None) -> str:
        return "none" if value is None else f"{value:g} ms"

    speed = "" if words["trace_speed"] == 1.0 else f", times divided by {words['trace_speed']:g}"
    return [
        ("trace", f"{trace.name}{speed}"),
        ("targets", f"TTFT {target(words['ttft_ms'])}, ITL {target(words['itl_ms'])}"),
        ("host", f"{words['gpus']}, start-up {words['start_up_s']:g} s"),
        ("seed", str(words["seed"])),
    ]


def _print_tables(facts: Sequence[tuple[str, str]], rows: Sequence[tuple[str, Metrics]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    # Of one width wherever it goes: the same command prints the same bytes.
    console = Console(width=120, highlight=False)
    console.print("; ".join(f"{what}: {value}" for what, value in facts), markup=False)
    worth = Table("run", box=box.SIMPLE)
    for label in ("requests", "completed", "dropped", "attainment", "goodput/s", "GPU-hours", "GPUs", "scale actions"):
        worth.add_column(label, justify="right")
    times = Table("run", box=box.SIMPLE)
    for label in ("mean", "p50", "p95", "p99"):
        times.add_column(f"TTFT {label}", justify="right")
    for label in ("mean", "p50", "p95", "p99"):
        times.add_column(f"ITL {label}", justify="right")
    for name, m in rows:
        counts = (m.requests, m.completed, m.dropped)
        worth.add_row(
            name,
            *(f"{count:,}" for count in counts),
            f"{m.attainment:.2%}",
            f"{m.goodput_rps:.2f}",
            f"{m.gpu_hours:.3f}",
            f"{m.gpus_mean:.2f}",
            str(m.scale_actions),
        )
        values = [getattr(spread, part) for spread in (m.ttft_ms, m.itl_ms) for part in ("mean", "p50", "p95", "p99")]
        times.add_row(name, *("–" if value is None else f"{value:.1f}" for value in values))
    console.print(worth)
    console.print("milliseconds:")
    console.print(times)
