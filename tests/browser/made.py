"""The page's own HTTP API over made state: fast, and as hostile as a test wants it.

    with MadeServer() as made:
        made.link()                       # the page with a one-time code
        made.put("point", {...})          # an event for every viewer

`python -m tests.browser.made` serves it to a person.
"""

from __future__ import annotations

import asyncio
import math
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from dynamo_local.dashboard.app import Page, build_app, load_assets
from dynamo_local.dashboard.figures import COLUMNS
from dynamo_local.dashboard.sessions import Sessions
from dynamo_local.dashboard.stream import Stream
from dynamo_local.errors import DynamoError

Json = dict[str, Any]
GIB = 2**30
WAIT_S = 20.0
COMPONENTS = ("PrefillWorker", "VllmWorker")


def level(t: float, period_s: float = 900.0) -> float:
    """A wave between 0 and 1."""
    return 0.5 + 0.4 * math.sin(2 * math.pi * t / period_s) + 0.1 * math.sin(t / 7)


def values(t: float) -> Json:
    """One point: a day with waves."""
    load = level(t)
    demand = 6 + 10 * load
    return {
        **dict.fromkeys(COLUMNS),
        "demand": demand,
        "requests_per_s": demand * 0.98,
        "forecast": demand * 1.03,
        "forecast_low": demand * 0.85,
        "forecast_high": demand * 1.25,
        "capacity": 12.0 if load < 0.5 else 20.0,
        "tokens_per_s": 900 * load + 120,
        **{f"ttft_{name}": 120 * load * much + 40 for name, much in (("p50", 1), ("p90", 1.9), ("p99", 3.2))},
        **{f"itl_{name}": 6 * load * much + 6 for name, much in (("p50", 1), ("p90", 1.4), ("p99", 2.1))},
        "waiting": max(0.0, round(12 * load - 7)),
        "running": round(30 * load),
        "kv_use": 0.2 + 0.6 * load,
        "kv_hit_rate": 0.42 + 0.1 * level(t, 300),
        "kept": 1 - 0.04 * load,
        "gpus_used": 4 if load < 0.5 else 6,
        "workers_PrefillWorker": 2 if load < 0.5 else 3,
        "workers_VllmWorker": 2 if load < 0.5 else 3,
    }


def worker(component: str = "VllmWorker", state: str = "ready", **more: Any) -> Json:
    return {
        "component": component,
        "role": "prefill" if component == "PrefillWorker" else "decode",
        "state": state,
        "age_s": 754,
        "since": time.time() - 754,
        "load": {"num_requests_waiting": 1, "gpu_cache_usage_perc": 0.41, "request_active_slots": 12},
        "restarts": 0,
        "reason": None,
        "last_words": None,
        "gpus": [],
        **more,
    }


def gpu(index: int, **more: Any) -> Json:
    return {
        "uuid": f"GPU-{index:08x}",
        "index": index,
        "name": "NVIDIA H100 80GB HBM3",
        "worker": None,
        "role": None,
        "model": None,
        "state": "free",
        "strangers": [],
        "allocated": None,
        "used": None,
        "total": 80 * GIB,
        "utilisation": None,
        "drain_left_s": None,
        **more,
    }


