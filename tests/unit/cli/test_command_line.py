"""Tests what `dynamo` answers to words that it cannot take: one line, exit code 2, and where to read on."""

from __future__ import annotations

from pathlib import Path

import pytest

from dynamo_local.cli.main import COMMANDS, cli
from dynamo_local.errors import EXIT_BAD_INPUT, EXIT_NOT_RUNNING, EXIT_OK
from tests.fakes.arbiter.scripted_arbiter import dynamo


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("statsu",), "dynamo: no command 'statsu', did you mean 'status'? (see `dynamo --help`)"),
        (("xyz",), "dynamo: no command 'xyz' (see `dynamo --help`)"),
        (("scale", "VllmWorker"), "dynamo: Missing argument 'TARGET' (see `dynamo scale --help`)"),
        (("ls", "more"), "dynamo: Got unexpected extra argument (more) (see `dynamo ls --help`)"),
    ],
)
def test_a_mistake_is_answered_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], line: str
) -> None:
    assert dynamo(monkeypatch, *words) == EXIT_BAD_INPUT
    out, err = capsys.readouterr()
    assert (out, err.rstrip()) == ("", line)


@pytest.mark.parametrize("group", [(), ("planner",), ("config",)])
def test_a_group_without_a_command_shows_its_help(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], group: tuple[str, ...]
) -> None:
    dynamo(monkeypatch, *group)
    shown = "".join(capsys.readouterr())
    assert shown.startswith("Usage: dynamo")
    assert "Commands:" in shown


@pytest.mark.parametrize("name", [*COMMANDS])
def test_every_command_has_help_and_needs_no_graph_for_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    assert dynamo(monkeypatch, name, "--help") == EXIT_OK
    assert capsys.readouterr().out.startswith(f"Usage: dynamo {name}")


@pytest.mark.parametrize("group", ["planner", "config"])
def test_no_line_of_a_list_of_commands_is_cut(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], group: str
) -> None:
    assert dynamo(monkeypatch, group, "--help") == EXIT_OK
    assert "..." not in capsys.readouterr().out.partition("Commands:")[2]


@pytest.mark.parametrize(
    "name",
    [name for name in COMMANDS if name not in ("ls", "config", "simulate", "plan", "planner", "export", "import")],
)
def test_n_is_the_namespace_of_every_command_that_has_one(name: str) -> None:
    import click

    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    (option,) = [param for param in command.params if "-n" in param.opts]
    assert option.name == "namespace"


def test_ctl_without_a_graph_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert dynamo(monkeypatch, "ctl", "list") == EXIT_NOT_RUNNING
    assert len(capsys.readouterr().err.splitlines()) == 1
