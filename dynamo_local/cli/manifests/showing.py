"""The list of what did not carry over, and documents as text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import click

from dynamo_local.manifests.notes import Kind, Note

WIDTH = 140


def yaml_text(*documents: Mapping[str, Any]) -> str:
    """Documents as people write them: keys in their order, no folded lines."""
    import yaml

    return str(yaml.safe_dump_all(map(dict, documents), sort_keys=False, width=1_000_000, allow_unicode=True))


def print_json(notes: Sequence[Note], **more: Any) -> None:
    """What was made, and `notes`, as one JSON object."""
    click.echo(json.dumps({**more, "notes": [note._asdict() for note in notes]}, indent=2))


def print_notes(notes: Sequence[Note]) -> None:
    """A table on stderr: stdout may be on its way to `kubectl apply -f -`."""
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
