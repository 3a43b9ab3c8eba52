"""The answers of `dynamo status`, `top`, `events` and `planner status`: records of what runs."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired, TypedDict

import msgspec

from dynamo_local.core.types import WorkerState
from dynamo_local.planner.plugins.registry import PluginRow
from dynamo_local.profile.judgement import Drifted

Share = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]


class WorkerLoad(TypedDict):
    """A worker's load, under Dynamo's names. Null is unknown, never 0."""

    request_active_slots: int
    request_total_slots: int
    kv_active_blocks: int
    kv_total_blocks: int
    num_requests_waiting: int
    gpu_cache_usage_perc: float | None
    gpu_prefix_cache_hit_rate: float
    remaining_tokens: int
    itl_ms: float | None
    prefills_waiting: int | None
    unread: int
    unread_s: float
    abandoned: int


class DrainStatus(TypedDict):
    """How far a drain is. `unread` answers have clients that take nothing, the longest for `unread_s`. Null is
    unknown."""

    left_requests: int | None
    left_tokens: int | None
    unread: int | None
    unread_s: float | None
    eta_s: float | None
    deadline_s: float | None


class StandbyStatus(TypedDict):
    """A worker that sleeps, or is to sleep. Memory that it keeps is in bytes, null if unknown."""

    wanted: bool
    level: int
    gpus: list[str]
    vram_bytes: int | None
    host_bytes: int | None


class WorkerStatus(TypedDict):
    """One worker."""

    watcher_name: str
    component: str
    guests: list[str]
    role: str
    model: str | None
    state: WorkerState
    pid: int | None
    gpus: list[str]
    lease: str | None
    endpoints: list[str]
    uptime_s: float | None
    restarts: int
    standby: StandbyStatus | None
    outdated: bool
    reason: str | None
    drain: DrainStatus | None
    log_file: str
    load: WorkerLoad | None
    dispatch: dict[str, float] | None


class GpuStatus(TypedDict):
    """One device, and who has it."""

    index: int
    uuid: str
    name: str
    state: Literal["free", "held", "taken", "quarantined"]
    worker: str | None
    sleepers: list[str]
    reason: str | None


class ServerStatus(TypedDict):
    """An embedded server."""

    watcher_name: str
    kind: Literal["etcd", "nats"]
    state: Literal["running", "restarting"]
    pid: int | None
    failures: int
    next_try_s: float | None
    reason: str | None


class QueueStatus(TypedDict):
    """The prefill queue. Null is unknown."""

    pending: int | None
    outstanding: int | None
    dead_letters: int | None


class Freshness(TypedDict):
    """Age of the GPUs' inventory, and why the latest look failed."""

    age_s: float | None
    stale: str | None


class ChangeStatus(TypedDict):
    """A restart or an apply that is under way."""

    stimulus_id: str
    left: list[str]
    done: list[str]
    substitutes: dict[str, str]


class KeptShare(TypedDict):
    """Requests that ended in a window, and how many kept both targets. `missed` counts the others by reason."""

    requests: int
    kept: int
    share: Share | None
    missed: dict[str, int]


class KeptStatus(TypedDict):
    """The latency targets, and the requests that kept them by window."""

    ttft_ms: float | None
    itl_ms: float | None
    minute: NotRequired[KeptShare]
    hour: NotRequired[KeptShare]
    day: NotRequired[KeptShare]
    total: KeptShare


class FollowStatus(TypedDict):
    """Another planner's decisions, which this run carries out."""

    environment: str
    layout: str
    keys: str
    phase: str
    decision_id: int
    num_prefill_workers: int
    num_decode_workers: int
    scaled_decision_id: int
    reason: str | None


class SpareStatus(TypedDict):
    """A prewarmed process."""

    watcher_name: str
    engine: str
    state: str
    pid: int | None
    uptime_s: float
    warm_after_s: float | None
    memory_bytes: int | None


class SparesStatus(TypedDict):
    """All prewarmed processes."""

    count: int
    spares: list[SpareStatus]
    failures: int
    reason: str | None
    next_try_s: float | None


class LeadTime(TypedDict):
    """Seconds from a decision until the worker serves."""

    count: int
    last_s: float
    median_s: float
    p90_s: float


class LeadTimeRow(TypedDict):
    """A component's lead times by scaling option, in this run, and on this host (this run included)."""

    component: str
    rung: str
    run: LeadTime | None
    host: LeadTime


class TaskStatus(TypedDict):
    """A task of the arbiter that is kept alive."""

    task: str
    running: bool
    deaths: int
    why: str | None
    again_s: float | None


class NoteStatus(TypedDict):
    """A note to people. Times are seconds since 1970."""

    text: str
    count: int
    first_at: float
    last_at: float


class FixedFleetStatus(TypedDict):
    """The cheapest fixed fleet that would have kept as large a share."""

    hours: float
    share: float
    gpu_hours: float
    prefill: int
    decode: int
    fixed_share: float
    fixed_gpu_hours: float
    gpu_hours_ratio: float


class VirtualStatus(TypedDict):
    """Decisions that are written to etcd for another environment."""

    keys: str
    num_prefill_workers: int
    num_decode_workers: int
    decision_id: int
    scaled_decision_id: int
    pending: bool
    waits_s: float | None


