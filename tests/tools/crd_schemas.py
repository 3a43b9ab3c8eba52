"""Dynamo's own schema of its graphs, as strict as a person's eye: a field that it does not name is a fault.

An API server drops such a field and says nothing. CEL rules are not looked at: those that matter to us are
`kubernetes.manifests` and the model's own.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from typing import Any

import jsonschema

from tests.tools.dynamos_files import dynamos_file

CRD = "nvidia.com_dynamographdeployments.json"


def schema_faults(document: Mapping[str, Any]) -> list[str]:
    """Findings of the schema of the document's own version. Skips where Dynamo's file cannot be had."""
    version = str(document["apiVersion"]).rpartition("/")[2]
    validator = jsonschema.Draft202012Validator(_schema(version))
    return [f"{error.json_path}: {error.message}" for error in validator.iter_errors(document)]


@functools.cache
def _schema(version: str) -> dict[str, Any]:
    crd = json.loads(dynamos_file(CRD).read_text(encoding="utf-8"))
    (schema,) = [one["schema"]["openAPIV3Schema"] for one in crd["spec"]["versions"] if one["name"] == version]
    strict: dict[str, Any] = _closed(schema)
    # The API server's own, of which a CRD says only that it is an object.
    strict["properties"]["metadata"] = {"type": "object"}
    return strict


def _closed(schema: Any) -> Any:
    if not isinstance(schema, dict):
        return schema
    closed = {key: value for key, value in schema.items() if not key.startswith("x-")}
    for key in ("items", "additionalProperties"):
        if key in closed:
            closed[key] = _closed(closed[key])
    if "properties" in closed:
        closed["properties"] = {name: _closed(value) for name, value in closed["properties"].items()}
        if "additionalProperties" not in closed and not schema.get("x-kubernetes-preserve-unknown-fields"):
            closed["additionalProperties"] = False
    return closed
