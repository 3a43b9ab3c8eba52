"""Reading traces: what is taken, and what is refused by file, line and field."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from dynamo_local.simulator.trace import TraceRequest, block_keys, read_trace, write_trace
from dynamo_local.system import json_lines as lines
from dynamo_local.system.json_lines import BadTrace, read_rows

GOOD = {"timestamp": 1000, "input_length": 1100, "output_length": 5, "hash_ids": [7, 8, 9]}


def written(folder: Path, *rows: object) -> Path:
    path = folder / "trace.jsonl"
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def test_times_are_seconds_after_the_first_request(tmp_path: Path) -> None:
    path = written(tmp_path, GOOD, {**GOOD, "timestamp": 3500.5, "hash_ids": None}, "")
    assert read_trace(path) == [
        TraceRequest(0.0, 1100, 5, (7, 8, 9)),
        TraceRequest(2.5005, 1100, 5, ()),
    ]


def test_hash_ids_may_be_absent_and_files_gzipped(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"timestamp": 0, "input_length": 3, "output_length": 1}\n'))
    assert read_trace(path) == [TraceRequest(0.0, 3, 1)]


def test_limit_and_speed(tmp_path: Path) -> None:
    path = written(tmp_path, GOOD, {**GOOD, "timestamp": 3000}, {**GOOD, "timestamp": "never read"})
    assert [request.at_s for request in read_trace(path, limit=2, speed=4)] == [0.0, 0.5]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({**GOOD, "timestamp": "soon"}, "timestamp must be a number of milliseconds"),
        ({**GOOD, "timestamp": True}, "timestamp must be a number"),
        ({**GOOD, "timestamp": float("nan")}, "timestamp must be a number"),
        ({**GOOD, "timestamp": 10}, "timestamp 10 is before the 1000 of the line before"),
        ({**GOOD, "timestamp": -1}, "timestamp must be 0 or more"),
        ({**GOOD, "input_length": 0}, "input_length must be a whole number of tokens, 1 or more, not 0"),
        ({**GOOD, "input_length": 1.5}, "input_length must be a whole number"),
        ({**GOOD, "output_length": None}, "output_length must be a whole number"),
        ({**GOOD, "hash_ids": 4}, "hash_ids must be a list"),
        ({**GOOD, "hash_ids": [1, "x"]}, 'hash_ids must hold whole numbers, not "x"'),
        ({"timestamp": 1000, "output_length": 1}, "input_length is missing"),
        ([1, 2], "a request is a JSON object"),
        ('{"timestamp": 10', "this is no JSON"),
    ],
)
def test_a_bad_line_is_named_with_file_line_and_field(tmp_path: Path, row: object, words: str) -> None:
    path = written(tmp_path, GOOD, row)
    with pytest.raises(BadTrace) as caught:
        read_trace(path)
    assert words in str(caught.value)
    assert f"{path}, line 2" in str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("data", [b"", b"\n\n"])
def test_a_trace_without_requests_is_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "empty.jsonl"
    path.write_bytes(data)
    with pytest.raises(BadTrace, match="holds no request"):
        read_trace(path)


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadTrace, match="there is no such file"):
        read_trace(tmp_path / "nowhere.jsonl")
    broken = tmp_path / "broken.jsonl.gz"
    broken.write_bytes(b"not gzip at all")
    with pytest.raises(BadTrace, match=r"broken\.jsonl\.gz cannot be read"):
        read_trace(broken)
    broken.write_bytes(gzip.compress(b"x" * 1000)[:-20])
    with pytest.raises(BadTrace, match="cannot be read"):
        read_trace(broken)


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
def test_what_is_written_is_read_back_and_has_the_same_bytes_again(tmp_path: Path, name: str) -> None:
    rows = [TraceRequest(0.0, 1, 1), TraceRequest(1.5005, 1100, 5, (7, 8, 9)), TraceRequest(1.5005, 3, 2, (7,))]
    files = [tmp_path / "one" / name, tmp_path / "two" / name]
    for file in files:
        file.parent.mkdir()
        assert write_trace(file, iter(rows)) == 3
        assert read_trace(file) == rows
        assert [path.name for path in file.parent.iterdir()] == [name]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_an_old_trace_stays_until_the_new_one_is_whole(tmp_path: Path) -> None:
    path = written(tmp_path, GOOD)

    def interrupted() -> Iterator[TraceRequest]:
        yield TraceRequest(0.0, 1, 1)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_trace(path, interrupted())
    assert len(read_trace(path)) == 1
    assert read_trace(path)[0].input_length == GOOD["input_length"]
    assert list(tmp_path.iterdir()) == [path]


def test_a_trace_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    with pytest.raises(BadTrace, match=r"nowhere/t\.jsonl cannot be written: No such file"):
        write_trace(tmp_path / "nowhere" / "t.jsonl", [])


def test_block_keys_are_those_of_full_blocks_within_the_prompt() -> None:
    """Two ids of 512 tokens cover 1,000 of 1,100 tokens' blocks of 64: 16 keys, though 17 blocks are full."""
    keys = block_keys((3, 5), 1100, 64)
    assert list(keys) == [*range(24, 32), *range(40, 48)]
    assert list(block_keys((3, 5), 600, 64)) == [*range(24, 32), 40]
    assert list(block_keys((), 600, 64)) == []


# --- trace lines
# Lines of traces that nobody wrote by hand: they are refused at the cost of one line, not of a machine.


def test_a_line_without_an_end_is_refused_before_all_of_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "LINE_BYTES_MAX", 1000)
    file = tmp_path / "t.jsonl.gz"
    file.write_bytes(gzip.compress(b"{}\n" + b" " * 100_000))
    rows = read_rows(file)
    assert next(rows).fields == {}
    with pytest.raises(BadTrace, match="a line of more than 1,000 bytes"):
        next(rows)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("[" * 100_000, "this is no JSON"),
        ('{"n": 1' + "0" * 5000 + "}", "this is no JSON"),
        ('{"n": 10000000000}', "no request has more than 1,000,000,000"),
        ('{"n": 1.0}', "n must be a whole number of tokens"),
    ],
    ids=["deep", "long number", "large number", "fraction"],
)
def test_nonsense_is_a_refusal_and_no_traceback(tmp_path: Path, line: str, words: str) -> None:
    file = tmp_path / "t.jsonl"
    file.write_text(line)
    with pytest.raises(BadTrace, match=words):
        next(read_rows(file)).tokens("n")


def test_a_time_too_large_for_a_number_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "t.jsonl"
    file.write_text('{"a": 1' + "0" * 400 + ', "b": 1e999}')
    row = next(read_rows(file))
    for name in ("a", "b"):
        with pytest.raises(BadTrace, match=f"{name} must be a number of milliseconds"):
            row.milliseconds(name)
