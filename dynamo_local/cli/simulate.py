"""`dynamo simulate`: runs a trace in the simulator. Prints a table or JSON, or writes an HTML page."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import click

from dynamo_local.cli.common import FiniteRange, Shape, json_option, shown
from dynamo_local.cli.mixes import models_option, simulate_models
from dynamo_local.core.lead_times import OptionKind
from dynamo_local.core.traffic import MAX_INFLIGHT, MAX_NUM_WAITING, REQUEST_TIMEOUT_S
from dynamo_local.core.types import SECONDS_MAX
from dynamo_local.errors import BadInput

if TYPE_CHECKING:
    from dynamo_local.simulator.generator import Generated
    from dynamo_local.simulator.metrics import Metrics
    from dynamo_local.simulator.options import LeadOptions
    from dynamo_local.simulator.simulation import Case
    from dynamo_local.simulator.trace import TraceRequest


NAMES = ("flip", "wake", "spare", "cold", "sleep")
MEASURED = "measured"
"""`--lead measured`, or `--lead measured:NAMESPACE`."""
NAMESPACE = "dynamo"
RUNGS: Mapping[str, tuple[OptionKind, ...]] = {
    "flip": (OptionKind.FLIP_TO_DECODE, OptionKind.FLIP_TO_PREFILL),
    "wake": (OptionKind.WAKE_1, OptionKind.WAKE_2),
    "spare": (OptionKind.PREWARMED,),
    "cold": (OptionKind.COLD,),
}


def leads_of(values: Sequence[str], start_up_s: float) -> LeadOptions:
    """Lead times by scaling option. `cold` is `--start-up-s`; the rest defaults to the simulator's own.

    A number given here replaces a measured one. The last value given for an option wins. Raises `BadInput`.
    """
    from dynamo_local.simulator.options import LeadOptions

    parts = [part.strip() for value in values for part in value.split(",")]
    measured = [_measured(part) for part in parts if part.partition(":")[0] == MEASURED]
    given = dict(_given(part) for part in parts if part.partition(":")[0] != MEASURED)
    found = {**(measured[-1] if measured else {}), **given}
    return LeadOptions(**{"cold_s": start_up_s, **{f"{name}_s": value for name, value in found.items()}})


def _given(part: str) -> tuple[str, float]:
    name, _, value = part.partition("=")
    if name not in NAMES:
        raise BadInput(f"--lead {part!r}: there are {', '.join(NAMES)}, such as spare=8,cold=45; or {MEASURED}")
    try:
        seconds = float(value)
    except ValueError:
        raise BadInput(f"--lead {part!r}: {value!r} is no number of seconds") from None
    if not 0 <= seconds <= SECONDS_MAX:
        raise BadInput(f"--lead {part!r}: seconds, 0 to {SECONDS_MAX:g}")
    return name, seconds


def _measured(text: str) -> dict[str, float]:
    """For each scaling option: the median of the slowest component, as measured in that namespace."""
    from dynamo_local.simulator.options import DECODE, PREFILL
    from dynamo_local.state.leads import LeadFile
    from dynamo_local.state.raw import state_folder

    namespace = text.partition(":")[2] or NAMESPACE
    file = LeadFile(state_folder(os.environ))
    components: dict[str, Any] = file.all(namespace)
    chosen = {name: rungs for name, rungs in components.items() if name in (DECODE, PREFILL)} or components
    found: dict[str, float] = {}
    for name, rungs in RUNGS.items():
        medians = [median(samples[rung]) for samples in chosen.values() for rung in rungs if samples.get(rung)]
        if medians:
            found[name] = max(medians)
    if not found:
        raise BadInput(f"--lead {text}: nothing was measured in namespace {namespace!r} on this host; see {file.path}")
    return found


# `dynamo simulate --profile FOLDER`: facts of a measured profile that are not times.

START_UP_S = 30.0
"""Start-up time of a new worker if nothing was measured."""


def with_measured(params: Mapping[str, Any]) -> dict[str, Any]:
    """The command's words with `start_up_s` and `engines`: options of the simulated engine, each as it was measured.

    Options given by the user win. A profile without `profile.json` gives none. Raises `ConfigError`.
    """
    from dynamo_local.profile.document import read_document
    from dynamo_local.profile.reading import profile_folder

    name, start_up_s = params["profile"], params["start_up_s"]
    document = None if name is None else read_document(profile_folder(name))
    engine = None if document is None else document.serving
    if document is None or engine is None:
        return {**params, "engines": {}, "start_up_s": START_UP_S if start_up_s is None else start_up_s}
    kv = engine.max_kv_tokens
    engines = {
        "block_size": next((size for size in (64, 32, 16, 8, 4, 2) if kv % size == 0), 1),
        "max_num_seqs": engine.max_num_seqs,
        "max_num_batched_tokens": engine.max_num_batched_tokens,
        "max_model_len": min(engine.context_length, kv),
    }
    measured_s = START_UP_S if document.cold_start_s is None else document.cold_start_s
    return {**params, "engines": engines, "start_up_s": measured_s if start_up_s is None else start_up_s}


# The requests of `dynamo simulate`: read from a file, or generated.


@dataclass(frozen=True, slots=True)
class RecordedRequests:
    """Requests of a trace. `name` is the file's, for the report."""

    path: Path
    what: str = "trace"

    @property
    def name(self) -> str:
        return self.path.name

    def requests(self, *, limit: int | None, speed: float) -> list[TraceRequest]:
        """The first `limit` of them (None: all), their times divided by `speed`."""
        from dynamo_local.simulator.trace import read_trace

        return read_trace(self.path, limit=limit, speed=speed)