def made_state() -> Json:
    """A graph of four workers on eight GPUs: one drains, one has crashed, a stranger holds a GPU."""
    held = {"state": "held", "model": "llama-3.1-8b", "allocated": 72 * GIB}
    return {
        "verdict": {
            "ok": False,
            "text": "dynamo_VllmWorker_2 crashed 2 minutes ago and starts again.",
            "problems": [
                {"text": "dynamo_VllmWorker_2 crashed: CUDA out of memory", "link": "#worker=dynamo_VllmWorker_2"},
                {"text": "96.1 % of the requests kept their targets in the last minute", "link": "#requests=failed"},
            ],
            "kept": {"minute": 0.961, "hour": 0.9923, "day": None},
            "gpu_hours": {"used": 41.3, "fixed": 57.0, "ratio": 0.7246},
        },
        "arbiter": {"alive": True, "since": time.time() - 90_000, "adopted": False},
        "targets": {"ttft_ms": 300, "itl_ms": 20, "target": 0.99},
        "planner": {"state": "running", "policy": "slo", "next_decision_s": 18.0, "trouble": None},
        "gpus": [
            gpu(0, **held, worker="dynamo_PrefillWorker_1", role="prefill", used=70 * GIB, utilisation=0.83),
            gpu(1, **held, worker="dynamo_PrefillWorker_2", role="prefill", used=71 * GIB, utilisation=0.64),
            gpu(
                2,
                **held,
                worker="dynamo_VllmWorker_1",
                role="decode",
                used=73 * GIB,
                utilisation=0.97,
                drain_left_s=42,
            ),
            gpu(3, **held, worker="dynamo_VllmWorker_2", role="decode", used=2 * GIB, utilisation=0.0),
            gpu(
                4,
                state="stranger",
                strangers=[{"pid": 4711, "name": "python train.py", "bytes": 31 * GIB}],
                used=31 * GIB,
                utilisation=0.5,
            ),
            *(gpu(index) for index in (5, 6, 7)),
        ],
        "workers": {
            "dynamo_PrefillWorker_1": worker("PrefillWorker", gpus=[0]),
            "dynamo_PrefillWorker_2": worker("PrefillWorker", gpus=[1]),
            "dynamo_VllmWorker_1": worker(state="draining", gpus=[2], reason="scale to 1"),
            "dynamo_VllmWorker_2": worker(
                state="crashed",
                gpus=[3],
                restarts=2,
                load=None,
                reason="exit code 1 after 12 s",
                last_words="torch.OutOfMemoryError: CUDA out of memory.\nTried to allocate 2.00 GiB.",
            ),
        },
    }


def made_marks(now_s: float) -> list[Json]:
    numbers = {"predicted": "14.2 requests/s", "capacity": "12.0", "would_change": "a forecast below 12.0 requests/s"}
    return [
        mark(
            now_s - 240,
            "decision",
            "VllmWorker +1 (scale up)",
            rule="scale_up: forecast above capacity",
            detail=numbers,
        ),
        mark(
            now_s - 200,
            "held",
            "PrefillWorker hold (cooldown)",
            reason="The last change was 40 s ago; the planner waits 60 s.",
            rule="cooldown",
            detail={"since_change_s": 40, "would_change": "20 s more"},
        ),
        mark(
            now_s - 150,
            "refused",
            "VllmWorker +1 (scale up)",
            reason="No GPU is free: a stranger (pid 4711) holds GPU 4.",
            rule="gpu budget",
            detail={"free": 0, "would_change": "one free GPU"},
        ),
        mark(
            now_s - 120,
            "crash",
            "dynamo_VllmWorker_2: ready to crashed",
            worker="dynamo_VllmWorker_2",
            reason="exit code 1",
        ),
        mark(now_s - 30, "drain", "dynamo_VllmWorker_1: ready to draining", worker="dynamo_VllmWorker_1"),
    ]


def mark(t: float, kind: str, title: str, **more: Any) -> Json:
    return {"t": t, "kind": kind, "worker": None, "title": title, "reason": None, "rule": None, "detail": {}, **more}


def request(name: str, t: float, outcome: str = "completed", much: float = 1.0, **more: Any) -> Json:
    times = (("routed", 0.004), ("queued", 0.02), ("prefilled", 0.11), ("handed off", 0.012), ("decoded", 0.6))
    phases = [[phase, seconds * much] for phase, seconds in times]
    return {
        "id": name,
        "t": t,
        "model": "llama-3.1-8b",
        "outcome": outcome,
        "worker": "dynamo_VllmWorker_1",
        "prefill_worker": "dynamo_PrefillWorker_1",
        "prompt_tokens": 512,
        "cached_tokens": 128,
        "tokens": 64,
        "phases": phases,
        "ttft_s": 0.146 * much,
        "itl_s": 0.0094 * much,
        "total_s": 0.746 * much,
        "missed": [] if much < 2 else ["ttft"],
        **more,
    }


