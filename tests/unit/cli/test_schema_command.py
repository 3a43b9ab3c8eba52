"""`dynamo schema`, and that each command with `--json` has a schema."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import click
import pytest

from dynamo_local.cli.main import cli
from dynamo_local.cli.schemas import ANSWERS
from dynamo_local.errors import EXIT_BAD_INPUT, EXIT_OK
from tests.fakes.arbiter.scripted_arbiter import dynamo
from tests.tools.answers import name_of


def with_json(group: click.Group, *before: str) -> Iterator[tuple[str, ...]]:
    """The words of each command that takes `--json`."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if isinstance(command, click.Group):
            yield from with_json(command, *before, name)
        elif command is not None and any("--json" in option.opts for option in command.params):
            yield (*before, name)


def test_each_command_with_json_has_a_schema_and_no_other() -> None:
    named = {name_of(words) for words in with_json(cli)}
    by_option = {"doctor.checks", "plan.models", "scale.flip", "serve.model", "simulate.models"}
    assert named | by_option == set(ANSWERS)


def test_a_schema_is_printed_with_its_version(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    assert dynamo(monkeypatch, "schema", "status") == EXIT_OK
    schema = json.loads(capsys.readouterr().out)
    assert schema["$id"] == "dynamo.status.v1"
    assert dynamo(monkeypatch, "schema") == EXIT_OK
    assert {line.split()[0] for line in capsys.readouterr().out.splitlines()} == set(ANSWERS)


def test_an_unknown_name_is_refused_with_the_nearest(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    assert dynamo(monkeypatch, "schema", "statsu") == EXIT_BAD_INPUT
    assert "did you mean 'status'?" in capsys.readouterr().err