@dataclass(frozen=True, slots=True)
class GeneratedRequests:
    """Requests of the generator. `name` is what it was given, for the report."""

    generated: Generated
    write_to: Path | None
    what: str = "generated"

    @property
    def name(self) -> str:
        return str(self.generated)

    def requests(self, *, limit: int | None, speed: float) -> list[TraceRequest]:
        """As for `RecordedRequests`. The times in the file `write_to` are not divided by `speed`."""
        from dynamo_local.simulator.generator import generate
        from dynamo_local.simulator.trace import write_trace

        made = list(islice(generate(self.generated.options), limit))
        if self.write_to is not None:
            write_trace(self.write_to, made)
        return made if speed == 1.0 else [replace(request, at_s=request.at_s / speed) for request in made]


Source = RecordedRequests | GeneratedRequests


def source_of(trace: Path | None, generate: str | None, write_to: Path | None) -> Source:
    """The requests to simulate. Raises `BadInput` unless exactly one of `--trace` and `--generate` is given."""
    if (trace is None) == (generate is None):
        given = "both are given; keep one" if trace is not None else "neither is given"
        raise BadInput(f"the requests come from --trace FILE or from --generate chat|code|sin, and {given}")
    if trace is not None:
        if write_to is not None:
            raise BadInput(f"--write-trace {write_to} keeps what --generate made; --trace {trace} is a file already")
        return RecordedRequests(trace)
    from dynamo_local.simulator.generator import parse_generated

    return GeneratedRequests(parse_generated(generate or ""), write_to)


# The runs of `dynamo simulate` as tables.