@dataclass
class Span:
    step_s: float
    columns: dict[str, list[float | None]]
    gaps: list[Json]


class MadeReader:
    """A history of any length, of the wave. `gap` is a time of which nothing is known."""

    def __init__(self) -> None:
        self.gap: tuple[float, float] | None = None
        self.calls = 0

    def span(self, from_s: float, to_s: float, *, points: int, columns: Sequence[str] | None, now_s: float) -> Span:
        self.calls += 1
        step_s = max(1.0, (to_s - from_s) / max(1, points))
        first = math.ceil(from_s / step_s)
        times = [number * step_s for number in range(first, int(min(to_s, now_s) / step_s) + 1)]
        if self.gap is not None:
            times = [t for t in times if not self.gap[0] < t < self.gap[1]]
        rows = [values(t) for t in times]
        names = columns or COLUMNS
        gaps = [] if self.gap is None else [{"from": self.gap[0], "to": self.gap[1], "why": "the arbiter was away"}]
        return Span(step_s, {"t": times, **{name: [row.get(name) for row in rows] for name in names}}, gaps)


@dataclass
class MadeRequests:
    rows: list[Json] = field(default_factory=list)

    def found(self, *, kind: str, limit: int, request_id: str | None) -> list[Json]:
        if request_id is not None:
            return [row for row in self.rows if row["id"] == request_id]
        rows = self.rows[::-1]
        if kind == "failed":
            rows = [row for row in rows if row["outcome"] != "completed"]
        if kind == "slowest":
            rows = sorted(rows, key=lambda row: -row["total_s"])
        return rows[:limit]


class MadeCollector:
    """A collector for the routes, in memory."""

    def __init__(self) -> None:
        now_s = time.time()
        self.reader = MadeReader()
        self.requests = MadeRequests(
            [request(f"req-{number:03}", now_s - 60 + number, much=1 + (number * 7 % 10) / 8) for number in range(20)]
        )
        self.requests.rows.append(request("req-failed", now_s - 10, "worker lost", 4.0))
        self.all_marks = made_marks(now_s)
        self.stream = Stream(f"e{int(now_s)}", self.snapshot)
        self.stream.state = made_state()
        self.asked: list[tuple[str, Json]] = []
        self.log_file: Any = None

    def snapshot(self) -> Mapping[str, Any]:
        now_s = int(time.time())
        points = [{"t": float(t), "v": values(t)} for t in range(now_s - 300, now_s)]
        return {"points": points, "marks": self.all_marks, "requests": self.requests.rows[-100:]}

    def marks(self, from_s: float, to_s: float) -> list[Json]:
        return [each for each in self.all_marks if from_s <= each["t"] <= to_s]

    def log_file_of(self, name: str) -> Any:
        return self.log_file

    def history_status(self) -> Json:
        return {"kept": True, "bytes": 1, "note": None}

    async def ask(self, command: str, timeout_s: float = 3.0, **properties: Any) -> Json:
        self.asked.append((command, properties))
        if command == "dynamo_planner_pause":
            return {"planner": {"state": "paused"}}
        if command == "dynamo_drain":
            return {"watcher_name": properties["name"], "state": "draining"}
        raise DynamoError(f"{command} is refused here")


class MadeWhatIfs:
    """A run that is done at the second question."""

    def __init__(self) -> None:
        self.looks = 0
        self.begun: Json | None = None
        self.cancelled = False

    async def begin(self, body: Mapping[str, Any]) -> str:
        self.begun, self.looks = dict(body), 0
        return "run1"

    def get(self, name: str) -> Json:
        self.looks += 1
        if self.cancelled or self.looks < 2 or (self.begun or {}).get("policy") == "sla":
            return {"state": "cancelled" if self.cancelled else "running", "progress": 0.4, "result": None}
        return {
            "state": "done",
            "progress": 1.0,
            "result": {"kept": 0.995, "gpu_hours": 31.0, "beside": {"kept": 0.961, "gpu_hours": 41.3}},
            "beside": {"kept": 0.961, "gpu_hours": 41.3},
        }

    async def cancel(self, name: str) -> Json:
        self.cancelled = True
        return self.get(name)


