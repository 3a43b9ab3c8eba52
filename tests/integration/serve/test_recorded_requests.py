"""`Frontend: {record-trace: FILE}` on a real graph: what it holds, and `dynamo simulate --as-it-was` of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dynamo_local.simulator.trace import read_trace
from tests.drivers.served import AGG, MODEL, Served, auntil

pytestmark = pytest.mark.infra
SECRET = "zebra crossing"


@pytest.mark.full
async def test_requests_are_recorded_and_simulated_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    words = (f"--Frontend.record-trace={path}", "--ttft", "300")
    with Served(*words, target=AGG) as served:
        served.start()
        async with served.client() as client:
            for n in range(3):
                message = {"role": "user", "content": f"{SECRET} " * 40 + str(n)}
                await client.chat.completions.create(model=MODEL, messages=[message], max_tokens=5)  # type: ignore[list-item]
        await auntil(
            lambda: path.exists() and path.read_text().count("request_end") == 3, what=lambda: list(tmp_path.iterdir())
        )
        text = path.read_text()
        assert "zebra" not in text
        rows = [json.loads(line) for line in text.splitlines()]
        requests = [row["request"] for row in rows if row["event_type"] == "request_end"]
        assert {request["outcome"] for request in requests} == {"success"}
        assert {request["output_tokens"] for request in requests} == {5}
        assert all(0 < request["ttft_ms"] <= request["total_time_ms"] for request in requests)
        first, second, _ = read_trace(path)
        assert first.hash_ids[:-1] == second.hash_ids[:-1]
        out = served.ok("simulate", "--trace", str(path), "--as-it-was")
        assert "as it was: 1 aggregated" in out
        assert "TTFT 300 ms" in out