def print_tables(
    facts: Sequence[tuple[str, str]], rows: Sequence[tuple[str, Metrics]], params: Mapping[str, Any]
) -> None:
    """Tables of the runs: attainment and cost, dropped requests with reasons, scaling actions, latencies."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    # A fixed width, so that the same command always prints the same bytes.
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
    for name, m in rows:
        for reason, count in m.dropped_by.items():
            console.print(f"{name}: {count:,} dropped: {_explained(reason, params)}", markup=False)
        if {"flips", "wakes", "sleeps"} & m.done_by.keys():
            console.print(
                f"{name}: {', '.join(f'{count:,} {what}' for what, count in m.done_by.items())}", markup=False
            )
    console.print("milliseconds:")
    console.print(times)


def _explained(reason: str, params: Mapping[str, Any]) -> str:
    """Why requests were dropped, and what changes it."""
    from dynamo_local.simulator.process import Dropped

    explanations = {
        Dropped.FRONTEND_FULL: f"the Frontend had {params['max_inflight']} requests already (429): more workers, or a "
        "higher --max-inflight, with which they wait until their deadline",
        Dropped.WORKERS_FULL: f"{params['max_num_waiting']} requests waited for each worker already (429): more "
        "workers, or a higher --max-num-waiting, with which they wait until their deadline",
        Dropped.DEADLINE: f"not done within {params['request_timeout_s']:g} s (504): more workers, or a longer "
        "--request-timeout-s",
        Dropped.TOO_LONG: "prompt and answer are longer than the model's context (400)",
    }
    return explanations.get(Dropped(reason), reason)


DEFAULT_INITIAL = "1,1"


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": True})
@click.option("--trace", type=click.Path(path_type=Path), help="Requests: a recording, or another format.")
@models_option
@click.option("--as-it-was", is_flag=True, help="Run the fleet that --trace FILE was recorded on, with its targets.")
@click.option("--generate", metavar="chat|code|sin[,KEY=VALUE…]", help="Make the requests (docs/simulate.md).")
@click.option(
    "-o",
    "--write-trace",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Keep what was made (.jsonl, .gz).",
)
@click.option("--limit", type=click.IntRange(min=1), help="Only the first so many requests.")
@click.option(
    "--trace-speed", type=FiniteRange(min=0, min_open=True), default=1.0, help="The trace's times, divided by it."
)
@click.option("--profile", default=None, help="Engine profile: a shipped one's name, or a folder.")
@click.option("--gpus", default="sim:8", show_default=True, help="sim:N, the GPUs of the host.")
@click.option("--ttft", "ttft_ms", type=FiniteRange(min=0), help="Target for the time to first token, ms.")
@click.option("--itl", "itl_ms", type=FiniteRange(min=0), help="Target for a request's mean gap of tokens, ms.")
@click.option("--policy", "policies", metavar="NAME[,NAME…]", help="A planned run with each of these policies.")
@click.option("--initial", type=Shape(), help="Workers at the beginning of a planned run.  [default: 1,1]")
@click.option("--static", "statics", type=Shape(), multiple=True, help="A run with this fleet and no planner.")
@click.option("--sweep", "sweeps", multiple=True, metavar="KEY=A,B,…", help="One run for each value (or combination).")
@click.option(
    "--start-up-s",
    type=FiniteRange(min=0, max=SECONDS_MAX),
    help="Start-up time of a new worker.  [default: the profile's cold start, or 30]",
)
@click.option("--spares", type=click.IntRange(0, 64), default=0, show_default=True, help="As Host's: warm starts.")
@click.option(
    "--lead", multiple=True, metavar="flip=S,wake=S,spare=S,cold=S|measured", help="Times to one more worker."
)
@click.option("--flips", is_flag=True, help="Workers can take over each other's role (ServiceArgs.flippable).")
@click.option("--standby", type=Shape(decode_min=0), help="P,D: so many workers are kept asleep (ServiceArgs.standby).")
@click.option(
    "--max-local-prefill-length", type=click.IntRange(min=0), default=10, show_default=True, help="As the worker's."
)
@click.option("--max-prefill-queue-size", type=click.IntRange(min=0), default=2, show_default=True, help="The same.")
@click.option("--always-remote", is_flag=True, help="Every prefill goes to prefill workers (no conditional-disagg).")
@click.option(
    "--disagg-policy",
    type=click.Choice(["threshold", "slo"]),
    help="As the worker's.  [default: slo with --ttft or --itl, else threshold; threshold with --always-remote]",
)
@click.option(
    "--max-inflight", type=click.IntRange(min=1), default=MAX_INFLIGHT, show_default=True, help="As the Frontend's."
)
@click.option(
    "--max-num-waiting", type=click.IntRange(min=1), default=MAX_NUM_WAITING, show_default=True, help="As the worker's."
)
@click.option(
    "--request-timeout-s",
    type=click.FloatRange(min=0, min_open=True),
    default=REQUEST_TIMEOUT_S,
    show_default=True,
    help="As the Frontend's.",
)
@click.option(
    "--router",
    type=click.Choice(["least-loaded", "slo", "round-robin", "random"]),
    help="As the Processor's.  [default: slo with --ttft or --itl, else least-loaded]",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the random router.")
@click.option("--jobs", type=click.IntRange(min=1), help="Runs at once.  [default: one for each core]")
@click.option("--progress", is_flag=True, help="Print the share of requests that have ended on stderr (with one job).")
@click.option("--report", type=click.Path(path_type=Path, dir_okay=False), help="Write an HTML page (extra `report`).")
@json_option
@click.argument("overrides", nargs=-1, type=click.UNPROCESSED, metavar="[--planner.KEY=VALUE …] [--sim.KEY=VALUE …]")
def simulate(as_json: bool, report: Path | None, jobs: int | None, progress: bool, **params: Any) -> None:
    """Run requests through this graph's engine, queue, router and planner on a virtual clock, without processes.

    Any planner option: --planner.adjustment-interval=10 (of several policies, for those that have it). Any option of
    the simulated engine: --sim.max-num-seqs=64.
    The requests are those of a --trace, or are made (--generate).
    With --static and no policy or option of the planner there is no planned run; with both they are compared.

    With --model, several models share the GPUs, beside the best fixed split of them.
    """
    if params["models"]:
        simulate_models(params, _gpus(params["gpus"]), as_json)
        return
    from dynamo_local.simulator.metrics import measure
    from dynamo_local.simulator.options import Slo
    from dynamo_local.simulator.report import ReportedRun, write_report
    from dynamo_local.simulator.simulation import run_cases
    from dynamo_local.system.pages import check_plots

    source = source_of(params["trace"], params["generate"], params["write_trace"])
    if report is not None:
        check_plots()
    params = with_defaults(as_it_was(with_planner_targets(with_measured(params))))
    cases = cases_of(params)
    requests = source.requests(limit=params["limit"], speed=params["trace_speed"])
    slo = Slo(params["ttft_ms"], params["itl_ms"])
    told = _percents(len(requests)) if progress else lambda ended: None
    runs = list(shown("runs", run_cases(requests, cases, jobs, told), len(cases)))
    rows = [(case.name, measure(run, slo)) for case, run in zip(cases, runs, strict=True)]
    if report is not None:
        reported = [ReportedRun(case.name, run, row[1]) for case, run, row in zip(cases, runs, rows, strict=True)]
        write_report(report, f"dynamo simulate: {source.name}", _facts(source, params), reported, slo)
    if as_json:
        found = [{**metrics.to_dict(), "name": name} for name, metrics in rows]
        click.echo(json.dumps(found if len(found) > 1 or params["sweeps"] else found[0], indent=2))
        return
    print_tables(_facts(source, params), rows, params)
    if report is not None:
        click.echo(f"report: {report}")


def _percents(requests: int) -> Callable[[int], None]:
    """Prints `progress 0.37` at each new percent."""
    last = -1

    def told(ended: int) -> None:
        nonlocal last
        if (percent := 100 * ended // requests) != last:
            last = percent
            click.echo(f"progress {percent / 100:.2f}", err=True)

    return told


def cases_of(params: Mapping[str, Any]) -> list[Case]:
    """The planned runs, then the fixed ones. Raises `BadInput` for options that cannot be run."""
    given = _overrides(params["overrides"])
    if params["profile"] is not None:
        given["sim"] = {**params["engines"], **given["sim"], "profile": params["profile"]}
    combinations = _combinations(params["sweeps"])
    has_planner_options = bool(given["planner"] or params["sweeps"] or params["initial"] or params["policies"])
    planned = not params["statics"] or has_planner_options
    shape = params["initial"] or Shape().convert(DEFAULT_INITIAL, None, None)
    cases = []
    for name, changes in combinations if planned else []:
        merged = {section: {**given[section], **changes.get(section, {})} for section in given}
        if params["policies"] is None:
            cases.append(_case(name or f"planner from {_shape(shape)}", params, merged, shape, planned=True))
            continue
        for policy, options in _by_policy(params["policies"], merged["planner"]).items():
            label = f"{policy}, {name}" if name else f"{policy} from {_shape(shape)}"
            cases.append(_case(label, params, {**merged, "planner": options}, shape, planned=True))
    engines = {name: value for name, value in given["planner"].items() if name.endswith("_engine_num_gpu")}
    for fixed in params["statics"]:
        cases.append(_case(f"static {_shape(fixed)}", params, {**given, "planner": engines}, fixed, planned=False))
    return cases


def _by_policy(names: str, options: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The options of each policy: of those that are given, its own. Raises `BadInput` for one that none of them has."""
    from dynamo_local.config.planner import POLICIES, aliases_of, options_of
    from dynamo_local.sdk.checks import listing, nearest

    found: dict[str, dict[str, Any]] = {}
    unused = set(options) - {"policy"}
    for name in (part.strip() for part in names.split(",")):
        if name not in POLICIES:
            raise BadInput(f"--policy {name!r} is none; there are: {listing(POLICIES)}{nearest(name, POLICIES)}")
        known = {*options_of(name), *aliases_of(name)}
        found[name] = {key: value for key, value in options.items() if key in known} | {"policy": name}
        unused -= known
    if unused:
        raise BadInput(f"--planner.{sorted(unused)[0]} is no option of {listing(found)}")
    return found


