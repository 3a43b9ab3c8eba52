"""`dynamo serve --model` with vLLM's CPU build: the bytes of KV are vLLM's own, and one line serves two models."""

from __future__ import annotations

import json
import subprocess
import sys

import httpx
import pytest

from dynamo_local.core.model_facts import model_facts
from dynamo_local.engines.vllm.checks import is_installed
from tests.drivers.served import ROOT, Served
from tests.tools.published_models import FITS, config, folder
from tests.vllm.hosts import START_TIMEOUT_S, VllmHost

pytestmark = [pytest.mark.vllm, pytest.mark.full]

MARK = "kv-specs:"
TIMEOUT_S = 900


@pytest.mark.timeout(TIMEOUT_S + 60)
def test_kv_bytes_per_token_and_state_are_those_of_vllm() -> None:
    if not is_installed():
        pytest.skip("vLLM is not installed here; tox -e vllm installs its CPU build")
    configs = folder()
    asked = {name: {"config": config(configs, name), "kv_dtype": "auto"} for name in FITS}
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests/vllm/kv_specs.py")],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    lines = [line.removeprefix(MARK) for line in done.stdout.splitlines() if line.startswith(MARK)]
    answers = {name: answer for line in lines for name, answer in json.loads(line).items()}
    ours = {}
    for name in FITS:
        facts = model_facts(asked[name]["config"])
        windows = facts.token_bytes(windows=True)
        ours[name] = {"token": facts.token_bytes(), "windows": windows, "state": facts.state_bytes()}
    assert ours == answers, done.stderr[-2000:]


@pytest.mark.infra
@pytest.mark.timeout(1500)
def test_two_models_are_served_in_one_line_by_vllms_cpu_build(vllm_host: VllmHost) -> None:
    model = ("--model", str(vllm_host.model))
    words = (*model, *model, "--served-model-name", "a", "--served-model-name", "b", "--pass-env", "VLLM_CACHE_ROOT")
    behind = ("--max-num-seqs", "4", "--max-model-len", "1024")
    with Served(target=words, behind=behind, env=dict(vllm_host.env), timeout_s=START_TIMEOUT_S).started() as served:
        url = f"{served.url}/v1/chat/completions"
        plain = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "temperature": 0}
        for more in ({}, {"logprobs": True}):  # the light way, and vLLM's own API
            answers = [httpx.post(url, json={"model": name, **plain, **more}, timeout=120.0) for name in "abc"]
            assert [answer.status_code for answer in answers] == [200, 200, 404]
            first, second = (answer.json()["choices"][0]["message"]["content"] for answer in answers[:2])
            assert first == second
