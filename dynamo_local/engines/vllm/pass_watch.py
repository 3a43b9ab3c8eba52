"""In EngineCore, beside vLLM's scheduler: what each pass computes, told to the worker ten times a second.

A pass costs a loop over what it schedules, and a look at the queue that takes at most half a percent of the time.
A thread sends; each second without a pass it sends a heartbeat, with the pass that is under way and the queue. So an
engine in a long pass is busy, an idle one is idle, and one that is stopped says nothing.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from dynamo_local.core.passes import variance

log = logging.getLogger(__name__)

SEND_EVERY_S = 0.1
HEARTBEAT_S = 1.0
UNSENT_PASSES = 1024
ENDPOINT = "DYN_PASSES_ENDPOINT"
"""Where EngineCore sends to; set for it by the worker."""
QUEUE_SHARE = 0.005
"""Largest share of the time for reading the queue."""

Numbers = tuple[int, int, float, int, int, int, float]
"""`core.passes.Requests`, in its order."""
NOTHING: Numbers = (0, 0, 0.0, 0, 0, 0, 0.0)


class EnginePass(msgspec.Struct, array_like=True):
    """One pass on its way to the worker; `wall_time_s` 0 is a heartbeat."""

    counter_id: int
    age_s: float
    wall_time_s: float
    scheduled: Numbers
    queued: Numbers


class EnginePasses(msgspec.Struct, array_like=True):
    """A message."""

    dp_rank: int
    passes: list[EnginePass]


def scheduled_numbers(requests: dict[str, Any], tokens: dict[str, int]) -> Numbers:
    """The content of a pass: `tokens` of each request, which the scheduler has counted as computed already.

    A request with only its last token left is a decode, whatever came before.
    """
    decodes = context = context_squares = 0
    prefills = computed = read = lengths = length_squares = 0
    for request_id, count in tokens.items():
        request = requests[request_id]
        done = request.num_computed_tokens
        if done - count + 1 >= request.num_tokens:
            decodes += 1
            context += done
            context_squares += done * done
        else:
            length = request.num_prompt_tokens
            prefills += 1
            computed += count
            read += done - count
            lengths += length
            length_squares += length * length
    return (
        prefills,
        computed,
        variance(prefills, lengths, length_squares),
        read,
        decodes,
        context,
        variance(decodes, context, context_squares),
    )


def queued_numbers(queues: Iterable[Iterable[Any]]) -> Numbers:
    """The waiting requests: prompts, and decodes that were preempted or wait for KV of another engine."""
    decodes = context = context_squares = 0
    prefills = lengths = length_squares = 0
    for queue in queues:
        for request in queue:
            if request.num_output_tokens or getattr(request.status, "name", "") == "WAITING_FOR_REMOTE_KVS":
                tokens = request.num_tokens
                decodes += 1
                context += tokens
                context_squares += tokens * tokens
            else:
                length = request.num_prompt_tokens
                prefills += 1
                lengths += length
                length_squares += length * length
    of_prefills = variance(prefills, lengths, length_squares)
    return (prefills, lengths, of_prefills, 0, decodes, context, variance(decodes, context, context_squares))


class PassWatch:
    """One engine's. `scheduled` and `ended` are called by its scheduler, in pairs and in order; a failure of ours is
    logged once, and nothing is told any more."""

    def __init__(
        self,
        scheduler: Any,
        dp_rank: int,
        send: Callable[[bytes], None],
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._scheduler = scheduler
        self._dp_rank = dp_rank
        self._send = send
        self._now_s = now_s
        self._flying: deque[tuple[Numbers, float]] = deque()
        self._ended: deque[tuple[float, float, Numbers, Numbers]] = deque(maxlen=UNSENT_PASSES)
        self._queued = NOTHING
        self._look_again_s = 0.0
        self._last_output_s = 0.0
        self._counter = 0
        self._told_s = now_s()
        self._failed = False

    def scheduled(self, output: Any) -> None:
        """The scheduler has decided about a pass."""
        if self._failed:
            return
        try:
            self._look_at_queue()
            if output.total_num_scheduled_tokens:
                numbers = scheduled_numbers(self._scheduler.requests, output.num_scheduled_tokens)
                self._flying.append((numbers, self._now_s()))
        except Exception:  # vLLM's insides differ by version; the engine must go on
            self._give_up()

    def ended(self, output: Any) -> None:
        """The result of that pass is there."""
        if self._failed or not output.total_num_scheduled_tokens or not self._flying:
            return
        now_s = self._now_s()
        numbers, began_s = self._flying.popleft()
        self._ended.append((now_s, now_s - max(began_s, self._last_output_s), numbers, self._queued))
        self._last_output_s = now_s

    def tell(self) -> None:
        """Send what has ended since the last call, or a heartbeat where one is due."""
        now_s = self._now_s()
        passes = []
        while self._ended:
            end_s, wall_time_s, scheduled, queued = self._ended.popleft()
            passes.append(self._numbered(now_s - end_s, wall_time_s, scheduled, queued))
        if not passes and now_s - self._told_s >= HEARTBEAT_S and not self._failed:
            passes.append(self._numbered(0.0, 0.0, self._under_way(), self._queued))
        if passes:
            self._told_s = now_s
            self._send(msgspec.msgpack.encode(EnginePasses(self._dp_rank, passes)))

    def _under_way(self) -> Numbers:
        try:
            return self._flying[0][0]
        except IndexError:
            return NOTHING

    def _numbered(self, age_s: float, wall_time_s: float, scheduled: Numbers, queued: Numbers) -> EnginePass:
        self._counter += 1
        return EnginePass(self._counter, age_s, wall_time_s, scheduled, queued)

    def _look_at_queue(self) -> None:
        began_s = self._now_s()
        if began_s < self._look_again_s:
            return
        names = ("waiting", "skipped_waiting", "kv_holding_waiting")
        self._queued = queued_numbers(getattr(self._scheduler, name, ()) for name in names)
        ended_s = self._now_s()
        self._look_again_s = ended_s + (ended_s - began_s) / QUEUE_SHARE

    def _give_up(self) -> None:
        self._failed = True
        log.exception("this vLLM's passes cannot be watched; planners will know nothing of them")


class Teller:
    """The thread that sends, over a ZeroMQ socket, without ever waiting for the worker."""

    def __init__(self, scheduler: Any, dp_rank: int, endpoint: str) -> None:
        import zmq

        self._zmq = zmq
        self._socket: Any = zmq.Context.instance().socket(zmq.PUSH)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 100)
        self._socket.connect(endpoint)
        self._stop = threading.Event()
        self.watch = PassWatch(scheduler, dp_rank, self._push)
        self._thread = threading.Thread(target=self._run, name="passes", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Send no more."""
        self._stop.set()
        self._thread.join(1.0)

    def _run(self) -> None:
        while not self._stop.wait(SEND_EVERY_S):
            try:
                self.watch.tell()
            except Exception:
                log.exception("the passes of this engine are not told any more")
                break
        self._socket.close()

    def _push(self, message: bytes) -> None:
        try:
            self._socket.send(message, self._zmq.NOBLOCK)
        except self._zmq.Again:  # the worker is busy or gone: these passes are lost, as their numbers will show
            log.debug("passes were not sent")