def with_planner_targets(params: Mapping[str, Any]) -> dict[str, Any]:
    """The command's words, with the targets that `--planner.ttft` and `--planner.itl` say for the whole run.

    Raises `BadInput` where a target has two values.
    """
    from dynamo_local.config.planner import LATENCY_ALIASES

    found, given = dict(params), _overrides(params["overrides"])["planner"]
    for target, option in LATENCY_ALIASES.items():
        for name in (target, option):
            if (value := given.get(name)) is None:
                continue
            if found[option] not in (None, value):
                raise BadInput(f"--{target} is {found[option]:g}, and --planner.{name} is {value}; say a target once")
            found[option] = value
    return found


def with_defaults(params: Mapping[str, Any]) -> dict[str, Any]:
    """The command's words with the defaults of `dynamo serve`: dispatch and router decide by the targets, if any."""
    targets = params["ttft_ms"] is not None or params["itl_ms"] is not None
    return {
        **params,
        "disagg_policy": params["disagg_policy"] or ("slo" if targets and not params["always_remote"] else "threshold"),
        "router": params["router"] or ("slo" if targets else "least-loaded"),
    }


def as_it_was(params: Mapping[str, Any]) -> dict[str, Any]:
    """With --as-it-was: the command's words with the recording's fleet, as a fixed run and as where planned runs begin.

    Its targets are those of the run, unless the command line gives them. Raises `BadInput` without --trace.
    """
    if not params["as_it_was"]:
        return dict(params)
    if params["trace"] is None:
        raise BadInput("--as-it-was takes the fleet of a recording: give --trace FILE, a file of record-trace")
    from dynamo_local.simulator.recordings import read_fleet

    fleet = read_fleet(params["trace"])
    shape = (fleet.prefill, fleet.decode)
    planned = bool(params["policies"] or params["sweeps"] or _overrides(params["overrides"])["planner"])
    return {
        **params,
        "recorded_fleet": f"{_shape(shape)}, changed {fleet.changes} time{'s' * (fleet.changes != 1)}",
        "statics": tuple(dict.fromkeys((shape, *params["statics"]))),
        "initial": shape if planned and params["initial"] is None else params["initial"],
        "ttft_ms": fleet.ttft_ms if params["ttft_ms"] is None else params["ttft_ms"],
        "itl_ms": fleet.itl_ms if params["itl_ms"] is None else params["itl_ms"],
    }


