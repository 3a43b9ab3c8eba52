"""`dynamo export kubernetes`: a host's graph as a manifest. `dynamo import` prints its notes in the same way."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dynamo_local.cli.common import json_option
from dynamo_local.errors import BadInput
from dynamo_local.kubernetes.manifests import Kind, Note

if TYPE_CHECKING:
    from dynamo_local.kubernetes.export import ExportRequest

PLANNER_IMAGE = (
    "the configuration has a Planner section, and its pod needs an image with dynamo-local in it: say --planner-image "
    "IMAGE (docs/kubernetes.md), or --no-planner"
)


@click.group()
def export() -> None:
    """Write a graph for another place than this host."""


@export.command("kubernetes", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": True})
@click.argument("target", metavar="[MODULE:SERVICE]", required=False)
@click.option("--file", "-f", type=click.Path(path_type=Path), help="Configuration, YAML.")
@click.option(
    "--output", "-o", type=click.Path(path_type=Path, file_okay=False), help="Folder for NAME.yaml.  [stdout]"
)
@click.option("--image", required=True, help="Image of frontend and workers: Dynamo's for the engine, with its tag.")
@click.option("--planner-image", help="Image of the planner's pod, with dynamo-local in it.")
@click.option("--planner/--no-planner", default=None, help="Default: as the configuration has it.")
@click.option("--name", help="Name of the graph on Kubernetes.  [its namespace here]")
@click.option("--secret", help="Name of the Secret that will hold what must not stand in a manifest.  [NAME-secrets]")
@click.option(
    "--api-version",
    type=click.Choice(["v1beta1", "v1alpha1"]),
    default="v1beta1",
    help="Operators before 1.2: v1alpha1.",
)
@click.option("--namespace", "-n", default=None, help="Replaces the graph's own namespace.")
@json_option
@click.argument("overrides", nargs=-1, type=click.UNPROCESSED)
def export_kubernetes(
    target: str | None, output: Path | None, api_version: str, as_json: bool, namespace: str | None, **words: Any
) -> None:
    """Write the graph as a DynamoGraphDeployment for Dynamo's operator.

    MODULE:SERVICE and `--Service.key=value` are as for `dynamo serve`. Stderr lists the parts that do not carry over.
    """
    from dynamo_local.components.commands.graph import with_commands
    from dynamo_local.components.targets import with_targets
    from dynamo_local.config import resolve
    from dynamo_local.config.loading import load_config
    from dynamo_local.config.resolve import planner_starts
    from dynamo_local.kubernetes.export import export as exported_graph
    from dynamo_local.kubernetes.manifests import as_v1alpha1, document
    from dynamo_local.sdk.loader import load_graph

    overrides = tuple(words["overrides"])
    if target is not None and target.startswith("-"):  # no graph was given: this is the first override
        target, overrides = None, (target, *overrides)
    python = load_graph(target, base_dir=Path.cwd()) if target is not None else None
    config = load_config(words["file"], env=os.environ, overrides=overrides)
    loaded = with_commands(python, config, words["file"])
    config = with_targets(loaded, config, {})
    spec = resolve(loaded, config, namespace=namespace)
    request = _request(spec.namespace, planner_starts(loaded, config, flag=words["planner"]), words)
    exported = exported_graph(loaded, spec, config, request)
    graph = document(as_v1alpha1(exported.graph) if api_version == "v1alpha1" else exported.graph)
    text = yaml_text(*exported.beside, graph)
    written = None if output is None else _write(output / f"{request.name}.yaml", text)
    if as_json:
        print_json(
            exported.notes,
            file=written,
            document=graph,
            beside=list(exported.beside),
            secret=request.secret,
            secret_keys=exported.secret_keys(request.secret),
        )
        return
    click.echo(text.rstrip() if written is None else written)
    print_notes(exported.notes)
    keys = exported.secret_keys(request.secret)
    if keys:
        literals = " ".join(f'--from-literal={key}="${key}"' for key in keys)
        click.echo(f"before it is applied: kubectl create secret generic {request.secret} {literals}", err=True)


def _request(namespace: str, planner: bool, words: dict[str, Any]) -> ExportRequest:
    from dynamo_local.kubernetes.export import ExportRequest, graph_name

    image = words["planner_image"]
    if planner and image is None:
        raise BadInput(PLANNER_IMAGE)
    name = words["name"] or graph_name(namespace)
    secret = words["secret"] or f"{name}-secrets"
    return ExportRequest(name, words["image"], secret, planner_image=image if planner else None)


def _write(path: Path, text: str) -> str:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise BadInput(f"cannot write {path}: {error.strerror or error}") from None
    return str(path)


WIDTH = 140


def yaml_text(*documents: Mapping[str, Any]) -> str:
    """Documents for people: keys in their order, no folded lines."""
    import yaml

    return str(yaml.safe_dump_all(map(dict, documents), sort_keys=False, width=1_000_000, allow_unicode=True))


def print_json(notes: Sequence[Note], **more: Any) -> None:
    """The result and its `notes` as one JSON object."""
    click.echo(json.dumps({**more, "notes": [note._asdict() for note in notes]}, indent=2))


def print_notes(notes: Sequence[Note]) -> None:
    """A table on stderr: stdout may go to `kubectl apply -f -`."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    if not notes:
        return
    table = Table("", "what", "why, or what to do", box=box.SIMPLE)
    table.columns[1].overflow = "fold"
    for kind in Kind:
        for note in notes:
            if note.kind is kind:
                table.add_row(str(kind), note.where, note.text)
    # A fixed width, so that the same command always prints the same bytes.
    Console(width=WIDTH, highlight=False, markup=False, stderr=True).print(table)
