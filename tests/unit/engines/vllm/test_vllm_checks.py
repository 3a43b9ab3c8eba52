"""Before anything starts: what vLLM says about a section, and that it is there at all. Its parser is a fake here."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dynamo_local.arbiter.checks import check_engines
from dynamo_local.config import resolve
from dynamo_local.config.loading import load_config
from dynamo_local.engines.vllm import checks as checking
from dynamo_local.engines.vllm.checks import VllmSection
from dynamo_local.errors import ConfigError
from dynamo_local.sdk.loader import load_graph
from tests.drivers.served import EXAMPLE


def check(*overrides: str, only_plan: bool = False) -> tuple[str, ...]:
    """The shipped disaggregated graph with overrides."""
    graph = load_graph("graphs.disagg:Frontend", base_dir=EXAMPLE)
    config = load_config(None, env={}, overrides=overrides)
    return check_engines(graph, resolve(graph, config, namespace=None), config, only_plan=only_plan)


WORDS = (f"--VllmWorker.model={EXAMPLE}", "--VllmWorker.block-size=32", f"--PrefillWorker.model={EXAMPLE}")
NOWHERE = "--VllmWorker.model=/models/nope"
NO_FOLDER = "VllmWorker: model /models/nope: there is no such folder on this host; name one with a config.json"


def test_the_simulation_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checking, "what_is_wrong", lambda sections: pytest.fail("vLLM was asked"))
    assert check() == ()


def test_a_host_without_vllm_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checking, "is_installed", lambda: False)
    with pytest.raises(ConfigError, match=r"VllmWorker, PrefillWorker: the engine is vllm, which is not installed"):
        check(*WORDS)
    (note,) = check(*WORDS, only_plan=True)
    assert "its options were not checked" in note


@pytest.mark.parametrize("engine", ["--VllmWorker.engine=sim", "--VllmWorker.engine=vllm"])
def test_a_model_folder_that_is_not_there_is_a_note_of_a_plan_and_refuses_a_start(
    monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    monkeypatch.setattr(checking, "is_installed", lambda: True)
    monkeypatch.setattr(checking, "what_is_wrong", lambda sections: {})
    (note,) = check(NOWHERE, engine, only_plan=True)
    assert note.startswith(NO_FOLDER)
    with pytest.raises(ConfigError, match=NO_FOLDER):
        check(NOWHERE, engine)


def test_options_of_the_sim_engine_are_not_the_complaint_where_the_folder_is_missing() -> None:
    with pytest.raises(ConfigError, match=NO_FOLDER):
        check(NOWHERE, '--VllmWorker.sim={"speed": 2}', only_plan=True)


def test_what_vllm_refuses_is_named_with_its_section(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, VllmSection] = {}

    def refuse(sections: Mapping[str, VllmSection]) -> dict[str, str]:
        asked.update(sections)
        return {"VllmWorker": "unknown key 'block-sizee'"}

    monkeypatch.setattr(checking, "is_installed", lambda: True)
    monkeypatch.setattr(checking, "what_is_wrong", refuse)
    with pytest.raises(ConfigError, match=r": VllmWorker: unknown key 'block-sizee'"):
        check(*WORDS)
    assert set(asked) == {"VllmWorker", "PrefillWorker"}
    assert "--tensor-parallel-size=1" in asked["VllmWorker"].words
    assert "remote_prefill" in asked["VllmWorker"].own_options


def test_gpus_that_do_not_fit_are_refused_before_vllm_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checking, "is_installed", lambda: pytest.fail("too late"))
    with pytest.raises(ConfigError, match=r"VllmWorker: tensor-parallel-size 2 needs 2 GPUs"):
        check(*WORDS, "--VllmWorker.tensor-parallel-size=2")


def test_what_passed_once_is_not_asked_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    runs: list[list[Any]] = []
    answers: list[str | None] = []

    def run(_words: Any, *, input: str, **_more: Any) -> Any:
        runs.append(json.loads(input))
        return SimpleNamespace(returncode=0, stdout=f"noise\n{checking.MARK}{json.dumps(answers)}\n", stderr="")

    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(checking.importlib.metadata, "version", lambda name: "0.32.0")
    section = VllmSection(("--block-size=32",), ())
    answers[:] = ["wrong"]
    assert checking.what_is_wrong({"A": section}) == checking.what_is_wrong({"A": section}) == {"A": "wrong"}
    answers[:] = [None]
    assert checking.what_is_wrong({"A": section}) == checking.what_is_wrong({"A": section}) == {}
    assert len(runs) == 3
    checking.what_is_wrong({"A": VllmSection(("--block-size=16",), ())})
    assert len(runs) == 4


def test_a_vllm_that_cannot_be_imported_is_told_in_a_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    done = SimpleNamespace(returncode=1, stdout="", stderr="Traceback …\nImportError: libcudart.so.13: cannot open\n")
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    monkeypatch.setattr(subprocess, "run", lambda *_words, **_more: done)
    monkeypatch.setattr(checking.importlib.metadata, "version", lambda name: "0.32.0")
    with pytest.raises(ConfigError, match=r"cannot be imported: ImportError: libcudart.so.13"):
        checking.what_is_wrong({"A": VllmSection((), ())})
