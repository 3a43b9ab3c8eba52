"""What a replay needs of a planner's ticks: the policy's options, all that it was shown, and what it decided then.

`decisions.jsonl` sums a decision up for people. This log, beside it, has the pulls whole, also those that decided
nothing: a policy remembers them. A pull is written as short lists, packed (zlib, base64): measured with
values by chance, a tick of `throughput-load` with 64 engines of 64 passes each takes 225 kB, one of `load` with 64
workers 2.5 kB. The file is bounded and
rotated as the decision log is; the options are written again now and then, so that a log whose beginning has gone can
still be read.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, astuple, fields
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from pydantic import TypeAdapter, ValidationError

from dynamo_local.core.types import Load, Missing
from dynamo_local.errors import BadInput
from dynamo_local.planner.policies.options import LoadOptions, PolicyOptions, name_of
from dynamo_local.planner.policies.sla.options import SlaOptions
from dynamo_local.planner.policies.slo.options import SloOptions
from dynamo_local.planner.policies.throughput_load.options import ThroughputLoadOptions
from dynamo_local.planner.values.decisions import Decision
from dynamo_local.planner.values.passes import Capabilities, EngineId, Engines, EngineSeen, ForwardPass, Requests
from dynamo_local.planner.values.pools import Pool, WorkerPools
from dynamo_local.planner.values.pull import Pull
from dynamo_local.planner.values.readings import Reading
from dynamo_local.planner.values.requests import Ended
from dynamo_local.planner.values.requests import Requests as ClientRequests
from dynamo_local.planner.values.traffic import Traffic
from dynamo_local.system.logs import jsonl
from dynamo_local.system.logs.jsonl import JsonLog, Record

VERSION = 1
"""Of the records' form. A reader refuses a newer one."""
FILE_NAME = "ticks.jsonl"
BEGAN, GOES_ON, CHANGED, MANUAL, TICK = "began", "goes_on", "changed", "manual", "tick"
KINDS: jsonl.Kinds = (("seq", int), ("version", int), ("kind", str), ("at_s", (int, float)))

_OPTIONS: Mapping[str, TypeAdapter[Any]] = {
    "load": TypeAdapter(LoadOptions),
    "sla": TypeAdapter(SlaOptions),
    "slo": TypeAdapter(SloOptions),
    "throughput-load": TypeAdapter(ThroughputLoadOptions),
}


class TickLog(JsonLog):
    """The writing end. See `JsonLog`."""

    what = "tick"
    kinds = KINDS


class Recorder(Protocol):
    """Told by a `PolicyDriver` what happens to it, in order. On the planner's loop: it must return at once."""

    def began(self, options: PolicyOptions, at_s: float) -> None:
        """A policy with these options begins, at that time of the planner's clock."""
        ...

    def changed(self, options: PolicyOptions, at_s: float) -> None:
        """It goes on with other options (or another policy begins)."""
        ...

    def manual(self, at_s: float) -> None:
        """A person has changed the number of workers."""
        ...

    def ticked(self, pull: Pull, decision: Decision | None) -> None:
        """It has taken this pull in, and decided this."""
        ...


class Decided(NamedTuple):
    """What of a decision is compared: by component, the step and the rule; `targets` are workers."""

    targets: Mapping[str, int]
    steps: Mapping[str, int]
    rules: Mapping[str, str]


def tick_log_path(logs: Path) -> Path:
    """Where the ticks of the namespace with that log folder are."""
    return logs / FILE_NAME


def oldest_first(path: Path) -> Iterator[Record]:
    """All records in order, rotated files included, one at a time. Raises `BadInput` for one of a newer version."""
    for record in jsonl.oldest_first(path, KINDS):
        if record["version"] > VERSION:
            raise BadInput(
                f"{path}: record {record['seq']} has version {record['version']}, this dynamo-local reads up to "
                f"{VERSION}: replay it with the one that wrote it, or a newer one"
            )
        yield record


def decided(decision: Decision | None) -> Decided | None:
    """None where nothing was decided."""
    if decision is None:
        return None
    rules = {reason.component: str(reason.rule) for reason in decision.reasons}
    return Decided(dict(decision.targets), decision.steps, rules)


# --- records ---------------------------------------------------------------------------------------


def options_record(kind: str, options: PolicyOptions, at_s: float) -> dict[str, Any]:
    """Of `began`, `goes_on` and `changed`."""
    name = name_of(options)
    return {**_head(kind, at_s), "policy": name, "options": json.loads(_OPTIONS[name].dump_json(options))}


def manual_record(at_s: float) -> dict[str, Any]:
    """A line of the log: a person has changed the number of workers."""
    return _head(MANUAL, at_s)


def tick_record(pull: Pull, decision: Decision | None) -> dict[str, Any]:
    """A line of the log: a tick, with all of its pull. Some milliseconds for thousands of passes: not on the loop."""
    found = decided(decision)
    told = None if found is None else found._asdict()
    return {**_head(TICK, pull.at_s), "decided": told, "pull": base64.b64encode(_packed(pull)).decode()}


def _packed(pull: Pull) -> bytes:
    """Engine by engine. `json.dumps` of thousands of passes at once takes 8 ms, in which no other thread has the
    interpreter: the arbiter's loop would stand still for a record that is made beside it."""
    packer = zlib.compressobj(6)
    told = _dumped(_pull_out(pull))
    packed = [packer.compress(f'{told[:-1]},"engines":['.encode())]
    for n, (engine, seen) in enumerate(pull.engines.items()):
        packed.append(packer.compress(f"{',' if n else ''}{_dumped(_engine_out(engine, seen))}".encode()))
    return b"".join([*packed, packer.compress(b"]}"), packer.flush()])


