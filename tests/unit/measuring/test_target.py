"""Tests what is to be measured, from a configuration with commands: how its graph is started, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from dynamo_local.errors import BadInput
from dynamo_local.measuring.target import AGG, DECODE, PREFILL, Target, understood

COMMAND = "python -c pass --port {port:http} --max-num-seqs 8"


def target(folder: Path, **sections: dict[str, object]) -> Target:
    """Of that file."""
    file = folder / "deployment.yaml"
    file.write_text(yaml.safe_dump({"Host": {"gpus": "sim:8"}, **sections}))
    return understood(None, file, (), "profile", None, None)


def test_http_servers_are_started_as_they_are_behind_a_frontend_of_any_port(tmp_path):
    """They have no options of our workers; their words are known, and a model that they do not list."""
    server = {"command": COMMAND, "runtime": "http", "role": "aggregated", "served-model-name": "m", "metrics": None}
    found = target(tmp_path, Server=server)
    assert (found.components, found.runtime_of("Server")) == ({AGG: "Server"}, "http")
    assert not any(word.startswith("--Server.") for word in found.serve_words())
    assert "--Frontend.port=0" in found.serve_words()
    assert "--max-num-seqs" in found.words_of("Server")
    assert (found.model_of("Server"), found.metrics_of("Server")) == ("m", None)
    assert found.engines[AGG] == {"engine": "http", "gpus": 0, "options": {"command": COMMAND}}


def test_of_dynamos_workers_there_is_one_of_each_role_behind_its_own_frontend(tmp_path):
    """Which is asked for them: with two of a role nobody would know who answered."""
    command = "python -c pass"
    found = target(
        tmp_path,
        Front={"command": command, "runtime": "dynamo-1x", "role": "frontend", "ports": {"http": 8000}},
        D={"command": command, "runtime": "dynamo-1x", "role": "decode", "ServiceArgs": {"workers": 3}},
        P={"command": command, "runtime": "dynamo-1x", "role": "prefill"},
    )
    assert found.components == {PREFILL: "P", DECODE: "D"}
    words = found.serve_words()
    assert {"--Front.ports.http=0", "--D.ServiceArgs.workers=1", "--P.ServiceArgs.workers=1"} <= set(words)
    assert found.model_of("D") is None
    assert found.metrics_of("D") == "/metrics"


def test_a_command_that_nobody_knows_how_to_ask_is_refused(tmp_path):
    with pytest.raises(BadInput, match=r"Thing is a command of the runtime none.*give it the runtime http"):
        target(tmp_path, Thing={"command": "python -c pass", "role": "decode"})
