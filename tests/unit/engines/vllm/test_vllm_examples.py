"""The configurations for real models: planned for eight GPUs, without the models, the GPUs and vLLM."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from dynamo_local.cli.serve import serve
from tests.drivers.served import EXAMPLE

EXPECTED = {
    "llama-3.1-8b-agg": {"VllmWorker": [1] * 8},
    "llama-3.1-8b-disagg": {"VllmWorker": [1] * 5, "PrefillWorker": [1] * 3},
    "qwen3-32b-agg": {"VllmWorker": [2] * 4},
    "qwen3-32b-disagg": {"VllmWorker": [4], "PrefillWorker": [2, 2]},
}


@pytest.mark.parametrize("name", EXPECTED)
def test_a_shipped_configuration_fills_eight_gpus(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`dynamo serve --dry-run`: the workers and their GPUs; on a host without vLLM it says what was not checked."""
    monkeypatch.chdir(EXAMPLE)
    monkeypatch.setattr("dynamo_local.engines.vllm.checks.is_installed", lambda: False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    graph = "disagg" if name.endswith("disagg") else "agg"
    words = [f"graphs.{graph}:Frontend", "-f", f"configs/{name}.yaml", "--gpus", "sim:8", "--dry-run", "--json"]
    done = CliRunner().invoke(serve, words)
    assert done.exit_code == 0, done.output
    assert "its options were not checked" in done.stderr
    found: dict[str, list[int]] = {}
    for watcher in json.loads(done.stdout)["watchers"]:
        if watcher["gpus"]:
            found.setdefault(watcher["component"], []).append(len(watcher["gpus"]))
    assert found == EXPECTED[name]