class LastTick(TypedDict):
    """The plugins' last tick."""

    action: str
    why: str | None


class PluginsStatus(TypedDict):
    """The planner's plugins. `not_taken` says why others are not among them."""

    plugins: list[PluginRow]
    not_taken: dict[str, str]
    gateway: str | None
    last_tick: LastTick | None


class ProfileStatus(TypedDict):
    """The profile by which the planner sizes."""

    name: str
    measured: bool
    certificate: str | None


class HeldMs(TypedDict):
    """Milliseconds."""

    wall: float
    cpu: float


class DecisionAnswer:
    """A decision as it is logged (`DecisionRecord`), with its number, its run and the targets that were kept."""


class ModelStatus(TypedDict):
    """A model that shares the GPUs: workers, held requests (the oldest for `held_s`), and why it has what it has.

    `last_worth` and `next_worth`: weighted requests within targets per second and GPU, of its last worker and of one
    more. Null before the first decision.
    """

    model: str
    component: str
    ready: int
    asleep: int
    target: int
    gpus_per_worker: int
    floor: int
    cap: int | None
    held: int
    held_s: float
    why: str | None
    last_worth: float | None
    next_worth: float | None


class PlannerStatus(TypedDict):
    """The planner's state. Keys that may be absent belong to a planner that has been started."""

    state: str
    no_operation: bool
    options: dict[str, Any]
    follow: FollowStatus | None
    virtual: VirtualStatus | None
    plugins: PluginsStatus
    lead_times: list[LeadTimeRow]
    tensorboard: str | None
    reports: str | None
    profile: ProfileStatus | None
    drift: list[Drifted]
    fixed_fleet: FixedFleetStatus | None
    last_decision: DecisionAnswer | None
    trouble: str | None
    for_s: NotRequired[float]
    adjusting: NotRequired[bool]
    next_decision_s: NotRequired[float | None]
    waiting_for_gpus: NotRequired[list[str]]
    models: NotRequired[dict[str, str]]
    pulls: NotRequired[int]
    decisions: NotRequired[int]
    failed_ticks: NotRequired[int]
    lag_s: NotRequired[float]
    loop_held_max_ms: NotRequired[dict[str, HeldMs]]


class Percentiles(TypedDict):
    """Milliseconds; null where no token came."""

    p50: float | None
    p95: float | None


class ServedStatus(TypedDict):
    """The figures of a component over the last minute, or as far as it was heard (`seconds`)."""

    seconds: float
    requests_per_s: float
    tokens_per_s: float
    ttft_ms: Percentiles
    itl_ms: Percentiles


class PageStatus(TypedDict):
    """The page that is served. `url` has no code; the command `link` prints a link that opens it."""

    url: str
    link: str


class Status(TypedDict):
    """`dynamo status`: the whole run."""

    namespace: str
    run_id: str
    state: str
    missing: list[str]
    arbiter_pid: int
    guardian_pid: int | None
    on_arbiter_death: str
    circus_endpoint: str
    etcd_endpoints: str | None
    etcd_shell_file: str | None
    nats_server: str | None
    servers: list[ServerStatus]
    frontend_url: str | None
    prefill_queue: QueueStatus | None
    metrics_url: str | None
    dashboard: PageStatus | None
    keeps_dashboard: bool
    gpus: list[GpuStatus]
    gpu_inventory: Freshness
    quarantined_gpus: dict[str, str]
    changes: list[ChangeStatus]
    planner: PlannerStatus
    models: list[ModelStatus]
    targets: KeptStatus | None
    follow: FollowStatus | None
    spares: SparesStatus | None
    lead_times: list[LeadTimeRow]
    components: dict[str, ServedStatus | None]
    tasks: list[TaskStatus]
    notes: list[NoteStatus]
    workers: list[WorkerStatus]


class TopGpu(GpuStatus):
    """One device, and the state of its worker."""

    worker_state: WorkerState | None


class TopWorker(TypedDict):
    """One worker. `kv` is the share of its KV cache that is in use; null is unknown."""

    watcher_name: str
    component: str
    state: WorkerState
    gpus: list[str]
    uptime_s: float | None
    reason: str | None
    drain: DrainStatus | None
    standby: StandbyStatus | None
    kv: Share | None
    running: int | None
    waiting: int | None


class TopPlanner(PlannerStatus):
    """The planner, with its last decision in words."""

    words: list[str]


class Top(TypedDict):
    """`dynamo top`: one frame."""

    namespace: str
    run_id: str | None
    state: str
    missing: list[str]
    gpus: list[TopGpu]
    workers: list[TopWorker]
    components: dict[str, ServedStatus | None]
    prefill_queue: QueueStatus | None
    follow: FollowStatus | None
    planner: TopPlanner | None
    notes: list[NoteStatus]


EventLine = TypedDict(
    "EventLine",
    {
        "seq": int,
        "time": float,
        "watcher_name": str,
        "component": NotRequired[str],
        "event": str,
        "from": str,
        "to": str,
        "stimulus_id": NotRequired[str | None],
        "aside": NotRequired[bool],
        "instructions": NotRequired[list[str]],
    },
)
"""A line of `dynamo events`: a change of a worker's state. An event has fields of its own beside these."""
