"""Where benchmarks get their requests: recorded ones where they lie, else generated ones, and a line says which."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.traces import BESIDE, CONVERSATION, FOLDER, conversation, folder, generated
from dynamo_local.errors import BadInput
from dynamo_local.simulator.trace import TraceRequest, write_trace

ROWS = [TraceRequest(0.0, 600, 3, (1, 2)), TraceRequest(1.5, 700, 4, (1, 3))]


def test_a_recorded_hour_is_taken_from_the_folder_that_is_named(tmp_path: Path) -> None:
    write_trace(tmp_path / CONVERSATION, ROWS)
    found = conversation(env={FOLDER: str(tmp_path)})
    assert (found.rows, found.recorded) == (ROWS, True)
    assert found.told == f"recorded requests ({CONVERSATION})"
    assert conversation(1, env={FOLDER: str(tmp_path)}).rows == ROWS[:1]


def test_without_one_the_requests_are_made_and_one_line_says_where_it_can_be_had(tmp_path: Path) -> None:
    found = conversation(20, env={FOLDER: str(tmp_path)})
    assert found.rows == generated("chat", 20).rows
    assert not found.recorded
    assert found.name == "generated requests (chat)"
    assert "https://github.com/kvcache-ai/Mooncake" in found.told
    assert str(tmp_path) in found.told
    assert "\n" not in found.told


def test_a_folder_that_was_named_and_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="is no folder"):
        conversation(env={FOLDER: str(tmp_path / "nowhere")})


def test_unset_it_is_the_folder_beside_the_checkout() -> None:
    assert folder({}) == folder({FOLDER: ""}) == BESIDE
    assert BESIDE.parts[-3:] == ("shared", "data", "traces")
