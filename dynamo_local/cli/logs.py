"""`dynamo logs [NAME] [-f]`: what the processes wrote, interleaved, with prefixes."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import click

from dynamo_local.cli.common import find_paths, namespace_option
from dynamo_local.errors import BadInput, NotRunning
from dynamo_local.serve.logs import Interleaver, colour_of, tail

POLL_S = 0.2


@click.command()
@click.argument("name", required=False)
@click.option("--follow", "-f", is_flag=True, help="Go on as the files grow; Ctrl-C ends it.")
@click.option("--lines", "-l", default=20, show_default=True, help="How many lines of each file to begin with.")
@namespace_option
def logs(name: str | None, follow: bool, lines: int, namespace: str | None) -> None:
    """Show the last lines of every process's log, or of those whose name is or ends in NAME."""
    paths = find_paths(namespace)
    files = {file.stem: file for file in sorted(paths.logs.glob("*.log"))}
    if not files:
        raise NotRunning(f"no logs of namespace {paths.namespace!r} in {paths.logs}")
    chosen = files if name is None else _matching(files, name)
    for watcher, file in chosen.items():
        for line in tail(file, lines):
            _show(watcher, line, chosen)
    if follow:
        _follow(chosen)


def _matching(files: dict[str, Path], name: str) -> dict[str, Path]:
    found = {watcher: file for watcher, file in files.items() if watcher == name or watcher.partition("_")[2] == name}
    if not found:
        raise BadInput(f"no process named {name!r}; there are: {', '.join(files)}")
    return found


def _follow(chosen: dict[str, Path]) -> None:
    followed = Interleaver(from_end=True)
    for watcher, file in chosen.items():
        followed.watch(watcher, file)
    try:
        while True:
            for watcher, line in followed.poll():
                _show(watcher, line, chosen)
            time.sleep(POLL_S)
    except KeyboardInterrupt:
        return


def _show(watcher: str, line: str, names: dict[str, Path]) -> None:
    if sys.stdout.isatty():
        colour = colour_of(watcher, names)
        click.echo(click.style(f"[{watcher}] ", fg=colour) + line)
    else:
        click.echo(f"[{watcher}] {line}")
