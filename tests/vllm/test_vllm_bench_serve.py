"""`vllm bench serve`, vLLM's own benchmark, as a client of a graph with the sim engine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from dynamo_local.components.text import tokenizer
from dynamo_local.engines.vllm.options import words_of
from tests.drivers.benchmarked import Counted, counted
from tests.drivers.served import MODEL, Served

pytestmark = [pytest.mark.vllm, pytest.mark.full, pytest.mark.infra, pytest.mark.timeout(2400)]

SIM_TOKENIZER = Path(tokenizer.__file__).with_name("tiny_tokenizer")
REQUESTS, AT_ONCE, PROMPT_TOKENS, TOKENS = 40, 8, 50, 24
TIMEOUT_S = 600.0
PATHS = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}


def benched(url: str, folder: Path, **options: Any) -> Mapping[str, Any]:
    """The report of `vllm bench serve` about so many requests, of exactly so many tokens each."""
    asked = {
        "base_url": url,
        "dataset_name": "random",
        "random_input_len": PROMPT_TOKENS,
        "random_output_len": TOKENS,
        "num_prompts": REQUESTS,
        "max_concurrency": AT_ONCE,
        "seed": 3,
        "disable_tqdm": True,
        "save_result": True,
        "save_detailed": True,
        "result_dir": folder,
        "result_filename": "bench.json",
    }
    done = subprocess.run(
        [str(Path(sys.executable).with_name("vllm")), "bench", "serve", *words_of({**asked, **options})],
        cwd=folder,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "HOME": str(folder)},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    found: Mapping[str, Any] = json.loads((folder / "bench.json").read_text())
    return found


def check_generating(graph: Served, folder: Path, **named: Any) -> None:
    """Both of OpenAI's paths: no request fails, each has its tokens, and the graph has counted the same."""
    for backend, path in PATHS.items():
        before = counted(graph.url)
        report = benched(graph.url, folder, backend=backend, endpoint=path, ignore_eos=True, **named)
        told = counted(graph.url) - before
        assert (report["completed"], report["failed"], set(report["errors"])) == (REQUESTS, 0, {""}), backend
        assert report["output_lens"] == [TOKENS] * REQUESTS, backend
        assert told == Counted(REQUESTS, 0, report["total_input_tokens"], REQUESTS * TOKENS), backend


def test_vllm_bench_serve_loses_no_request_of_the_sim_engine(tmp_path: Path) -> None:
    with Served("--VllmWorker.max-local-prefill-length=16").started() as graph:
        check_generating(graph, tmp_path, model=MODEL, tokenizer=SIM_TOKENIZER)
