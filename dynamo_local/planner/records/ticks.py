"""The tick log and its replay: the policy's options, each observation, and each decision.

`decisions.jsonl` sums a decision up for people. This log, beside it, has each observation whole, also those
that decided nothing: a policy remembers them. An observation is packed (zlib, base64), its passes as columns
(`packed`). Random values pack worst: 73 kB for 64 new passes of each of 64 engines. The file is rotated as the decision
log is. An hour of such ticks, one every five seconds, always fits. The options are written again now and then, so that
a log without its beginning can be read.

Replay shows the same observations to the same policy, and compares its decisions with those of the log. It makes the
forecasts anew: the same task has the same answer. The log does not have the answers of plugins, so decisions that they
changed differ. With another policy or other options the replay says what it would have decided on the same
observations. Data that the recorded policy did not need is missing then.
"""

from __future__ import annotations

import base64
import json
import math
import struct
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field, fields, replace
from itertools import accumulate, islice, pairwise
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from dynamo_local.config.planner import PlannerConfig, options_of
from dynamo_local.core.passes import EngineId, ForwardPass, Requests
from dynamo_local.core.types import Load, Missing
from dynamo_local.errors import BadInput
from dynamo_local.planner.driver import PolicyDriver
from dynamo_local.planner.forecasting.answers import InlineForecaster
from dynamo_local.planner.policies.protocol import Policy, start_up_s
from dynamo_local.planner.values import (
    Capabilities,
    Decision,
    Ended,
    Engines,
    EngineSeen,
    Observation,
    Pool,
    Reading,
    Traffic,
    WorkerPools,
)
from dynamo_local.planner.values import Requests as ClientRequests
from dynamo_local.system import json_lines as jsonl
from dynamo_local.system.json_lines import JsonLog, Record

# --- columns
# Columns of numbers, packed small and without loss: for the log of ticks, most of which are engines' passes.
#
# Neighbours in a column are alike: a pass has a token more than the one before. Most numbers are small or have few
# decimals. So each column becomes whole numbers if possible, or their differences if these are smaller. Its bytes are
# sorted by their weight: the upper ones are long runs of zeros, which zlib packs to almost nothing.

_HEAD = struct.Struct("<I")
_COLUMN = struct.Struct("<BBBI")
"""Kind, whether it is of differences, bytes of each number, and bytes that follow."""
_WHOLE, _FLOAT = 0, 255
"""Kinds; one between is of floats with so many decimals."""
_DECIMALS = (0, 3, 4, 6)
_LARGEST = 2**53
_LEVEL = 6


def packed(columns: Sequence[Sequence[float]]) -> bytes:
    """Packs columns of one length. Whole numbers must be within 2^53; `unpacked` gives the same numbers, of the same
    types."""
    return b"".join([_HEAD.pack(len(columns[0]) if columns else 0), *map(_column_out, columns)])


def unpacked(data: bytes) -> list[list[float]]:
    """The columns. Raises `ValueError` or `zlib.error` for what `packed` did not write."""
    found: list[list[float]] = []
    try:
        (count,) = _HEAD.unpack_from(data)
        at = _HEAD.size
        while at < len(data):
            kind, differs, width, size = _COLUMN.unpack_from(data, at)
            at += _COLUMN.size
            found.append(_column_in(kind, bool(differs), width, count, data[at : at + size]))
            at += size
    except struct.error as error:
        raise ValueError(f"a column ends too early: {error}") from None
    return found


def _column_out(values: Sequence[float]) -> bytes:
    kind, numbers = _as_whole(values)
    if numbers is None:
        raw, differs, width = struct.pack(f"<{len(values)}d", *values), False, 8
    else:
        steps = [*numbers[:1], *(after - before for before, after in pairwise(numbers))]
        differs = sum(map(abs, steps)) < sum(map(abs, numbers))
        # The sign goes into the lowest bit: small numbers stay small on both sides of 0.
        unsigned = [n + n if n >= 0 else -n - n - 1 for n in (steps if differs else numbers)]
        width = (max(unsigned, default=0).bit_length() + 7) // 8
        raw = struct.pack(f"<{len(unsigned)}Q", *unsigned)
    by_weight = b"".join(raw[weight::8] for weight in range(width))
    small = zlib.compress(by_weight, _LEVEL)
    return _COLUMN.pack(kind, differs, width, len(small)) + small