class MadeServer:
    """Serves on a port of its own, in a thread."""

    def __init__(self, *, read_only: bool = False, base: str = "", ticking: bool = True) -> None:
        self.base = base
        self.refuse_streams = False
        self.holds_streams = False
        self.streams = 0
        self.posted: list[str] = []
        self._options = {"read_only": read_only, "base": base}
        self._ticking = ticking
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="made page", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(WAIT_S), "the made server does not start"
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._server.should_exit = True
        self._server.force_exit = True
        self._thread.join(WAIT_S)

    def link(self) -> str:
        code = self.call(lambda: self.sessions.new_code(time.monotonic()))
        return f"http://127.0.0.1:{self.port}{self.base}/#code={code}"

    def call(self, work: Callable[[], Any]) -> Any:
        """Call in the server's thread."""

        async def calling() -> Any:
            return work()

        return asyncio.run_coroutine_threadsafe(calling(), self._loop).result(WAIT_S)

    def put(self, kind: Any, value: Json) -> None:
        self.call(lambda: self.collector.stream.put(kind, value))

    def change(self, work: Callable[[Json], None]) -> None:
        """Change the state: viewers get the patch."""

        def changing() -> None:
            import copy

            after = copy.deepcopy(self.collector.stream.state)
            work(after)
            self.collector.stream.put_state(after)

        self.call(changing)

    def _run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.collector, self.sessions, self.whatifs = MadeCollector(), Sessions(None), MadeWhatIfs()
        from dynamo_local.dashboard.acts import Acts

        page = Page(
            namespace="made",
            collector=self.collector,  # type: ignore[arg-type]
            sessions=self.sessions,
            acts=Acts(self.collector),  # type: ignore[arg-type]
            whatifs=self.whatifs,  # type: ignore[arg-type]
            assets=load_assets(),
            **self._options,  # type: ignore[arg-type]
        )
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(("127.0.0.1", 0))
            self.port = sock.getsockname()[1]
            config = uvicorn.Config(self._watched(build_app(page)), log_level="critical", lifespan="off", ws="none")
            self._server = uvicorn.Server(config)
            self._server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
            ticks = asyncio.create_task(self._tick())
            self._ready.set()
            try:
                await self._server.serve(sockets=[sock])
            finally:
                ticks.cancel()

    async def _tick(self) -> None:
        while self._ticking:
            await asyncio.sleep(1.0)
            now_s = time.time()
            self.collector.stream.put("point", {"t": now_s, "v": values(now_s)})

    def _watched(self, app: ASGIApp) -> ASGIApp:
        """Counts streams; refuses them, or holds them back as a proxy does that buffers."""

        async def watched(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "http" and scope["method"] != "GET":
                self.posted.append(scope["path"])
            if not (scope["type"] == "http" and scope["path"].endswith("/api/stream")):
                await app(scope, receive, send)
                return
            if self.refuse_streams:
                await send({"type": "http.response.start", "status": 503, "headers": []})
                await send({"type": "http.response.body", "body": b""})
                return

            async def sending(message: Any) -> None:
                if self.refuse_streams:
                    raise ConnectionResetError("the test cuts the stream")
                if not self.holds_streams:
                    await send(message)

            self.streams += 1
            try:
                await app(scope, receive, sending)
            except ConnectionResetError:
                return
            finally:
                self.streams -= 1

        return watched


def main() -> None:
    with MadeServer() as made:
        print(made.link(), flush=True)
        threading.Event().wait()


if __name__ == "__main__":
    main()
