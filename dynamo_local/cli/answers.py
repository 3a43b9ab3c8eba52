"""The answers of `--json`, one record each, and their schemas. `status_answers` has those about what runs. A command
whose answer is a record already has it here.

A schema's `$id` has a version. It rises if a key is renamed, goes, or becomes another type. A new key does
not raise it.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired, TypedDict

import msgspec

from dynamo_local.cli.status_answers import Share
from dynamo_local.core.doctor.findings import Verdict
from dynamo_local.simulator.metrics import Metrics, Spread

Id = Annotated[str, msgspec.Meta(pattern="^[a-z0-9]+(-[a-z0-9]+)*$")]
Said = Annotated[str, msgspec.Meta(min_length=1)]
Count = Annotated[int, msgspec.Meta(ge=0)]


# --- what is changed -----------------------------------------------------------------------------


class WorkerEffect(TypedDict):
    """A command's effect on a worker."""

    kind: str
    watcher_name: str
    reason: str
    becomes: NotRequired[str]


class _Changed(TypedDict):
    stimulus_id: str
    outcomes: NotRequired[dict[str, str]]


class Scaled(_Changed):
    """`dynamo scale`. `outcomes`, here and below, is there with `--wait`: each worker's end in words."""

    component: str
    instructions: list[WorkerEffect]
    ready: int
    target: int


class ReadyOf(TypedDict):
    """Workers of a component."""

    ready: int
    target: int


class Exchanged(_Changed):
    """`dynamo scale --flip`."""

    components: dict[str, ReadyOf]
    instructions: list[WorkerEffect]


class WorkerChanged(_Changed):
    """`dynamo drain`, `sleep` and `wake`. `state` is `removed` if no such worker is left."""

    watcher_name: str
    state: str
    instructions: list[WorkerEffect]


class Flipped(WorkerChanged):
    """`dynamo flip`: the worker's next name and component; null if its flip was taken back."""

    becomes: str | None
    component: NotRequired[str | None]


class Restarted(_Changed):
    """`dynamo restart`. `substitutes`: a worker that leaves -> the one that takes its place."""

    workers: list[str]
    substitutes: dict[str, str]
    warnings: list[str]


class Difference(TypedDict):
    """One difference. Secrets are masked; null: absent."""

    what: str
    before: Any
    after: Any


class Touched(TypedDict):
    """Workers by what happens to them."""

    start: list[str]
    leave: list[str]
    renew: list[str]


class Applied(TypedDict):
    """`dynamo apply`. `components`: how many workers each component that is touched is to have. `kept`: values of
    earlier command lines that count."""

    stimulus_id: str
    dry_run: bool
    changes: list[Difference]
    notes: list[str]
    components: dict[str, int | None]
    removed: list[str]
    workers: Touched
    kept: dict[str, Any]
    failures: list[str]


# --- planner -------------------------------------------------------------------------------------


class Reported(TypedDict):
    """`dynamo planner report`: the page, and the number of decisions in it."""

    report: str
    decisions: int
    bytes: int


class Side(TypedDict):
    """Workers, step and rule of each component."""

    targets: dict[str, int]
    steps: dict[str, int]
    rules: dict[str, str]


class ComparedTick(TypedDict):
    """A tick in which the log or the replay decided."""

    seq: int
    at_s: float
    agrees: bool
    then: Side | None
    now: Side | None


class Replayed(TypedDict):
    """`dynamo planner replay`. `whole` is false if the log's beginning is gone."""

    policies: list[str]
    ticks: int
    ticks_without_what_is_wanted: int
    whole: bool
    decisions: int
    differ: int
    compared: list[ComparedTick]


class MeasuredRange(TypedDict):
    """The lowest and the highest measured length, in tokens."""

    isl: tuple[float, float]
    context_length: tuple[float, float]


class PrefillRow(TypedDict):
    """A prompt length. Null: not measured there."""

    isl: float
    measured_ttft_ms: float | None
    measured_thpt_per_gpu: float | None
    ttft_ms: float
    thpt_per_gpu: float
    extrapolated: bool


class DecodeRow(TypedDict):
    """A context length under a load."""

    context_length: float
    kv_usage: float
    concurrency: float
    measured_itl_ms: float
    measured_thpt_per_gpu: float
    itl_ms: float
    thpt_per_gpu: float


class BestRow(TypedDict):
    """The most that a GPU decodes within a target."""

    itl_target_ms: float
    context_length: float
    thpt_per_gpu: float
    concurrency: float
    itl_ms: float
    attainable: bool
    extrapolated: bool


class ProfileTables(TypedDict):
    """`dynamo planner profile show`."""

    profile: str
    files: list[str]
    max_kv_tokens: int
    measured: MeasuredRange
    prefill: list[PrefillRow]
    decode: list[DecodeRow]
    best: list[BestRow]
    notes: list[str]


# --- simulator -----------------------------------------------------------------------------------


class _RunMetrics(TypedDict):
    requests: int
    completed: int
    dropped: int
    attainment: Share
    goodput_rps: float
    gpu_hours: float
    scale_actions: int
    ttft_ms: Spread
    itl_ms: Spread
    duration_s: float
    remote_prefills: int
    preemptions: int
    output_tokens: int
    gpus_mean: float
    dropped_by: dict[str, int]
    done_by: dict[str, int]


assert _RunMetrics.__annotations__.keys() == Metrics.__annotations__.keys()


class SimulatedRun(_RunMetrics):
    """One run of `dynamo simulate`. Several runs are a list."""

    name: str


class PlannedFleet(_RunMetrics):
    """A fleet that was tried."""

    prefill: int
    decode: int
    gpus: int


class PlannedProfile(PlannedFleet):
    """The best fleet of one profile."""

    profile: str
    settings: dict[str, Any]
    attained: bool
    attainment_low: float
    attainment_high: float


