"""`dynamo top`: the graph, live. Each refresh asks the arbiter for its status. No worker is asked."""

from __future__ import annotations

import io
import json
import os
import select
import signal
import sys
import termios
import time
import tty
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

import click
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from dynamo_local.cli.common import FiniteRange, ask_arbiter, find_paths, json_option, namespace_option
from dynamo_local.cli.planner_words import decision_line, fixed_fleet_line, follow_line
from dynamo_local.cli.status import drain_note, duration, gpus_of, note_line, present, served_lines
from dynamo_local.core.fleet.states import Traits, traits_of
from dynamo_local.core.traffic import kept_words
from dynamo_local.errors import BadInput, NotRunning
from dynamo_local.system.paths import Paths

# Below: from the values of a status to tables of rich. No clock, no terminal, no arbiter. An unknown number is `-`,
# and a gap in a history, never 0.

Graph = Mapping[str, Any]
"""The object of `dynamo status --json`."""

KEPT = 60
"""Values of a history, one per refresh."""

WIDE = 100
"""The terminal width, in columns, from which the uptime is shown."""

KV_CELLS, RUNNING_CELLS, WAITING_CELLS = 4, 9, 7
HISTORIES_MIN = 14
"""Cells of a row that the two histories keep however long the name is."""

WAITING_TOP_MIN = 8.0
"""So many waiting requests fill a bar, at least. All rows share one scale, that of the longest queue shown."""

GPU_COLOURS = {"free": "bright_black", "quarantined": "red", "taken": "magenta"}
LEFT_FROM_NAME = 6
"""The last characters of a shortened name are always shown, because they are the worker's number."""


class Marks(NamedTuple):
    """Characters of the display: bars from low to high, the sign of an unknown value, the sign of cut text."""

    bars: str
    gap: str
    cut: str


MARKS = Marks("▁▂▃▄▅▆▇█", "·", "…")
ASCII_MARKS = Marks("_.-=+*#@", " ", "~")


class Histories:
    """The last values of each worker's KV load and waiting requests, and of the prefill queue, of one run."""

    def __init__(self) -> None:
        self._run_id: str | None = None
        self._values: dict[tuple[str, str], deque[float | None]] = {}

    def add(self, graph: Graph) -> None:
        """Add the values of one status. A new run starts empty; a worker that is gone is forgotten."""
        if graph.get("run_id") != self._run_id:
            self._run_id, self._values = graph.get("run_id"), {}
        now: dict[tuple[str, str], float | None] = {("", "queue"): (graph.get("prefill_queue") or {}).get("pending")}
        for worker in graph["workers"]:
            name, load = worker["watcher_name"], worker.get("load")
            now[name, "kv"] = _kv(load)
            now[name, "waiting"] = None if load is None else load["num_requests_waiting"]
        self._values = {key: self._values.get(key) or deque(maxlen=KEPT) for key in now}
        for key, value in now.items():
            self._values[key].append(value)

    def most_waiting(self) -> float:
        """The scale of all histories of waiting requests."""
        known = (value for (_, what), values in self._values.items() if what == "waiting" for value in values)
        return max([WAITING_TOP_MIN, *(value for value in known if value is not None)])

    def of(self, name: str, what: str) -> tuple[float | None, ...]:
        """`kv` or `waiting` of a worker, `queue` of "": oldest first; empty where nothing was seen."""
        return tuple(self._values.get((name, what), ()))


@dataclass(frozen=True, slots=True)
class Frame:
    """One picture. `words` tell the planner's last decision; `lost` says why the status could not be refreshed."""

    graph: Graph
    histories: Histories = field(default_factory=Histories)
    words: Sequence[str] = ()
    lost: str | None = None
    at: str = ""


def render(frame: Frame, width: int, height: int | None = None, *, ascii_only: bool = False) -> RenderableType:
    """The picture for a terminal of `width` columns; with a height, workers are left out where they do not fit."""
    marks = ASCII_MARKS if ascii_only else MARKS
    above, below = _head(frame), _below(frame, width, marks)
    rows = _rows(frame.graph)
    fitting = len(rows) if height is None else max(1, height - _lines(Group(above, below), width) - 2)
    hidden = len(rows) - fitting if len(rows) > fitting else 0
    table = _table(frame, rows[: len(rows) - hidden], width, marks)
    more = [Text(f"{hidden} more do not fit; `dynamo status` lists all", style="bright_black")] if hidden else []
    return Group(above, table, *more, below)