def _as_whole(values: Sequence[float]) -> tuple[int, list[int] | None]:
    """The kind, and the column as whole numbers; None where it has too many decimals."""
    if all(type(value) is int for value in values):
        return _WHOLE, [int(value) for value in values]
    if all(type(value) is float and abs(value) < _LARGEST / 10 ** _DECIMALS[-1] for value in values):
        for decimals in _DECIMALS:
            scale = 10**decimals
            numbers = [round(value * scale) for value in values]
            if all(number / scale == value for number, value in zip(numbers, values, strict=True)):
                return decimals + 1, numbers
    return _FLOAT, None


def _column_in(kind: int, differs: bool, width: int, count: int, small: bytes) -> list[float]:
    by_weight = zlib.decompress(small)
    if width > 8 or len(by_weight) != width * count:
        raise ValueError(f"a column has {len(by_weight)} bytes, and not {width} for each of {count} numbers")
    raw = bytearray(8 * count)
    for weight in range(width):
        raw[weight::8] = by_weight[weight * count : (weight + 1) * count]
    if kind == _FLOAT:
        return list(struct.unpack(f"<{count}d", raw))
    signed = [n >> 1 if n & 1 == 0 else -(n >> 1) - 1 for n in struct.unpack(f"<{count}Q", raw)]
    numbers = list(accumulate(signed)) if differs else signed
    if kind == _WHOLE:
        return [*numbers]
    scale = 10 ** (kind - 1)
    return [number / scale for number in numbers]


VERSION = 3
"""The version of the records' form. A log of version 2 (0.14) is read as well; others are refused."""
READABLE = (2, VERSION)
FILE_NAME = "ticks.jsonl"
MAX_BYTES = 20 * 1024 * 1024
"""The limit of each of its four files. Three of them are always full after the first rotation."""
BEGAN, GOES_ON, CHANGED, MANUAL, TICK = "began", "goes_on", "changed", "manual", "tick"
KINDS: jsonl.Kinds = (("seq", int), ("version", int), ("kind", str), ("at_s", (int, float)))


class TickLog(JsonLog):
    """The writing end. See `JsonLog`."""

    what = "tick"
    kinds = KINDS

    def __init__(self, path: Path, *, max_bytes: int = MAX_BYTES, kept: int = jsonl.KEPT) -> None:
        super().__init__(path, max_bytes=max_bytes, kept=kept)


class Decided(NamedTuple):
    """The compared part of a decision: by component, the step and the rule; `targets` are workers."""

    targets: Mapping[str, int]
    steps: Mapping[str, int]
    rules: Mapping[str, str]


def tick_log_path(logs: Path) -> Path:
    """Where the ticks of the namespace with that log folder are."""
    return logs / FILE_NAME


def oldest_first(path: Path) -> Iterator[Record]:
    """All records in order, rotated files included, one at a time. Raises `BadInput` for one of another version."""
    for record in jsonl.oldest_first(path, KINDS):
        if record["version"] not in READABLE:
            raise BadInput(
                f"{path}: record {record['seq']} has version {record['version']}, this dynamo-local reads {VERSION}: "
                f"replay it with the one that wrote it"
            )
        yield record


def decided(decision: Decision | None) -> Decided | None:
    """None where nothing was decided."""
    if decision is None:
        return None
    rules = {reason.component: str(reason.rule) for reason in decision.reasons}
    return Decided(dict(decision.targets), decision.steps, rules)


# --- the requests of a log

RECORDED_S = 6 * 3600.0
"""A planner begins with its recorded requests of at most so long ago: older ones would count less than 2 %."""
RECORDED_MAX = 200_000
"""And with at most so many."""
RECORDED_BYTES_MAX = 64 * 1024 * 1024
RECORDED_TICKS = int(RECORDED_S)
"""A replay remembers the requests of so many ticks: a policy asks for requests every second at most."""

Recorded = list[tuple[float, int, int]]
"""When each request came (seconds, ascending; the last tick is at 0 s), and the tokens of its prompt and answer."""


def recorded_requests(path: Path, skipped: jsonl.Skipped) -> Recorded:
    """The last requests of the log. Reads at most `RECORDED_BYTES_MAX`. Damaged lines are counted in `skipped`.

    Raises OSError.
    """
    return joined(_seen_requests(path, skipped))


