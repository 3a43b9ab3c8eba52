"""`dynamo profile`: measure the engines of a configuration on this host."""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dynamo_local.cli.common import json_option
from dynamo_local.core.types import SECONDS_MAX
from dynamo_local.errors import EXIT_FAILED

if TYPE_CHECKING:
    from dynamo_local.profile.document import Document
    from dynamo_local.profile.points import Point
    from dynamo_local.profile.repetitions import Progress

TELL_EVERY_S = 5.0
"""Where nobody looks at a terminal, a line so often."""
STOPPED = 130
UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}


class Budget(click.ParamType):
    """`90`, `90s`, `15m`, `1h`."""

    name = "TIME"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Seconds."""
        found = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,3})?)(s|m|h|)", str(value), re.ASCII)
        seconds = float(found[1]) * UNITS[found[2]] if found else 0.0
        if not 0 < seconds <= SECONDS_MAX:
            self.fail(f"{value!r} is no time such as 90s, 15m or 1h", param, ctx)
        return seconds


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": True})
@click.argument("graph", metavar="[MODULE:SERVICE]", required=False)
@click.option("--file", "-f", type=click.Path(path_type=Path), help="Configuration, YAML.")
@click.option(
    "--output",
    "-o",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("profile"),
    help="Folder that is written.  [profile]",
)
@click.option("--budget", type=Budget(), default="15m", show_default=True, help="For everything that is measured.")
@click.option("--roles", default=None, help="Only these: prefill, decode, or agg.  [all of the graph]")
@click.option("--gpus", default=None, help="As for `dynamo serve`.")
@click.option("--namespace", "-n", default="profile", show_default=True, help="Namespace of the measured graph.")
@click.option(
    "--max-context",
    type=click.IntRange(min=256),
    default=16_384,
    show_default=True,
    help="Longest sequence that is measured, tokens.",
)
@click.option("--start-deadline", type=click.FloatRange(min=0.1, max=SECONDS_MAX), help="As for `dynamo serve`.")
@click.option("--kv-tokens", type=click.IntRange(min=1), help="For a command: size of its KV cache, tokens.")
@click.option("--context-length", type=click.IntRange(min=1), help="For a command: its longest sequence, tokens.")
@click.option("--max-num-seqs", type=click.IntRange(min=1), help="For a command: requests that it runs at once.")
@click.option(
    "--prefill-interpolation-granularity",
    "--prefillInterpolationGranularity",
    "prefill_steps",
    type=click.IntRange(min=2),
    help="Prompt lengths that are measured: more take longer, and are more exact.  [default: 16]",
)
@click.option(
    "--decode-interpolation-granularity",
    "--decodeInterpolationGranularity",
    "decode_steps",
    type=click.IntRange(min=2),
    help="Contexts that are measured, and loads of each.  [default: 6]",
)
@click.option("--small", is_flag=True, help="A third of the points: for a first look.")
@click.option("--resume", is_flag=True, help="Go on with what an earlier run left in the folder.")
@click.option("--no-actions", is_flag=True, help="Do not time starts, drains, flips and sleeps.")
@click.option("--report", type=click.Path(path_type=Path, dir_okay=False), help="Write an HTML page (extra `report`).")
@json_option
@click.argument("overrides", nargs=-1, type=click.UNPROCESSED)
def profile(graph: str | None, as_json: bool, report: Path | None, **words: Any) -> int:
    """Measure the engines of the graph MODULE:SERVICE, and write a profile that planners go by.

    The graph is started as `dynamo serve` would, in a namespace of its own, and ended. Any `--Service.key=value`
    overrides the configuration. Ctrl-C keeps what is there; --resume goes on.
    """
    from dynamo_local.measuring.profile import ProfileRequest
    from dynamo_local.measuring.profile import profile as measure
    from dynamo_local.measuring.target import understood
    from dynamo_local.profile.outside import Given
    from dynamo_local.system.pages import check_plots

    overrides = words["overrides"]
    if graph is not None and graph.startswith("-"):  # no graph was given: this is the first override
        graph, overrides = None, (graph, *overrides)
    if report is not None:
        check_plots()
    target = understood(
        graph,
        words["file"],
        overrides,
        words["namespace"],
        words["gpus"],
        words["roles"],
        words["start_deadline"],
        Given(words["kv_tokens"], words["context_length"], words["max_num_seqs"]),
    )
    request = ProfileRequest(
        *(words["output"], words["budget"]),
        context_max=words["max_context"],
        small=words["small"],
        resume=words["resume"],
        actions=not words["no_actions"],
        prefill_steps=words["prefill_steps"],
        decode_steps=words["decode_steps"],
    )
    view = _View()
    try:
        measured = asyncio.run(measure(target, request, view.say, view.point))
    except KeyboardInterrupt:  # later on Ctrl-C ends the measurement itself
        click.echo("stopped while the graph was starting; nothing was measured", err=True)
        return STOPPED
    view.end()
    if measured.document is None:
        done = sum(1 for point in measured.progress.points if measured.progress.of(point).samples)
        why = "stopped" if measured.stopped else f"no profile: {measured.why}"
        click.echo(
            f"{why}; {done} of {len(measured.progress.points)} points are kept in {request.folder}: --resume goes on",
            err=True,
        )
        return STOPPED if measured.stopped else EXIT_FAILED
    if report is not None:
        _report(report, request.folder, measured.document)
    if as_json:
        import msgspec

        click.echo(json.dumps(msgspec.to_builtins(measured.document), indent=2))
    else:
        _print(measured.document, request.folder, report)
    return 0


def _report(path: Path, folder: Path, document: Document) -> None:
    from dynamo_local.profile.reading import read_profile
    from dynamo_local.profile.report import write_report
    from dynamo_local.profile.summary import facts_of

    read = read_profile(str(folder))
    write_report(path, read, facts_of(read, (10.0, 20.0, 50.0)), document)


def _print(document: Document, folder: Path, report: Path | None) -> None:
    from dynamo_local.profile.summary import summary_lines

    for line in summary_lines(document):
        click.echo(line)
    click.echo(f"profile: {folder}" + (f"; report: {report}" if report else ""))


class _View:
    """Progress on stderr: one line that changes on a terminal, now and then a line elsewhere."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._told_s = 0.0
        self._open = False

    def say(self, text: str) -> None:
        """A line of its own."""
        self.end()
        click.echo(text, err=True)

    def point(self, progress: Progress, point: Point | None) -> None:
        """Where it stands, and what comes now."""
        from dynamo_local.profile.repetitions import share_done

        now_s = time.monotonic()
        if now_s - self._told_s < (0.2 if self._terminal else TELL_EVERY_S) and point is not None:
            return
        self._told_s = now_s
        done, points = share_done(progress)
        repeated = sum(len(progress.of(each).samples) for each in progress.points)
        text = f"{done} of {points} points, {repeated} repetitions, about {progress.left_s:.0f} s left of the points"
        text += f": {point}" if point else ""
        if self._terminal:
            click.echo(f"\r\x1b[K{text}", err=True, nl=False)
            self._open = True
        else:
            click.echo(text, err=True)

    def end(self) -> None:
        """Leave the line."""
        if self._open:
            click.echo(err=True)
            self._open = False
