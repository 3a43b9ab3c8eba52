"""`dynamo schema`: JSON schemas of what `--json` prints."""

from __future__ import annotations

import json
from difflib import get_close_matches

import click

from dynamo_local.cli.common import aligned
from dynamo_local.errors import BadInput


@click.command()
@click.argument("name", required=False)
def schema(name: str | None) -> None:
    """Print the JSON schema of an answer of --json, such as `status`; without NAME, list all."""
    from dynamo_local.cli.schemas import ANSWERS, schema_of

    if name is None:
        rows = [(each, f"dynamo {answer.command} --json") for each, answer in ANSWERS.items()]
        click.echo("\n".join("  ".join(row).rstrip() for row in aligned(rows)))
        return
    if name not in ANSWERS:
        near = get_close_matches(name, ANSWERS, n=1)
        meant = f"; did you mean {near[0]!r}?" if near else ""
        raise BadInput(f"no answer is named {name!r}{meant} (`dynamo schema` lists all)")
    click.echo(json.dumps(schema_of(name), indent=2))