def joined(newest_first: Iterable[ClientRequests]) -> Recorded:
    """The last requests of these intervals: at most `RECORDED_MAX`, of `RECORDED_S`. Time between them is left out."""
    found: Recorded = []
    ends_s = 0.0  # where the intervals that are not read yet end
    for seen in newest_first:
        moved_s = ends_s - seen.at_s
        found += [
            (each.at_s - each.lasted_s + moved_s, each.isl, max(1, each.osl))
            for each in seen.ended
            if each.ttft_s is not None
        ]
        ends_s -= max(0.0, seen.at_s - seen.since_s)
        if ends_s <= -RECORDED_S or len(found) >= RECORDED_MAX:
            break
    return sorted(found)


def _seen_requests(path: Path, skipped: jsonl.Skipped) -> Iterator[ClientRequests]:
    """Those of the log's ticks, newest first."""
    for record, line in jsonl.newest_lines(path, KINDS, bytes_max=RECORDED_BYTES_MAX, skipped=skipped):
        if record["kind"] != TICK or record["version"] not in READABLE:
            continue
        try:
            reported = json.loads(zlib.decompress(base64.b64decode(record["pull"], validate=True))).get("requests")
            seen = None if reported is None else _clients_in(reported)
            if seen is not None:
                _check(seen)
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError, RecursionError, zlib.error) as error:
            skipped.add(f"{line}: {_bad(record, error)}")
            continue
        if seen is not None:
            yield seen


def _check(seen: ClientRequests) -> None:
    """Raises ValueError for numbers that no planner wrote."""
    if not math.isfinite(seen.at_s - seen.since_s):
        raise ValueError("its time is no number")
    for each in seen.ended:
        if not (math.isfinite(each.at_s) and math.isfinite(each.lasted_s) and 0 < each.isl <= jsonl.TOKENS_MAX):
            raise ValueError("a request's time or prompt is no number")
        if not 0 <= each.osl <= jsonl.TOKENS_MAX:
            raise ValueError("a request's answer has no number of tokens")


# --- records ---------------------------------------------------------------------------------------


def options_record(kind: str, options: PlannerConfig, at_s: float) -> dict[str, Any]:
    """The record of `began`, `goes_on` and `changed`."""
    unset = () if "min_gpu_budget" in options.model_fields_set else ("min_gpu_budget",)
    names = set(options_of(options.policy)) - {"plugin_registration", "scheduling", *unset}
    shown = options.model_dump(mode="json", include={*names})
    shown["scheduling"] = {"scale_interval_seconds": options.scheduling.scale_interval_seconds}
    return {**_head(kind, at_s), "policy": options.policy, "options": shown}


def manual_record(at_s: float) -> dict[str, Any]:
    """A line of the log: a person has changed the number of workers."""
    return _head(MANUAL, at_s)


def tick_record(observation: Observation, decision: Decision | None) -> dict[str, Any]:
    """A line of the log: a tick, with all of its observation. Some milliseconds for thousands of passes: not on the
    loop."""
    found = decided(decision)
    reported = None if found is None else found._asdict()
    small = zlib.compress(json.dumps(_observation_out(observation), separators=(",", ":")).encode())
    return {
        **_head(TICK, observation.at_s),
        "decided": reported,
        "pull": _text(small),
        "passes": _text(_passes_out(observation.engines)),
    }


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def options_in(record: Record) -> PlannerConfig:
    """The options of `began`, `goes_on` and `changed`. Raises `BadInput`."""
    try:
        values = record["options"]
        if record["version"] == 2:
            values = _of_version_2(values)
        return PlannerConfig.model_validate({**values, "policy": record.get("policy")})
    except (AttributeError, KeyError, TypeError, ValidationError) as error:
        raise _bad(record, error) from None


_NAMES_OF_VERSION_2 = {
    "metric_pulling_interval_s": "metric_pulling_interval",
    "throughput_adjustment_interval_s": "throughput_adjustment_interval_seconds",
    "load_adjustment_interval_s": "load_adjustment_interval_seconds",
    "down_rule": "scale_down_rule",
    "max_step": "max_throughput_scaling_replicas",
    "thrift": "cost_factor",
    "profile": "profile_results_dir",
    "warmup_trace": "load_predictor_warmup_trace",
    "log1p": "load_predictor_log1p",
    "q_level": "kalman_q_level",
    "q_trend": "kalman_q_trend",
    "r": "kalman_r",
    "min_points": "kalman_min_points",
    "window_size": "prophet_window_size",
}
_GONE_SINCE_VERSION_2 = ("start_up_s", "speed", "engine", "windows_max", "predictor", "predictor_options")


