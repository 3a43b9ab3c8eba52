"""Answers of `--json`, checked by the schema of their command. A key that the schema does not have is a fault here."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from typing import Any

import jsonschema

from dynamo_local.cli.schemas import ANSWERS, schema_of

BY_OTHERS = ("start", "stop", "pause", "resume", "set", "status")
"""`dynamo planner` commands that answer with its status."""
OPEN = ("EventLine",)
"""An event has fields of its own."""


def read_answer(words: Sequence[str], out: str) -> Any:
    """The answer of `dynamo WORDS --json`: of lines, the last one."""
    name, lines = name_of(words), [out]
    if ANSWERS[name].lines:
        lines = out.splitlines()
    answers = [json.loads(line) for line in lines]
    if name == "serve" and "reasons" in answers[-1]:
        name = "serve.model"
    for answer in answers:
        checked(name, answer)
    return answers[-1]


def name_of(words: Sequence[str]) -> str:
    """The schema's name."""
    match words:
        case ["planner", command, *_] if command in BY_OTHERS:
            return "planner"
        case ["planner" | "export", command, *_]:
            return f"{words[0]}.{command}"
        case ["doctor", *more] if "--list" in more:
            return "doctor.checks"
        case ["scale", *more] if "--flip" in more:
            return "scale.flip"
        case ["plan" | "simulate", *more] if "--model" in more:
            return f"{words[0]}.models"
    return words[0]


def checked(name: str, answer: Any) -> None:
    """Raises `jsonschema.ValidationError`."""
    if (error := jsonschema.exceptions.best_match(_validator(name).iter_errors(answer))) is not None:
        raise error


@functools.cache
def _validator(name: str) -> jsonschema.Draft202012Validator:
    schema = schema_of(name)
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(_closed(schema))


def _closed(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: _closed(value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and schema.get("title") not in OPEN:
        closed.setdefault("additionalProperties", False)
    return closed