def _shape(shape: tuple[int, int]) -> str:
    return f"{shape[0]}P{shape[1]}D" if shape[0] else f"{shape[1]} aggregated"


def _case(
    name: str,
    params: Mapping[str, Any],
    given: Mapping[str, Mapping[str, Any]],
    shape: tuple[int, int],
    *,
    planned: bool,
) -> Case:
    from functools import partial

    from dynamo_local.arbiter.planner_options import actuators
    from dynamo_local.components.dispatcher import sim_picker
    from dynamo_local.config.planner_section import planner_section
    from dynamo_local.core.routing.disagg import DisaggSettings
    from dynamo_local.core.routing.estimates import Targets
    from dynamo_local.core.types import Actuator
    from dynamo_local.engines.sim.options import SimOptions
    from dynamo_local.planner.choosing import policy_of
    from dynamo_local.simulator.options import FleetShape, SimulationOptions
    from dynamo_local.simulator.simulation import Case

    config = planner_section("--planner", _with_targets(given, params))
    sim = SimOptions.from_mapping(given["sim"])
    targets = Targets.of_ms(params["ttft_ms"], params["itl_ms"])
    allowed = actuators(config)
    options = SimulationOptions(
        shape=FleetShape(*shape),
        sim=sim,
        gpus=_gpus(params["gpus"]),
        prefill_gpus=config.prefill_engine_num_gpu or 1,
        decode_gpus=config.decode_engine_num_gpu or 1,
        start_up_s=params["start_up_s"],
        spares=params["spares"],
        flips=params["flips"] and (config.actuators is None or Actuator.FLIP in allowed),
        standby=FleetShape(*params["standby"]) if params["standby"] and Actuator.WAKE in allowed else None,
        leads=leads_of(params["lead"], params["start_up_s"]),
        disagg=DisaggSettings(params["max_local_prefill_length"], params["max_prefill_queue_size"]),
        conditional=not params["always_remote"],
        disagg_policy=params["disagg_policy"],
        targets=targets,
        max_inflight=params["max_inflight"],
        max_num_waiting=params["max_num_waiting"],
        request_timeout_s=params["request_timeout_s"],
    )
    return Case(
        name,
        options,
        planner=config if planned and config.enabled else None,
        make_policy=partial(policy_of, gpus=(options.prefill_gpus if shape[0] else 0, options.decode_gpus)),
        no_operation=config.no_operation,
        make_picker=partial(sim_picker, params["router"], params["seed"], sim, targets),
    )


