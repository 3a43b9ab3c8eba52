"""A script with `vllm serve` lines is imported, started, and answers."""

from __future__ import annotations

import sys

import httpx
import pytest

from dynamo_local.kubernetes.commands import yaml_text
from dynamo_local.kubernetes.importing.commands import imported
from tests.drivers.http_graphs import SERVER
from tests.drivers.served import Served

pytestmark = pytest.mark.infra

STUB = f"""#!{sys.executable}
import os, sys
words = sys.argv[1:]
port = words[words.index("--port") + 1]
os.execv({sys.executable!r}, [{sys.executable!r}, {str(SERVER)!r}, "--port", port, "--model", words[1]])
"""


@pytest.mark.full
def test_an_imported_script_starts_and_answers(tmp_path_factory: pytest.TempPathFactory) -> None:
    program = tmp_path_factory.mktemp("bin") / "vllm"
    program.write_text(STUB)
    program.chmod(0o755)
    script = f"{program} serve tiny --port 8100 &\n{program} serve tiny --port 8101 &\nwait\n"
    sections, notes = imported(script, "run.sh", "shell script", {})
    assert [note.where for note in notes] == [f"run.sh:2: {program} serve tiny"] * 2
    with Served("--gpus", "sim:2", target=("-f", "run.yaml"), files={"run.yaml": yaml_text(sections)}) as served:
        served.start()
        body = {"model": "tiny", "prompt": "x", "max_tokens": 3}
        answer = httpx.post(f"{served.url}/v1/completions", json=body, timeout=30.0).json()
        assert answer["choices"][0]["text"] == "0 1 2 "
        assert len([name for name in served.pids() if name.startswith("Vllm")]) == 2
