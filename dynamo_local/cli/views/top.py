"""`dynamo top`: the graph, live. Asks the arbiter what `dynamo status` asks, once a refresh; it asks no worker."""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import click
from rich.console import Console
from rich.live import Live

from dynamo_local.cli.common import ask_arbiter, find_paths, json_option, namespace_option
from dynamo_local.cli.numbers import FiniteRange
from dynamo_local.cli.planner_words import decision_line
from dynamo_local.cli.views import top_view
from dynamo_local.cli.views.top_view import Frame, Histories, render
from dynamo_local.errors import BadInput, NotRunning
from dynamo_local.system.paths import Paths

LOOK_TIMEOUT_S = 2.0
STDIN = 0


@click.command()
@namespace_option
@click.option(
    "--refresh",
    "-r",
    "refresh_s",
    default=1.0,
    show_default=True,
    type=FiniteRange(min=0.2, max=3600.0),
    help="Seconds between two looks.",
)
@click.option("--once", is_flag=True, help="Print one frame and return; so does a pipe.")
@json_option
def top(namespace: str | None, refresh_s: float, once: bool, as_json: bool) -> None:
    """Watch GPUs, workers, drains and the planner, live; q or Ctrl-C leaves.

    When the arbiter goes away the last picture stays, and it goes on as soon as one answers again.
    """
    paths = find_paths(namespace)
    console = Console()
    watch = Watch(lambda: look(paths))
    frame = watch.look()
    if as_json:
        click.echo(json.dumps(top_view.as_json(frame), indent=2 if console.is_terminal else None))
    elif once or not console.is_terminal:
        console.print(render(frame, console.width, ascii_only=_ascii_only(console)))
    else:
        _live(console, watch, frame, refresh_s)


def look(paths: Paths) -> dict[str, Any]:
    """The object of `dynamo status --json`. Raises `NotRunning`."""
    graph: dict[str, Any] = ask_arbiter(paths, "dynamo_status", LOOK_TIMEOUT_S)["graph"]
    return graph


class Watch:
    """Polls the status. The first poll must succeed; when a later one fails, the last picture stays."""

    def __init__(self, see: Callable[[], dict[str, Any]], clock: Callable[[], float] = time.time) -> None:
        self._see = see
        self._clock = clock
        self._histories = Histories()
        self._last: Frame | None = None

    def look(self) -> Frame:
        """The next picture. Raises `NotRunning` where there is none to show."""
        try:
            graph = self._see()
        except NotRunning as error:
            if self._last is None:
                raise
            return Frame(self._last.graph, self._histories, self._last.words, str(error), self._last.at)
        self._histories.add(graph)
        self._last = Frame(
            graph, self._histories, last_decision(graph), None, time.strftime("%H:%M:%S", time.localtime(self._clock()))
        )
        return self._last


def last_decision(graph: dict[str, Any]) -> tuple[str, ...]:
    """The planner's last decision in words; nothing where there was none."""
    record = (graph.get("planner") or {}).get("last_decision")
    if record is None:
        return ()
    from dynamo_local.planner.records.decision_log import (
        words,  # imports pydantic (a third of a second), which most graphs never need
    )

    try:
        lines = words(record).splitlines()
    except BadInput:  # an arbiter of another version, whose decisions have other fields
        return (decision_line(record),)
    at = time.strftime("%H:%M:%S", time.localtime(record["wall_s"]))
    return (f"{record['stimulus_id']} at {at}:", *lines)


def _live(console: Console, watch: Watch, frame: Frame, refresh_s: float) -> None:
    with (
        _terminated(),
        Keys(sys.stdin.fileno()) as keys,
        Live(console=console, screen=True, auto_refresh=False) as live,
    ):
        next_s = time.monotonic()
        try:
            while True:
                picture = render(frame, console.width, console.height, ascii_only=_ascii_only(console))
                live.update(picture, refresh=True)
                next_s = max(next_s + refresh_s, time.monotonic())
                if keys.quit_within(next_s - time.monotonic()):
                    return
                frame = watch.look()
        except KeyboardInterrupt:
            return


def _ascii_only(console: Console) -> bool:
    return not console.encoding.lower().startswith("utf")


class Keys:
    """Reads single keys if `fd` is a terminal. Leaving the block restores the terminal's settings."""

    def __init__(self, fd: int) -> None:
        self._fd: int | None = fd if os.isatty(fd) else None
        self._before: list[Any] | None = None

    def __enter__(self) -> Keys:
        if self._fd is not None:
            self._before = termios.tcgetattr(self._fd)
            tty.setcbreak(self._fd)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None and self._fd is not None:
            termios.tcsetattr(self._fd, termios.TCSADRAIN, self._before)

    def quit_within(self, seconds: float) -> bool:
        """Wait this long for a q; other keys are ignored."""
        deadline_s = time.monotonic() + seconds
        while (left_s := deadline_s - time.monotonic()) > 0:
            if self._fd is None:
                time.sleep(left_s)
                return False
            if select.select([self._fd], [], [], left_s)[0]:
                pressed = os.read(self._fd, 64)
                if b"q" in pressed.lower():
                    return True
                if not pressed:
                    self._fd = None  # the terminal is gone: no more keys, and nothing to restore
        return False


@contextmanager
def _terminated() -> Iterator[None]:
    """SIGTERM raises inside the block, so that the terminal is restored."""

    def leave(signum: int, _frame: Any) -> NoReturn:
        sys.exit(128 + signum)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