class Planned(TypedDict):
    """`dynamo plan`. The first of `profiles` is the best; `yaml` has the sections that `--write` writes."""

    profile: str
    profiles: list[PlannedProfile]
    best: PlannedFleet
    attained: bool
    attainment_low: float
    attainment_high: float
    alternatives: list[PlannedFleet]
    tried: int
    yaml: str


class MixModel(TypedDict):
    """One model of a mix. `slots`: requests that a worker serves at once. `wait_s_p99`: until a worker took it."""

    name: str
    requests: int
    attainment: float
    ttft_ms_p50: float | None
    ttft_ms_p95: float | None
    wait_s_p99: float | None
    worker_gpus: int
    slots: int
    start_s: float


class _Mix(TypedDict):
    gpus: int
    attainment: float
    gpu_hours: float
    switches: int
    models: list[MixModel]


class PlannedMix(_Mix):
    """`dynamo plan --model`: the models together on the fewest GPUs. `apart`: GPUs if each has its own; null: none."""

    attained: bool
    apart_gpus: int | None
    apart: dict[str, int | None]


class FixedSplit(TypedDict):
    """The GPUs of each model in the best split that is fixed for the whole time, chosen afterwards."""

    gpus: dict[str, int]
    attainment: float


class SimulatedMix(_Mix):
    """`dynamo simulate --model`. The second split has a worker of each model; null: the GPUs are too few for that."""

    best_fixed_split: FixedSplit
    best_fixed_split_of_all: FixedSplit | None


class Benched(TypedDict):
    """`dynamo bench`, under the names of `vllm bench serve`. Null: no sample. `errors` has the first reasons."""

    tool: Literal["own", "vllm"]
    url: str
    model: str
    completed: int
    failed: int
    duration: float
    total_input_tokens: int
    total_output_tokens: int
    request_throughput: float
    output_throughput: float
    total_token_throughput: float
    mean_ttft_ms: float | None
    median_ttft_ms: float | None
    std_ttft_ms: float | None
    p99_ttft_ms: float | None
    mean_tpot_ms: float | None
    median_tpot_ms: float | None
    std_tpot_ms: float | None
    p99_tpot_ms: float | None
    mean_itl_ms: float | None
    median_itl_ms: float | None
    std_itl_ms: float | None
    p99_itl_ms: float | None
    mean_e2el_ms: float | None
    median_e2el_ms: float | None
    std_e2el_ms: float | None
    p99_e2el_ms: float | None
    errors: list[str]


# --- graphs --------------------------------------------------------------------------------------


class PlannedWatcher(TypedDict):
    """A worker that would be started. Secrets in `env` are masked."""

    watcher_name: str
    component: str
    role: str
    gpus: list[int]
    gpu_uuids: list[str]
    cmd: str
    cwd: str
    log_file: str
    start_deadline_s: float
    drain_deadline_s: float
    env: dict[str, str]


class DryRun(TypedDict):
    """`dynamo serve --dry-run` of a graph."""

    namespace: str
    graph: str | None
    config: dict[str, Any]
    gpus: str
    etcd_endpoints: str
    nats_server: str
    planner: dict[str, Any] | None
    follow: str | None
    flips: dict[str, str]
    infra_watchers: list[str]
    watchers: list[PlannedWatcher]


class ServedModel(TypedDict):
    """One model. Bytes are of one GPU of an engine; they are absent on a CPU, and for a command."""

    model: str
    name: str | None
    engines: int
    prefill_engines: int
    gpus_per_engine: int
    max_model_len: NotRequired[int]
    weights_bytes: NotRequired[int]
    working_bytes: NotRequired[int]
    kv_room_bytes: NotRequired[int]
    kv_bytes_per_token: NotRequired[int]
    window_kv_bytes_per_token: NotRequired[int]
    state_bytes_per_request: NotRequired[int]
    kv_bytes_per_request: NotRequired[int]
    requests_at_once: NotRequired[int]
    gpu_memory_bytes: NotRequired[int]


class ServedModels(TypedDict):
    """`dynamo serve --dry-run` of models or a command: the decision, and `configuration` as YAML."""

    graph: str | None
    engine: str | None
    reasons: list[str]
    models: list[ServedModel]
    configuration: str


class CarriedNote(TypedDict):
    """A part that changes or is left out, and its place in the input."""

    kind: Literal["left out", "changed", "secret"]
    where: str
    text: str


class Exported(TypedDict):
    """`dynamo export kubernetes`. `beside` are the other documents."""

    file: str | None
    document: dict[str, Any]
    beside: list[dict[str, Any]]
    secret: str
    secret_keys: list[str]
    notes: list[CarriedNote]


class Imported(TypedDict):
    """`dynamo import`."""

    name: str | None
    file: str | None
    sections: dict[str, dict[str, Any]]
    notes: list[CarriedNote]


# --- doctor --------------------------------------------------------------------------------------


class DoctorFinding(TypedDict):
    """A result of a check. `subject` is the thing that was checked, where there are several (`GPU 0`)."""

    id: Id
    verdict: Verdict
    subject: str
    evidence: Said
    repair: str


class DoctorReport(TypedDict):
    """`dynamo doctor`. `serving_fails`: a finding is a problem; the exit code is then 1."""

    schema: Literal["dynamo.doctor.v1"]
    version: str
    serving_fails: bool
    counts: dict[Verdict, Count]
    findings: list[DoctorFinding]


class DoctorCheck(TypedDict):
    """An id, and what is in order."""

    id: Id
    subject: str
    explanation: Said


class DoctorList(TypedDict):
    """`dynamo doctor --list`."""

    schema: Literal["dynamo.doctor.checks.v1"]
    version: str
    checks: list[DoctorCheck]
