"""Collects what the page shows: one poll of the arbiter a second, the event log, the decision log, ended requests.

However many viewers there are, each source is read once. A source that fails costs its part of the page only.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from dynamo_local.arbiter.event_log import RUN_ADOPTED, EventTail, event_log_path, is_aside
from dynamo_local.arbiter.event_log import read as read_events
from dynamo_local.cli.common import ArbiterRefused
from dynamo_local.dashboard.figures import cut, decision_mark, event_mark, point_of, state_of
from dynamo_local.dashboard.history import HistoryReader, HistoryWriter, history_path
from dynamo_local.dashboard.stream import Stream, encoded
from dynamo_local.errors import DynamoError, NotRunning
from dynamo_local.planner.records import decision_log
from dynamo_local.system.liveness import lives
from dynamo_local.system.paths import Paths

log = logging.getLogger(__name__)

POLL_S = 1.0
LOGS_S = 0.25
ANSWER_S = 3.0
GAP_AFTER_S = 2.5
"""The arbiter did not answer for so long: that is a gap."""
CLOCK_STEP_S = 2.0
FLUSH_S = 10.0
DEVICES_S = 5.0
WINDOW_S = 10.0
"""Requests that ended within so many seconds make a point's percentiles."""
REQUESTS_MAX = 2_000
LENGTHS_MAX = 100_000
"""Requests whose lengths are remembered for a what-if: an hour of 28 a second, in 15 MB."""
REQUEST_BYTES_MAX = 8_192
SHOWN = 100
MARKS_SHOWN = 100
POINTS_SHOWN = 300
WORDS_BYTES = 4_096
DIED = ("crashed", "faulted", "start_timed_out")


class ControlClient:
    """One kept connection to the arbiter's control socket. Calls block: one thread makes them, one after the other."""

    def __init__(self, paths: Paths) -> None:
        self._paths = paths
        self._socket: Any = None
        self._context: Any = None

    def ask(self, command: str, timeout_s: float = ANSWER_S, **properties: Any) -> dict[str, Any]:
        """The arbiter's answer. Raises `NotRunning`, or `DynamoError` with its refusal."""
        import zmq

        if not self._paths.control_socket.exists():
            self.close()
            raise NotRunning(
                f"nothing answers in namespace {self._paths.namespace!r}: {self._paths.control_socket} is gone"
            )
        if self._socket is None:
            self._context = zmq.Context()
            self._socket = self._context.socket(zmq.DEALER)
            self._socket.setsockopt(zmq.LINGER, 0)
            self._socket.connect(self._paths.circus_endpoint)
        call_id = uuid.uuid4().hex
        self._socket.send(json.dumps({"id": call_id, "command": command, "properties": properties}).encode())
        deadline_s = time.monotonic() + timeout_s
        while (left_s := deadline_s - time.monotonic()) > 0:
            if not self._socket.poll(int(1000 * min(left_s, 0.5))):
                if not lives(self._paths):
                    break
                continue
            answer: dict[str, Any] = msgspec.json.decode(self._socket.recv())
            if answer.get("id") == call_id:
                if answer.get("status") != "ok":
                    raise ArbiterRefused(answer)
                return answer
        self.close()  # a late answer must not be taken for the next one's
        gone = not lives(self._paths)
        raise NotRunning(
            f"the arbiter of {self._paths.namespace!r} "
            + ("is gone: it ended or was killed" if gone else f"did not answer within {timeout_s:g} s")
        )

    def close(self) -> None:
        """Let go of the connection; the next call makes another one."""
        if self._socket is not None:
            self._socket.close()
            self._context.term()
        self._socket = self._context = None


class Length(NamedTuple):
    """A request for a what-if: its arrival, its tokens, and whether it kept its targets (None: there are none)."""

    at_s: float
    isl: int
    osl: int
    kept: bool | None


@dataclass(slots=True)
class Requests:
    """Ended requests, the newest last. Lengths and times only."""

    kept: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=REQUESTS_MAX))
    failed: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=SHOWN))

    lengths: deque[Length] = field(default_factory=lambda: deque(maxlen=LENGTHS_MAX))

    def add(self, request: dict[str, Any]) -> None:
        """One more."""
        self.kept.append(request)
        isl, osl, missed = request.get("prompt_tokens"), request.get("tokens"), request.get("missed")
        if isinstance(isl, int) and isinstance(osl, int) and isl > 0 and osl > 0:
            at_s = request["t"] - (request.get("total_s") or 0.0)
            self.lengths.append(Length(at_s, isl, osl, None if missed is None else not missed))
        if request.get("outcome") not in ("success", "cancelled"):
            self.failed.append(request)

    def found(self, *, kind: str, limit: int, request_id: str | None) -> list[dict[str, Any]]:
        """The newest first, the slowest first, or those that failed."""
        if request_id is not None:
            return [each for each in reversed(self.kept) if each["id"] == request_id][:limit]
        if kind == "failed":
            return list(reversed(self.failed))[:limit]
        if kind == "slowest":
            return sorted(self.kept, key=lambda each: -(each.get("total_s") or 0.0))[:limit]
        return list(reversed(self.kept))[:limit]

    def lengths_since(self, since_s: float) -> list[Length]:
        """Those that came after that time."""
        return [each for each in self.lengths if each.at_s >= since_s]

    def ended_since(self, since_s: float) -> list[dict[str, Any]]:
        """Those that ended after that time."""
        found = []
        for each in reversed(self.kept):
            if each["t"] < since_s:
                break
            found.append(each)
        return found


