"""YAML as we read it: JSON's types, no duplicate keys, no dates, and no numbers in base 60."""

from __future__ import annotations

import math
import re
from typing import Any

import yaml

from dynamo_local.errors import ConfigError

_MERGE = "tag:yaml.org,2002:merge"
_REPLACED = {f"tag:yaml.org,2002:{name}" for name in ("int", "float", "timestamp")}
_INT = re.compile(r"[-+]?(?:0|[1-9][0-9]*)|0x[0-9a-fA-F]+")
_FLOAT = re.compile(
    r"[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]+)?"
    r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
)
_MAX_DEPTH = 50


class _Loader(yaml.SafeLoader):
    """SafeLoader without YAML 1.1's surprises: `12:30` is text (not 750), `010` is text (not 8), a date is text."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: dict[Any, int] = {}
        for key_node, _ in node.value:
            if key_node.tag == _MERGE:
                continue
            key = self.construct_object(key_node, deep=True)
            line = key_node.start_mark.line + 1
            if not isinstance(key, str):
                raise ConfigError(f"line {line}: the key {key!r} is not a string; put it in quotes")
            if key in seen:
                raise ConfigError(f"line {line}: the key {key!r} was given before, on line {seen[key]}")
            seen[key] = line
        return super().construct_mapping(node, deep=deep)


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in _REPLACED]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(rf"(?:{_INT.pattern})$"), list("-+0123456789"))
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(rf"(?:{_FLOAT.pattern})$"), list("-+0123456789."))


def parse_yaml(text: str, source: str) -> dict[str, Any]:
    """The sections of a configuration. `source` names the text in errors. Raises `ConfigError` with the line."""
    loaded = parse_mapping(text, source, what="one section per service")
    for name, section in loaded.items():
        if section is not None and not isinstance(section, dict):
            raise ConfigError(f"{source}: the section {name!r} must hold keys and values, not {_kind(section)}")
    return {name: section or {} for name, section in loaded.items()}


def parse_mapping(text: str, source: str, *, what: str) -> dict[str, Any]:
    """Keys and values of JSON's types; `what` says in the error what they are. Raises `ConfigError` with the line."""
    try:
        loaded = _load(text)
        if not isinstance(loaded, dict):
            raise ConfigError(f"must be {what}, not {_kind(loaded)}")
        for name, value in loaded.items():
            _check_json(value, name)
    except yaml.YAMLError as error:
        raise not_yaml(source, error) from None
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None
    return loaded


def not_yaml(source: str, error: yaml.YAMLError) -> ConfigError:
    """What is wrong with the text, and where."""
    if not isinstance(error, yaml.MarkedYAMLError):
        return ConfigError(f"{source}: not YAML: {' '.join(str(error).split())}")
    mark = error.problem_mark or error.context_mark
    line = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
    return ConfigError(f"{source}: {line}not YAML: {error.problem or error.context}")


def _load(text: str) -> Any:
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return {}
        _check_depth(node, 0)
        return loader.construct_document(node)
    finally:
        loader.dispose()


def _check_depth(node: yaml.Node, depth: int) -> None:
    """A node that holds itself through an alias is endless; so is, for us, one that is nested this deep."""
    if depth > _MAX_DEPTH:
        raise ConfigError(f"line {node.start_mark.line + 1}: nested more than {_MAX_DEPTH} deep, or an alias of itself")
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            _check_depth(key, depth + 1)
            _check_depth(value, depth + 1)
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _check_depth(item, depth + 1)


def _check_json(value: Any, path: str) -> None:
    """Workers get the configuration as JSON: bytes, sets and infinities have no place in it."""
    if isinstance(value, dict):
        for key, item in value.items():
            _check_json(item, f"{path}.{key}")
    elif isinstance(value, list):
        for item in value:
            _check_json(item, path)
    elif isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{path}: {value} is not a number that can be used")
    elif value is not None and not isinstance(value, str | int | float):
        raise ConfigError(f"{path}: {type(value).__name__} is not supported; use text, numbers, lists and mappings")


def _kind(value: Any) -> str:
    return "a list" if isinstance(value, list) else f"{value!r}"
