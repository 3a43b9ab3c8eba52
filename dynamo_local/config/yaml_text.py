"""YAML as we read it: JSON's types, no duplicate keys, no dates, no numbers in base 60, and bounded in every direction.

A file may come from anywhere. So text, depth, nodes (aliases count as what they stand for) and digits have bounds,
which hold before anything is built.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from dynamo_local.errors import ConfigError

MAX_CHARACTERS = 4 << 20
MAX_DEPTH = 50
MAX_NODES = 20_000
"""Keys and values of one document, each alias counted as the whole that it repeats."""
MAX_DIGITS = 64
"""No option has a number that long. Python refuses to print one of more than 4,300 decimal digits."""

_MERGE = "tag:yaml.org,2002:merge"
_REPLACED = {f"tag:yaml.org,2002:{name}" for name in ("int", "float", "timestamp")}
_INT = re.compile(r"[-+]?(?:0|[1-9][0-9]*)|0x[0-9a-fA-F]+")
_FLOAT = re.compile(
    r"[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]+)?"
    r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
)

Lines = Mapping[tuple[str | int, ...], int]
"""The line of each value in a text, by its path of keys and indices; the first line is 1."""


@dataclass(frozen=True, slots=True)
class Document:
    """One document: its value, and where each part of it stands."""

    value: Any
    lines: Lines


class _Bounded(yaml.SafeLoader):
    """YAML 1.1, bounded. A `ConfigError` names the line."""

    def __init__(self, text: str) -> None:
        if len(text) > MAX_CHARACTERS:
            raise ConfigError(f"{len(text):,} characters; a file has {MAX_CHARACTERS:,} at most")
        super().__init__(text)
        self._depth = 0
        self._nodes = 0
        self._sizes: dict[int, int] = {}

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """As PyYAML's. It recurses, so that its depth is that of Python's stack."""
        line = self.peek_event().start_mark.line + 1
        alias = self.check_event(yaml.AliasEvent)
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise ConfigError(f"line {line}: nested more than {MAX_DEPTH} deep")
        before = self._nodes
        node = super().compose_node(parent, index)
        if alias:
            if id(node) not in self._sizes:
                raise ConfigError(f"line {line}: an alias of something that holds it")
            self._nodes += self._sizes[id(node)]
        else:
            self._nodes += 1
        if self._nodes > MAX_NODES:
            raise ConfigError(
                f"line {line}: more than {MAX_NODES:,} keys and values, aliases counted as what they repeat"
            )
        self._sizes[id(node)] = self._nodes - before
        self._depth -= 1
        return node

    def compose_document(self) -> yaml.Node | None:
        """Bounds are each document's own."""
        self._nodes = 0
        self._sizes.clear()
        return super().compose_document()

    def construct_scalar(self, node: yaml.ScalarNode | yaml.MappingNode) -> Any:
        """The text of a scalar."""
        if node.tag == "tag:yaml.org,2002:int" and len(node.value) > MAX_DIGITS:
            raise ConfigError(
                f"line {node.start_mark.line + 1}: a number of {len(node.value):,} digits; {MAX_DIGITS} at most"
            )
        return super().construct_scalar(node)


class _Loader(_Bounded):
    """Without YAML 1.1's surprises: `12:30` is text (not 750), `010` is text (not 8), a date is text."""

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
    sections: dict[str, Any] = located_sections(text, source).value
    return sections


def located_sections(text: str, source: str) -> Document:
    """As `parse_yaml`, with the line of each key."""
    found = located_mapping(text, source, what="one section per service")
    for name, section in found.value.items():
        if section is not None and not isinstance(section, dict):
            line = found.lines[(name,)]
            raise ConfigError(
                f"{source}, line {line}: the section {name!r} must hold keys and values, not {_kind(section)}"
            )
    return Document({name: section or {} for name, section in found.value.items()}, found.lines)


def parse_mapping(text: str, source: str, *, what: str) -> dict[str, Any]:
    """Keys and values of JSON's types; `what` says in the error what they are. Raises `ConfigError` with the line."""
    found = located_mapping(text, source, what=what).value
    assert isinstance(found, dict)
    return found


def located_mapping(text: str, source: str, *, what: str) -> Document:
    """As `parse_mapping`, with the line of each value."""
    try:
        documents = list(_documents(_Loader, text))
        if len(documents) > 1:
            line = documents[1].lines[()]
            raise ConfigError(f"line {line}: a second document; a file has one")
        document = documents[0] if documents else Document({}, {})
        if not isinstance(document.value, dict):
            raise ConfigError(f"must be {what}, not {_kind(document.value)}")
        for name, value in document.value.items():
            _check_json(value, name)
    except yaml.YAMLError as error:
        raise _not_yaml(source, error) from None
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None
    return document


def manifests(text: str, source: str) -> list[Document]:
    """All documents of a text, read as YAML 1.1, which is how Kubernetes' own tools read it.

    Raises `ConfigError` with the line.
    """
    try:
        found = list(_documents(_Bounded, text))
        for document in found:
            _check_json(document.value, "a manifest")
    except yaml.YAMLError as error:
        raise _not_yaml(source, error) from None
    except (ConfigError, ValueError) as error:
        raise ConfigError(f"{source}: {error}") from None
    return found


def _documents(kind: type[_Bounded], text: str) -> Iterator[Document]:
    loader = kind(text)
    try:
        while loader.check_node() and (node := loader.get_node()) is not None:
            lines = dict(_lines(node, ()))  # before a merge key changes the node
            yield Document(loader.construct_document(node), lines)
    finally:
        loader.dispose()


def _lines(node: yaml.Node, path: tuple[str | int, ...]) -> Iterator[tuple[tuple[str | int, ...], int]]:
    """A value of a mapping stands where its key stands."""
    if not path:
        yield path, node.start_mark.line + 1
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            below = (*path, str(key.value))
            yield below, key.start_mark.line + 1
            yield from _lines(value, below)
    elif isinstance(node, yaml.SequenceNode):
        for at, item in enumerate(node.value):
            below = (*path, at)
            yield below, item.start_mark.line + 1
            yield from _lines(item, below)


def _not_yaml(source: str, error: yaml.YAMLError) -> ConfigError:
    """The error in the text, and its place."""
    if not isinstance(error, yaml.MarkedYAMLError):
        return ConfigError(f"{source}: not YAML: {' '.join(str(error).split())}")
    mark = error.problem_mark or error.context_mark
    line = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
    return ConfigError(f"{source}: {line}not YAML: {error.problem or error.context}")


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
