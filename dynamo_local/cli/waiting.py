"""`--wait`: watch named workers until each is ready, or gone, or has failed.

It only reads `dynamo status`: to stop waiting (Ctrl-C, `--timeout`) changes nothing.
"""

from __future__ import annotations

import enum
import json
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click

from dynamo_local.cli.common import SECONDS, ask_arbiter
from dynamo_local.cli.status import drain_note
from dynamo_local.core.fleet.states import Traits, traits_of
from dynamo_local.core.types import WorkerState
from dynamo_local.errors import TimedOut, WorkerDied
from dynamo_local.system.log_files import tail
from dynamo_local.system.paths import Paths

POLL_S = 0.1
TELL_EVERY_S = 2.0
"""A drain's progress is printed this often while the worker's state stays the same."""

DEFAULT_TIMEOUT_S = 900.0

Rows = Mapping[str, Mapping[str, Any]]
"""Workers of `dynamo status --json` by name."""

F = TypeVar("F", bound=Callable[..., Any])


def wait_options(command: F) -> F:
    """`--wait` and `--timeout`."""
    timeout = click.option(
        "--timeout",
        "timeout_s",
        default=DEFAULT_TIMEOUT_S,
        show_default=True,
        type=SECONDS,
        help="With --wait: seconds; past them exit code 5, and the work goes on.",
    )
    wait = click.option("--wait", is_flag=True, help="Return when it is done; exit code 1 if a worker failed.")
    return wait(timeout(command))


class Goal(enum.Enum):
    """The state that `--wait` waits for."""

    READY = "ready"
    ASLEEP = "asleep"
    GONE = "gone"
    RESTARTED = "restarted"
    REPLACED = "replaced"
    """Gone, but only when another worker is ready."""
    FLIPPED = "flipped"
    """The same process under another name, ready."""


ONE_BY_ONE = (Goal.RESTARTED, Goal.REPLACED)


@dataclass(frozen=True, slots=True)
class WaitResult:
    """How it ended, in words that follow the worker's name; `show_log` where its log says why."""

    text: str
    failed: bool = False
    show_log: bool = False


@dataclass(slots=True)
class Want:
    """One worker and its goal. `state` and `pid` are from before the command; `moved`: it has left that state since."""

    name: str
    goal: Goal
    state: str | None = None
    pid: int | None = None
    moved: bool = False

    @classmethod
    def of(cls, name: str, goal: Goal, before: Rows) -> Want:
        """With the worker's state and pid from before the command; None if the worker is new."""
        row = before.get(name, {})
        return cls(name, goal, row.get("state"), row.get("pid"))

    def judge(self, row: Mapping[str, Any] | None) -> WaitResult | None:
        """The end of the wait, or None while it goes on. `row` is None when there is no such worker (any more)."""
        if self.goal in (Goal.GONE, Goal.REPLACED):
            return self._judge_gone(row)
        if row is None:
            return WaitResult("was removed before it was ready", failed=True, show_log=True)
        self.moved = self.moved or row["state"] != self.state or row["pid"] != self.pid
        traits = traits_of(row["state"])
        if self.goal is Goal.ASLEEP and not traits.failed:
            return self._judge_asleep(traits)
        if traits.serves:
            if self.goal is Goal.READY or row["pid"] != self.pid:
                return WaitResult("ready")
            return WaitResult("serves on: its restart was taken back", failed=True) if self.moved else None
        if traits.failed and (self.moved or self.goal is Goal.READY):
            reason = f" ({row['reason']})" if row.get("reason") else ""
            return WaitResult(f"is {row['state']}{reason}", failed=True, show_log=True)
        if traits.gone and self.goal is Goal.READY:
            return WaitResult("was taken back before it was ready", failed=True)
        return None

    def judge_flip(self, rows: Rows) -> WaitResult | None:
        """As `judge`: the worker is looked for by its process, because its name changes."""
        row = next((each for each in rows.values() if self.pid is not None and each["pid"] == self.pid), None)
        if row is None:
            return WaitResult("ended while it changed its role", failed=True, show_log=True)
        self.moved = self.moved or row["state"] != self.state
        if row["watcher_name"] != self.name:
            return WaitResult(f"is {row['watcher_name']} now") if traits_of(row["state"]).serves else None
        if traits_of(row["state"]).serves:  # the command has answered: it was flipping before we looked
            return WaitResult("has stayed what it was: its flip has failed, or was taken back", failed=True)
        return WaitResult(f"is {row['state']}", failed=True) if row["state"] != WorkerState.FLIPPING else None

    def _judge_asleep(self, traits: Traits) -> WaitResult | None:
        if traits.asleep:
            return WaitResult("asleep")
        if traits.leaves:
            return WaitResult("leaves instead", failed=True)
        woken = self.moved and (traits.serves or (traits.standby and traits.comes_up))
        return WaitResult("serves on: it was woken, or could not be put to sleep", failed=True) if woken else None

    def _judge_gone(self, row: Mapping[str, Any] | None) -> WaitResult | None:
        if row is None:
            return WaitResult("gone")
        traits = traits_of(row["state"])
        if traits.gone:
            return WaitResult("gone")
        self.moved = self.moved or row["state"] != self.state
        if traits.leaves or (self.goal is Goal.REPLACED and not self.moved):
            return None
        if self.pid is not None and row["pid"] not in (None, self.pid):
            return WaitResult("gone")  # another worker has its name by now
        if traits.serves:
            return WaitResult("serves on: its drain was taken back", failed=True)
        return None