def _of_version_2(found: Mapping[str, Any]) -> dict[str, Any]:
    """The options under their names in a configuration. Version 2 had names of its own for some of them."""
    values = {**found, **found.get("predictor", {}), **dict(found.get("predictor_options", ()))}
    interval_s = values.pop("adjustment_interval_s", None)
    if interval_s is not None and "thrift" not in values:
        values["throughput_adjustment_interval_seconds" if "profile" in values else "adjustment_interval"] = interval_s
    if "scale_interval_s" in values:
        values["scheduling"] = {"scale_interval_seconds": values.pop("scale_interval_s")}
        if values.get("min_gpu_budget", 0) < 0:
            del values["min_gpu_budget"]
    named = {_NAMES_OF_VERSION_2.get(name, name): value for name, value in values.items()}
    return {name: value for name, value in named.items() if name not in _GONE_SINCE_VERSION_2}


def tick_in(record: Record) -> tuple[Observation, Decided | None]:
    """The observation and the decision of a line that `tick_record` made. Raises `BadInput`."""
    try:
        reported = record["decided"]
        raw = zlib.decompress(base64.b64decode(record["pull"], validate=True))
        passes = _passes_in(base64.b64decode(record["passes"], validate=True))
        return _observation_in(json.loads(raw), passes), None if reported is None else Decided(**reported)
    except (KeyError, TypeError, ValueError, IndexError, StopIteration, zlib.error) as error:
        raise _bad(record, error) from None


def _bad(record: Record, error: Exception) -> BadInput:
    why = next(iter(str(error).splitlines()), "no reason")
    return BadInput(f"record {record['seq']} of the log of ticks cannot be read ({type(error).__name__}: {why})")


def _head(kind: str, at_s: float) -> dict[str, Any]:
    return {"version": VERSION, "kind": kind, "at_s": at_s}


# --- an observation as lists ---------------------------------------------------------------------------------


def _out(value: Any) -> Any:
    """A value that may be missing."""
    return {"missing": value.reason} if isinstance(value, Missing) else value


def _in(value: Any) -> Any:
    return Missing(value["missing"]) if isinstance(value, dict) else value


def _observation_out(observation: Observation) -> dict[str, Any]:
    """All but its engines."""
    reading, traffic = observation.reading, observation.traffic
    return {
        "at_s": reading.at_s,
        "queue": _out(reading.queue),
        "loads": {name: _load_out(load) for name, load in reading.loads.items()},
        "pools": asdict(observation.pools),
        "traffic": [_out(getattr(traffic, one.name)) for one in fields(Traffic)]
        if isinstance(traffic, Traffic)
        else _out(traffic),
        "capabilities": {name: _can_out(reported) for name, reported in observation.capabilities.items()},
        "blind": observation.blind,
        "engines": [_engine_out(engine, seen) for engine, seen in observation.engines.items()],
        **({} if observation.requests is None else {"requests": _clients_out(observation.requests)}),
    }


def _observation_in(reported: Mapping[str, Any], passes: Iterator[_Row]) -> Observation:
    """`passes` are those of all its engines, one after the other."""
    pools, traffic = reported["pools"], reported["traffic"]
    for pool in (pools["prefill"], pools["decode"]):
        if pool is not None and "leads" in pool:  # version 2
            pool["lead_times"] = pool.pop("leads")
    prefill = None if pools["prefill"] is None else Pool(**pools["prefill"])
    engines: dict[EngineId, EngineSeen] = {}
    for worker, rank, component, count, last in reported["engines"]:
        engine = EngineId(worker, rank)
        known = tuple(_pass_in(engine, row) for row in islice(passes, count))
        if isinstance(last, dict):
            engines[engine] = EngineSeen(component, known, _in(last))
        else:
            engines[engine] = EngineSeen(
                component, known, known[-1] if last == _IN_THEM else _pass_in(engine, next(passes))
            )
    seen: Engines = engines
    return Observation(
        Reading(
            reported["at_s"], _in(reported["queue"]), {name: _load_in(load) for name, load in reported["loads"].items()}
        ),
        WorkerPools(prefill, Pool(**pools["decode"]), pools["pending"]),
        Traffic(*map(_in, traffic)) if isinstance(traffic, list) else _in(traffic),
        seen,
        {name: _can_in(limits) for name, limits in reported["capabilities"].items()},
        reported["blind"],
        _clients_in(reported["requests"]) if "requests" in reported else None,
    )


