"""One simulated worker process, and one request on its way."""

from __future__ import annotations

import enum
import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from dynamo_local.core.fleet.draining import exit_in_s
from dynamo_local.core.routing.choice import MIN_CHANGE_INTERVAL_S, PUBLISH_INTERVAL_S, Sample
from dynamo_local.core.routing.disagg import SampledDepth
from dynamo_local.core.routing.prefill_choice import DecodeSide
from dynamo_local.core.routing.prompts import Turns
from dynamo_local.core.types import Role
from dynamo_local.engines.sim.facts import load_of
from dynamo_local.engines.sim.scheduler import SimScheduler
from dynamo_local.simulator.trace import TraceRequest

ENTRY = "-kv"


class Dropped(enum.StrEnum):
    """Why a request was given up."""

    TOO_LONG = "longer than max_model_len"
    FRONTEND_FULL = "the Frontend was full"
    WORKERS_FULL = "every worker was full"
    NO_WORKER = "no worker was registered"
    DEADLINE = "not done by its deadline"
    CUT = "cut at its worker's drain deadline"
    KILLED = "its workers were all killed"


@dataclass(slots=True, eq=False)
class Job:
    """One request. A time is None until it comes. `dropped` is the reason if the request was given up.

    `worker` decodes the request and `source` prefills it. `engine_id` is its name in the decode engine. `queued`: its
    entry waits in the prefill queue. `away`: its decode worker waits for the reply.
    """

    number: int
    request: TraceRequest
    keys: Sequence[int] = ()
    worker: SimulatedProcess | None = None
    source: SimulatedProcess | None = None
    engine_id: str = ""
    queued: bool = False
    away: bool = False
    remote: bool = False
    tries: int = 0
    first_s: float | None = None
    last_s: float | None = None
    dropped: Dropped | None = None

    @property
    def ended(self) -> bool:
        """It has its last token, or never will."""
        return self.last_s is not None or self.dropped is not None

    @property
    def ttft_s(self) -> float | None:
        """From its arrival to its first token."""
        return None if self.first_s is None else self.first_s - self.request.at_s

    @property
    def itl_s(self) -> float | None:
        """The mean gap between its tokens; None where it has no two."""
        if self.first_s is None or self.last_s is None or self.request.output_length < 2:
            return None
        return (self.last_s - self.first_s) / (self.request.output_length - 1)


@dataclass(slots=True, eq=False)
class SimulatedProcess:
    """A process that has been ready. `streams`: name in its engine -> request.

    `away`: requests of a decode worker that wait for a remote prefill. `side`: decides with `disagg-policy: slo`.
    `pulls`: it takes entries from the prefill queue. `prefilling`: how many streams are such entries. `resting`: it is
    asleep or about to sleep, and leaves only if `leave_requested`.
    """

    instance_id: int
    name: str
    role: Role
    scheduler: SimScheduler
    due_s: float | None = None
    deregistered_s: float | None = None
    last_arrival_s: float | None = None
    streams: dict[str, Job] = field(default_factory=dict)
    waiting: dict[int, Job] = field(default_factory=dict)
    sample: Sample | None = None
    depth: SampledDepth = field(default_factory=SampledDepth)
    turns: Turns = field(default_factory=Turns)
    side: DecodeSide | None = None
    pulls: bool = False
    prefilling: int = 0
    resting: bool = False
    leave_requested: bool = False

    @property
    def serves(self) -> bool:
        """It is registered."""
        return self.deregistered_s is None

    @property
    def in_flight(self) -> int:
        """Requests to finish before it may leave."""
        return len(self.streams) + len(self.waiting) + self.scheduler.num_held

    @property
    def num_waiting(self) -> int:
        """Requests that wait here, for the engine or for their KV."""
        return self.scheduler.num_waiting + len(self.waiting)

    def exit_in_s(self, now_s: float) -> float | None:
        """See `core.fleet.draining.exit_in_s`; None also for one that does not leave."""
        if self.deregistered_s is None:
            return None
        return exit_in_s(
            now_s=now_s,
            deregistered_s=self.deregistered_s,
            last_arrival_s=self.last_arrival_s,
            in_flight=self.in_flight,
        )

    def sample_due(self, now_s: float) -> bool:
        """Whether it would have published its load again: after a change, or after a second."""
        sample = self.sample
        if sample is None:
            return True
        age_s = now_s - sample.at_s
        if age_s < MIN_CHANGE_INTERVAL_S:
            return False
        return age_s >= PUBLISH_INTERVAL_S or bool(self.scheduler.num_running or self.scheduler.num_waiting)

    def publish(self, now_s: float) -> None:
        """Its load of now; the schedule has been brought to it."""
        self.sample = Sample(load_of(self.scheduler), now_s)


def entry_of(job: Job) -> str:
    """The name of its prefill in the engine of its source, which may be its decode worker's, too."""
    return f"{job.number}-{job.tries}{ENTRY}"


def is_entry(engine_id: str) -> bool:
    """Whether that request of an engine is a prefill for somebody."""
    return engine_id.endswith(ENTRY)


def samples_of(
    candidates: Mapping[int, SimulatedProcess], now_s: float, bring: Callable[[SimulatedProcess, float], None]
) -> dict[int, Sample]:
    """Their loads as they are published, by instance; `bring` one to a time before it publishes again."""
    found = {}
    for instance_id, process in candidates.items():
        if process.sample_due(now_s):
            bring(process, now_s)
            process.publish(now_s)
        if process.sample is not None:
            found[instance_id] = process.sample
    return found


# --- The agenda. The order of events depends only on their time and kind.


class What(enum.IntEnum):
    """Kinds of events, in the order in which those of one instant happen."""

    ENGINE = 0
    """An engine's schedule has something to tell; `index` is the instance."""
    PULLED = 1
    """KV has arrived; `index` is the request."""
    EXIT = 2
    """A leaving process may be done; `index` is the instance."""
    DEADLINE = 3
    """Something that the controller of the fleet waits for is due."""
    STARTED = 4
    """A process is ready to serve; `index` is the instance."""
    FLIPPED = 5
    """A process has registered in its new role; `index` is the instance."""
    ORDERED = 6
    """A process has carried out an order to sleep or to wake; `index` is the instance."""
    PREFILL_DEADLINE = 7
    """A request has waited for its remote prefill long enough; `index` is the request."""
    REQUEST_DEADLINE = 8
    """A client has waited long enough; `index` is the request."""
    ROUND = 9
    """The planner looks."""
    ARRIVAL = 10
    """The next request comes."""


Item = tuple[float, int, int]
"""(at_s, What, index)"""


class Agenda:
    """A heap of `(at_s, what, index)`. Ties are broken by what and index, never by who asked first: advancing many
    passes as one event must not change any order."""

    __slots__ = ("_heap",)

    def __init__(self) -> None:
        self._heap: list[Item] = []

    def add(self, at_s: float, what: What, index: int = 0) -> None:
        """One more. The same one twice is allowed."""
        heapq.heappush(self._heap, (at_s, int(what), index))

    @property
    def next_at_s(self) -> float | None:
        """When the next one is; None: never."""
        return self._heap[0][0] if self._heap else None

    def pop(self) -> Item:
        """The next one. IndexError if there is none."""
        return heapq.heappop(self._heap)
