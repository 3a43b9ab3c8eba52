"""NVIDIA's aiperf against a real graph, with the model's own tokenizer from its folder, and no way to the internet.
`tox -e clients`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dynamo_local.components.text import tokenizer
from dynamo_local.simulator.trace import read_trace
from tests.drivers.benchmarked import Counted, counted
from tests.drivers.served import MODEL, Served

pytestmark = [pytest.mark.full, pytest.mark.infra, pytest.mark.timeout(900)]

TOKENIZER = Path(tokenizer.__file__).with_name("tiny_tokenizer")
REQUESTS, AT_ONCE, PROMPT_TOKENS, TOKENS = 40, 8, 50, 24
TIMEOUT_S = 600.0
"""It starts eight processes that import transformers."""

OFFLINE = {
    # With HF_HUB_OFFLINE it takes a folder for the name of a repository (0.13): so what it would ask is not there.
    "HF_ENDPOINT": "http://127.0.0.1:9",
    "DO_NOT_TRACK": "1",
}


def profiled(graph: Served, folder: Path, *words: str) -> dict[str, Any]:
    """The report of `aiperf profile` about so many requests, of exactly so many tokens each."""
    asked = {
        "model": MODEL,
        "url": graph.url,
        "tokenizer": TOKENIZER,
        "artifact-dir": folder,
        "request-count": REQUESTS,
        "concurrency": AT_ONCE,
        "workers-max": 1,
        "isl": PROMPT_TOKENS,
        "isl-stddev": 0,
        "osl": TOKENS,
        "osl-stddev": 0,
        "extra-inputs": "ignore_eos:true",
        "random-seed": 3,
        "ui": "none",
    }
    options = [word for name, value in asked.items() for word in (f"--{name}", str(value))]
    done = subprocess.run(
        [
            *(str(Path(sys.executable).with_name("aiperf")), "profile", *options),
            *("--no-gpu-telemetry", "--no-server-metrics", "--use-server-token-count", *words),
        ],
        cwd=folder,
        env={**os.environ, **OFFLINE, "HOME": str(folder)},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    found: dict[str, Any] = json.loads((folder / "profile_export_aiperf.json").read_text())
    return found


@pytest.mark.parametrize(
    ("kind", "words"), [("chat", ["--streaming"]), ("completions", [])], ids=["a chat, streamed", "a completion, whole"]
)
def test_aiperf_loses_no_request_and_counts_every_token(
    graph: Served, tmp_path: Path, kind: str, words: list[str]
) -> None:
    before = counted(graph.url)
    report = profiled(graph, tmp_path, "--endpoint-type", kind, *words)
    told = counted(graph.url) - before
    assert (report["request_count"]["avg"], report["error_summary"], report["was_cancelled"]) == (REQUESTS, [], False)
    lengths = report["output_sequence_length"]
    assert (lengths["min"], lengths["max"], lengths["sum"]) == (TOKENS, TOKENS, REQUESTS * TOKENS)
    assert told == Counted(REQUESTS, 0, report["total_usage_prompt_tokens"]["avg"], REQUESTS * TOKENS)
    assert told.prompt_tokens >= 0.9 * REQUESTS * PROMPT_TOKENS  # a text that is cut at random may be shorter
    recorded = read_trace(tmp_path / "profile_export.jsonl")
    assert [request.output_length for request in recorded] == [TOKENS] * REQUESTS
