"""`dynamo schema`: the JSON schemas of `--json`, made from the records of its answers (`answers`, `status_answers`)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, TypedDict

import click
import msgspec

from dynamo_local.cli.answers import (
    Applied,
    Benched,
    DoctorList,
    DoctorReport,
    DryRun,
    Exchanged,
    Exported,
    Flipped,
    Imported,
    Planned,
    PlannedMix,
    ProfileTables,
    Replayed,
    Reported,
    Restarted,
    Scaled,
    ServedModels,
    SimulatedMix,
    SimulatedRun,
    WorkerChanged,
)
from dynamo_local.cli.common import aligned
from dynamo_local.cli.ls import Run
from dynamo_local.cli.status_answers import (
    DecisionAnswer,
    EventLine,
    KeptStatus,
    PlannerStatus,
    PluginsStatus,
    Status,
    Top,
)
from dynamo_local.errors import BadInput
from dynamo_local.profile.document import Document


class Gap(TypedDict):
    """A time without points. Times are seconds since 1970."""

    began: float
    ended: float | None
    why: str | None


class History(TypedDict):
    """`dynamo history`: points of one step, column by column. `t` has their times. Null is unknown, never 0."""

    began: float
    ended: float
    step_s: int
    columns: dict[str, list[float | None]]
    gaps: list[Gap]
    bytes: int


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer: the command that gives it, and its record. `lines`: each line is such an object."""

    command: str
    record: Any
    version: int = 1
    lines: bool = False


ANSWERS: Mapping[str, Answer] = {
    "apply": Answer("apply", Applied),
    "bench": Answer("bench", Benched),
    "doctor": Answer("doctor", DoctorReport),
    "doctor.checks": Answer("doctor --list", DoctorList),
    "drain": Answer("drain", WorkerChanged),
    "events": Answer("events", EventLine, lines=True),
    "export.kubernetes": Answer("export kubernetes", Exported),
    "flip": Answer("flip", Flipped),
    "history": Answer("history", History),
    "import": Answer("import", Imported),
    "ls": Answer("ls", list[Run]),
    "plan": Answer("plan", Planned),
    "plan.models": Answer("plan --model", PlannedMix),
    "planner": Answer("planner status", PlannerStatus),
    "planner.explain": Answer("planner explain", list[DecisionAnswer]),
    "planner.history": Answer("planner history", list[DecisionAnswer]),
    "planner.plugins": Answer("planner plugins", PluginsStatus),
    "planner.profile": Answer("planner profile show", ProfileTables),
    "planner.replay": Answer("planner replay", Replayed),
    "planner.report": Answer("planner report", Reported),
    "profile": Answer("profile", Document),
    "restart": Answer("restart", Restarted),
    "scale": Answer("scale", Scaled),
    "scale.flip": Answer("scale --flip", Exchanged),
    "serve": Answer("serve --dry-run", DryRun),
    "serve.model": Answer("serve --dry-run --model", ServedModels),
    "simulate": Answer("simulate", SimulatedRun | list[SimulatedRun]),
    "simulate.models": Answer("simulate --model", SimulatedMix),
    "sleep": Answer("sleep", WorkerChanged),
    "status": Answer("status", Status),
    "top": Answer("top", Top),
    "wake": Answer("wake", WorkerChanged),
}
"""Name of the schema -> its answer. `planner start`, `stop`, `pause`, `resume` and `set` answer as `planner status`."""


def schema_of(name: str) -> dict[str, Any]:
    """The JSON schema of an answer. KeyError for a name that has none."""
    answer = ANSWERS[name]
    definitions: dict[str, Any] = {}
    made = _plain(msgspec.json.schema(answer.record, schema_hook=_foreign), definitions)
    head = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"dynamo.{name}.v{answer.version}",
        "title": f"dynamo {answer.command} --json{': each line' if answer.lines else ''}",
    }
    return {**head, **made, **({"$defs": dict(sorted(definitions.items()))} if definitions else {})}


def _plain(schema: Any, definitions: dict[str, Any]) -> Any:
    """The schema with all `$defs` moved to `definitions`, and descriptions on one line."""
    if isinstance(schema, list):
        return [_plain(each, definitions) for each in schema]
    if isinstance(schema, float) and schema.is_integer():
        return int(schema)  # `Annotated` is cached: which of two equal bounds, 0 or 0.0, depends on the imports before
    if not isinstance(schema, dict):
        return schema
    for key, value in schema.get("$defs", {}).items():
        definitions[key] = _plain(value, definitions)
    found = {key: _plain(value, definitions) for key, value in schema.items() if key != "$defs"}
    if isinstance(text := found.get("description"), str):
        found["description"] = " ".join(text.split())
    return found


def _foreign(kind: type) -> dict[str, Any]:
    """The schema of a record that pydantic writes."""
    if kind is not DecisionAnswer:
        raise NotImplementedError(kind)
    from pydantic import TypeAdapter

    from dynamo_local.planner.records.decision_log import DecisionRecord

    made = TypeAdapter(DecisionRecord).json_schema(mode="serialization")
    kept = msgspec.json.schema(KeptStatus)
    made["$defs"] |= kept["$defs"]
    made["description"] = DecisionAnswer.__doc__
    made["properties"] |= {
        "seq": {"type": "integer"},
        "run_id": {"type": "string"},
        "targets": {"anyOf": [{"$ref": kept["$ref"]}, {"type": "null"}]},
        "words": {"type": "string", "description": "the decision in words (`planner explain`)"},
    }
    return made


@click.command()
@click.argument("name", required=False)
def schema(name: str | None) -> None:
    """Print the JSON schema of an answer of --json, such as `status`; without NAME, list all."""
    if name is None:
        rows = [(each, f"dynamo {answer.command} --json") for each, answer in ANSWERS.items()]
        click.echo("\n".join("  ".join(row).rstrip() for row in aligned(rows)))
        return
    if name not in ANSWERS:
        near = get_close_matches(name, ANSWERS, n=1)
        meant = f"; did you mean {near[0]!r}?" if near else ""
        raise BadInput(f"no answer is named {name!r}{meant} (`dynamo schema` lists all)")
    click.echo(json.dumps(schema_of(name), indent=2))