def look(paths: Paths) -> Rows:
    """The workers as they are now. Raises `NotRunning` if the arbiter does not answer."""
    return {row["watcher_name"]: row for row in ask_arbiter(paths, "dynamo_status")["graph"]["workers"]}


class Wait:
    """Waits for several workers, telling what they do. One that fails does not end the wait for the others."""

    def __init__(
        self,
        wants: Iterable[Want],
        see: Callable[[], Rows],
        tell: Callable[[str], None],
        *,
        now_s: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._open = {want.name: want for want in wants}
        self._see = see
        self._tell = tell
        self._now_s = now_s
        self._sleep = sleep
        self._logs: dict[str, str] = {}
        self._printed: dict[str, tuple[str, str, float]] = {}
        self.outcomes: dict[str, WaitResult] = {}

    def run(self, timeout_s: float) -> None:
        """Return when all have an outcome. Raises `TimedOut`; the work goes on."""
        deadline_s = self._now_s() + timeout_s
        while True:
            rows = self._see()
            self._step(rows)
            if not self._open:
                return
            if self._now_s() >= deadline_s:
                left = "; ".join(f"{name} is {_doing(rows.get(name))}" for name in self._open)
                raise TimedOut(
                    f"not done within {timeout_s:g} s: {left}. It goes on; `dynamo status` shows how far it is"
                )
            self._sleep(POLL_S)

    def _step(self, rows: Rows) -> None:
        for name, want in list(self._open.items()):
            row = rows.get(name)
            if row is not None and row.get("log_file"):
                self._logs[name] = row["log_file"]
            outcome = want.judge_flip(rows) if want.goal is Goal.FLIPPED else want.judge(row)
            if outcome is None:
                self._progress(name, row)
            else:
                self._end(name, outcome)
        self._stop_waiting_in_line()

    def _end(self, name: str, outcome: WaitResult) -> None:
        del self._open[name]
        self.outcomes[name] = outcome
        self._tell(f"{name}: {outcome.text}")

    def _stop_waiting_in_line(self) -> None:
        """A rolling restart stops at the first faulted worker: do not wait for those after it."""
        failed = next((name for name, outcome in self.outcomes.items() if outcome.failed), None)
        in_line = [want for want in self._open.values() if want.goal in ONE_BY_ONE and not want.moved]
        for want in in_line if failed is not None else ():
            self._end(want.name, WaitResult(f"still has its old process: {failed} failed first", failed=True))

    def _progress(self, name: str, row: Mapping[str, Any] | None) -> None:
        state, line, now_s = row["state"] if row else "", _doing(row), self._now_s()
        printed = self._printed.get(name)
        if printed is None or printed[0] != state or (printed[1] != line and now_s - printed[2] >= TELL_EVERY_S):
            self._printed[name] = (state, line, now_s)
            self._tell(f"{name}: {line}")

    def raise_failures(self, paths: Paths) -> None:
        """`WorkerDied` with the tail of each failed worker's log; nothing if none failed."""
        failures = {name: outcome for name, outcome in self.outcomes.items() if outcome.failed}
        if failures:
            raise WorkerDied("\n".join(self._failure(paths, name, failures[name]) for name in failures))

    def _failure(self, paths: Paths, name: str, outcome: WaitResult) -> str:
        if not outcome.show_log:
            return f"{name} {outcome.text}"
        path = Path(self._logs.get(name) or paths.log_file(name))
        quoted = "".join(f"\n  | {line}" for line in tail(path)) or "\n  | (it wrote nothing)"
        return f"{name} {outcome.text}; the end of its log, {path}:{quoted}"


def _doing(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return "not there yet"
    note = drain_note(row.get("drain"))
    return f"{row['state']}, {note}" if note else str(row["state"])


# Shared by `scale`, `drain` and `restart`: ask the arbiter, print what it began, wait for the end with `--wait`.

COMMIT_TIMEOUT_S = 30.0
"""An answer comes when the intent is committed: milliseconds, or as long as a slow disk takes to fsync."""


@dataclass(frozen=True, slots=True)
class Manner:
    """How the caller wants to be answered."""

    as_json: bool
    wait: bool
    timeout_s: float


def ask_and_tell(
    paths: Paths,
    manner: Manner,
    command: str,
    properties: Mapping[str, Any],
    *,
    goals: Callable[[dict[str, Any]], Iterable[tuple[str, Goal]]],
    words: Callable[[dict[str, Any]], str],
) -> None:
    """Send `command`, print `words` of the reply (or the reply itself), and wait until all `goals` are reached.

    With --json stdout holds one object only, with each worker's end under `outcomes`; progress goes to stderr.
    Raises what the arbiter refuses, `WorkerDied` and `TimedOut`.
    """
    before = look(paths) if manner.wait else {}
    reply = ask_arbiter(paths, command, timeout_s=COMMIT_TIMEOUT_S, **properties)
    reply = {key: value for key, value in reply.items() if key not in ("id", "status", "time")}
    if not manner.as_json:
        click.echo(words(reply))
    if not manner.wait:
        if manner.as_json:
            click.echo(json.dumps(reply))
        return
    waiting = Wait(
        [Want.of(name, goal, before) for name, goal in goals(reply)],
        lambda: look(paths),
        lambda line: click.echo(line, err=manner.as_json),
    )
    try:
        waiting.run(manner.timeout_s)
    finally:
        if manner.as_json:
            outcomes = {name: outcome.text for name, outcome in waiting.outcomes.items()}
            click.echo(json.dumps({**reply, "outcomes": outcomes}))
    waiting.raise_failures(paths)
