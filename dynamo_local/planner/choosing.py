"""Makes the policy that options describe, for the arbiter and for `dynamo simulate`.

This may read files (profiles, traces) and imports all policies, so the arbiter imports and calls it in a thread.
"""

from __future__ import annotations

import glob
import logging
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dynamo_local.config.planner import PlannerConfig
from dynamo_local.errors import ConfigError
from dynamo_local.planner.pass_model import Kind, PassModel, bootstrapped, decode_passes, prefill_passes
from dynamo_local.planner.policies.load_planner import LoadPlanner
from dynamo_local.planner.policies.protocol import Policy
from dynamo_local.planner.policies.sla import SlaPolicy
from dynamo_local.planner.policies.slo.policy import SloPolicy
from dynamo_local.planner.policies.slo.scaling_options import INTERVAL_S, START_UP_S
from dynamo_local.planner.policies.slo.warm_start import Request, warmed
from dynamo_local.planner.policies.throughput_load.policy import ThroughputLoadPolicy
from dynamo_local.planner.policies.throughput_load.state import learning_of
from dynamo_local.planner.predictors import check_installed, windows_max
from dynamo_local.planner.queueing import Engine, EngineOptions
from dynamo_local.planner.queueing_task import passes_of
from dynamo_local.planner.values import WINDOWS_MAX, Window
from dynamo_local.profile.interpolation import interpolators
from dynamo_local.profile.reading import DEFAULT_PROFILE, read_profile, shipped_profiles
from dynamo_local.system.json_lines import BadTrace, Row, Skipped, read_rows, shown

log = logging.getLogger(__name__)

# --- warmup
# A recorded trace as the windows that came before a planner's first: predictors begin with a history.
#
# Two formats are read, one of them at a time: Mooncake's (`{"timestamp": ms, "input_length": …, "output_length": …}`)
# and
# Dynamo's request trace (`"schema": "dynamo.request.trace.v1"`, of which the `request_end` events count).

MOONCAKE = "Mooncake's format"
DYNAMO = "dynamo.request.trace.v1"
ENDINGS = (".jsonl", ".jsonl.gz")


@dataclass(frozen=True, slots=True)
class _Arrival:
    at_ms: float
    isl: int
    osl: int


def read_warmup(named: str, window_s: float, windows_max: int = WINDOWS_MAX) -> tuple[Window, ...]:
    """The trace's last windows of `window_s` seconds, oldest first; those in which nothing came have a count of 0, and
    the lengths of the window before.

    `named` is a file, a folder of `.jsonl` and `.jsonl.gz` files, or a glob of such; several files are one trace, on
    one clock. The first window begins with the first request. The last one is left out where there are others, because
    the trace ends within it: it would look like a load that falls.

    Blocks, for as long as reading takes. Raises `BadTrace`, in one line.
    """
    return _windows(_arrivals(_files(named)), window_s, windows_max)


def read_requests(named: str, skipped: Skipped) -> list[Request]:
    """The trace's requests, as `read_warmup` names it: seconds, ascending, and tokens.

    A damaged line is counted in `skipped`. Raises `BadTrace`, also for a file without any line of a trace.
    """
    arrivals, known = list[_Arrival](), ""
    for file in _files(named):
        found, here = _good_arrivals(file, skipped)
        if known and here and here != known:
            raise BadTrace(f"{file}: this is {here}, and the files before are {known}; a history has one format")
        arrivals, known = arrivals + found, known or here
    if not arrivals:
        raise BadTrace(f"the trace {named} holds no request")
    return sorted((each.at_ms / 1000, each.isl, max(1, each.osl)) for each in arrivals)


# --- which files -------------------------------------------------------------------------------


def _files(named: str) -> list[Path]:
    path = Path(named)
    if path.is_file():
        return [path]
    within = path.iterdir() if path.is_dir() else map(Path, glob.glob(named, recursive=True))
    files = sorted(file for file in within if file.name.endswith(ENDINGS) and file.is_file())
    if not files:
        raise BadTrace(
            f"the warm-up trace {named} is no file, and no folder or glob of {' and '.join(ENDINGS)} files; "
            "name one that is there"
        )
    for file in files:
        packed = file.with_name(f"{file.name}.gz")
        if packed in files:
            raise BadTrace(f"the warm-up has {file} and {packed}, which is the same trace twice; take one away")
    return files