def _with_targets(given: Mapping[str, Mapping[str, Any]], params: Mapping[str, Any]) -> dict[str, Any]:
    """The planner's options. A policy with targets has those of the run, and the profile that the engines run by.

    With targets the default is `slo`, as in `dynamo serve`.
    """
    from dynamo_local.config.planner import BY_TARGETS, POLICIES, options_of
    from dynamo_local.config.planner_section import chosen_policy, own_names, takes_targets
    from dynamo_local.engines.sim.options import SimOptions

    targets = params["ttft_ms"] is not None or params["itl_ms"] is not None
    by_targets = targets and takes_targets(given["planner"])
    policy = chosen_policy(given["planner"], BY_TARGETS if by_targets else "load")
    found = own_names("--planner", given["planner"], policy)
    profile = given["sim"].get("profile", SimOptions().profile)
    of_the_run = {"ttft_ms": params["ttft_ms"], "itl_ms": params["itl_ms"], "profile_results_dir": profile}
    for name, value in of_the_run.items():
        if policy in POLICIES and name in options_of(policy) and value is not None:
            found.setdefault(name, value)
    return found


def _gpus(option: str) -> int:
    match = re.fullmatch(r"sim:([0-9]{1,4})", option, re.ASCII)
    if match is None or int(match[1]) < 1:
        raise BadInput(f"--gpus {option}: the simulator has simulated GPUs only; write sim:<number>, for example sim:8")
    return int(match[1])


