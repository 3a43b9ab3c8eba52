"""`dynamo profile` of Dynamo 1.x's mocker: measured from outside, through Dynamo's own frontend."""

from __future__ import annotations

import json

import pytest

from dynamo_local.profile.reading import read_profile
from tests.dynamo1x.dynamo_graphs import graph

pytestmark = [pytest.mark.full, pytest.mark.timeout(700)]


def test_its_workers_are_measured_through_its_frontend(tmp_path) -> None:
    words = ("--small", "--budget", "40s", "--context-length", "4096", "--no-actions", "--json")
    with graph("agg") as served:
        done = served.ok("profile", "-f", "agg.yaml", "-o", str(tmp_path), "-n", "dynamo", *words, timeout_s=600.0)
        document = json.loads(done)
    assert {point["over"] for point in document["points"]} == {"http"}
    assert {each["engine"] for each in document["engines"].values()} == {"dynamo-1x"}
    assert document["engines"].keys() == {"agg"}
    prompts = sorted((p["tokens"], p["mean_ms"]) for p in document["points"] if p["kind"] == "prefill")
    assert prompts[-1][1] > prompts[0][1]
    assert read_profile(str(tmp_path)).decode.max_kv_tokens > 0
