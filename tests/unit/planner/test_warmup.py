"""Warm-up traces: which files, which formats, which windows; what is wrong is refused in one line."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from dynamo_local.planner.choosing import read_warmup
from dynamo_local.planner.values import Window
from dynamo_local.system.json_lines import BadTrace


def mooncake(at_ms: float, isl: Any = 100, osl: Any = 10) -> dict[str, Any]:
    return {"timestamp": at_ms, "input_length": isl, "output_length": osl}


def dynamo(at_ms: float, isl: Any = 100, osl: Any = 10, **request: Any) -> dict[str, Any]:
    """As Dynamo's request trace has it."""
    ended = {"request_received_ms": at_ms, "output_tokens": osl, "replay": {"input_length": isl}}
    return {
        "schema": "dynamo.request.trace.v1",
        "event_type": "request_end",
        "event_time_unix_ms": at_ms + 5_000,
        "request": {**ended, **request},
    }


def written(file: Path, *rows: Any) -> Path:
    data = "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows).encode()
    file.write_bytes(gzip.compress(data) if file.suffix == ".gz" else data)
    return file


# --- windows -----------------------------------------------------------------------------------


def test_windows_begin_with_the_first_request_and_gaps_are_idle(tmp_path: Path) -> None:
    """At 5, 6, 14 and 36 s, in windows of 10 s; the trace ends within the last one, which is left out."""
    rows = [mooncake(5_000, 100, 10), mooncake(6_000, 200, 30), mooncake(14_000, 50, 5), mooncake(36_000)]
    found = read_warmup(str(written(tmp_path / "t.jsonl", *rows, "")), 10.0)
    assert found == (Window(3, 350 / 3, 15), Window(0, 350 / 3, 15), Window(0, 350 / 3, 15))


def test_a_trace_of_one_window_is_that_window(tmp_path: Path) -> None:
    assert read_warmup(str(written(tmp_path / "t.jsonl", mooncake(0), mooncake(9))), 10.0) == (Window(2, 100, 10),)


def test_only_the_last_windows_are_taken(tmp_path: Path) -> None:
    file = written(tmp_path / "t.jsonl", mooncake(0, 70, 7), mooncake(1e13), mooncake(1e13 + 25_000))
    assert read_warmup(str(file), 10.0, windows_max=4) == (
        Window(0, 70, 7),
        Window(0, 70, 7),
        Window(1, 100, 10),
        Window(0, 100, 10),
    )


# --- formats -----------------------------------------------------------------------------------


def test_dynamo_s_request_ends_count_by_when_they_were_received(tmp_path: Path) -> None:
    """Else by when they ended; other events and the envelope of a file sink are passed over."""
    tool = {"schema": "dynamo.request.trace.v1", "event_type": "tool_end", "event_time_unix_ms": 1}
    rows = [
        dynamo(100_000, 60, 6),
        {"timestamp": 0, "event": dynamo(101_000, 80, 8)},
        tool,
        dynamo(107_000, request_received_ms=None),
        dynamo(125_000),
    ]
    assert read_warmup(str(written(tmp_path / "t.jsonl.gz", *rows)), 10.0) == (Window(2, 70, 7), Window(1, 100, 10))


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (dynamo(1_000), "line 2: this is dynamo.request.trace.v1, and .*line 1 is Mooncake's format"),
        ({"schema": "dynamo.request.trace.v9"}, 'line 2: the schema "dynamo.request.trace.v9" is not known'),
        (mooncake(-1), "line 2: timestamp must be 0 or more, not -1"),
        (mooncake(1, isl=0), "line 2: input_length must be a whole number of tokens, 1 or more, not 0"),
        (mooncake(1, osl="ten"), 'line 2: output_length must be a whole number of tokens, 1 or more, not "ten"'),
        ({"timestamp": 3}, "line 2: input_length is missing; the line has: timestamp"),
        ("{", "line 2: this is no JSON"),
    ],
)
def test_a_bad_line_is_refused_by_file_and_line(tmp_path: Path, row: Any, words: str) -> None:
    with pytest.raises(BadTrace, match=words) as caught:
        read_warmup(str(written(tmp_path / "t.jsonl", mooncake(0), row)), 10.0)
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (dynamo(1, osl=-1), "line 1, in request: output_tokens must be a whole number of tokens, 0 or more, not -1"),
        (dynamo(1, isl=None), "line 1, in request, in replay: input_length must be a whole number"),
        (dynamo(1, replay=3), "line 1, in request: replay must be an object, not 3"),
        (dynamo(1, request_received_ms="x"), "line 1, in request: request_received_ms must be a number"),
    ],
)
def test_a_bad_record_of_dynamo_s_is_refused_by_its_field(tmp_path: Path, row: Any, words: str) -> None:
    with pytest.raises(BadTrace, match=words):
        read_warmup(str(written(tmp_path / "t.jsonl", row)), 10.0)


# --- files -------------------------------------------------------------------------------------


def test_a_folder_and_a_glob_are_one_trace_on_one_clock(tmp_path: Path) -> None:
    written(tmp_path / "b.jsonl", mooncake(0), mooncake(12_000))
    written(tmp_path / "a.jsonl.gz", mooncake(1_000), mooncake(30_000))
    written(tmp_path / "notes.txt", "not a trace")
    expected = (Window(2, 100, 10), Window(1, 100, 10), Window(0, 100, 10))
    assert read_warmup(str(tmp_path), 10.0) == expected
    assert read_warmup(str(tmp_path / "*.jsonl*"), 10.0) == expected


def test_the_same_trace_twice_is_refused(tmp_path: Path) -> None:
    """Rotation leaves both for a moment; every request would count twice."""
    written(tmp_path / "a.jsonl", mooncake(0))
    written(tmp_path / "a.jsonl.gz", mooncake(0))
    with pytest.raises(BadTrace, match=r"a\.jsonl and .*a\.jsonl\.gz, which is the same trace twice"):
        read_warmup(str(tmp_path), 10.0)


def test_two_files_of_two_formats_are_refused(tmp_path: Path) -> None:
    written(tmp_path / "a.jsonl", mooncake(0))
    written(tmp_path / "b.jsonl", dynamo(0))
    with pytest.raises(BadTrace, match="a warm-up has one format"):
        read_warmup(str(tmp_path), 10.0)


@pytest.mark.parametrize("named", ["nowhere.jsonl", "*.jsonl", "."])
def test_where_there_is_no_trace_it_is_said(tmp_path: Path, named: str) -> None:
    with pytest.raises(BadTrace, match="is no file, and no folder or glob of"):
        read_warmup(str(tmp_path / named), 10.0)


def test_a_trace_without_requests_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadTrace, match="holds no request"):
        read_warmup(str(written(tmp_path / "t.jsonl", "", "")), 10.0)
