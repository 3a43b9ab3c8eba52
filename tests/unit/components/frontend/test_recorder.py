"""The request recorder: what it writes, and that a bad disk costs records only."""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from dynamo_local.clock import AsyncioClock
from dynamo_local.components.http_metrics import EndedRequest
from dynamo_local.components.openai.recorder import QUEUED_MAX, PageFeed, Recorder
from dynamo_local.core.routing.estimates import Targets
from dynamo_local.core.traffic import Phases
from dynamo_local.errors import ConfigError
from dynamo_local.simulator.trace import read_trace
from tests.drivers.eventually import eventually

TARGETS = Targets.of_ms(200.0, None)
REQUEST = EndedRequest(
    model="m",
    prompt_tokens=70,
    tokens=3,
    cached_tokens=64,
    ttft_s=0.25,
    itl_s=0.01,
    kv_hit_rate=0.5,
    phases=Phases(0.2),
    gone=False,
    trace={"hashes": [2**63, 5], "worker": 7},
)


def rows(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


async def test_a_record_has_dynamos_fields_and_no_text(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    recorder = Recorder(path, 1 << 20, AsyncioClock(), TARGETS)
    recorder.fleet = {"VllmWorker": 2}
    recorder.ended("id-1", "success", 0.5, REQUEST)
    await recorder.close()
    (ended,) = rows(path)
    assert (ended["fleet"], ended["targets"]) == ({"VllmWorker": 2}, {"ttft_ms": 200.0, "itl_ms": None})
    assert (ended["schema"], ended["event_type"]) == ("dynamo.request.trace.v1", "request_end")
    request = ended["request"]
    assert isinstance(request, dict)
    assert ended["event_time_unix_ms"] == pytest.approx(request.pop("request_received_ms") + 500, abs=1)
    assert request == {
        "request_id": "id-1",
        "model": "m",
        "input_tokens": 70,
        "output_tokens": 3,
        "cached_tokens": 64,
        "prefill_time_ms": 200.0,
        "ttft_ms": 250.0,
        "total_time_ms": 500.0,
        "avg_itl_ms": 10.0,
        "kv_hit_rate": 0.5,
        "outcome": "success",
        "worker": {"decode_worker_id": 7},
        "replay": {"trace_block_size": 64, "input_length": 70, "input_sequence_hashes": [2**63, 5]},
    }
    assert [(each.input_length, each.output_length) for each in read_trace(path)] == [(70, 3)]
    assert path.stat().st_mode & 0o077 == 0


async def test_a_request_whose_tokens_nobody_knows_shares_nothing_and_a_failed_one_is_passed_over_by_replay(
    tmp_path: Path,
) -> None:
    path = tmp_path / "r.jsonl"
    recorder = Recorder(path, 1 << 20, AsyncioClock(), TARGETS)
    recorder.ended("a", "success", 0.5, replace(REQUEST, trace=None))
    recorder.ended("b", "success", 0.5, replace(REQUEST, trace=None))
    recorder.ended("c", "error", 0.5, replace(REQUEST, tokens=0, trace=None))
    recorder.ended("d", "success", 0.5, replace(REQUEST, tokens=0))
    await recorder.close()
    assert [row["event_type"] for row in rows(path)] == ["request_end", "request_end", "request_payload"]
    first, second = read_trace(path)
    assert set(first.hash_ids).isdisjoint(second.hash_ids)


async def test_files_are_rotated_and_bounded(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    for _ in range(7):
        recorder = Recorder(path, 4_000, AsyncioClock(), TARGETS)
        for _ in range(3):
            recorder.ended("id", "success", 0.5, REQUEST)
        await recorder.close()
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == ["r.jsonl", "r.jsonl.1", "r.jsonl.2", "r.jsonl.3"]
    assert sum(file.stat().st_size for file in files) < 8_000


async def test_a_file_that_cannot_be_written_is_said_once_and_nobody_waits(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "d" / "r.jsonl"
    path.parent.mkdir()
    recorder = Recorder(path, 1 << 20, AsyncioClock(), TARGETS)
    path.parent.rmdir()
    with caplog.at_level(logging.INFO, "dynamo_local.requests"):
        for _ in range(4 * QUEUED_MAX):  # the thread takes some meanwhile
            recorder.ended("id", "success", 0.5, REQUEST)
        assert recorder.lost > 0
        await recorder.close()
        # The writer has a machine's whole load to wait for: it may say it after the end.
        await eventually(lambda: any("wait to be written" in message for message in caplog.messages), timeout_s=60.0)
    assert len([message for message in caplog.messages if "wait to be written" in message]) == 1
    assert len([message for message in caplog.messages if "are lost from now on" in message]) == 1


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as found:
        found.bind(str(tmp_path / "page"))
        found.settimeout(5.0)
        yield found


def test_the_page_gets_all_phases_and_who_prefilled(tmp_path: Path, listener: socket.socket) -> None:
    feed = PageFeed(tmp_path / "page", AsyncioClock(), TARGETS)
    feed.ended("id-1", "success", 0.5, replace(REQUEST, routed_s=0.01, phases=Phases(0.15, 0.04, "dynamo_P")))
    feed.ended("id-2", "success", 0.5, replace(REQUEST, phases=None))
    feed.close()
    whole, old = (json.loads(listener.recv(65_536)) for _ in range(2))
    assert whole["phases"] == [
        ["routed", 0.01],
        ["queued", 0.05],
        ["prefilled", 0.15],
        ["handed off", 0.04],
        ["decoded", 0.25],
    ]
    assert whole["prefill_worker"] == "dynamo_P"
    assert (old["phases"], old["prefill_worker"]) == ([["queued", 0.25], ["decoded", 0.25]], None)


def test_a_path_that_cannot_be_a_file_is_told_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="it is no file"):
        Recorder(Path("/dev/full"), 1 << 20, AsyncioClock(), TARGETS)
    with pytest.raises(ConfigError, match=r"record-trace .*there is no folder"):
        Recorder(tmp_path / "away" / "r.jsonl", 1 << 20, AsyncioClock(), TARGETS)
