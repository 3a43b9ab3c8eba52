"""The documents of a file of manifests: the graph, and whatever else stands beside it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml
from pydantic import ValidationError

from dynamo_local.config.yaml_text import not_yaml
from dynamo_local.errors import ConfigError
from dynamo_local.kubernetes.model import GRAPH_KIND, Graph, WrongKind, read_graph
from dynamo_local.sdk.checks import listing

CONFIG_MAP = "ConfigMap"


@dataclass(frozen=True, slots=True)
class Documents:
    """`others` are kind and name; `config_maps` their data by name."""

    graph: Graph
    others: tuple[tuple[str, str], ...] = ()
    config_maps: Mapping[str, Mapping[str, str]] | None = None

    def config_value(self, name: str, key: str) -> str | None:
        """A key of a ConfigMap of the same file."""
        return (self.config_maps or {}).get(name, {}).get(key)


def read_documents(text: str, source: str, name: str | None = None) -> Documents:
    """The file's graph, that of this name where there are several. Raises `ConfigError`, which names the field."""
    found = _objects(_documents(text, source), source)
    graphs = {_name(raw): raw for raw in found if raw["kind"] == GRAPH_KIND}
    if name is None and len(graphs) > 1:
        raise ConfigError(f"{source}: it holds the graphs {listing(graphs)}; say --name with one of them")
    if not graphs or (name is not None and name not in graphs):
        there = listing(graphs) if graphs else f"documents of the kinds {listing({raw['kind'] for raw in found})}"
        wanted = "" if name is None else f" {name!r}"
        raise ConfigError(f"{source}: there is no {GRAPH_KIND}{wanted} in it; it holds {there}")
    chosen = name if name is not None else next(iter(graphs))
    others = tuple((raw["kind"], _name(raw)) for raw in found if raw["kind"] not in (GRAPH_KIND, CONFIG_MAP))
    maps = {_name(raw): raw["data"] for raw in found if raw["kind"] == CONFIG_MAP and isinstance(raw.get("data"), dict)}
    return Documents(_graph(graphs[chosen], source), others, maps)


def _objects(documents: list[Any], source: str) -> list[dict[str, Any]]:
    """Each with a `kind`; the items of a `List` (`kubectl get … -o yaml`) are objects like others."""
    found = []
    for raw in documents:
        if raw is None:
            continue
        if not isinstance(raw, dict) or not isinstance(raw.get("kind"), str):
            raise ConfigError(f"{source}: it holds a document without `kind`: no manifest of Kubernetes")
        if raw["kind"] == "List" and isinstance(raw.get("items"), list):
            found += _objects(raw["items"], source)
        else:
            found.append(raw)
    return found


def _documents(text: str, source: str) -> list[Any]:
    """Raises `ConfigError` for what is not YAML, or holds itself, or what JSON does not have."""
    try:
        found = list(yaml.safe_load_all(text))  # YAML 1.1, as Kubernetes' own tools read it
        json.dumps(found)
    except yaml.YAMLError as error:
        raise not_yaml(source, error) from None
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"{source}: not what a manifest may hold: {error}") from None
    return found


def _name(raw: Mapping[str, Any]) -> str:
    metadata = raw.get("metadata")
    return str(metadata.get("name") or "") if isinstance(metadata, dict) else ""


def _graph(raw: Mapping[str, Any], source: str) -> Graph:
    try:
        return read_graph(raw)
    except WrongKind as error:
        raise ConfigError(f"{source}: {error}") from None
    except ValidationError as error:
        first = error.errors()[0]
        # Between the version's model and the field: pydantic's own names of alternatives are nobody's.
        place = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"{source}: {place}: {first['msg']}") from None
