"""The arbiter's commands call a supervisor that circus hands on as `Any`: mypy cannot check what it has."""

from __future__ import annotations

import inspect

import pytest

from dynamo_local.arbiter.supervisor import Supervisor
from dynamo_local.circus_plugins.commands import Commanded

ASKED = [name for name in vars(Commanded) if not name.startswith("_")]


def _parameters(owner: type, name: str) -> list[tuple[str, object]]:
    return [(each.name, each.kind) for each in inspect.signature(getattr(owner, name)).parameters.values()]


@pytest.mark.parametrize("name", ASKED)
def test_supervisor_has_what_commands_call(name: str) -> None:
    """With the same parameters; else a command would fail at its first use, as "a bug of ours"."""
    assert _parameters(Supervisor, name) == _parameters(Commanded, name)
