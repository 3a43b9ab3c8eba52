"""A planner's component as the section `Planner`: this project's own, and Dynamo's."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from dynamo_local.config import planner_section
from dynamo_local.config.planner.options import BY_TARGETS, chosen_policy, known_names
from dynamo_local.errors import ConfigError
from dynamo_local.kubernetes.model import Component, Container
from dynamo_local.kubernetes.program import module_of, option
from dynamo_local.manifests.exporting.planner import MODULE, NAME
from dynamo_local.manifests.importing.words import CannotRun, pod_words
from dynamo_local.manifests.notes import Kind, Note
from dynamo_local.sdk.service_config import underscored

FIRST = "planner_sla"
DYNAMOS = ("dynamo.planner", FIRST)
_OF_THE_CLUSTER = ("environment", "namespace", "config", "frontend", "graph", "kubernetes_namespace", "metrics_port")
_POLICY = "throughput-load"
"""What Dynamo's planner does is this policy, under the same names, and ours does in a pod where none is named; Dynamo's
first one was `sla`."""


def planner_of(component: Component) -> tuple[dict[str, Any] | None, tuple[Note, ...]]:
    """The section, None where it cannot be one, and what was left out of it. A graph can be served without it."""
    try:
        words = pod_words(component.type, component.main or Container())
    except CannotRun as error:
        return None, (Note(Kind.LEFT_OUT, component.name, str(error)),)
    module = module_of(words) or ""
    if module != MODULE and not module.startswith(DYNAMOS):
        return None, (Note(Kind.LEFT_OUT, component.name, f"it runs {' '.join(words[:3])}, which is no planner here"),)
    given, notes = _options(words[3:], component.name)
    section: dict[str, Any] = {}
    if module != MODULE:
        section["policy"] = "sla" if module.endswith(FIRST) else _POLICY
    elif chosen_policy(given) == BY_TARGETS:
        section["policy"] = _POLICY  # unless it is named, below: here targets alone would choose another one
    names = known_names()
    for key, value in given.items():
        where = f"{component.name}.{key}"
        if key in _OF_THE_CLUSTER:
            continue
        if key not in names:
            notes.append(Note(Kind.LEFT_OUT, where, "an option that the planners here do not have"))
        elif key == "profile_results_dir" and "/" in str(value):
            notes.append(
                Note(
                    Kind.LEFT_OUT,
                    where,
                    f"{value} is a folder of its pod; name one of this host, if it plans by a profile",
                )
            )
        else:
            section[key] = value
    try:
        planner_section(NAME, section)
    except ConfigError as error:
        return None, (*notes, Note(Kind.LEFT_OUT, component.name, f"its options do not go together here: {error}"))
    return section, tuple(notes)


def _options(words: Sequence[str], where: str) -> tuple[dict[str, Any], list[Note]]:
    """`--config JSON`, and `--name value` as Dynamo's first planners took them."""
    notes: list[Note] = []
    found: dict[str, Any] = {}
    for at, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name.startswith("--"):
            behind = words[at + 1] if at + 1 < len(words) and not words[at + 1].startswith("--") else "true"
            found[underscored(name.removeprefix("--"))] = _value(value if equals else behind)
    text = option(words, "--config")
    if text is None:
        return found, notes
    try:
        parsed = json.loads(text)
    except ValueError:
        parsed = None
    if not isinstance(parsed, Mapping):
        notes.append(Note(Kind.LEFT_OUT, f"{where}.--config", f"{text} is a file of its pod, or no JSON"))
        return found, notes
    return {**found, **{underscored(str(key)): value for key, value in parsed.items()}}, notes


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
