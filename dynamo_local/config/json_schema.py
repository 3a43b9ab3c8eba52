"""`dynamo config schema`: a JSON schema of the configuration file, for editors and reviewers."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel
from pydantic.errors import PydanticInvalidForJsonSchema

from dynamo_local.config.loading import COMMON, HOST, PLANNER, SERVICE_ARGS
from dynamo_local.config.planner import PlannerConfig, known_names
from dynamo_local.config.schema import HostConfig
from dynamo_local.errors import ConfigError
from dynamo_local.sdk.loader import LoadedGraph

_DIALECT = "https://json-schema.org/draft/2020-12/schema"

_SECONDS = {"type": "number", "exclusiveMinimum": 0, "description": "seconds"}
_WHOLE = {"oneOf": [{"type": "integer", "minimum": 0}, {"type": "string", "pattern": "^[0-9]+$"}]}
_QUANTITY = {"type": ["string", "number"]}
_ENVS = {
    "oneOf": [
        {"type": "object", "additionalProperties": {"type": ["string", "integer"]}},
        {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"name": {"type": "string"}, "value": {"type": ["string", "integer"]}},
                "required": ["name", "value"],
                "additionalProperties": False,
            },
        },
    ]
}


def config_json_schema(graph: LoadedGraph | None) -> dict[str, Any]:
    """Draft 2020-12. With a graph, exactly its services' sections; without, any service's.

    Both spellings of a key (`max-model-len`, `max_model_len`) are listed. Nothing is `required`: a value may
    come from `Common` or from the command line. Raises `ConfigError` if a service's model has no JSON schema.
    """
    definitions: dict[str, Any] = {"ServiceArgs": _service_args()}
    properties: dict[str, Any] = {
        COMMON: {"type": "object", "description": "Values for the services that list them in common-configs."},
        HOST: _section_of(HostConfig, HOST, definitions),
        PLANNER: _planner_section(definitions),
    }
    schema: dict[str, Any] = {"$schema": _DIALECT, "title": "dynamo-local configuration", "type": "object"}
    if graph is None:
        schema["additionalProperties"] = _service_section({}, closed=False)
    else:
        schema["title"] += f" of {graph.target}"
        schema["additionalProperties"] = False
        for name, service in graph.services.items():
            if service.config_model is None:
                if name != PLANNER:
                    properties[name] = _service_section({}, closed=False)
                continue
            own = _section_of(service.config_model, name, definitions)
            properties[name] = _service_section(own["properties"], closed=own["additionalProperties"] is False)
    return {**schema, "properties": properties, "$defs": definitions}


def _planner_section(definitions: dict[str, Any]) -> dict[str, Any]:
    """An option under each of its names."""
    section = _section_of(PlannerConfig, PLANNER, definitions)
    own = section["properties"]
    others = {alias: own[name] for alias, name in known_names().items()}
    return {**section, "properties": {**own, **_both_spellings(others)}}


def _section_of(model: type[BaseModel], name: str, definitions: dict[str, Any]) -> dict[str, Any]:
    """The model's properties in both spellings; its nested models go to `$defs` as `{section}.{model}`."""
    try:
        schema = model.model_json_schema(ref_template="#/$defs/" + name + ".{model}")
    except PydanticInvalidForJsonSchema as error:
        raise ConfigError(f"{name}: {model.__name__} has no JSON schema: {error.message}") from None
    definitions.update({f"{name}.{key}": value for key, value in schema.get("$defs", {}).items()})
    closed = model.model_config.get("extra") != "allow"
    return {
        "type": "object",
        "properties": _both_spellings(schema.get("properties", {})),
        "additionalProperties": not closed,
    }


def _service_section(own: dict[str, Any], *, closed: bool) -> dict[str, Any]:
    common = _both_spellings({"common-configs": {"type": "array", "items": {"type": "string"}}})
    return {
        "type": ["object", "null"],
        "properties": {**own, **common, SERVICE_ARGS: {"$ref": "#/$defs/ServiceArgs"}},
        "additionalProperties": not closed,
    }


def _service_args() -> dict[str, Any]:
    resources = {"gpu": _WHOLE, "cpu": _QUANTITY, "memory": _QUANTITY}
    deadlines = {f"{what}_deadline{unit}": _SECONDS for what in ("start", "drain") for unit in ("", "_s")}
    return {
        "type": "object",
        "properties": {
            "workers": _WHOLE,
            "resources": {"type": "object", "properties": resources, "additionalProperties": False},
            "envs": _ENVS,
            **_both_spellings(deadlines),
        },
        "additionalProperties": False,
    }


def _both_spellings(properties: dict[str, Any]) -> dict[str, Any]:
    spelt = {key.replace("-", "_"): value for key, value in properties.items()}
    return {**spelt, **{key.replace("_", "-"): value for key, value in spelt.items()}}
