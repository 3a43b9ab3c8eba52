"""The request recorder: one line of `dynamo.request.trace.v1` for each request, and never its text.

A request's end puts a record into a bounded queue. A thread of its own writes them. So neither a slow disk nor a full
one delays a request: records are dropped then, and the gap in `seq` counts them.
"""

from __future__ import annotations

import asyncio
import json
import logging
import queue
import socket
import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from xxhash import xxh3_64_intdigest

from dynamo_local.clock import Clock
from dynamo_local.components.http_metrics import EndedRequest, Status
from dynamo_local.core.routing.estimates import Targets
from dynamo_local.errors import ConfigError
from dynamo_local.ports import KeyValueStore
from dynamo_local.system.json_lines import JsonLog, Kinds, LogUnwritable
from dynamo_local.system.request_log import x_request_id

PAGE_TRY_S = 2.0
"""Nobody listens to ended requests: look again after so long."""
SCHEMA = "dynamo.request.trace.v1"
BLOCK_TOKENS = 64
"""So many tokens have one hash. Dynamo's replay takes any number."""
QUEUED_MAX = 8_192
KEPT = 3
"""Files of an earlier time: FILE.1 is the newest of them."""
FLUSH_S = 0.5
CLOSE_S = 3.0
"""A disk that hangs for longer does not hold up the end of the Frontend."""
FLEET_EVERY_S = 2.0

log = logging.getLogger("dynamo_local.requests")


class RequestTrace(JsonLog):
    """The file, and its earlier ones."""

    what: ClassVar[str] = "request record"
    kinds: ClassVar[Kinds] = (("seq", int), ("schema", str))


@dataclass(frozen=True, slots=True)
class _Ended:
    request_id: str
    status: Status
    received_s: float
    total_s: float
    request: EndedRequest
    fleet: Mapping[str, int]