def _dumped(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def options_in(record: Record) -> PolicyOptions:
    """Of `began`, `goes_on` and `changed`. Raises `BadInput`; `ConfigError` where they need what is not installed."""
    try:
        options: PolicyOptions = _OPTIONS[str(record.get("policy"))].validate_python(record["options"])
    except (KeyError, ValidationError) as error:
        raise _bad(record, error) from None
    return options


def tick_in(record: Record) -> tuple[Pull, Decided | None]:
    """The pull and the decision of a line that `tick_record` made. Raises `BadInput`."""
    try:
        told = record["decided"]
        raw = zlib.decompress(base64.b64decode(record["pull"], validate=True))
        return _pull_in(json.loads(raw)), None if told is None else Decided(**told)
    except (KeyError, TypeError, ValueError, IndexError, zlib.error) as error:
        raise _bad(record, error) from None


def _bad(record: Record, error: Exception) -> BadInput:
    why = str(error).splitlines()[0]
    return BadInput(f"record {record['seq']} of the log of ticks cannot be read ({type(error).__name__}: {why})")


def _head(kind: str, at_s: float) -> dict[str, Any]:
    return {"version": VERSION, "kind": kind, "at_s": at_s}


# --- a pull as lists ---------------------------------------------------------------------------------

_REQUESTS = tuple(field.name for field in fields(Requests))


def _out(value: Any) -> Any:
    """A value that may be missing."""
    return {"missing": value.reason} if isinstance(value, Missing) else value


def _in(value: Any) -> Any:
    return Missing(value["missing"]) if isinstance(value, dict) else value


def _pull_out(pull: Pull) -> dict[str, Any]:
    """All but its engines."""
    reading, traffic = pull.reading, pull.traffic
    return {
        "at_s": reading.at_s,
        "queue": _out(reading.queue),
        "loads": {name: _load_out(load) for name, load in reading.loads.items()},
        "pools": asdict(pull.pools),
        "traffic": [_out(getattr(traffic, one.name)) for one in fields(Traffic)]
        if isinstance(traffic, Traffic)
        else _out(traffic),
        "capabilities": {name: asdict(told) for name, told in pull.capabilities.items()},
        "blind": pull.blind,
        **({} if pull.requests is None else {"requests": _clients_out(pull.requests)}),
    }


def _engine_out(engine: EngineId, seen: EngineSeen) -> list[Any]:
    return [engine.worker_id, engine.dp_rank, seen.component, _pass_out(seen.last), [*map(_pass_out, seen.passes)]]


def _pull_in(told: Mapping[str, Any]) -> Pull:
    pools, traffic = told["pools"], told["traffic"]
    prefill = None if pools["prefill"] is None else Pool(**pools["prefill"])
    engines: dict[EngineId, EngineSeen] = {}
    for worker, rank, component, last, passes in told["engines"]:
        engine = EngineId(worker, rank)
        known = tuple(_pass_in(engine, one) for one in passes)
        engines[engine] = EngineSeen(component, known, _in(last) if isinstance(last, dict) else _pass_in(engine, last))
    seen: Engines = engines
    return Pull(
        Reading(told["at_s"], _in(told["queue"]), {name: _load_in(load) for name, load in told["loads"].items()}),
        WorkerPools(prefill, Pool(**pools["decode"]), pools["pending"]),
        Traffic(*map(_in, traffic)) if isinstance(traffic, list) else _in(traffic),
        seen,
        {name: Capabilities(**limits) for name, limits in told["capabilities"].items()},
        told["blind"],
        _clients_in(told["requests"]) if "requests" in told else None,
    )


def _clients_out(seen: ClientRequests) -> list[Any]:
    return [seen.since_s, seen.at_s, seen.began, [astuple(one) for one in seen.ended]]


def _clients_in(told: list[Any]) -> ClientRequests:
    since_s, at_s, began, ended = told
    return ClientRequests(since_s, at_s, tuple(began), tuple(Ended(*one) for one in ended))


def _load_out(load: Load | Missing) -> dict[str, Any]:
    if isinstance(load, Missing):
        return {"missing": load.reason}
    return {
        "load": {one.name: _out(value) for one in fields(Load) if (value := getattr(load, one.name)) != one.default}
    }


def _load_in(told: Mapping[str, Any]) -> Load | Missing:
    if "load" not in told:
        return Missing(told["missing"])
    return Load(**{name: _in(value) for name, value in told["load"].items()})


def _pass_out(one: ForwardPass | Missing) -> Any:
    if isinstance(one, Missing):
        return {"missing": one.reason}
    return [one.counter_id, one.wall_time_s, one.at_s, _requests_out(one.scheduled), _requests_out(one.queued)]


def _pass_in(engine: EngineId, told: list[Any]) -> ForwardPass:
    counter_id, wall_time_s, at_s, scheduled, queued = told
    return ForwardPass(engine, counter_id, wall_time_s, Requests(*scheduled), Requests(*queued), at_s)


def _requests_out(requests: Requests) -> list[float]:
    """Its numbers, without the zeros at the end: most are."""
    values = [getattr(requests, name) for name in _REQUESTS]
    while values and not values[-1]:
        values.pop()
    return values
