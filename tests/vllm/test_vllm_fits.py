"""The bytes of KV that `dynamo serve --model` counts with are vLLM's own, for published models."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from dynamo_local.core.model_facts import model_facts
from dynamo_local.engines.vllm.checks import is_installed
from tests.drivers.served import ROOT
from tests.tools.published_models import FITS, config, folder

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
