"""`dynamo plan`: how many workers keep targets under a load, found with a measured profile in the simulator."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dynamo_local.cli.common import FiniteRange, json_option
from dynamo_local.cli.mixes import models_option, plan_models
from dynamo_local.errors import EXIT_FAILED, BadInput

if TYPE_CHECKING:
    from dynamo_local.simulator.sizing import Candidate, Traces, Wanted

POSITIVE = FiniteRange(min=0, min_open=True, max=1e9)
TOKENS = click.IntRange(1, 1_000_000)


@click.command()
@click.option(
    "--profile",
    "profiles",
    multiple=True,
    default=("profile",),
    show_default=True,
    help="Folder of a profile, or the name of one that ships. Several: the better engines are named.",
)
@models_option
@click.option("--trace", type=click.Path(path_type=Path), help="The load, in Mooncake's format; or …")
@click.option("--rate", type=POSITIVE, help="… requests per second …")
@click.option("--isl", type=TOKENS, help="… with prompts around so many tokens …")
@click.option("--osl", type=TOKENS, help="… and answers around so many.")
@click.option(
    "--spread",
    type=click.FloatRange(0, 2),
    default=0.5,
    show_default=True,
    help="How far lengths vary: standard deviation of their logarithm.",
)
@click.option("--ttft", "ttft_ms", type=POSITIVE, help="Target for the time to first token, ms.")
@click.option("--itl", "itl_ms", type=POSITIVE, help="Target for a request's mean gap of tokens, ms.")
@click.option(
    "--attainment",
    type=FiniteRange(min=0, max=1),
    default=0.95,
    show_default=True,
    help="Share of requests that keeps them.",
)
@click.option("--gpus", type=click.IntRange(1, 64), default=8, show_default=True, help="GPUs of the host.")
@click.option("--agg", is_flag=True, help="Workers that do both (with a profile of such engines: always).")
@click.option(
    "--limit",
    type=click.IntRange(min=1),
    default=5000,
    show_default=True,
    help="Only the first so many requests of a trace.",
)
@click.option("--write", type=click.Path(path_type=Path, dir_okay=False), help="Write the YAML sections there.")
@json_option
def plan(as_json: bool, write: Path | None, **words: Any) -> int:
    """Find the smallest fleet that keeps targets under a load, and the best split of its GPUs.

    Nothing has to run: the simulator tries fleets with the profile. Given profiles of several engines (other GPUs per
    worker, other settings), the command names the better one. Exit code 1 if no fleet keeps the targets.

    With --model, several models share the GPUs: how many they need together, and how many each would need alone.
    """
    if words["models"]:
        return plan_models(words, as_json)
    import yaml

    from dynamo_local.simulator.options import Slo
    from dynamo_local.simulator.sizing import Wanted, engines_of_profile, merged, ranked, section, sections_of
    from dynamo_local.simulator.sizing import plan as find

    if words["ttft_ms"] is None and words["itl_ms"] is None:
        raise BadInput("there is no target to keep: give --ttft or --itl, or both")
    wanted = Wanted(Slo(words["ttft_ms"], words["itl_ms"]), words["attainment"], words["gpus"], words["agg"])
    traces, found, refused = _traces(words), [], []
    for name in dict.fromkeys(words["profiles"]):
        engines = engines_of_profile(name, aggregated=words["agg"])
        if len(words["profiles"]) > 1:
            click.echo(f"profile {name}:", err=True)
        try:
            found.append((engines, find(engines, wanted, traces, lambda text: click.echo(text, err=True))))
        except BadInput as error:  # too few GPUs for these: others may take fewer
            refused.append(error)
    if not found:
        raise refused[0]
    for each in refused:
        click.echo(f"left out: {each}", err=True)
    candidates = ranked(found)
    engines, planned = candidates[0].engines, candidates[0].planned
    document = engines.document
    names = {} if document is None else {role: engine.component for role, engine in document.engines.items()}
    names.setdefault("decode", names.get("agg", "VllmWorker"))
    sections = merged(section(engines, planned, wanted, names), sections_of(candidates[0], names))
    text = yaml.safe_dump(sections, sort_keys=False).rstrip() + "\n"
    if write is not None:
        _write(write, text)
    if as_json:
        click.echo(json.dumps(_json(candidates, text), indent=2))
    else:
        _print(candidates, wanted, traces, text, write)
        if words["trace"] is not None:
            click.echo(f"a planner of the policy slo begins with this load by Planner: {{history: {words['trace']}}}")
    return 0 if planned.attained else EXIT_FAILED


def _traces(words: dict[str, Any]) -> Traces:
    from dynamo_local.simulator.sizing import made
    from dynamo_local.simulator.trace import read_trace

    numbers = {name: words[name] for name in ("rate", "isl", "osl")}
    given = [f"--{name}" for name, value in numbers.items() if value is not None]
    if words["trace"] is not None:
        if given:
            raise BadInput(f"--trace has the load, and so has {given[0]}; keep one")
        read = read_trace(words["trace"], limit=words["limit"])
        return lambda _seed: read
    missing = [f"--{name}" for name, value in numbers.items() if value is None]
    if missing:
        raise BadInput(
            f"the load is not known: give --trace FILE, or --rate, --isl and --osl ({missing[0]} is missing)"
        )
    return made(numbers["rate"], numbers["isl"], numbers["osl"], words["spread"])


def _candidate_line(each: Candidate) -> str:
    """`64seqs (agg: max_num_seqs 64): 0P+3D on 3 GPUs, 96.2% within the targets (94.8% to 97.1%)`"""
    planned, described = each.planned, f" ({each.words})" if each.words else ""
    attained = (
        f"{planned.best.metrics.attainment:.1%} within the targets ({planned.lowest:.1%} to {planned.highest:.1%})"
    )
    kept = "" if planned.attained else ", which does not keep them"
    return f"{each.engines.profile}{described}: {planned.best.shape} on {_gpus(planned.best.gpus)}, {attained}{kept}"


def _gpus(count: int) -> str:
    return f"{count} GPU{'s' * (count != 1)}"


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise BadInput(f"{path} cannot be written: {error.strerror}") from error


def _json(candidates: Sequence[Candidate], text: str) -> dict[str, Any]:
    planned = candidates[0].planned

    def row(tried: Any) -> dict[str, Any]:
        return {**asdict(tried.shape), "gpus": tried.gpus, **tried.metrics.to_dict()}

    return {
        "profile": candidates[0].engines.profile,
        "profiles": [
            {
                "profile": each.engines.profile,
                "settings": each.settings,
                "attained": each.planned.attained,
                "attainment_low": each.planned.lowest,
                "attainment_high": each.planned.highest,
                **row(each.planned.best),
            }
            for each in candidates
        ],
        "best": row(planned.best),
        "attained": planned.attained,
        "attainment_low": planned.lowest,
        "attainment_high": planned.highest,
        "alternatives": [row(tried) for tried in planned.alternatives],
        "tried": planned.tried,
        "yaml": text,
    }


def _print(candidates: Sequence[Candidate], wanted: Wanted, traces: Traces, text: str, write: Path | None) -> None:
    from dynamo_local.simulator.sizing import load_of

    engines, planned = candidates[0].engines, candidates[0].planned
    best = planned.best
    click.echo(f"load: {load_of(traces(0))}")
    if len(candidates) > 1:
        for each in candidates:
            click.echo(_candidate_line(each))
        click.echo(f"the better engines: {engines.profile}")
    if engines.document is None:
        click.echo("the profile says nothing of what it was measured on: it may be another engine's")
    elif engines.document.certificate.state != "certified":
        click.echo(f"the profile is uncertified: {engines.document.certificate.where[0]}")
    if not planned.attained:
        click.echo(f"no fleet on {wanted.gpus} GPUs keeps the targets for {wanted.attainment:.0%}; the best one:")
    click.echo(
        f"{best.shape} on {_gpus(best.gpus)}: {best.metrics.attainment:.1%} within the targets "
        f"({planned.lowest:.1%} to {planned.highest:.1%} with other arrivals, and engines ±{engines.error:.0%})"
    )
    for tried in planned.alternatives:
        click.echo(f"  {tried.shape} on as many: {tried.metrics.attainment:.1%}")
    click.echo(text.rstrip() if write is None else f"written: {write}")
