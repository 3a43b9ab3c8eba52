"""`dynamo dashboard` and `dynamo history`."""

from __future__ import annotations

import csv
import json
import os
import sys
import time
import webbrowser
from collections.abc import Mapping
from datetime import datetime
from typing import Any

import click

from dynamo_local.cli.common import ask_arbiter, find_paths, json_option, namespace_option
from dynamo_local.errors import BadInput, ConfigError, NotRunning
from dynamo_local.system.paths import Paths

START_TIMEOUT_S = 20.0
LOOK_EVERY_S = 0.1


@click.command()
@click.argument("name", metavar="[NAMESPACE]", required=False)
@click.option("--open", "opens", is_flag=True, help="Open it in the browser.")
@click.option("--print-url", is_flag=True, help="Print a new link of the page that runs, and return.")
@click.option("--read-only", is_flag=True, help="Show everything, change nothing.")
@click.option("--listen", default="127.0.0.1:0", show_default=True, metavar="HOST:PORT", help="Port 0: any free one.")
@click.option("--base-path", default="", metavar="/PATH", help="The path before it, behind a reverse proxy.")
@click.option("--name", "names", multiple=True, metavar="HOST", help="A host name under which it is reached, too.")
@click.option("--cert", metavar="FILE", help="TLS certificate, PEM.")
@click.option("--key", metavar="FILE", help="Its key, PEM.")
@click.option("--password-file", metavar="FILE", help="The password for viewers of other hosts.")
@namespace_option
def dashboard(
    name: str | None,
    opens: bool,
    print_url: bool,
    read_only: bool,
    listen: str,
    base_path: str,
    names: tuple[str, ...],
    cert: str | None,
    key: str | None,
    password_file: str | None,
    namespace: str | None,
) -> None:
    """Serve a page that shows the graph: is it well, what happened, why, what would help.

    If the page of the graph is served already, the command prints a new link to it. The link works once.
    """
    from dynamo_local.dashboard.process import Settings, serve

    paths = find_paths(name or namespace)
    host, _, port = listen.rpartition(":")
    if not port.isdecimal() or int(port) > 65535:
        raise BadInput(f"--listen {listen}: it is HOST:PORT, such as 127.0.0.1:8700")
    settings = Settings(
        paths.namespace,
        host.strip("[]") or "127.0.0.1",
        int(port),
        base_path,
        cert,
        key,
        password_file,
        tuple(each.lower() for each in names),
        read_only,
    ).checked()
    running = _running_page(paths)
    if running is not None:
        if running.get("url") is None:
            raise ConfigError(
                f"process {running.get('pid')} keeps the history and serves no page; set `Host: dashboard`"
            )
        _show(str(running["url"]), opens)
        return
    if print_url:
        raise NotRunning(f"no page is served in namespace {paths.namespace!r}; `dynamo dashboard` serves one")
    if not paths.runtime.is_dir():
        raise NotRunning(f"nothing runs in namespace {paths.namespace!r}; try `dynamo serve`")
    serve(settings, paths, lambda process: _show(process.link(), opens))


def _running_page(paths: Paths) -> Mapping[str, Any] | None:
    """The page's answer (`ask_running`); None where there is none.

    A run that keeps a page (`Host.dashboard`) starts it beside its workers, and again if it dies: it is waited for.
    Raises `NotRunning` if it does not come.
    """
    from dynamo_local.dashboard.process import ask_running

    if (running := ask_running(paths)) is not None or not _is_kept(paths):
        return running
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while (running := ask_running(paths)) is None:
        if time.monotonic() >= deadline_s:
            raise NotRunning(f"the run's page does not answer; its log says why: {paths.page_log}")
        time.sleep(LOOK_EVERY_S)
    return running


def _is_kept(paths: Paths) -> bool:
    try:
        return bool(ask_arbiter(paths, "dynamo_status")["graph"].get("keeps_dashboard"))
    except NotRunning:
        return False


def _show(url: str, opens: bool) -> None:
    click.echo(url)
    sys.stdout.flush()
    if opens and not webbrowser.open(url):
        click.echo("dynamo: no browser was found; open the link yourself", err=True)


@click.command()
@click.option("--since", default="1h", show_default=True, metavar="TIME", help="2h, 1d, 14:05, 2026-03-01.")
@click.option("--points", default=1_000, show_default=True, type=click.IntRange(1, 100_000), help="At least so many.")
@click.option("--columns", metavar="A,B,…", help="Only these columns.")
@click.option("--csv", "as_csv", is_flag=True, help="Print CSV.")
@json_option
@namespace_option
def history(since: str, points: int, columns: str | None, as_csv: bool, as_json: bool, namespace: str | None) -> None:
    """Print the recorded history: load, latencies, workers and forecasts.

    The page's process records it (`dynamo dashboard`, or `Host: {history: true}`).
    """
    from dynamo_local.dashboard.history import HistoryReader, history_path
    from dynamo_local.system.log_files import since as time_of

    if as_csv and as_json:
        raise BadInput("--json and --csv are two forms of the same; choose one")
    paths = find_paths(namespace)
    file = history_path(paths.logs)
    if not file.exists():
        raise NotRunning(f"there is no history {file}; `dynamo dashboard` or `Host: {{history: true}}` records one")
    now_s = time.time()
    from_s = time_of(since, datetime.now().astimezone())
    wanted = columns.split(",") if columns else None
    span = HistoryReader(file).span(from_s, now_s, points=points, columns=wanted, now_s=now_s)
    if as_json:
        click.echo(json.dumps(_answer(span, from_s, now_s, os.path.getsize(file))))
        return
    _print(span.columns, as_csv)
    for gap in () if as_csv else span.gaps:
        click.echo(f"gap: {_at(gap['from'])} to {_at(gap['to'])}: {gap['why']}")


def _answer(span: Any, from_s: float, to_s: float, size: int) -> dict[str, Any]:
    gaps = [{"began": gap["from"], "ended": gap["to"], "why": gap["why"]} for gap in span.gaps]
    return {
        "began": from_s,
        "ended": to_s,
        "step_s": span.step_s,
        "columns": span.columns,
        "gaps": gaps,
        "bytes": size,
    }


def _print(columns: dict[str, list[float | None]], as_csv: bool) -> None:
    names = [name for name, values in columns.items() if name == "t" or any(each is not None for each in values)]
    rows = zip(*(columns[name] for name in names), strict=True)
    if as_csv:
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow(names)
        writer.writerows(["" if value is None else value for value in row] for row in rows)
        return
    from dynamo_local.cli.common import aligned

    cells = [["TIME", *names[1:]]]
    cells += [[_at(row[0]), *("-" if value is None else f"{value:.6g}" for value in row[1:])] for row in rows]
    click.echo("\n".join("  ".join(row).rstrip() for row in aligned(cells)))


def _at(seconds: float | None) -> str:
    return "-" if seconds is None else f"{datetime.fromtimestamp(seconds).astimezone():%Y-%m-%d %H:%M:%S}"
