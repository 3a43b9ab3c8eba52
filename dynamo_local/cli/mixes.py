"""`--model` of `dynamo plan` and `dynamo simulate`: several models on the GPUs of one host."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from dynamo_local.cli.common import aligned
from dynamo_local.errors import EXIT_FAILED, BadInput

if TYPE_CHECKING:
    from dynamo_local.simulator.mix_plans import Judged, Loaded, Split

models_option = click.option(
    "--model",
    "models",
    multiple=True,
    metavar="NAME=TRACE[,KEY=VALUE…]",
    help="A model that shares the GPUs with others, and its load. Several (docs/models.md).",
)

GOES_WITH = {"models", "profiles", "profile", "ttft_ms", "itl_ms", "attainment", "gpus", "limit", "as_json"}


def plan_models(words: Mapping[str, Any], as_json: bool) -> int:
    """`dynamo plan --model …`: the fewest GPUs for all models together. The exit code."""
    from dynamo_local.simulator.mix_plans import plan

    models = _loaded(words, words["profiles"])
    planned = plan(models, words["gpus"], words["attainment"], lambda text: click.echo(text, err=True))
    apart = None if None in planned.apart.values() else sum(each or 0 for each in planned.apart.values())
    if as_json:
        found = {
            "attained": planned.attained,
            **_run(models, planned.together),
            "apart_gpus": apart,
            "apart": dict(planned.apart),
        }
        click.echo(json.dumps(found, indent=2))
    else:
        if not planned.attained:
            share = f"{words['attainment']:.0%}"
            click.echo(f"with --gpus {words['gpus']} too few requests are within the targets ({share} wanted):")
        _print(models, planned.together)
        alone = ", ".join(f"{name} {'none is enough' if n is None else n}" for name, n in planned.apart.items())
        click.echo(f"each on GPUs of its own: {'–' if apart is None else apart} ({alone})")
    return 0 if planned.attained else EXIT_FAILED


def simulate_models(words: Mapping[str, Any], gpus: int, as_json: bool) -> None:
    """`dynamo simulate --model …`: the models on so many GPUs, shared, and beside that the best fixed split."""
    from dynamo_local.simulator.mix_plans import best_splits, together

    models = _loaded(words, () if words["profile"] is None else (words["profile"],))
    judged = together(models, gpus)
    best, of_all = best_splits(models, gpus)
    if as_json:
        splits = {"best_fixed_split": _split(best), "best_fixed_split_of_all": of_all and _split(of_all)}
        click.echo(json.dumps({**_run(models, judged), **splits}, indent=2))
        return
    _print(models, judged)
    for split, whose in ((best, ""), (of_all, " with a worker of each")):
        if split is not None and (whose == "" or split != best):
            said = ", ".join(f"{name} {count or 'none'}" for name, count in split.gpus.items())
            click.echo(f"the best fixed split{whose}, chosen afterwards: {split.share:.1%} within the targets ({said})")


def _split(split: Split) -> dict[str, Any]:
    return {"gpus": dict(split.gpus), "attainment": round(split.share, 6)}


def _loaded(words: Mapping[str, Any], profiles: Sequence[str]) -> list[Loaded]:
    """The models. Raises `BadInput`, also for an option that says nothing of several models."""
    from dynamo_local.simulator.mix_plans import parse_model

    context = click.get_current_context()
    for name in context.params:
        if name not in GOES_WITH and context.get_parameter_source(name) is not ParameterSource.DEFAULT:
            option = next(each.opts[0] for each in context.command.params if each.name == name)
            raise BadInput(f"{option} does not go with --model; see docs/models.md for what does")
    if len(profiles) > 1:
        raise BadInput("--profile is for all models; say a model's own as --model NAME=TRACE,profile=…")
    usual = {"profile": profiles[0] if profiles else None, "ttft": words["ttft_ms"], "itl": words["itl_ms"]}
    models = [parse_model(text, usual, words["limit"]) for text in words["models"]]
    names = [each.name for each in models]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise BadInput(f"--model {twice} is given twice; a model has one load")
    return models


def _rows(models: Sequence[Loaded], judged: Judged) -> list[dict[str, Any]]:
    from dynamo_local.simulator.metrics import spread

    found = []
    for number, model in enumerate(models):
        mine = judged.judged(number)
        ttfts = [judged.result.ttfts_s[at] * 1000 for at in mine if judged.result.ttfts_s[at] < math.inf]
        waits = [judged.result.waits_s[at] for at in mine if judged.result.waits_s[at] < math.inf]
        ttft, wait = spread(ttfts), spread(waits)
        came, kept = judged.kept[model.name]
        found.append(
            {
                "name": model.name,
                "requests": came,
                "attainment": round(kept / max(1, came), 6),
                "ttft_ms_p50": ttft.p50,
                "ttft_ms_p95": ttft.p95,
                "wait_s_p99": wait.p99,
                "worker_gpus": model.engine.gpus,
                "slots": model.engine.slots,
                "start_s": min(model.engine.start_s, model.engine.wake_s),
            }
        )
    return found


def _run(models: Sequence[Loaded], judged: Judged) -> dict[str, Any]:
    return {
        "gpus": judged.gpus,
        "attainment": round(judged.share, 6),
        "gpu_hours": round(judged.result.gpu_hours, 6),
        "switches": judged.result.switches,
        "models": _rows(models, judged),
    }


def _print(models: Sequence[Loaded], judged: Judged) -> None:
    head = ["MODEL", "REQUESTS", "WITHIN", "TTFT p50", "TTFT p95", "WAIT p99", "GPUS/WORKER", "SLOTS", "START"]
    rows = [
        [
            each["name"],
            f"{each['requests']:,}",
            f"{each['attainment']:.1%}",
            _shown(each["ttft_ms_p50"], "ms"),
            _shown(each["ttft_ms_p95"], "ms"),
            _shown(each["wait_s_p99"], "s"),
            str(each["worker_gpus"]),
            str(each["slots"]),
            f"{each['start_s']:g} s",
        ]
        for each in _rows(models, judged)
    ]
    for row in aligned([head, *rows]):
        click.echo("  ".join(row).rstrip())
    hours = judged.requests[-1].at_s / 3600
    mean = judged.result.gpu_hours / hours if hours else 0.0
    click.echo(
        f"shared, on {judged.gpus} GPU{'s' * (judged.gpus != 1)}: {judged.share:.1%} within the targets; "
        f"{mean:.1f} GPUs held in the mean; {judged.result.switches} workers came"
    )


def _shown(value: float | None, unit: str) -> str:
    return "–" if value is None else f"{value:,.{0 if unit == 'ms' else 1}f} {unit}"
