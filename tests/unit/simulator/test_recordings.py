"""Recordings of servers and load generators are traces, and a recording names the fleet that it was made on."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from dynamo_local.cli.main import main
from dynamo_local.simulator.recordings import Fleet, read_fleet
from dynamo_local.simulator.trace import TraceRequest, read_trace
from dynamo_local.system.json_lines import BadTrace


def request_end(at_ms: int, isl: int, osl: int | None, hashes: list[int], size: int = 64) -> dict[str, Any]:
    replay = {"trace_block_size": size, "input_length": isl, "input_sequence_hashes": hashes}
    request = {"request_id": str(at_ms), "output_tokens": osl, "request_received_ms": at_ms, "replay": replay}
    schema = {"schema": "dynamo.request.trace.v1", "event_type": "request_end", "event_time_unix_ms": at_ms + 9}
    return {**schema, "request": request}


def under(row: dict[str, Any], **instances: int) -> dict[str, Any]:
    return {**row, "fleet": instances, "targets": {"ttft_ms": 200.0, "itl_ms": None}}


def written(path: Path, *rows: dict[str, Any]) -> Path:
    text = "".join(f"{json.dumps(row)}\n" for row in rows).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


def test_a_recording_is_sorted_by_arrival_and_shares_blocks_of_512_tokens(tmp_path: Path) -> None:
    first, second = list(range(100, 109)), [*range(100, 108), 7]
    path = written(
        tmp_path / "r.jsonl.gz",
        {"event_type": "request_payload"},
        request_end(3_000, 513, 4, second),
        {"event": request_end(1_000, 530, 2, first)},
        request_end(2_000, 5, None, [1]),
    )
    assert read_trace(path) == [TraceRequest(0.0, 530, 2, (0, 2)), TraceRequest(2.0, 513, 4, (0, 1))]


def test_rotated_files_are_read_before_the_newest(tmp_path: Path) -> None:
    written(tmp_path / "r.jsonl.1", request_end(1_000, 5, 2, [1]))
    path = written(tmp_path / "r.jsonl", request_end(2_000, 6, 2, [2]))
    assert [each.input_length for each in read_trace(path)] == [5, 6]


def test_a_record_that_was_half_written_when_its_writer_was_killed_is_lost_and_not_the_others(tmp_path: Path) -> None:
    whole = [json.dumps({"seq": at, **request_end(at * 1_000, at, 2, [at])}) for at in (1, 2, 3)]
    for half in ("{", '{"se', whole[1][:40]):
        path = tmp_path / "r.jsonl"
        path.write_text("\n".join([half, whole[0], half, whole[2], half]))
        assert [each.input_length for each in read_trace(path)] == [1, 3]
    path.write_text(f"{whole[0]}\nnonsense\n")
    with pytest.raises(BadTrace, match="line 2: this is no JSON"):
        read_trace(path)


def test_the_result_of_vllm_bench_serve_is_a_trace(tmp_path: Path) -> None:
    result = {"input_lens": [7, 9, 8], "output_lens": [3, 4, 0], "start_times": [51.5, 50.0, 52.0], "ttfts": [0.1] * 3}
    path = written(tmp_path / "vllm.json", result)
    assert read_trace(path) == [TraceRequest(0.0, 9, 4), TraceRequest(1.5, 7, 3)]


def test_aiperfs_export_is_a_trace_without_its_warmup_and_failures(tmp_path: Path) -> None:
    def row(start_ns: int, isl: float, **more: Any) -> dict[str, Any]:
        lengths = {"input_sequence_length": isl, "output_sequence_length": 24}
        metrics = {name: {"value": value, "unit": "tokens"} for name, value in lengths.items()}
        metadata = {"request_start_ns": start_ns, "benchmark_phase": more.pop("phase", "profiling")}
        return {"metadata": metadata, "metrics": metrics, "error": None, **more}

    rows = row(10**18, 1, phase="warmup"), row(10**18, 50), row(10**18 + 10**9, 60, error={"code": 500})
    path = written(tmp_path / "profile_export.jsonl", *rows, row(10**18 + 2 * 10**9, 70.0))
    assert read_trace(path) == [TraceRequest(0.0, 50, 24), TraceRequest(2.0, 70, 24)]


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"input_lens": [1], "output_lens": [1]}, "start_times is missing; run `vllm bench serve`"),
        ({"input_lens": [1], "output_lens": [1, 2], "start_times": [0]}, "different lengths"),
        (request_end(1, 5, 2, ["x"]), "input_sequence_hashes must be a list of whole numbers"),  # type: ignore[list-item]
        (request_end(1, 5, None, []), "holds no request that has its lengths"),
        ({"metadata": 5}, "metadata must be an object"),
    ],
)
def test_a_bad_recording_names_the_field(row: dict[str, Any], why: str, tmp_path: Path) -> None:
    with pytest.raises(BadTrace, match=why):
        read_trace(written(tmp_path / "r.jsonl", row))


def test_the_fleet_is_the_one_that_stood_longest(tmp_path: Path) -> None:
    path = written(
        tmp_path / "r.jsonl",
        under(request_end(0, 5, 2, [1]), Frontend=1, Processor=1),
        under(request_end(1_000, 5, 2, [1]), Frontend=1, Processor=1, VllmWorker=2, PrefillWorker=1),
        under(request_end(9_000, 5, 2, [1]), Frontend=1, VllmWorker=3, PrefillWorker=1),
        request_end(10_000, 5, 2, [1]),
    )
    assert read_fleet(path) == Fleet(1, 2, 2, 200.0, None)
    with pytest.raises(BadTrace, match="names no fleet"):
        read_fleet(written(tmp_path / "d.jsonl", request_end(10_000, 5, 2, [1])))


def test_simulate_as_it_was_runs_the_recorded_fleet_under_its_targets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [under(request_end(1_000 * n, 100, 10, [n]), VllmWorker=2) for n in range(5)]
    path = written(tmp_path / "r.jsonl", *rows)
    for words in ([], ["--policy", "load"]):
        monkeypatch.setattr("sys.argv", ["dynamo", "simulate", "--trace", str(path), "--as-it-was", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        out = capsys.readouterr().out
        assert ended.value.code == 0
        assert "as it was: 2 aggregated, changed 0 times" in out
        assert "TTFT 200 ms" in out
        assert ("load from 2 aggregated" in out) == bool(words)