class Recorder:
    """Takes ended requests from the loop, and writes them in a thread. Times of day come from the clock's `wall_s`."""

    def __init__(self, path: Path, max_bytes: int, clock: Clock, targets: Targets) -> None:
        """Raises `ConfigError` if the file cannot be opened now. Later failures cost records only."""
        try:
            if not path.parent.is_dir():
                raise NotADirectoryError(f"there is no folder {path.parent}")
            if path.exists() and not path.is_file():
                raise FileExistsError("it is no file")
            self._file = RequestTrace(path, max_bytes=max(max_bytes // (KEPT + 1), 1), kept=KEPT)
        except OSError as error:
            raise ConfigError(
                f"record-trace {path}: {error.strerror or error}; name a file that can be written"
            ) from None
        self._path, self._clock = path, clock
        ttft_s, itl_s = targets.seconds
        self._targets = {"ttft_ms": _ms(ttft_s), "itl_ms": _ms(itl_s)}
        self.fleet: Mapping[str, int] = {}
        """Registered workers by component."""
        self._queue: queue.Queue[_Ended | None] = queue.Queue(QUEUED_MAX)
        self._lost = 0
        self._thread = threading.Thread(target=self._write, name="request-recorder", daemon=True)
        self._thread.start()

    @property
    def lost(self) -> int:
        """Records that could not be queued."""
        return self._lost

    def ended(self, request_id: str, status: Status, total_s: float, request: EndedRequest) -> None:
        """One more request has ended now. It never waits. An answer without tokens (an embedding) is no record."""
        if status == "success" and request.tokens == 0:
            return
        self._put(_Ended(request_id, status, self._clock.wall_s() - total_s, total_s, request, self.fleet))

    def _put(self, item: _Ended) -> None:
        try:
            self._queue.put_nowait(item)
        except queue.Full:
            if self._lost == 0:
                log.warning("%s: the disk is slower than the requests; records are lost from now on", self._path)
            self._lost += 1

    async def close(self) -> None:
        """Write the rest. A disk that hangs is left alone after `CLOSE_S`."""
        deadline_s = time.monotonic() + CLOSE_S
        while time.monotonic() < deadline_s and self._thread.is_alive():
            try:
                self._queue.put_nowait(None)
                break
            except queue.Full:
                await asyncio.sleep(FLUSH_S / 10)
        await asyncio.to_thread(self._thread.join, max(0.0, deadline_s - time.monotonic()))
        if self._thread.is_alive():
            log.warning("%s: records were still unwritten after %g s; they may be lost", self._path, CLOSE_S)
        if self._lost:
            log.warning("%s: %d records were lost", self._path, self._lost)

    def _write(self) -> None:
        refused = False
        ended = False
        while not ended:
            items = [self._queue.get()]
            time.sleep(FLUSH_S if items[0] is not None else 0)  # one write for all that come within this time
            while len(items) < QUEUED_MAX and not self._queue.empty():
                items.append(self._queue.get_nowait())
            ended = None in items
            try:
                self._file.append({**_record(item), "targets": self._targets} for item in items if item)
                if refused:
                    log.info("%s: requests are recorded again", self._path)
                refused = False
            except LogUnwritable as error:
                if not refused:
                    log.warning("%s", error)
                refused = True
            except Exception:
                if not refused:
                    log.exception("%s: requests could not be recorded", self._path)
                refused = True


class PageFeed:
    """Hands ended requests to the page's process: one datagram each, lengths and times only, never text.

    It never waits. If nobody listens, or that process is slow, a request is dropped, which costs the page one row.
    """

    def __init__(self, path: Path, clock: Clock, targets: Targets) -> None:
        self._path, self._clock = str(path), clock
        self._targets_s = targets.seconds
        self._socket: socket.socket | None = None
        self._next_try_s = 0.0

    def is_heard(self) -> bool:
        """Whether somebody listens, or may by now. A graph without a page pays no more than this."""
        return self._socket is not None or self._clock.now_s() >= self._next_try_s

    def ended(self, request_id: str, status: Status, total_s: float, request: EndedRequest) -> None:
        """One more request has ended now."""
        try:
            if self._socket is None:
                self._socket = _connected(self._path)
            self._socket.send(json.dumps(self._row(request_id, status, total_s, request)).encode())
        except BlockingIOError:
            return
        except OSError:
            self.close()
            self._next_try_s = self._clock.now_s() + PAGE_TRY_S

    def close(self) -> None:
        """Let go of the socket."""
        if self._socket is not None:
            self._socket.close()
        self._socket = None

    def _row(self, request_id: str, status: Status, total_s: float, request: EndedRequest) -> dict[str, Any]:
        phases, ttft_s = request.phases, request.ttft_s
        spent: list[tuple[str, float]] = []
        if ttft_s is not None:
            before_s, routed_s = ttft_s, request.routed_s
            if phases is not None:
                before_s -= phases.prefilled_s + phases.handed_off_s
                spent = [("prefilled", phases.prefilled_s), ("handed off", phases.handed_off_s)]
            spent = [
                ("queued", max(0.0, before_s - (routed_s or 0.0))),
                *spent,
                ("decoded", max(0.0, total_s - ttft_s)),
            ]
            if routed_s is not None:
                spent = [("routed", routed_s), *spent]
        missed: list[str] | None = None
        if ttft_s is not None and any(self._targets_s):
            pairs = zip(("ttft", "itl"), (ttft_s, request.itl_s), self._targets_s, strict=True)
            missed = [name for name, took_s, most_s in pairs if took_s is not None and most_s and took_s > most_s]
        return {
            "id": x_request_id() or request_id[:128],
            "t": round(self._clock.wall_s(), 3),
            "model": request.model[:200],
            "outcome": "cancelled" if request.gone else status,
            "instance": request.worker,
            "prefill_worker": None if phases is None else phases.prefill_worker,
            "prompt_tokens": request.prompt_tokens,
            "cached_tokens": request.cached_tokens,
            "tokens": request.tokens,
            "phases": [(name, round(seconds, 6)) for name, seconds in spent],
            "ttft_s": ttft_s,
            "itl_s": request.itl_s,
            "total_s": round(total_s, 6),
            "missed": missed,
        }


def _connected(path: str) -> socket.socket:
    found = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    found.setblocking(False)
    try:
        found.connect(path)
    except BaseException:
        found.close()
        raise
    return found


def _record(ended: _Ended) -> dict[str, Any]:
    request = ended.request
    received_ms = round(ended.received_s * 1e3)
    found: dict[str, Any] = {
        "request_id": ended.request_id,
        "model": request.model,
        "input_tokens": request.prompt_tokens,
        "output_tokens": request.tokens,
        "cached_tokens": request.cached_tokens,
        "request_received_ms": received_ms,
        "prefill_time_ms": _ms(None if request.phases is None else request.phases.prefilled_s),
        "ttft_ms": _ms(request.ttft_s),
        "total_time_ms": _ms(ended.total_s),
        "avg_itl_ms": _ms(request.itl_s),
        "kv_hit_rate": request.kv_hit_rate,
        "outcome": "cancelled" if request.gone else ended.status,
    }
    if (trace := request.trace) is not None:
        found["worker"] = {"decode_worker_id": trace["worker"]}
    whole = request.prompt_tokens is not None and request.tokens > 0
    if request.prompt_tokens is not None and whole:
        hashes = _unshared(ended.request_id, request.prompt_tokens) if trace is None else trace["hashes"]
        found["replay"] = {
            "trace_block_size": BLOCK_TOKENS,
            "input_length": request.prompt_tokens,
            "input_sequence_hashes": hashes,
        }
    return {
        "schema": SCHEMA,
        # Dynamo's replay refuses a request_end without lengths, and passes over a request_payload.
        "event_type": "request_end" if whole else "request_payload",
        "event_time_unix_ms": round((ended.received_s + ended.total_s) * 1e3),
        "event_source": "dynamo",
        "fleet": dict(sorted(ended.fleet.items())),
        "request": {name: value for name, value in found.items() if value is not None},
    }


def _unshared(request_id: str, prompt_tokens: int) -> list[int]:
    """Hashes of a prompt whose tokens are not known here: no other request has them."""
    return [xxh3_64_intdigest(f"{request_id} {block}".encode()) for block in range(-(-prompt_tokens // BLOCK_TOKENS))]


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 3)


async def follow_fleet(recorder: Recorder, kv: KeyValueStore, namespace: str) -> None:
    """Tell the recorder which workers are registered. Ends when it is cancelled."""
    while True:
        try:
            found, _ = await kv.get_prefix(f"{namespace}/components/")
        except Exception as error:  # etcd is away: requests are recorded all the same
            log.debug("the fleet is not known: %s", error)
        else:
            workers = {tuple(each.key.split("/")[2:3] + each.key.rsplit(":", 1)[1:]) for each in found}
            recorder.fleet = Counter(component for component, _ in workers)
        await asyncio.sleep(FLEET_EVERY_S)
