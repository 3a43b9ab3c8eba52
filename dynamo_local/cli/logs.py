"""`dynamo logs [NAME…] [-f]`: what the processes wrote, by time, with prefixes."""

from __future__ import annotations

import re
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from pathlib import Path

import click

from dynamo_local.arbiter.leftovers import recorded
from dynamo_local.cli.common import complete_names, find_paths, namespace_option
from dynamo_local.errors import BadInput, NotRunning
from dynamo_local.system.log_files import Interleaver, colour_of, last_lines, lines_since, merged, since, timed
from dynamo_local.system.paths import Paths

POLL_S = 0.2
LINES = 20


@click.command()
@click.argument("names", nargs=-1, metavar="[NAME]...", shell_complete=complete_names)
@click.option(
    "--follow", "-f", is_flag=True, help="Go on as they write, also with those that come later; Ctrl-C ends it."
)
@click.option(
    "--lines",
    "-l",
    type=click.IntRange(min=0),
    default=None,
    help=f"How many lines of each process to begin with (default: {LINES}; with --since all).",
)
@click.option(
    "--since", "since_text", metavar="10m|TIME", help="From then on: 90s, 10m, 2h, 1d, 14:05, '2026-03-01 14:05:21'."
)
@namespace_option
def logs(
    names: tuple[str, ...], follow: bool, lines: int | None, since_text: str | None, namespace: str | None
) -> None:
    """Show the end of the processes' logs, ordered by time.

    NAME is a component (VllmWorker: all of its workers), one worker (dynamo_VllmWorker, VllmWorker_1), or arbiter,
    etcd, nats, guardian. Without a name: all. Lines from before a restart are included.
    """
    paths, now = find_paths(namespace), datetime.now().astimezone()
    since_s = None if since_text is None else since(since_text, now)
    files = _files(paths)
    if not files:
        raise NotRunning(f"no logs of namespace {paths.namespace!r} in {paths.logs}{_elsewhere(paths)}")
    chosen = choose(files, paths.namespace, names)
    followed = Interleaver()
    followed.skip(chosen)  # before what is there: a line may be shown twice, but none is lost
    _show(merged({watcher: _begin(file, lines, since_s, now) for watcher, file in chosen.items()}), chosen)
    if follow:
        _follow(followed, lambda: choose(_files(paths), paths.namespace, names))


def _files(paths: Paths) -> dict[str, Path]:
    """The log file of each process, by its present name. A worker that changed its role keeps its first file."""
    found = {file.name.partition(".log")[0] for file in paths.logs.glob("*.log*")}
    born = {worker.born: worker.name for worker in recorded(paths.statefile).workers if worker.born is not None}
    return {born.get(name, name): paths.log_file(name) for name in sorted(found)}


def choose(files: Mapping[str, Path], namespace: str, names: Iterable[str]) -> dict[str, Path]:
    """The files of these processes and components; without a name all. Raises `BadInput` for one that is not there."""
    chosen_names = list(names)
    if not chosen_names:
        return dict(files)
    found: dict[str, Path] = {}
    for name in chosen_names:
        chosen = [name] if name in files else [watcher for watcher in files if _is_of(watcher, namespace, name)]
        if not chosen:
            raise BadInput(f"no process named {name!r}; there are: {', '.join(files)}")
        found.update((watcher, files[watcher]) for watcher in chosen)
    return found


def _is_of(watcher: str, namespace: str, name: str) -> bool:
    short = watcher.removeprefix(f"{namespace}_")
    return re.fullmatch(rf"{re.escape(name)}(_\d+)?", short) is not None


def _elsewhere(paths: Paths) -> str:
    """The namespaces that have logs, for somebody who has left out `--namespace`."""
    others = sorted({file.parent.name for file in paths.logs.parent.glob("*/*.log")})
    return f"; there are some of: {', '.join(others)}" if others else ""


def _begin(file: Path, lines: int | None, since_s: float | None, now: datetime) -> Iterator[tuple[float, str]]:
    """The last lines of one process, with their times."""
    try:
        written_s = file.stat().st_mtime
    except OSError:
        written_s = 0.0
    if since_s is None:
        yield from timed(last_lines(file, LINES if lines is None else lines), now, written_s)
        return
    found = ((at_s, line) for at_s, line in timed(lines_since(file, since_s), now, written_s) if at_s >= since_s)
    yield from found if lines is None else deque(found, maxlen=lines)


def _follow(followed: Interleaver, files: Callable[[], dict[str, Path]]) -> None:
    """Until Ctrl-C. Workers that are added meanwhile join."""
    try:
        while True:
            now = files()
            new: dict[str, list[str]] = {}
            for watcher, line in followed.poll(now):
                new.setdefault(watcher, []).append(line)
            at = datetime.now().astimezone()
            _show(merged({watcher: timed(lines, at, at.timestamp()) for watcher, lines in new.items()}), now)
            time.sleep(POLL_S)
    except KeyboardInterrupt:
        return


def _show(lines: Iterable[tuple[str, str]], names: Iterable[str]) -> None:
    colours = {name: colour_of(name, list(names)) for name in names} if sys.stdout.isatty() else {}
    for watcher, line in lines:
        prefix = f"[{watcher}] "
        click.echo((click.style(prefix, fg=colours[watcher]) if watcher in colours else prefix) + line)
