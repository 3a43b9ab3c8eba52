"""`dynamo config schema`: a JSON schema of the configuration file, for editors and for reviewers."""

from __future__ import annotations

import json
from pathlib import Path

import click


@click.group()
def config() -> None:
    """Help with configuration files."""


@config.command()
@click.argument("target", required=False)
def schema(target: str | None) -> None:
    """Print a configuration's JSON schema.

    With a graph (`graphs.disagg:Frontend`), of exactly its services' sections.
    """
    from dynamo_local.config.json_schema import config_json_schema
    from dynamo_local.sdk.loader import load_graph

    graph = load_graph(target, base_dir=Path.cwd()) if target else None
    click.echo(json.dumps(config_json_schema(graph), indent=2))
