"""A standby that vLLM could never have is refused before anything starts, with its reason."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from dynamo_local.arbiter.request import ServeOptions, understand
from dynamo_local.errors import ConfigError
from tests.drivers.served import ROOT


def plan(tmp_path: Path, target: str, **worker: object) -> None:
    """`dynamo serve --dry-run` of a graph whose VllmWorker has real vLLM and that section."""
    args = {"standby": 0, **worker.pop("ServiceArgs", {})}  # type: ignore[dict-item]
    config = {"VllmWorker": {"engine": "vllm", "model": str(tmp_path), **worker, "ServiceArgs": args}}
    if target == "disagg":
        config["PrefillWorker"] = {"engine": "vllm", "model": str(tmp_path)}
    file = tmp_path / "graph.yaml"
    file.write_text(yaml.safe_dump(config))
    understand(ServeOptions(f"graphs.{target}:Frontend", file=file), {}, ROOT / "examples" / "llm", only_plan=True)


@pytest.mark.parametrize(
    ("target", "worker", "why"),
    [
        ("disagg", {"remote-prefill": True}, "with a KV connector vLLM cannot sleep"),
        ("agg", {"kv-transfer-config": {"kv_connector": "NixlConnector"}}, "registered with NIXL at the start"),
        ("agg", {"ServiceArgs": {"resources": {"gpu": 0}}}, "vLLM's CPU platform has no sleep mode"),
    ],
)
def test_what_keeps_vllm_awake_is_named(tmp_path: Path, target: str, worker: dict[str, object], why: str) -> None:
    with pytest.raises(ConfigError, match=why) as refused:
        plan(tmp_path, target, **worker)
    assert "VllmWorker" in str(refused.value)
    assert "ServiceArgs.standby" in str(refused.value)
    assert "remove it" in str(refused.value)
