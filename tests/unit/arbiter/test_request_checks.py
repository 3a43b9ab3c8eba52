"""`dynamo serve` reads a configuration: keys of `Common` that nobody gets, and where a wrong key stands."""

from __future__ import annotations

from pathlib import Path

import pytest

from dynamo_local.arbiter.request import Request, ServeOptions, understand
from dynamo_local.errors import ConfigError
from tests.drivers.served import ROOT

LLM = ROOT / "examples" / "llm"


def read(tmp_path: Path, text: str, *words: str) -> Request:
    """The shipped aggregated graph, with this text laid over its file."""
    file = tmp_path / "more.yaml"
    file.write_text(text)
    options = ServeOptions("graphs.agg:Frontend", LLM / "configs" / "agg.yaml", (file,), overrides=words)
    return understand(options, {}, LLM, only_plan=True)


def test_a_key_of_common_that_nobody_lists_is_named_with_those_who_know_it(tmp_path: Path) -> None:
    notes = read(tmp_path, "Common:\n  our-own: 1\n  max-model-len: 4096\n  ttft: 500\n").notes
    where, said = f"{tmp_path}/more.yaml, line", "Common: no common-configs lists"
    assert f"{where} 2: {said} 'our-own', so no service gets it" in notes
    assert f"{where} 3: {said} 'max-model-len', so no service gets it; add it to those of VllmWorker" in notes
    assert not any("ttft" in note and "Common" in note for note in notes), "targets hold for all"


@pytest.mark.parametrize(
    ("text", "words", "told"),
    [
        ("Common:\n  modle: x\n", (), r"more\.yaml, line 2: Common: unknown key 'modle'; did you mean 'model'\?$"),
        ("VllmWorker:\n  wokers: 3\n", (), r"more\.yaml, line 2: VllmWorker: unknown key 'wokers'"),
        (
            "VllmWorker: {ServiceArgs: {workers: 1}}",
            ("--VllmWorker.ServiceArgs.workers=x",),
            r"^command line: VllmWorker.ServiceArgs: workers must be .*, not 'x'",
        ),
        ("{}", ("--VllmWorker.wokers=3",), r"^command line: VllmWorker: unknown key 'wokers'"),
        ("Common:\n  sim:\n    speed: fast\n", (), r"more\.yaml, line 2: VllmWorker: sim.*speed"),
        ("VllmWorker:\n  ServiceArgs:\n    workers: -1\n", (), r"more\.yaml, line 3: VllmWorker\.ServiceArgs: "),
        ("Planner:\n  policy: slo\n  ttft: -5\n", (), r"more\.yaml, line 3: Planner: ttft: must be greater than 0"),
        (
            "Planner:\n  min-gpu-budget: 5\n  max-gpu-budget: 2\n",
            (),
            r"r: min-gpu-budget \(5\) .* max-gpu-",
        ),
        ("Frontend:\n  request-timeout-s: 0\n", (), r"more\.yaml, line 2: Frontend: request-timeout-s: must be"),
        ("{}", ("--Frontend.request-timeout-s=0",), r"^command line: Frontend: request-timeout-s: must be"),
        ("Frontend: {request_timeout_s: 0}", (), r"Frontend: request_timeout_s: must be"),
        ("\nVllmWroker: {}\n", (), r"more\.yaml, line 2: the section 'VllmWroker'"),
    ],
)
def test_a_wrong_key_is_named_with_its_place(tmp_path: Path, text: str, words: tuple[str, ...], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        read(tmp_path, text, *words)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("Frontend: {api-key: 'file:/nowhere/keys'}", r"Frontend\.api-key: the file /nowhere/keys cannot be read"),
        (
            "Frontend: {record-trace: /nowhere/trace.jsonl}",
            r"Frontend\.record-trace: there is no folder /nowhere;",
        ),
    ],
)
def test_a_dry_run_refuses_the_files_that_serve_refuses(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        read(tmp_path, text)
