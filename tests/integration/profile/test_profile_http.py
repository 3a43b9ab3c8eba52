"""`dynamo profile` of plain HTTP servers: measured at their own OpenAI endpoints, from outside."""

from __future__ import annotations

import json

import pytest

from dynamo_local.profile.reading import read_profile
from tests.drivers.http_graphs import http_graph, section

pytestmark = [pytest.mark.infra, pytest.mark.full, pytest.mark.timeout(400)]

TOKEN_S, SEQ_S, PREFILL_S, PROMPT_TOKEN_S = 0.02, 0.002, 0.05, 1e-4
WORDS = (
    *("--token-s", str(TOKEN_S), "--seq-s", str(SEQ_S), "--prefill-s", str(PREFILL_S)),
    *("--prompt-token-s", str(PROMPT_TOKEN_S), "--block-size", "16"),
)
PROFILE = ("profile", "-f", "deployment.yaml", "--namespace", "dynamo", "--no-actions", "--json", "-o", "out")
OVERHEAD_MS = 30.0
"""What HTTP and timers add to a repetition, on a machine that does something else."""


@pytest.mark.timing
def test_servers_are_measured_from_outside_at_their_own_port() -> None:
    with http_graph(Vllm=section("aggregated", 2, *WORDS)) as served:
        done = served.cli(*PROFILE, "--small", "--budget", "60s", "--max-num-seqs", "8", timeout_s=300.0)
        assert done.returncode == 0, done.stderr
        document = json.loads(done.stdout)
        engine = document["engines"]["agg"]
        assert (engine["engine"], engine["max_kv_tokens"], engine["context_length"]) == ("http", 16_000, 4096)
        assert engine["max_num_seqs"] == 8
        assert "openai_server.py" in engine["options"]["command"]
        for point in document["points"]:
            assert point["over"] == "http"
            assert set(point["workers"]) == {"dynamo_Vllm", "dynamo_Vllm_1"}
            if point["kind"] == "decode":
                truth_ms = 1000 * (TOKEN_S + SEQ_S * point["requests"])
            else:
                truth_ms = 1000 * (PREFILL_S + TOKEN_S + SEQ_S + PROMPT_TOKEN_S * (point["tokens"] - point["cached"]))
            assert truth_ms - 1.0 <= point["mean_ms"] <= truth_ms * 1.1 + OVERHEAD_MS, point
        assert {point["kind"] for point in document["points"]} == {"prefill", "cached", "decode"}
        assert document["certificate"]["trace"], document["certificate"]
        assert read_profile(str(served.cwd / "out")).decode.max_kv_tokens == 16_000


def test_what_a_server_does_not_say_is_asked_for_by_its_option() -> None:
    with http_graph(Vllm=section("aggregated", 1)) as served:
        done = served.cli(*PROFILE, timeout_s=200.0)
        assert done.returncode == 1, (done.stdout, done.stderr)
        assert "dynamo_Vllm does not say how many tokens its KV cache holds" in done.stderr
        assert "--kv-tokens N and --max-num-seqs N" in done.stderr
