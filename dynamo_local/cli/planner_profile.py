"""`dynamo planner profile …`: what a planner takes from an engine's profile. Needs no graph that runs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from dynamo_local.cli.common import FiniteRange, json_option

POSITIVE = FiniteRange(min=0, min_open=True, max=1e9)
ITL_MS = (10.0, 20.0, 50.0)


@click.group()
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
    from dynamo_local.errors import BadInput
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