# --- which requests ----------------------------------------------------------------------------


def _arrivals(files: Iterable[Path]) -> Iterator[_Arrival]:
    """The arrivals of all files. Raises `BadTrace` where two formats are mixed, or nothing came."""
    first: tuple[str, str] | None = None
    counted = 0
    for file in files:
        for row in read_rows(file):
            known = _format(row)
            first = first or (known, row.where)
            if known != first[0]:
                raise BadTrace(f"{row.where}: this is {known}, and {first[1]} is {first[0]}; a warm-up has one format")
            arrival = _mooncake(row) if known == MOONCAKE else _dynamo(row)
            if arrival is not None:
                counted += 1
                yield arrival
    if not counted:
        raise BadTrace("the warm-up trace holds no request")


def _good_arrivals(file: Path, skipped: Skipped) -> tuple[list[_Arrival], str]:
    """The arrivals of a file, and its format: that of its first good line ("": the file is empty)."""
    arrivals, known, damaged = list[_Arrival](), "", Skipped()
    rows = read_rows(file, damaged)
    while True:
        try:
            row = next(rows, None)
            if row is None:
                break
            here = _format(row)
            if known and here != known:
                raise BadTrace(f"{row.where}: this is {here}, and the lines before are {known}")
            arrival = _mooncake(row) if here == MOONCAKE else _dynamo(row)
        except BadTrace as error:  # also the file's unreadable rest, which ends `rows`
            damaged.add(str(error))
            continue
        known = here
        if arrival is not None:
            arrivals.append(arrival)
    if damaged.count and not known:
        raise BadTrace(f"{damaged.first}; no other line of {file} is a request: give a trace")
    skipped.add_all(damaged)
    return arrivals, known


def _format(row: Row) -> str:
    schema = _event(row).fields.get("schema")
    if schema is None:
        return MOONCAKE
    if schema != DYNAMO:
        raise BadTrace(f"{row.where}: the schema {shown(schema)} is not known; {DYNAMO} is, and {MOONCAKE}")
    return DYNAMO


def _event(row: Row) -> Row:
    """Dynamo's file sink wraps each record: `{"timestamp": …, "event": {…}}`."""
    return row.inner("event") if isinstance(row.fields.get("event"), dict) else row


def _mooncake(row: Row) -> _Arrival:
    return _Arrival(row.milliseconds("timestamp"), row.tokens("input_length"), row.tokens("output_length"))


def _dynamo(row: Row) -> _Arrival | None:
    """None for an event that is no request's end."""
    event = _event(row)
    if event.field("event_type") != "request_end":
        return None
    request = event.inner("request")
    received = request.fields.get("request_received_ms") is not None
    return _Arrival(
        at_ms=request.milliseconds("request_received_ms") if received else event.milliseconds("event_time_unix_ms"),
        isl=request.inner("replay").tokens("input_length"),
        osl=request.tokens("output_tokens", least=0),
    )


# --- which windows -----------------------------------------------------------------------------