class Collector:
    """Polls, follows the logs, and puts what is new into the stream and the history."""

    def __init__(
        self,
        paths: Paths,
        *,
        history: bool,
        devices: Callable[[], dict[str, Any]],
        on_new_run: Callable[[], None],
        url: Callable[[], str | None] = lambda: None,
    ) -> None:
        self.paths = paths
        self.requests = Requests()
        self.stream = Stream(f"{time.time_ns() // 1_000_000:x}", self._snapshot)
        self.writer: HistoryWriter | None = None
        self.reader = HistoryReader(history_path(paths.logs))
        self.graph: dict[str, Any] | None = None
        self._keeps = history
        self._devices = devices
        self._on_new_run = on_new_run
        self._url = url
        self._client = ControlClient(paths)
        self._extra: dict[str, Any] = {"devices": {}, "last_words": {}}
        self._points: deque[dict[str, Any]] = deque(maxlen=POINTS_SHOWN)
        self._marks: deque[dict[str, Any]] = deque(maxlen=MARKS_SHOWN)
        self._new_marks: list[dict[str, Any]] = []
        self._new_gaps: list[dict[str, Any]] = []
        self._events: EventTail | None = None
        self._decisions: EventTail | None = None
        self._since_s: float | None = None
        self._adopted = False
        self._lost: tuple[float, str] | None = None
        self._answered_s = time.time()
        self._why: str | None = None
        self._starts: dict[tuple[str, int | None], float] = {}
        self._instances: dict[int, str] = {}
        self._asking = asyncio.Lock()

    async def ask(self, command: str, timeout_s: float = ANSWER_S, **properties: Any) -> dict[str, Any]:
        """One command, one after the other."""
        async with self._asking:
            return await asyncio.to_thread(self._client.ask, command, timeout_s, **properties)

    async def run(self) -> None:
        """Poll until cancelled."""
        await asyncio.to_thread(self._begin)
        following = asyncio.create_task(self._follow_logs(), name="logs")
        try:
            await self._poll()
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)

    async def _poll(self) -> None:
        flushed_s = devices_s = 0.0
        next_s = time.monotonic()
        offset_s = time.time() - time.monotonic()
        while True:
            now_s = time.monotonic()
            offset_s = self._note_clock(offset_s)
            if now_s - devices_s >= DEVICES_S:
                devices_s = now_s
                self._extra["devices"] = await asyncio.to_thread(self._devices)
            await self._tick()
            if now_s - flushed_s >= FLUSH_S:
                flushed_s = now_s
                await asyncio.to_thread(self._flush)
            next_s = max(next_s + POLL_S, time.monotonic())
            await asyncio.sleep(next_s - time.monotonic())

    async def close(self) -> None:
        """Write the rest of the history."""
        await asyncio.to_thread(self._end)

    def _end(self) -> None:
        self._flush()
        if self.writer is not None:
            self.writer.close(time.time())
        self._client.close()

    def _begin(self) -> None:
        if self._keeps:
            self.writer = HistoryWriter(history_path(self.paths.logs))
        recent = read_events(event_log_path(self.paths.logs), last=MARKS_SHOWN, asides=True)
        marks = [event_mark(record) for record in recent if not is_aside(record)]
        decided = decision_log.read(decision_log.decision_log_path(self.paths.logs), last=MARKS_SHOWN)
        marks += [mark_of(record) for record in decided]
        self._marks.extend(sorted(marks, key=lambda mark: float(mark["t"])))
        self._events = EventTail(event_log_path(self.paths.logs), max((each["seq"] for each in recent), default=0))
        self._decisions = EventTail(
            decision_log.decision_log_path(self.paths.logs),
            max((each["seq"] for each in decided), default=0),
            kinds=decision_log.KINDS,
        )

    # --- a second --------------------------------------------------------------------------------

    async def _tick(self) -> None:
        now_s = time.time()
        why = None
        try:
            graph = (await self.ask("dynamo_status", page=self._url()))["graph"]
        except (DynamoError, OSError, ValueError) as error:
            graph, why = None, str(error)
        self._heard(graph, why, now_s)
        if graph is not None:
            ended = self.requests.ended_since(now_s - WINDOW_S)
            values = point_of(graph, ended, WINDOW_S)
            point = {"t": round(now_s, 3), "v": values}
            self._points.append(point)
            self.stream.put("point", point)
            if self.writer is not None:
                self.writer.add(now_s, values)
        self._why = why if self._lost is not None or self.graph is None else None
        self._show()

    def _show(self) -> None:
        self._extra["history"] = None if self.writer is None else self.writer.note
        self.stream.put_state(
            state_of(self.graph, alive_since_s=self._since_s, adopted=self._adopted, why=self._why, extra=self._extra)
        )

    async def _follow_logs(self) -> None:
        """An event is on the page within half a second, without a poll of the arbiter."""
        while True:
            await asyncio.sleep(LOGS_S)
            found = await asyncio.to_thread(self._read_marks)
            for mark in found:
                self._marks.append(mark)
                self._new_marks.append(mark)
                self.stream.put("mark", mark)
            if found:
                self._show()

    def _heard(self, graph: dict[str, Any] | None, why: str | None, now_s: float) -> None:
        """Note whether the arbiter is there, whether it is another one, and how long it was away."""
        if graph is None:
            if self._lost is None and now_s - self._answered_s > GAP_AFTER_S:
                self._lost = (self._answered_s, str(why))
                self._since_s = None
                self.stream.put("gap", {"from": self._answered_s, "to": None, "why": cut(why)})
            elif self._lost is None and self.graph is None:
                self._since_s = None
            return
        self._note_starts(graph, now_s)
        before, self.graph = self.graph, graph
        if before is None or before.get("run_id") != graph.get("run_id"):
            if before is not None:
                self._on_new_run()
            self._adopted = False
        if before is None or before.get("arbiter_pid") != graph.get("arbiter_pid"):
            self._since_s = now_s
            self._adopted = before is not None and before.get("run_id") == graph.get("run_id")
        if self._lost is not None:
            gap = {"from": self._lost[0], "to": now_s, "why": cut(self._lost[1])}
            self._new_gaps.append(gap)
            self.stream.put("gap", gap)
            self._lost = None
            self._since_s = self._since_s or now_s
        self._answered_s = now_s

    def _note_starts(self, graph: dict[str, Any], now_s: float) -> None:
        """Give each worker `since`: when its process began. It never changes while the process lives."""
        known = self._starts
        self._starts = {}
        self._instances = {}
        for worker in graph["workers"]:
            key = (worker["watcher_name"], worker.get("pid"))
            uptime_s = worker.get("uptime_s")
            if uptime_s is not None:
                self._starts[key] = worker["since"] = known.get(key, round(now_s - uptime_s, 1))
            if isinstance(worker.get("lease"), str):
                with contextlib.suppress(ValueError):
                    self._instances[int(worker["lease"], 16)] = str(worker["watcher_name"])

    def _note_clock(self, before_s: float) -> float:
        """A clock that was set leaves a gap, and no point is moved."""
        offset_s = time.time() - time.monotonic()
        step_s = offset_s - before_s
        if abs(step_s) < CLOCK_STEP_S:
            return offset_s
        now_s = time.time()
        gap = {
            "from": min(now_s, now_s - step_s),
            "to": max(now_s, now_s - step_s),
            "why": f"the clock was set by {step_s:+.0f} s",
        }
        self._new_gaps.append(gap)
        self.stream.put("gap", gap)
        self._answered_s += step_s
        return offset_s

    # --- logs ------------------------------------------------------------------------------------

    def _read_marks(self) -> list[dict[str, Any]]:
        found = []
        for record in self._events.poll() if self._events is not None else ():
            if record["event"] == RUN_ADOPTED:
                self._adopted = True
            name, state = str(record["watcher_name"]), str(record.get("to"))
            if state in DIED:
                self._remember_words(name)
            for worker in (self.graph or {}).get("workers") or ():
                if worker["watcher_name"] == name:
                    worker["state"] = state
            if not is_aside(record):
                found.append(event_mark(record))
        found += [mark_of(record) for record in (self._decisions.poll() if self._decisions is not None else ())]
        return sorted(found, key=lambda mark: float(mark["t"]))

    def _remember_words(self, name: str) -> None:
        words = {**self._extra["last_words"], name: last_words(self._log_file(name))}
        self._extra["last_words"] = dict(list(words.items())[-64:])

    def _log_file(self, name: str) -> Path:
        workers = (self.graph or {}).get("workers") or ()
        found = next((each["log_file"] for each in workers if each["watcher_name"] == name), None)
        return self.paths.log_file(name) if found is None else Path(found)

    def log_file_of(self, name: str) -> Path | None:
        """The log of a worker that the status names, or of the arbiter; None for any other name."""
        names = {str(each["watcher_name"]) for each in (self.graph or {}).get("workers") or ()}
        if name in names:
            return self._log_file(name)
        own = f"{self.paths.namespace}_"
        known = [f"{own}arbiter", f"{own}etcd", f"{own}nats", f"{own}guardian", f"{own}dashboard"]
        return self.paths.log_file(name) if name in known else None

    # --- history ---------------------------------------------------------------------------------

    def _flush(self) -> None:
        marks, self._new_marks = self._new_marks, []
        gaps, self._new_gaps = self._new_gaps, []
        if self.writer is not None:
            self.writer.flush(time.time(), marks, gaps)

    def history_status(self) -> dict[str, Any]:
        """Whether a history is kept, its size, and what is wrong with it."""
        writer = self.writer
        return {"kept": writer is not None, "bytes": writer and writer.size(), "note": writer and writer.note}

    def marks(self, from_s: float, to_s: float) -> list[Any]:
        """Marks of a time, from the history and from memory. It reads a file."""
        stored = [json.loads(mark) for mark in self.reader.marks(from_s, to_s)]
        last_s = max((mark["t"] for mark in stored), default=0.0)
        known = {encoded(mark) for mark in stored if mark["t"] == last_s}
        recent = [mark for mark in list(self._marks) if from_s <= mark["t"] <= to_s]
        if not stored:
            return recent
        return [*stored, *(mark for mark in recent if mark["t"] >= last_s and encoded(mark) not in known)]

    def _snapshot(self) -> Mapping[str, Any]:
        return {
            "points": list(self._points),
            "marks": list(self._marks),
            "requests": self.requests.found(kind="latest", limit=SHOWN, request_id=None)[::-1],
        }

    def ended(self, request: dict[str, Any]) -> None:
        """The Frontend has handed a request over."""
        request["worker"] = self._instances.get(request.pop("instance", None))
        self.requests.add(request)
        self.stream.put("request", request)