def _lines(part: RenderableType, width: int) -> int:
    console = Console(width=width, file=io.StringIO())
    return len(console.render_lines(part, console.options))


def sparkline(values: Sequence[float | None], cells: int, top: float, marks: Marks = MARKS) -> str:
    """The last values, one a character, right-aligned; blank where none is known. `top` is the highest bar's value.

    >>> sparkline([0.0, 0.5, None, 1.0], 6, 1.0)
    '  ▁▅·█'
    """
    steps = marks.bars
    shown = values[-cells:] if cells else ()
    known = [value for value in shown if value is not None]
    if not known:
        return " " * cells

    def bar(value: float | None) -> str:
        if value is None:
            return marks.gap
        share = value / top
        return steps[min(len(steps) - 1, max(0, int(share * len(steps))))]

    return "".join(map(bar, shown)).rjust(cells)


def shorten(name: str, cells: int, cut: str = MARKS.cut) -> str:
    """A name in at most `cells` cells: its beginning and its end, where the worker's number is.

    >>> shorten("AVeryLongComponentName_12", 16)
    'AVeryLong…ame_12'
    """
    if len(name) <= cells:
        return name
    tail = min(LEFT_FROM_NAME, max(0, cells - 2))
    return name[: max(0, cells - tail - 1)] + cut + name[len(name) - tail :]


def _head(frame: Frame) -> RenderableType:
    graph = frame.graph
    line = Text(no_wrap=True, overflow="crop")
    line.append(str(graph["namespace"]), style="bold")
    line.append(f"  {graph['state']}", style="green" if graph["state"] == "ready" else "yellow")
    if graph.get("gpus"):
        line.append(f"  {_gpu_count(graph['gpus'])}")
    if graph.get("frontend_url"):
        line.append(f"  {graph['frontend_url']}")
    if frame.at:
        line.append(f"  {frame.at}", style="bright_black")
    kept = [Text(words, no_wrap=True, overflow="ellipsis") for words in kept_words(graph.get("targets"))]
    if frame.lost is None:
        return Group(line, *kept)
    return Group(line, *kept, Text(f"{frame.lost}; this is how it was. Waiting for it; q leaves", style="bold red"))


def _gpu_count(gpus: Sequence[Mapping[str, Any]]) -> str:
    used = sum(gpu["state"] == "held" for gpu in gpus)
    return f"{used} of {len(gpus)} GPUs held"


@dataclass(frozen=True, slots=True)
class _Row:
    """One row of the table. `worker` is None for a device without a worker of ours: `state` is then the device's."""

    gpus: str
    state: str
    worker: Mapping[str, Any] | None = None


def _rows(graph: Graph) -> list[_Row]:
    """Rows in the order of GPUs, a worker at the first of its devices; then the workers without GPUs."""
    workers = {worker["watcher_name"]: worker for worker in graph["workers"]}
    gpus = graph.get("gpus") or ()
    held: dict[str, list[str]] = {}
    for gpu in gpus:
        if gpu["worker"] is not None:
            held.setdefault(gpu["worker"], []).append(str(gpu["index"]))
    rows, listed = [], set()
    for gpu in gpus:
        name = gpu["worker"]
        if name is None:
            rows.append(_Row(str(gpu["index"]), gpu["state"]))
        elif name not in listed:
            listed.add(name)
            worker = workers.get(name) or {"watcher_name": name, "state": "gone"}
            rows.append(_Row(",".join(held[name]), worker["state"], worker))
    others = (worker for worker in present(graph["workers"]) if worker["watcher_name"] not in listed)
    rows += [_Row(gpus_of(worker), worker["state"], worker) for worker in others]
    return rows