def _windows(arrivals: Iterable[_Arrival], window_s: float, windows_max: int) -> tuple[Window, ...]:
    """A gap of years costs no more than `windows_max` windows."""
    within: dict[int, list[_Arrival]] = defaultdict(list)
    came = sorted(arrivals, key=lambda arrival: arrival.at_ms)
    for arrival in came:
        within[int((arrival.at_ms - came[0].at_ms) // (window_s * 1000))].append(arrival)
    last = max(within)
    end = last if last > 0 else 1
    begin = max(0, end - windows_max)
    windows: list[Window] = []
    before = _before(within, begin)
    for index in range(begin, end):
        before = _window(within[index]) if index in within else Window(0.0, before.isl, before.osl)
        windows.append(before)
    return tuple(windows)


def _before(within: dict[int, list[_Arrival]], begin: int) -> Window:
    """The last window before `begin` in which something came; the first one has none before it."""
    earlier = [index for index in within if index < begin]
    return _window(within[max(earlier)]) if earlier else Window(0.0, 0.0, 0.0)


def _window(arrivals: list[_Arrival]) -> Window:
    count = len(arrivals)
    return Window(
        num_req=float(count),
        isl=sum(arrival.isl for arrival in arrivals) / count,
        osl=sum(arrival.osl for arrival in arrivals) / count,
    )


def history_of(options: PlannerConfig) -> tuple[list[Request], str | None]:
    """The requests of `history`, and a warning about its damaged lines. No requests without that option.

    Raises `ConfigError`.
    """
    if options.history is None:
        return [], None
    skipped = Skipped()
    try:
        return read_requests(str(options.history), skipped), skipped.warning(f"Planner: history: {options.history}")
    except BadTrace as error:
        raise ConfigError(f"Planner: history: {error}") from error


def policy_of(
    options: PlannerConfig,
    *,
    start_up_s: float | None = None,
    speed: float = 1.0,
    gpus: tuple[int, int] | None = None,
    recorded: Sequence[Request] = (),
    begins: bool = True,
) -> Policy[Any]:
    """A new policy with these options. Raises `ConfigError` if a file or a library that they name cannot be used.

    `slo` takes `start_up_s` for the lead time until it has observed a start (None or 0: unknown, so `START_UP_S`). Its
    engines are `speed` times as fast as their profile says. Where it `begins`, it does so with the requests of its
    `history`, or with the `recorded` ones. That takes seconds.
    `gpus` are those of a prefill worker (0: the graph is aggregated) and of a decode worker; by default the options'.
    """
    check_installed(options)
    match options.policy:
        case "load":
            return LoadPlanner(options)
        case "sla":
            return _sla(options)
        case "slo":
            each = gpus or (options.prefill_engine_num_gpu or 1, options.decode_engine_num_gpu or 1)
            requests, warning = history_of(options) if begins else ((), None)
            if warning is not None:
                log.warning("%s", warning)
            return _slo(options, start_up_s or START_UP_S, speed, each, requests or recorded)
        case "throughput-load":
            return _throughput_load(options)


def begins_anew(before: PlannerConfig, after: PlannerConfig) -> bool:
    """Whether other options make the recorded requests be judged anew: another policy, or other targets."""
    return any(
        getattr(before, name) != getattr(after, name)
        for name in ("policy", "ttft_ms", "itl_ms", "profile_results_dir", "history")
    )


def _slo(
    options: PlannerConfig, start_up_s: float, speed: float, gpus: tuple[int, int], requests: Sequence[Request]
) -> SloPolicy:
    profile = str(options.profile_results_dir or DEFAULT_PROFILE)
    passes, engine = passes_of(profile, speed), EngineOptions(mixed=not gpus[0])
    history = None
    if requests:
        history = warmed(
            requests,
            Engine(passes, engine),
            options.ttft_ms / 1000,
            options.itl_ms / 1000,
            workers_max=options.max_gpu_budget // min(each for each in gpus if each),
            lead_s=start_up_s,
            gpus=gpus,
            bin_s=INTERVAL_S,
        )
    return SloPolicy(options, passes, profile, start_up_s, speed, history=history)


def _sla(options: PlannerConfig) -> SlaPolicy:
    if options.profile_results_dir is None:
        raise ConfigError(
            "Planner: the policy sla sizes by a profile of the engines: say profile-results-dir, a folder as Dynamo's "
            f"profiler writes it, or one of: {', '.join(shipped_profiles())}"
        )
    return SlaPolicy(options, *interpolators(str(options.profile_results_dir)), warmup=_warmup(options))


def _throughput_load(options: PlannerConfig) -> ThroughputLoadPolicy:
    known: dict[Kind, PassModel] = {}
    if options.profile_results_dir is not None and options.optimization_target == "sla":
        profile = read_profile(str(options.profile_results_dir))
        decode = profile.decode
        passes = {
            Kind.PREFILL: prefill_passes(profile.prefill.isl, profile.prefill.ttft_ms),
            Kind.DECODE: decode_passes(decode.kv_usage, decode.context_length, decode.itl_ms, decode.max_kv_tokens),
        }
        passes[Kind.AGG] = passes[Kind.PREFILL] + passes[Kind.DECODE]
        known = {kind: bootstrapped(PassModel(kind, learning_of(options)), passes[kind]) for kind in Kind}
    return ThroughputLoadPolicy(options, known, _warmup(options) if options.predicts else ())


def _warmup(options: PlannerConfig) -> tuple[Window, ...]:
    trace, window_s = options.load_predictor_warmup_trace, options.throughput_adjustment_interval_seconds
    return () if trace is None else read_warmup(str(trace), window_s, windows_max(options))