SECTIONS = ("planner", "sim")


def _overrides(arguments: Sequence[str]) -> dict[str, dict[str, Any]]:
    """`--planner.KEY=VALUE` and `--sim.KEY=VALUE`, keys with underscores."""
    from dynamo_local.config.loading import parse_overrides
    from dynamo_local.sdk.checks import nearest

    for argument in arguments:
        section = argument.removeprefix("--").partition(".")[0] if argument.startswith("--") else None
        if section is not None and section not in SECTIONS:
            known = [name.lstrip("-") for option in simulate.params for name in option.opts]
            near = nearest(
                argument.removeprefix("--").partition("=")[0], [*known, *(f"{name}.KEY" for name in SECTIONS)]
            )
            raise BadInput(f"unknown option {argument!r}{near}; see dynamo simulate --help")
    found: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    for section, keys in parse_overrides(arguments).items():
        for key, value in keys.items():
            found[section][_known(section, key)] = value
    return found


def _known(section: str, key: str) -> str:
    """The option's name with underscores. Raises `BadInput` with the nearest one."""
    import dataclasses

    from dynamo_local.config.planner import known_names
    from dynamo_local.engines.sim.options import SimOptions
    from dynamo_local.sdk.checks import nearest

    fields = {"planner": list(known_names()), "sim": [f.name for f in dataclasses.fields(SimOptions)]}
    name = key.replace("-", "_")
    if name not in fields[section]:
        near = nearest(name.replace("_", "-"), [field.replace("_", "-") for field in fields[section]])
        raise BadInput(f"--{section}.{key} is no option of {'the planner' if section == 'planner' else section}{near}")
    return name


def _combinations(sweeps: Sequence[str]) -> list[tuple[str, dict[str, dict[str, Any]]]]:
    """`(name, changes by section)` for the product of all sweeps, the last one changing fastest."""
    from dynamo_local.config.loading import parse_value

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


def _facts(source: Source, params: Mapping[str, Any]) -> list[tuple[str, str]]:
    def target(value: float | None) -> str:
        return "none" if value is None else f"{value:g} ms"

    speed = "" if params["trace_speed"] == 1.0 else f", times divided by {params['trace_speed']:g}"
    recorded = params.get("recorded_fleet")
    return [
        (source.what, f"{source.name}{speed}"),
        *([("as it was", recorded)] if recorded else []),
        ("targets", f"TTFT {target(params['ttft_ms'])}, ITL {target(params['itl_ms'])}"),
        ("host", _host(params)),
        ("seed", str(params["seed"])),
        (
            "bounds",
            f"max-inflight {params['max_inflight']}, max-num-waiting {params['max_num_waiting']} for each worker, "
            f"request-timeout {params['request_timeout_s']:g} s",
        ),
    ]


def _host(params: Mapping[str, Any]) -> str:
    lead, spares = leads_of(params["lead"], params["start_up_s"]), params["spares"]
    found = [f"start-up {lead.cold_s:g} s"]
    found += [f"{spares} spare{'s' * (spares != 1)} with {lead.spare_s:g} s"] if spares else []
    found += [f"flips with {lead.flip_s:g} s"] if params["flips"] else []
    if params["standby"]:
        found.append(f"{_shape(params['standby'])} on standby with {lead.wake_s:g} s")
    return ", ".join([params["gpus"], *found])
