"""Lines of traces that nobody wrote by hand: they are refused at the cost of one line, not of a machine."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from dynamo_local.system import json_lines as lines
from dynamo_local.system.json_lines import BadTrace, read_rows


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
