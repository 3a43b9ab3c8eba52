"""Tests what `dynamo` answers to words that it cannot take: one line, exit code 2, and where to read on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from dynamo_local.cli.main import COMMANDS, cli
from dynamo_local.config.schema import ServiceArgs
from dynamo_local.errors import EXIT_BAD_INPUT, EXIT_NOT_RUNNING, EXIT_OK
from tests.fakes.arbiter.scripted_arbiter import dynamo

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("statsu",), "dynamo: no command 'statsu', did you mean 'status'? (see `dynamo --help`)"),
        (("xyz",), "dynamo: no command 'xyz' (see `dynamo --help`)"),
        (("stop",), "dynamo: no command 'stop', did you mean 'down'? (see `dynamo --help`)"),
        (("scale", "VllmWorker"), "dynamo: Missing argument 'TARGET' (see `dynamo scale --help`)"),
        (("serve", "-f"), "dynamo: Option '-f' requires an argument"),
        (
            ("completion",),
            "dynamo: Missing argument '{bash|zsh|fish}'. Choose from: bash, zsh, fish (see `dynamo completion --help`)",
        ),
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


WITHOUT_NAMESPACE = ("ls", "config", "simulate", "plan", "planner", "export", "import", "schema", "completion", "man")


@pytest.mark.parametrize("name", [name for name in COMMANDS if name not in WITHOUT_NAMESPACE])
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


@pytest.mark.parametrize(
    ("words", "port"),
    [
        (("--dashboard", "graphs.agg:Frontend"), 0),
        (("graphs.agg:Frontend", "--dashboard"), 0),
        (("--dashboard", "8700", "graphs.agg:Frontend"), 8700),
        (("--dashboard=8700", "graphs.agg:Frontend", "--Host.dashboard=1"), 8700),
        (("graphs.agg:Frontend", "--Host.dashboard=1"), 1),
        (("graphs.agg:Frontend", "--dashboard", "--VllmWorker.itl", "50"), 0),
    ],
)
def test_the_page_s_port_may_be_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], port: int
) -> None:
    monkeypatch.chdir(ROOT / "examples" / "llm")
    assert dynamo(monkeypatch, "serve", *words, "-f", "configs/agg.yaml", "--gpus", "sim:2", "--dry-run", "--json") == 0
    assert json.loads(capsys.readouterr().out)["config"]["Host"]["dashboard"] == port


# --- numbers on the command line
# Durations that cannot be meant are refused with the option's name, before anything else happens.

OPTIONS = [
    ("serve", "--start-deadline"),
    ("serve", "--drain-deadline"),
    ("down", "--timeout"),
    ("scale", "--timeout"),
    ("drain", "--timeout"),
    ("restart", "--timeout"),
    ("top", "--refresh"),
    ("simulate", "--start-up-s"),
]
ABSURD = ["nan", "-nan", "inf", "-inf", "-1", "1e300", "31536001", "ten", ""]


@pytest.mark.parametrize("value", ABSURD)
@pytest.mark.parametrize(("command", "option"), OPTIONS)
def test_an_absurd_duration_is_refused_by_name(command: str, option: str, value: str) -> None:
    done = CliRunner().invoke(cli, [command, f"{option}={value}"])
    assert done.exit_code == EXIT_BAD_INPUT
    assert f"Invalid value for '{option}'" in done.output


@pytest.mark.parametrize("value", [-1, 0, 31536001, float("inf"), float("nan")])
@pytest.mark.parametrize("key", ["start_deadline_s", "drain_deadline_s"])
def test_so_is_one_in_a_configuration(key: str, value: float) -> None:
    with pytest.raises(ValueError, match=key):
        ServiceArgs.model_validate({key: value})
