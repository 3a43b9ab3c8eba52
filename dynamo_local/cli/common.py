"""Shared by the commands: the namespace option, and a client of the arbiter's control endpoint."""

from __future__ import annotations

import json
import math
import os
import re
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any, TypeVar

import click

from dynamo_local.core.types import SECONDS_MAX
from dynamo_local.errors import EXIT_FAILED, DynamoError, NotRunning
from dynamo_local.state.raw import namespaces, read_raw
from dynamo_local.system.paths import Paths

T = TypeVar("T")

DEFAULT_NAMESPACE = "dynamo"

LOOK_EVERY_S = 0.5
"""While it waits for an answer, a client checks this often that the arbiter is still alive."""
SOCKET_POLL_S = 0.05


def complete_namespaces(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[str]:
    """For the shell: namespaces that have a statefile."""
    try:
        return [name for name in namespaces(os.environ) if name.startswith(incomplete)]
    except DynamoError:
        return []


def complete_components(ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[str]:
    """For the shell: components of the namespace. The statefile has them, so that no arbiter is asked."""
    return sorted({entry for entry, _ in _recorded_workers(ctx) if entry.startswith(incomplete)})


def complete_names(ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[str]:
    """For the shell: components and workers of the namespace, workers without the prefix, too."""
    names = {name for component, worker in _recorded_workers(ctx) for name in (component, worker)}
    return sorted(name for name in names if name.startswith(incomplete))


def _recorded_workers(ctx: click.Context) -> list[tuple[str, str]]:
    """Component and name of each worker in the statefile. Empty where there is none."""
    try:
        entries = read_raw(find_paths(ctx.params.get("namespace")).statefile).get("components")
    except DynamoError:
        return []
    found = entries.values() if isinstance(entries, dict) else ()
    return [(str(entry.get("component")), str(entry.get("watcher_name"))) for entry in found if isinstance(entry, dict)]


namespace_option = click.option(
    "--namespace",
    "-n",
    default=None,
    shell_complete=complete_namespaces,
    envvar="DYN_NAMESPACE",
    help=f"The graph's namespace (default: the only one that runs, else {DEFAULT_NAMESPACE}).",
)

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")


def find_paths(namespace: str | None) -> Paths:
    """Paths of the namespace; without one, of the only running graph, else of the default namespace."""
    if namespace is not None:
        return Paths.found(namespace, os.environ)
    running = namespaces(os.environ)
    if DEFAULT_NAMESPACE in running or not running:
        return Paths.found(DEFAULT_NAMESPACE, os.environ)
    if len(running) > 1:
        raise NotRunning(f"no graph runs in namespace 'dynamo'; say --namespace with one of: {', '.join(running)}")
    return Paths.found(running[0], os.environ)


def ask_arbiter(paths: Paths, command: str, timeout_s: float = 5.0, **properties: Any) -> dict[str, Any]:
    """Send one circus command and return its answer.

    Raises `NotRunning` if the arbiter is gone or does not answer within the timeout, `DynamoError` if it refuses.
    Plain pyzmq: circus's client pulls in tornado and psutil, a third of `dynamo status`'s time.
    """
    await_socket(paths, timeout_s)
    import zmq

    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    try:
        socket.connect(paths.circus_endpoint)
        call_id = uuid.uuid4().hex
        socket.send(json.dumps({"id": call_id, "command": command, "properties": properties}).encode())
        _wait_answer(socket, paths, timeout_s)
        answer: dict[str, Any] = json.loads(socket.recv())
    finally:
        socket.close()
        context.term()
    if answer.get("status") != "ok":
        raise ArbiterRefused(answer)
    return answer


def _wait_answer(socket: Any, paths: Paths, timeout_s: float) -> None:
    """Return when there is something to read.

    A killed arbiter leaves its socket, but its lock is free: then `NotRunning` is raised without waiting further.
    """
    deadline_s = time.monotonic() + timeout_s
    while not socket.poll(int(min(timeout_s, LOOK_EVERY_S) * 1000)):
        if not _lives(paths):
            raise NotRunning(_killed(paths))
        if time.monotonic() >= deadline_s:
            raise NotRunning(
                f"the arbiter of {paths.namespace!r} did not answer within {timeout_s:.0f} s on {paths.control_socket}"
            )


def await_socket(paths: Paths, timeout_s: float) -> None:
    """Return when the arbiter's control socket is there. A live arbiter makes a socket that was removed again.

    Raises `NotRunning`, which says what there is instead.
    """
    deadline_s = time.monotonic() + timeout_s
    while not paths.control_socket.exists():
        if not _lives(paths):
            raise NotRunning(_killed(paths) if paths.statefile.exists() else _nothing_runs(paths))
        if time.monotonic() >= deadline_s:
            from dynamo_local.system.liveness import who

            raise NotRunning(
                f"namespace {paths.namespace!r} is run by {who(paths)}, which has no control socket "
                f"{paths.control_socket}: it starts or leaves, or cannot make it; its log is in {paths.logs}"
            )
        time.sleep(SOCKET_POLL_S)


def _lives(paths: Paths) -> bool:
    from dynamo_local.arbiter.marks import (
        guarded_arbiter,
        marked,  # not needed where the answer comes at once
    )
    from dynamo_local.system.liveness import lives

    return lives(paths) or guarded_arbiter(marked(paths)) is not None


def _killed(paths: Paths) -> str:
    return (
        f"the arbiter of {paths.namespace!r} has been killed: it left {paths.statefile}; "
        "`dynamo serve` cleans up after it (or takes back what runs, with --adopt), `dynamo down` ends it"
    )


def death_words(record: Mapping[str, Any]) -> str:
    """`its arbiter (pid 4711) was killed by SIGKILL at 2026-11-27 06:26:22, and its 3 workers were ended`, from the
    guardian's record of a run's end."""
    at = f"{datetime.fromtimestamp(record['time']).astimezone():%Y-%m-%d %H:%M:%S}"
    workers = record.get("workers") or ()
    left = f"its {len(workers)} worker{'s' * (len(workers) != 1)}, etcd and NATS" if workers else "all that it left"
    return f"its arbiter (pid {record.get('arbiter_pid')}) {record['death']} at {at}, and the guardian ended {left}"


def _nothing_runs(paths: Paths) -> str:
    from dynamo_local.arbiter.event_log import arbiter_name, ended_by_death, event_log_path
    from dynamo_local.arbiter.marks import statefiles_elsewhere

    if (dead := ended_by_death(event_log_path(paths.logs), paths.namespace)) is not None:
        return (
            f"nothing runs in namespace {paths.namespace!r} any more: {death_words(dead)}. The log is "
            f"{paths.log_file(arbiter_name(paths.namespace))}, and `dynamo events -n {paths.namespace}` has the story. "
            "`dynamo serve` starts it anew; with --on-arbiter-death keep workers survive their arbiter"
        )
    elsewhere = "".join(
        f"; one that a shell with another DYN_LOCAL_STATE_DIR or HOME began has {path}: "
        f"say DYN_LOCAL_STATE_DIR={path.parent}"
        for path in statefiles_elsewhere(paths)
    )
    return f"nothing runs in namespace {paths.namespace!r} (no {paths.statefile}); try `dynamo serve`{elsewhere}"


class ArbiterRefused(DynamoError):
    """The arbiter said no: its message and its exit code (`details["code"]` names its error's type)."""

    def __init__(self, answer: Mapping[str, Any]) -> None:
        reason = str(answer.get("reason") or "the arbiter refused without a reason")
        super().__init__(reason, code=answer.get("code"))
        self.exit_code = int(answer.get("exit_code", EXIT_FAILED))  # type: ignore[misc]  # of this one refusal


def aligned(rows: Sequence[Sequence[str]]) -> list[list[str]]:
    """The cells, padded to the width of their column. All rows have the same number of cells."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in rows]


# Numbers on the command line. `nan` is within every range that click knows: it compares with nothing.


class FiniteRange(click.FloatRange):
    """A `FloatRange` without `nan` and the infinities."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The number, or a usage error that names the option."""
        number = float(click.FLOAT.convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value} is not a number to go by.", param, ctx)
        return float(super().convert(number, param, ctx))


SECONDS = FiniteRange(min=0, min_open=True, max=SECONDS_MAX)
"""A duration: more than nothing, a year at most."""


class Shape(click.ParamType):
    """`P,D`: that many prefill and decode workers; `0,D`: aggregated ones. At least `decode_min` decode."""

    name = "P,D"

    def __init__(self, decode_min: int = 1) -> None:
        self._decode_min = decode_min

    def convert(
        self, value: str | tuple[int, int], param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, int]:
        """Two whole numbers."""
        if isinstance(value, tuple):
            return value
        match = re.fullmatch(r"\s*([0-9]{1,3})\s*,\s*([0-9]{1,3})\s*", value, re.ASCII)
        if match is None or int(match[2]) < self._decode_min:
            self.fail(
                f"{value!r} is no P,D, such as 2,2 (prefill, decode) or 0,4 (four aggregated workers)", param, ctx
            )
        return int(match[1]), int(match[2])


@contextmanager
def progress_bar(what: str, total: int | None) -> Iterator[Callable[[], None]]:
    """A bar on stderr, only where that is a terminal. Call the result once for each step that is done. `total` None:
    it is not known how many there are."""
    if not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    left = TimeRemainingColumn(elapsed_when_finished=True) if total is not None else TimeElapsedColumn()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), left)
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda: bar.advance(task)


def shown(what: str, items: Iterable[T], total: int | None = None) -> Iterator[T]:
    """The items, each a step of a `progress_bar` once it is there."""
    with progress_bar(what, total) as advance:
        for item in items:
            advance()
            yield item
