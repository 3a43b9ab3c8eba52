"""NVIDIA's aiperf against a real graph, with the model's tokenizer from a folder. It wants other versions of what we
have, so it lives in an environment of its own, whose program DYN_AIPERF names; `tox -e clients` makes one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

import dynamo_local.components.text
from tests.drivers.served import MODEL, Served

AIPERF = os.environ.get("DYN_AIPERF")
TOKENIZER = Path(dynamo_local.components.text.__file__).with_name("tiny_tokenizer")
REQUESTS, TOKENS = 40, 12

pytestmark = [
    pytest.mark.full,
    pytest.mark.infra,
    pytest.mark.timeout(600),
    pytest.mark.skipif(AIPERF is None, reason="DYN_AIPERF names no aiperf; tox -e clients installs one"),
]


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_aiperf_measures_every_request(graph: Served, endpoint: str, tmp_path: Path):
    """Streamed, several at once: none fails, each has its tokens, and there is a time to the first of them."""
    words = ["--model", MODEL, "--url", graph.url, "--endpoint-type", endpoint, "--streaming"]
    load = ["--request-count", str(REQUESTS), "--concurrency", "8", "--isl", "50", "--osl", str(TOKENS)]
    sampled = ["--extra-inputs", "ignore_eos:true"]
    told = ["--tokenizer", str(tokenizer_in(tmp_path / "tokenizer")), "--artifact-dir", str(tmp_path), "--ui", "none"]
    assert AIPERF is not None
    done = subprocess.run(
        [AIPERF, "profile", *words, *load, *sampled, *told],
        env={**os.environ, "HOME": str(tmp_path)},  # offline mode takes a path for the name of a repository
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (file,) = tmp_path.rglob("profile_export_aiperf.json")
    found = json.loads(file.read_text())
    assert found["request_count"]["avg"] == REQUESTS
    assert not (found.get("error_request_count") or {}).get("avg")
    assert found["output_sequence_length"]["avg"] == pytest.approx(TOKENS, abs=2)
    assert found["time_to_first_token"]["avg"] > 0


def tokenizer_in(folder: Path) -> Path:
    """The graph's, as transformers wants it."""
    folder.mkdir()
    shutil.copy(TOKENIZER / "tokenizer.json", folder)
    told = json.loads((TOKENIZER / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**told, "tokenizer_class": "PreTrainedTokenizerFast"}))
    return folder