_LIMITS = tuple(one.name for one in fields(Capabilities) if one.name != "benchmark")


def _can_out(can: Capabilities) -> dict[str, Any]:
    limits, reported = {name: getattr(can, name) for name in _LIMITS}, can.benchmark
    if reported is None:
        return limits
    if isinstance(reported, Missing):
        return {**limits, "benchmark": _out(reported)}
    return {**limits, "benchmark": [[*one.engine, *_row(one)] for one in reported]}


def _can_in(reported: Mapping[str, Any]) -> Capabilities:
    benchmark = reported.get("benchmark")
    if isinstance(benchmark, list):
        known = tuple(_pass_in(EngineId(worker, rank), tuple(row)) for worker, rank, *row in benchmark)
        return Capabilities(**{**reported, "benchmark": known})
    return Capabilities(**{**reported, "benchmark": _in(benchmark)})


def _clients_out(seen: ClientRequests) -> list[Any]:
    return [seen.since_s, seen.at_s, seen.began, [astuple(one) for one in seen.ended]]


def _clients_in(reported: list[Any]) -> ClientRequests:
    since_s, at_s, began, ended = reported
    return ClientRequests(since_s, at_s, tuple(began), tuple(Ended(*one) for one in ended))


def _load_out(load: Load | Missing) -> dict[str, Any]:
    if isinstance(load, Missing):
        return {"missing": load.reason}
    return {
        "load": {one.name: _out(value) for one in fields(Load) if (value := getattr(load, one.name)) != one.default}
    }


def _load_in(reported: Mapping[str, Any]) -> Load | Missing:
    if "load" not in reported:
        return Missing(reported["missing"])
    return Load(**{name: _in(value) for name, value in reported["load"].items()})


# --- passes as columns -------------------------------------------------------------------------------

_Row = tuple[Any, ...]
_IN_THEM, _BEHIND_THEM = "in them", "behind them"
"""Where an engine's last pass is: the last of those that came, or (a heartbeat) the next one in the columns."""
_COUNTS = attrgetter(*(field.name for field in fields(Requests)))
_WIDTH = len(fields(Requests))


def _engine_out(engine: EngineId, seen: EngineSeen) -> list[Any]:
    """The part beside the columns: the engine, its number of passes, and its last pass."""
    last = _out(seen.last) if isinstance(seen.last, Missing) else _BEHIND_THEM if _behind(seen) else _IN_THEM
    return [engine.worker_id, engine.dp_rank, seen.component, len(seen.passes), last]


def _behind(seen: EngineSeen) -> bool:
    return not seen.passes or seen.passes[-1] != seen.last


def _row(one: ForwardPass) -> _Row:
    return one.counter_id, one.wall_time_s, one.at_s, *_COUNTS(one.scheduled), *_COUNTS(one.queued)


def _passes_out(engines: Engines) -> bytes:
    rows = [
        _row(one)
        for seen in engines.values()
        for one in ((*seen.passes, seen.last) if _behind(seen) else seen.passes)
        if not isinstance(one, Missing)
    ]
    return packed([*zip(*rows, strict=True)])


def _passes_in(data: bytes) -> Iterator[_Row]:
    return zip(*unpacked(data), strict=True)


def _pass_in(engine: EngineId, row: _Row) -> ForwardPass:
    counter_id, wall_time_s, at_s, *counts = row
    scheduled, queued = Requests(*counts[:_WIDTH]), Requests(*counts[_WIDTH:])
    return ForwardPass(engine, counter_id, wall_time_s, scheduled, queued, at_s)


# --- replay
NOT_RECORDED = Missing("the log of ticks does not have it: the policy that was recorded did not ask for it")


