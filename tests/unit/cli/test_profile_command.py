"""`dynamo profile` refuses what cannot be measured, in a line and before anything starts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import click
import pytest

from dynamo_local.cli.profile import Budget, profile
from dynamo_local.errors import BadInput
from dynamo_local.measuring.target import understood

ROOT = Path(__file__).parents[3]


def run(*words: str) -> None:
    profile.main(list(words), standalone_mode=False)


@pytest.mark.parametrize(("text", "seconds"), [("90", 90.0), ("90s", 90.0), ("15m", 900.0), ("1.5h", 5400.0)])
def test_a_budget_is_a_time(text, seconds):
    assert Budget().convert(text, None, None) == seconds


@pytest.mark.parametrize("text", ["", "0", "-5s", "soon", "nan", "1d", "9999999h"])
def test_what_is_no_time_is_refused(text):
    with pytest.raises(click.UsageError, match="is no time"):
        Budget().convert(text, None, None)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--roles", "agg"), "this graph has prefill and decode"),
        (("--resume",), "nothing to go on with"),
        (("--VllmWorker.sim.sped=3",), "sped"),
        (("--namespace", "no/such"), "namespace"),
    ],
)
def test_what_cannot_be_measured_is_refused(words, said, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT / "examples" / "llm")
    with pytest.raises(BadInput, match=said):
        run("graphs.disagg:Frontend", "-f", "configs/disagg.yaml", "-o", str(tmp_path / "out"), *words)
    assert not (tmp_path / "out").exists()


def test_ctrl_c_while_the_graph_starts_says_so_and_exits_as_a_stopped_command_does(monkeypatch, tmp_path, capsys):

    async def measure(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.chdir(ROOT / "examples" / "llm")
    monkeypatch.setattr("dynamo_local.measuring.profile.profile", measure)
    words = ["graphs.disagg:Frontend", "-f", "configs/disagg.yaml", "-o", str(tmp_path / "out")]
    assert profile.main(words, standalone_mode=False) == 130
    assert "nothing was measured" in capsys.readouterr().err


def test_engines_that_start_slowly_get_the_time_that_is_given(monkeypatch):
    """A vLLM worker on a busy host took longer than the five minutes of `dynamo serve`: it could not be measured."""
    monkeypatch.chdir(ROOT / "examples" / "llm")
    of = ("graphs.disagg:Frontend", Path("configs/disagg.yaml"), (), "profile", None, None)
    assert "--start-deadline" not in understood(*of).serve_words()
    words = understood(*of, 900.0).serve_words()
    assert words[words.index("--start-deadline") + 1] == "900"


def test_real_engines_get_a_quarter_of_an_hour_and_no_cached_prompts_where_they_keep_none(monkeypatch):
    """Nobody waits at a prompt for a profile; and what is called a cached prompt must have been one."""
    monkeypatch.chdir(ROOT / "examples" / "llm")
    simulated = understood("graphs.agg:Frontend", Path("configs/agg.yaml"), (), "profile", None, None)
    assert simulated.has_prefix_cache("agg")
    options = {"model": "/models/tiny", "enable_prefix_caching": False}
    target = replace(simulated, engines={"agg": {"engine": "vllm", "gpus": 1, "options": options}})
    words = target.serve_words()
    assert words[words.index("--start-deadline") + 1] == "900"
    assert not target.has_prefix_cache("agg")


def test_commands_that_nobody_knows_how_to_ask_are_refused_by_name(tmp_path):
    file = tmp_path / "commands.yaml"
    file.write_text("Mine: {command: sleep 60, runtime: none, role: decode, ServiceArgs: {resources: {gpu: 1}}}\n")
    with pytest.raises(BadInput, match="Mine is a command of the runtime none, and nobody knows"):
        run("-f", str(file), "--gpus", "sim:8", "-o", str(tmp_path / "out"))
