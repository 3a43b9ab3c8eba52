"""When a line was written, and lines of several processes by time."""

from __future__ import annotations

from datetime import datetime, timedelta

import pytest

from dynamo_local.errors import BadInput
from dynamo_local.system.log_files import merged, since, timed, written_at

NOW = datetime(2026, 3, 1, 14, 30).astimezone()
AT = datetime(2026, 3, 1, 14, 5, 21).astimezone()


@pytest.mark.parametrize(
    ("line", "at_s"),
    [
        ("2026-03-01 14:05:21,250 INFO dynamo_local.worker: ready", AT.timestamp() + 0.25),
        ("[26304] 2026/03/01 14:05:21.250000 [INF] Starting nats-server", AT.timestamp() + 0.25),
        ("INFO 03-01 14:05:21 [core.py:58] Initializing a V1 LLM engine", AT.timestamp()),
        ("(EngineCore_0 pid=7) WARNING 03-01 14:05:21 [core.py:58] slow", AT.timestamp()),
        ("[2026-03-01 14:05:21] server_args=ServerArgs(...)", AT.timestamp()),
        ('{"level":"warn","ts":"2026-03-01T14:05:21.250Z","caller":"auth/store.go:1220"}', 1772373921.25),
        ("\x1b[2m2026-03-01T14:05:21.250000Z\x1b[0m \x1b[32m INFO\x1b[0m frontend", 1772373921.25),
        ("2026-03-01T16:05:21+0200 INFO x", 1772373921.0),
    ],
)
def test_the_time_of_a_line_is_read_however_its_process_writes_it(line: str, at_s: float) -> None:
    assert written_at(line, NOW) == at_s


@pytest.mark.parametrize(
    "line",
    [
        "",
        "Traceback (most recent call last):",
        "2026-02-31 14:05:21 x",
        "x" * 200 + "2026-03-01 14:05:21",
        "INFO 03-01",
    ],
)
def test_a_line_without_a_time_has_none(line: str) -> None:
    assert written_at(line, NOW) is None


def test_a_day_without_a_year_is_the_last_one_that_has_been() -> None:
    january = datetime(2027, 1, 2).astimezone()
    assert written_at("INFO 12-31 23:59:59 x", january) == datetime(2026, 12, 31, 23, 59, 59).astimezone().timestamp()


def test_a_line_without_a_time_belongs_to_the_one_before() -> None:
    lines = ["a banner", "2026-03-01 14:05:21 ERROR it failed", "Traceback", "2026-03-01 14:05:22 INFO on"]
    at_s = AT.timestamp()
    assert list(timed(lines, NOW, 7.0)) == list(zip([at_s, at_s, at_s, at_s + 1.0], lines, strict=True))
    assert list(timed(["no", "times"], NOW, 7.0)) == [(7.0, "no"), (7.0, "times")]


def test_lines_are_merged_by_time_and_each_process_s_own_keep_their_order() -> None:
    streams = {"a": [(1.0, "a1"), (4.0, "a2"), (2.0, "a3")], "b": [(3.0, "b1"), (5.0, "b2")]}
    assert list(merged(streams)) == [("a", "a1"), ("b", "b1"), ("a", "a2"), ("a", "a3"), ("b", "b2")]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("90s", NOW - timedelta(seconds=90)),
        ("10m", NOW - timedelta(minutes=10)),
        ("1h30m", NOW - timedelta(hours=1.5)),
        ("2d", NOW - timedelta(days=2)),
        ("14:05", datetime(2026, 3, 1, 14, 5).astimezone()),
        ("14:05:21", AT),
        ("23:00", datetime(2026, 2, 28, 23, 0).astimezone()),
        ("2026-03-01", datetime(2026, 3, 1).astimezone()),
        ("2026-03-01 14:05:21", AT),
        ("2026-03-01T14:05:21+00:00", datetime.fromisoformat("2026-03-01T14:05:21+00:00")),
    ],
)
def test_since_is_how_long_ago_or_when(text: str, expected: datetime) -> None:
    assert since(text, NOW) == expected.timestamp()


@pytest.mark.parametrize("text", ["", "10", "-10m", "10x", "nan", "25:00", "tomorrow", "2026-13-01", "1.5h"])
def test_since_refuses_what_it_does_not_understand_and_says_what_it_does(text: str) -> None:
    with pytest.raises(BadInput, match=r"--since .*: say how long ago .90s, 10m"):
        since(text, NOW)


def test_longer_ago_than_there_is_time_is_everything() -> None:
    assert since("9999999999d", NOW) == 0.0