class RequestSocket(asyncio.DatagramProtocol):
    """Takes ended requests from Frontends: one datagram each. Any other datagram is dropped."""

    def __init__(self, ended: Callable[[dict[str, Any]], None]) -> None:
        self._ended = ended

    def datagram_received(self, data: bytes, addr: Any) -> None:
        with contextlib.suppress(ValueError, RecursionError):
            request = json.loads(data)
            if isinstance(request, dict) and isinstance(request.get("id"), str) and isinstance(request.get("t"), float):
                self._ended(request)


def _bound(path: Path) -> socket.socket:
    path.unlink(missing_ok=True)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    sock.setblocking(False)
    sock.bind(str(path))
    path.chmod(0o600)
    return sock


async def open_request_socket(path: Path, ended: Callable[[dict[str, Any]], None]) -> asyncio.DatagramTransport:
    """Bind the socket, in place of one that a killed process left."""
    sock = _bound(path)
    transport, _ = await asyncio.get_running_loop().create_datagram_endpoint(lambda: RequestSocket(ended), sock=sock)
    return transport


def mark_of(record: Mapping[str, Any]) -> dict[str, Any]:
    """A logged decision as a mark, in words where the line can be read."""
    try:
        words: str | None = decision_log.describe(record)
    except DynamoError:
        words = None
    return decision_mark(record, words)


def last_words(path: Path) -> str:
    """The end of a log."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - WORDS_BYTES))
            lines = file.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return ""
    return "\n".join(lines[-12:])


def log_lines(
    path: Path, after: int | None, *, bytes_max: int = 65_536, lines_max: int = 500
) -> tuple[int, Sequence[str]]:
    """`(offset, lines)` after that offset; without one, the end. A truncated file begins anew."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            begin = size - bytes_max if after is None or after > size or size - after > bytes_max else after
            file.seek(max(0, begin))
            block = file.read(bytes_max)
    except OSError:
        return 0, ()
    whole, cutting = block.rpartition(b"\n")[:2]
    offset = max(0, begin) + len(whole) + len(cutting)
    if not cutting and len(block) == bytes_max:  # one line of more than the bound: pass on
        return max(0, begin) + len(block), [str(cut(block.decode("utf-8", "replace"), 4_000))]
    lines = whole.decode("utf-8", "replace").split("\n") if whole else []
    return offset, [str(cut(line, 4_000)) for line in lines[-lines_max:]]
