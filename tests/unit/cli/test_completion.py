"""Completion and manual pages: from the records of the commands, and from the statefile."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.shell_completion import get_completion_class

from dynamo_local.cli.main import COMMANDS, cli
from dynamo_local.errors import EXIT_BAD_INPUT, EXIT_OK
from dynamo_local.state.raw import statefile_path
from tests.fakes.arbiter.scripted_arbiter import dynamo


@pytest.fixture(autouse=True)
def two_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Statefiles of two namespaces. Nothing runs, so that nobody can be asked."""
    monkeypatch.setenv("DYN_LOCAL_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.delenv("DYN_NAMESPACE", raising=False)
    (tmp_path / "state").mkdir()
    for namespace, components in (("dynamo", ("Frontend", "VllmWorker")), ("other", ("Router",))):
        entries = {name: {"component": name, "watcher_name": f"{namespace}_{name}"} for name in components}
        statefile_path(namespace, os.environ).write_text(json.dumps({"components": entries}))


def completed(*words: str) -> list[str]:
    """The shell's proposals for the last of the words."""
    bash = get_completion_class("bash")
    assert bash is not None
    return [item.value for item in bash(cli, {}, "dynamo", "_X").get_completions(list(words[:-1]), words[-1])]


@pytest.mark.parametrize(
    ("words", "proposed"),
    [
        (("do",), ["down", "doctor"]),
        (("planner", "st"), ["start", "status", "stop"]),
        (("status", "--names"), ["--namespace"]),
        (("status", "-n", ""), ["dynamo", "other"]),
        (("scale", "V"), ["VllmWorker"]),
        (("drain", "dynamo_"), ["dynamo_Frontend", "dynamo_VllmWorker"]),
        (("restart", "-n", "other", ""), ["Router", "other_Router"]),
        (("logs", "Frontend", "Vllm"), ["VllmWorker"]),
        (("events", "--story", "Front"), ["Frontend"]),
        (("completion", ""), ["bash", "zsh", "fish"]),
    ],
)
def test_names_are_completed(words: tuple[str, ...], proposed: list[str]) -> None:
    assert completed(*words) == proposed


def test_a_broken_statefile_completes_nothing_and_says_nothing(capfd: Any) -> None:
    statefile_path("dynamo", os.environ).write_text("{")
    assert completed("drain", "") == []
    statefile_path("dynamo", os.environ).write_text('{"components": [1]}')
    assert completed("drain", "") == []
    assert capfd.readouterr() == ("", "")


def test_commands_are_completed_without_importing_them() -> None:
    """A proposal that takes a second is of no use."""
    code = "import sys; from dynamo_local.cli.main import main; main()"
    env = {**os.environ, "COMP_WORDS": "dynamo s", "COMP_CWORD": "1", "_DYNAMO_COMPLETE": "bash_complete"}
    script = f"import sys; sys.argv[0] = 'dynamo'\n{code}"
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", script], env=env, capture_output=True, text=True, check=False
    )
    assert "plain,serve" in done.stdout.splitlines()
    assert "dynamo_local.cli.serve" not in done.stderr


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_takes_the_script(monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path) -> None:
    assert dynamo(monkeypatch, "completion", "bash") == EXIT_OK
    program = tmp_path / "bin" / "dynamo"
    program.parent.mkdir()
    program.write_text(f"#!{sys.executable}\nfrom dynamo_local.cli.main import main\nmain()\n")
    program.chmod(0o755)
    ask = 'COMP_WORDS=(dynamo drain Vllm); COMP_CWORD=2; _dynamo_completion dynamo; echo "${COMPREPLY[@]}"'
    env = {**os.environ, "PATH": f"{program.parent}:{os.environ['PATH']}", "PYTHONPATH": os.pathsep.join(sys.path)}
    script = capsys.readouterr().out + ask
    done = subprocess.run(["bash", "--norc", "-c", script], env=env, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("VllmWorker\n", "")


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_the_other_shells_have_a_script(shell: str, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    assert dynamo(monkeypatch, "completion", shell) == EXIT_OK
    assert "_DYNAMO_COMPLETE" in capsys.readouterr().out


def test_every_command_has_a_manual_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    assert dynamo(monkeypatch, "man", "--to", str(tmp_path / "man1")) == EXIT_OK
    written = {path.name for path in (tmp_path / "man1").iterdir()}
    assert {"dynamo.1", "dynamo-planner-set.1", *(f"dynamo-{name}.1" for name in COMMANDS)} <= written
    if shutil.which("groff") is not None:
        files = sorted(map(str, (tmp_path / "man1").iterdir()))
        done = subprocess.run(
            ["groff", "-Kutf8", "-Tutf8", "-man", "-ww", "-z", *files], capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stderr) == (0, "")


def test_one_page_is_printed(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    assert dynamo(monkeypatch, "man", "planner", "set") == EXIT_OK
    assert capsys.readouterr().out.startswith('.TH "DYNAMO-PLANNER-SET" "1"')
    assert dynamo(monkeypatch, "man", "nope") == EXIT_BAD_INPUT
