"""Exports and imports of texts, for the tests beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from dynamo_local.components.commands.graph import with_commands
from dynamo_local.config import resolve
from dynamo_local.config.loading import load_config
from dynamo_local.kubernetes.export import ExportRequest, ExportResult, export
from dynamo_local.kubernetes.import_graph import ImportResult, import_graph, read_documents
from dynamo_local.kubernetes.manifests import Note, document
from dynamo_local.sdk.loader import load_graph

ROOT = Path(__file__).parents[4]
EXAMPLES = ROOT / "examples"
WISH = ExportRequest("graph", "image:1", "graph-secrets", planner_image=None)
PLANNED = ExportRequest("graph", "image:1", "graph-secrets", planner_image="planner:1")
VLLM = ["python3", "-m", "dynamo.vllm"]
BESIDE = {"name": "frontend", "command": ["python3"], "args": ["-m", "dynamo.frontend", "--router-mode", "direct"]}


def exported(
    text: str, wish: ExportRequest = WISH, *, target: str | None = None, cwd: Path = EXAMPLES / "llm"
) -> ExportResult:
    """The graph of this configuration, and of a Python graph where there is one."""
    python = load_graph(target, base_dir=cwd) if target is not None else None
    config = load_config(None, env={"DYN_DEPLOYMENT_CONFIG": text})
    loaded = with_commands(python, config, None)
    return export(loaded, resolve(loaded, config, namespace=None), config, wish)


def imported(text: str) -> ImportResult:
    return import_graph(read_documents(text, "test"), "test")


def components(found: ExportResult) -> dict[str, dict[str, Any]]:
    return {one["name"]: one for one in document(found.graph)["spec"]["components"]}


def main_of(component: dict[str, Any]) -> dict[str, Any]:
    (container,) = component["podTemplate"]["spec"]["containers"]
    return dict(container)


def words_of(component: dict[str, Any]) -> list[str]:
    """Its command and arguments."""
    main = main_of(component)
    return [*main["command"], *main["args"]]


def env_of(component: dict[str, Any]) -> dict[str, Any]:
    return {one["name"]: one.get("value", one.get("valueFrom")) for one in main_of(component).get("env", ())}


def told(notes: tuple[Note, ...], kind: str) -> dict[str, str]:
    """The notes of one kind, by their place."""
    return {note.where: note.text for note in notes if note.kind == kind}


def component(name: str = "W", kind: str = "worker", **main: Any) -> dict[str, Any]:
    """Of v1beta1; `pod`, `own`: further keys of its pod and its own."""
    pod, own = main.pop("pod", {}), main.pop("own", {})
    container = {"name": "main", "image": "image:1", **main}
    return {"name": name, "type": kind, **own, "podTemplate": {"spec": {"containers": [container], **pod}}}


def manifest(*components: dict[str, Any], **spec: Any) -> str:
    """One graph."""
    graph = {
        "apiVersion": "nvidia.com/v1beta1",
        "kind": "DynamoGraphDeployment",
        "metadata": {"name": "g"},
        "spec": {"components": list(components), **spec},
    }
    return yaml.safe_dump(graph, sort_keys=False)


def worker(args: list[str] | None = None, **more: Any) -> dict[str, Any]:
    return component(command=VLLM, args=["--model", "org/name"] if args is None else args, **more)


def section(text: str, name: str = "W") -> dict[str, Any]:
    return dict(imported(text).sections[name])