@dataclass(frozen=True, slots=True)
class Replayed:
    """One tick in which one of both decided something: `then` is the log's decision, `now` the replay's."""

    seq: int
    at_s: float
    then: Decided | None
    now: Decided | None

    @property
    def agrees(self) -> bool:
        """Targets, steps and rules are the same."""
        return self.then == self.now


@dataclass(slots=True)
class Replay:
    """Shows a policy what is in a log. `options` None: the recorded ones. The counts grow while `run` is iterated.

    `whole` is False if the log does not have its planner's beginning. The earlier knowledge of the policy is then
    missing, and it may decide otherwise until it has learned the same again.
    """

    options: PlannerConfig | None = None
    ticks: int = 0
    without: int = 0
    """Ticks in which the policy wanted something that the log does not have."""
    whole: bool = True
    policies: list[str] = field(default_factory=list)
    """Those that were shown something."""
    _driver: PolicyDriver | None = None
    _begins: Record | None = None
    """The beginning of a planner whose first tick, which tells its pools, is to come."""
    _pools: WorkerPools | None = None
    _seen: deque[ClientRequests] = field(default_factory=lambda: deque(maxlen=RECORDED_TICKS))

    def run(self, records: Iterable[Record]) -> Iterator[Replayed]:
        """In order. Raises `BadInput` for a record that cannot be read."""
        for record in records:
            kind, at_s = record["kind"], float(record["at_s"])
            if kind == TICK:
                yield from self._tick(record)
            elif kind == MANUAL:
                if self._begins is not None:
                    self._driver = self._begun(self._begins)
                if self._driver is not None:
                    self._driver.manual(at_s)
            elif kind == BEGAN or (self._driver is None and self._begins is None and kind in (GOES_ON, CHANGED)):
                self.whole = self.whole and kind == BEGAN
                self._driver, self._begins = None, record
            elif kind == CHANGED and self._begins is not None:
                self._begins = {**self._begins, "options": record["options"], "policy": record["policy"]}
            elif kind == CHANGED and self._driver is not None:
                self._driver.change(self._policy(self._driver.options, record), at_s)
            elif kind != GOES_ON:
                raise BadInput(f"record {record['seq']} of the log of ticks is a {kind[:40]!r}: not known here")

    def _chosen(self, record: Record) -> PlannerConfig:
        options = self.options or options_in(record)
        if options.policy not in self.policies:
            self.policies.append(options.policy)
        return options

    def _begun(self, began: Record) -> PolicyDriver:
        """A planner that begins. As the arbiter's does, it knows the requests that were recorded before."""
        self._begins = None
        return PolicyDriver(self._policy(None, began), float(began["at_s"]), forecaster=InlineForecaster())

    def _policy(self, before: PlannerConfig | None, record: Record) -> Policy[Any]:
        from dynamo_local.planner import choosing  # imports all policies, which a log's writer does not need

        options, pools = self._chosen(record), self._pools
        begins = before is None or choosing.begins_anew(before, options)
        recorded = joined(reversed(self._seen)) if begins else ()
        if before is not None and before.history == options.history and recorded:
            begins = False  # as the arbiter's planner, it knows its own run's before those of the file
        if pools is None:
            return choosing.policy_of(options, recorded=recorded, begins=begins)
        start_s = start_up_s(pools)
        return choosing.policy_of(options, start_up_s=start_s, gpus=pools.gpus, recorded=recorded, begins=begins)

    def _tick(self, record: Record) -> Iterator[Replayed]:
        if self._driver is None and self._begins is None:  # the options of its time have gone with the log's beginning
            self.whole = False
            return
        observation, then = tick_in(record)
        self._pools = observation.pools
        if self._begins is not None:
            self._driver = self._begun(self._begins)
        assert self._driver is not None
        self.ticks += 1
        now = decided(self._driver.tick_now(self._as_wanted(self._driver, observation)))
        if isinstance(observation.requests, ClientRequests):
            self._seen.append(observation.requests)
        if then is not None or now is not None:
            yield Replayed(int(record["seq"]), observation.at_s, then, now)

    def _as_wanted(self, driver: PolicyDriver, observation: Observation) -> Observation:
        needs = driver.needs
        no_traffic = needs.traffic_window_s is not None and observation.traffic is None
        if no_traffic or (needs.passes and not observation.engines):
            self.without += 1
        return replace(observation, traffic=NOT_RECORDED) if no_traffic else observation
