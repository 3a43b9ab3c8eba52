"""A whole graph as the sections of a configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from dynamo_local.commands.graph import with_commands
from dynamo_local.config import Config, resolve
from dynamo_local.config.loading import COMMON, HOST, PLANNER
from dynamo_local.config.merge import SERVICE_ARGS, normalise
from dynamo_local.errors import ConfigError
from dynamo_local.kubernetes.model import Component, ComponentType, Graph, GraphV1Beta1
from dynamo_local.kubernetes.program import mode_of
from dynamo_local.manifests.importing.components import Section, section_of
from dynamo_local.manifests.importing.documents import Documents
from dynamo_local.manifests.importing.planner import planner_of
from dynamo_local.manifests.notes import Kind, Note, Refusal, left_out, refuse, unread
from dynamo_local.manifests.versions import components_of, variables_of

_SPEC = ("components", "services", "env", "envs", "backend_framework")


@dataclass(frozen=True, slots=True)
class Imported:
    """`sections` as they are written to a file; `dynamo serve -f` takes them."""

    name: str
    sections: Mapping[str, Mapping[str, Any]]
    notes: tuple[Note, ...]


def import_graph(documents: Documents, source: str) -> Imported:
    """The configuration. Raises `NotCarried` with everything that stands against it."""
    graph = documents.graph
    try:
        components = components_of(graph)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        refuse(source, [Refusal("spec.services", f"{first['input']!r}: {place}: {first['msg']}")])
        raise
    sections, refusals, notes = list[Section](), list[Refusal](), list[Note]()
    planner: dict[str, Any] | None = None
    disaggregated = any(_is_prefill(component) for component in components)
    for component in components:
        if component.type is ComponentType.PLANNER:
            planner, told = planner_of(component)
            notes += told
            continue
        part = section_of(component, variables_of(graph), documents, disaggregated=disaggregated)
        if isinstance(part, Section):
            sections.append(part)
            notes += part.notes
        elif isinstance(part, Refusal):
            refusals.append(part)
        else:
            notes.append(part)
    if not refusals and not sections:
        refusals.append(Refusal(graph.metadata.name or source, "it has no component that can run on this host"))
    refuse(source, refusals)
    found = _sections(sections, planner)
    _check(found, source)
    return Imported(graph.metadata.name or "", found, (*_of_graph(graph, documents, components), *dict.fromkeys(notes)))


def _is_prefill(component: Component) -> bool:
    main = component.main
    words = [] if main is None else [*(main.command or ()), *(main.args or ())]
    return component.type is ComponentType.PREFILL or mode_of(words) == "prefill"


def _sections(parts: Sequence[Section], planner: Mapping[str, Any] | None) -> dict[str, dict[str, Any]]:
    """In the order of a file that a person writes: what is common first, the planner last."""
    models = {part.model for part in parts if part.model is not None}
    shared = models.pop() if len(models) == 1 and sum(part.model is not None for part in parts) > 1 else None
    found: dict[str, dict[str, Any]] = {} if shared is None else {COMMON: {"model": shared}}
    passed = sorted({name for part in parts for name in part.passed})
    if passed:
        found[HOST] = {"pass-env": passed}
    for part in parts:
        section = dict(part.keys)
        if part.model is not None:
            section.update({"common-configs": ["model"]} if shared is not None else {"model": part.model})
        found[part.name] = {**section, SERVICE_ARGS: dict(part.args)}
    if planner is not None:
        found[PLANNER] = dict(planner)
    return found


def _check(sections: Mapping[str, Mapping[str, Any]], source: str) -> None:
    """What `dynamo serve` would refuse of it is told now. Raises `NotCarried`."""
    config = Config(sections=normalise(sections, source), source=source)
    try:
        resolve(with_commands(None, config, None), config, namespace=None)
    except ConfigError as error:
        text = str(error).removeprefix(f"{source}: ")
        refuse(source, [Refusal("the configuration that it would be", text)])


def _of_graph(graph: Graph, documents: Documents, components: Sequence[Component]) -> tuple[Note, ...]:
    """What the graph, and the file, have beside its components."""
    images = sorted({one.main.image for one in components if one.main is not None and one.main.image})
    notes = [
        Note(Kind.CHANGED, "image", f"{image}: the Dynamo that is installed beside dynamo serve runs")
        for image in images
    ]
    notes += left_out("spec", {}, unread(graph.spec, _SPEC), "of Kubernetes: nothing on one host stands for it")
    version = "spec.components" if isinstance(graph, GraphV1Beta1) else "spec.services"
    if any(component.scaling_adapter is not None for component in components):
        notes.append(
            Note(Kind.CHANGED, version, "scaling adapters: dynamo scale and the planner scale each component here")
        )
    notes += [Note(Kind.LEFT_OUT, f"{kind} {name}", "another document of the file") for kind, name in documents.others]
    return tuple(notes)