def _table(frame: Frame, rows: Sequence[_Row], width: int, marks: Marks) -> Table:
    """Columns of numbers have a fixed width; the names, then the histories, get the rest."""
    prefix = f"{frame.graph['namespace']}_"
    names = [_name(row, prefix) for row in rows]
    gap, uptime = (2, [("UP", 6, "right")]) if width >= WIDE else (1, [])
    gpus, states = max([3, *(len(row.gpus) for row in rows)]), max([8, *(len(row.state) for row in rows)])
    left = width - gpus - states - sum((KV_CELLS, RUNNING_CELLS, WAITING_CELLS, *(cells for _, cells, _ in uptime)))
    left -= gap * (7 + len(uptime))
    name_cells = max(LEFT_FROM_NAME, min(left - HISTORIES_MIN, max([len("WORKER"), *map(len, names)])))
    kv_history = min(KEPT, max(1, (left - name_cells) * 3 // 5))
    waiting_history = min(KEPT, max(1, left - name_cells - kv_history))
    columns = [
        ("GPU", gpus, "left"),
        ("WORKER", name_cells, "left"),
        ("STATE", states, "left"),
        ("KV", KV_CELLS, "right"),
        ("", kv_history, "left"),
        ("RUNNING", RUNNING_CELLS, "right"),
        ("WAITING", WAITING_CELLS, "right"),
        ("", waiting_history, "left"),
        *uptime,
    ]
    table = Table(box=None, padding=(0, gap, 0, 0), pad_edge=False, header_style="bold")
    for title, cells, justify in columns:
        table.add_column(title, width=cells, no_wrap=True, justify=justify, overflow="crop")  # type: ignore[arg-type]
    for row, name in zip(rows, names, strict=True):
        first, *others = _cells(frame, row, kv_history, waiting_history, marks)
        table.add_row(first, Text(shorten(name, name_cells, marks.cut)), *others[: len(columns) - 2])
    return table


def _name(row: _Row, prefix: str) -> str:
    return "" if row.worker is None else str(row.worker["watcher_name"]).removeprefix(prefix)


def _cells(frame: Frame, row: _Row, kv_cells: int, waiting_cells: int, marks: Marks) -> list[Text]:
    """The row's cells after the name."""
    if row.worker is None:
        return [Text(row.gpus), Text(row.state, style=GPU_COLOURS.get(row.state, "")), *[Text("")] * 6]
    name, load = row.worker["watcher_name"], row.worker.get("load")
    kv, waiting = _kv(load), frame.histories.of(name, "waiting")
    return [
        Text(row.gpus),
        Text(row.state, style=traits_of(row.state).colour),
        Text("-" if kv is None else f"{kv:.0%}"),
        Text(sparkline(frame.histories.of(name, "kv"), kv_cells, 1.0, marks), style="cyan"),
        Text("-" if load is None else _running(load)),
        Text("-" if load is None else str(load["num_requests_waiting"])),
        Text(sparkline(waiting, waiting_cells, frame.histories.most_waiting(), marks), style="cyan"),
        Text(duration(row.worker.get("uptime_s"))),
    ]


def _kv(load: Mapping[str, Any] | None) -> float | None:
    """None where it is not known, or where the worker has no KV cache."""
    share = load["gpu_cache_usage_perc"] if load and load.get("kv_total_blocks") else None
    return None if share is None else float(share)


def _running(load: Mapping[str, Any]) -> str:
    total = load["request_total_slots"]
    return f"{load['request_active_slots']}/{total}" if total else str(load["request_active_slots"])


def _below(frame: Frame, width: int, marks: Marks) -> RenderableType:
    """The last minute of components, then lines that each begin with their subject."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True, style="bold")
    grid.add_column(overflow="fold")
    previous = ""
    for about, text in _news(frame, width, marks):
        grid.add_row("" if about == previous else about, text)
        previous = about
    served = [Text(line, no_wrap=True, overflow="crop") for line in served_lines(frame.graph.get("components"))]
    return Group(*([Text(""), *served] if served else []), Text(""), *([grid] if grid.row_count else []))


def _news(frame: Frame, width: int, marks: Marks) -> Iterator[tuple[str, Text]]:
    graph, prefix = frame.graph, f"{frame.graph['namespace']}_"
    yield from (("missing", Text(str(line), style="red")) for line in graph.get("missing") or ())
    yield from _queue(frame, 24 if width >= WIDE else 12, marks)
    for worker in graph["workers"]:
        name = str(worker["watcher_name"]).removeprefix(prefix)
        if worker.get("drain") is not None:
            yield "drain", Text(f"{name}: {drain_note(worker['drain'])}")
        elif worker.get("reason") and _is_trouble(traits_of(worker["state"])):
            yield "trouble", Text(f"{name} is {worker['state']}: {worker['reason']}", style="red")
    for gpu in graph.get("gpus") or ():
        if gpu.get("reason"):
            yield "GPU", Text(f"{gpu['index']} is {gpu['state']}: {gpu['reason']}")
    yield from (("planner", text) for text in _planner(graph.get("planner"), frame.words))
    if graph.get("follow"):
        yield "follow", Text(follow_line(graph["follow"]))
    yield from (("note", Text(note_line(note))) for note in graph.get("notes") or ())


def _is_trouble(traits: Traits) -> bool:
    return not (traits.serves or traits.gone or traits.standby)


def _queue(frame: Frame, cells: int, marks: Marks) -> Iterator[tuple[str, Text]]:
    queue = frame.graph.get("prefill_queue")
    if queue is None:
        return
    shown = {name: "-" if value is None else value for name, value in queue.items()}
    text = Text(f"{shown['pending']} waiting ")
    pending = frame.histories.of("", "queue")
    most = max([WAITING_TOP_MIN, *(value for value in pending if value is not None)])
    text.append(sparkline(pending, cells, most, marks), style="cyan")
    text.append(f"  {shown['outstanding']} outstanding")
    if queue["dead_letters"]:
        text.append(f"  {queue['dead_letters']} given up (dead letters)", style="red")
    yield "prefill", text


def _planner(planner: Mapping[str, Any] | None, words: Iterable[str]) -> Iterator[Text]:
    """Its state, and its last decision in words. Nothing where the graph has none, or one that never ran."""
    if planner is None or (planner["state"] == "stopped" and not planner.get("last_decision")):
        return
    line = Text(planner["state"], style="green" if planner["state"] == "running" else "yellow")
    parts = ["no operation: decides, acts on nothing"] if planner.get("no_operation") else []
    next_s = planner.get("next_decision_s")
    if next_s is not None:
        parts.append(f"decides in {duration(max(0.0, next_s))}")
    elif planner.get("adjusting"):
        parts.append("an adjustment is under way")
    if planner.get("waiting_for_gpus"):
        parts.append(f"waits for GPUs: {', '.join(planner['waiting_for_gpus'])}")
    line.append("".join(f", {part}" for part in parts), style="default")
    yield line
    if planner.get("fixed_fleet"):
        yield Text(fixed_fleet_line(planner["fixed_fleet"]))
    if planner.get("trouble"):
        yield Text(str(planner["trouble"]), style="red")
    yield from map(Text, words)


def view_as_json(frame: Frame) -> dict[str, Any]:
    """The picture as one object: what each GPU does, each worker, its drain, the queue and the planner."""
    graph = frame.graph
    workers = {worker["watcher_name"]: worker for worker in graph["workers"]}
    return {
        "namespace": graph["namespace"],
        "run_id": graph.get("run_id"),
        "state": graph["state"],
        "missing": list(graph.get("missing") or ()),
        "gpus": [
            {**gpu, "worker_state": workers[gpu["worker"]]["state"] if gpu["worker"] in workers else None}
            for gpu in graph.get("gpus") or ()
        ],
        "workers": [_worker_json(worker) for worker in graph["workers"]],
        "components": dict(graph.get("components") or {}),
        "prefill_queue": graph.get("prefill_queue"),
        "follow": graph.get("follow"),
        "planner": None if graph.get("planner") is None else {**graph["planner"], "words": list(frame.words)},
        "notes": list(graph.get("notes") or ()),
    }


def _worker_json(worker: Mapping[str, Any]) -> dict[str, Any]:
    load = worker.get("load")
    return {
        "watcher_name": worker["watcher_name"],
        "component": worker["component"],
        "state": worker["state"],
        "gpus": worker["gpus"],
        "uptime_s": worker.get("uptime_s"),
        "reason": worker.get("reason"),
        "drain": worker.get("drain"),
        "standby": worker.get("standby"),
        "kv": _kv(load),
        "running": None if load is None else load["request_active_slots"],
        "waiting": None if load is None else load["num_requests_waiting"],
    }


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
        click.echo(json.dumps(view_as_json(frame), indent=2 if console.is_terminal else None))
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
    from dynamo_local.planner.records.decision_log import describe

    try:
        lines = describe(record).splitlines()
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
