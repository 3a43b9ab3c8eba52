"""Event files are read back; a disk that says no, or is slow, costs points and nothing else."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from tensorboardX.event_file_writer import EventsWriter

from dynamo_local.arbiter import tensorboard
from dynamo_local.arbiter.request import ServeOptions, understand
from dynamo_local.arbiter.tensorboard import ScalarFile, folder_for, missing_library
from dynamo_local.errors import EXIT_BAD_INPUT, ConfigError
from tests.tools.clean_imports import clean_imports
from tests.tools.event_files import named, read_points

NOW = datetime(2026, 3, 7, 14, 5, 9, tzinfo=UTC)


def _until(done: Callable[[], bool], timeout_s: float = 5.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not done():
        assert time.monotonic() < deadline_s, "it did not happen"
        time.sleep(0.002)


def test_points_are_read_back_with_their_step_and_time(tmp_path: Path) -> None:
    file = ScalarFile(tmp_path / "deep" / "folder")
    file.add({"num_gpu": 2, "average_kv_load": 0.25}, step=0, wall_s=1000.5)
    file.add({"num_gpu": 3}, step=7, wall_s=1007.5)
    file.close()
    points = read_points(tmp_path / "deep" / "folder")
    assert named(points, "num_gpu") == [(0, 2.0), (7, 3.0)]
    assert named(points, "average_kv_load") == [(0, 0.25)]
    assert [point.wall_s for point in points] == [1000.5, 1000.5, 1007.5]
    assert file.dropped == 0


def test_two_planners_in_one_second_write_two_files(tmp_path: Path) -> None:
    for value in (1, 2):
        file = ScalarFile(tmp_path)
        file.add({"num_gpu": value}, step=0, wall_s=0.0)
        file.close()
    assert named(read_points(tmp_path), "num_gpu") == [(0, 1.0), (0, 2.0)]


def test_points_are_seen_by_a_reader_while_the_planner_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensorboard, "FLUSH_S", 0.01)
    file = ScalarFile(tmp_path)
    file.add({"num_gpu": 2}, step=0, wall_s=0.0)
    _until(lambda: named(read_points(tmp_path), "num_gpu") == [(0, 2.0)])
    file.close()


def test_what_the_disk_cannot_take_in_time_is_dropped_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = ScalarFile(tmp_path, capacity=2)
    free, entered, write = threading.Event(), threading.Event(), EventsWriter.write_event

    def slow(writer: EventsWriter, event: Any) -> None:
        entered.set()
        assert free.wait(5.0)
        write(writer, event)

    monkeypatch.setattr(EventsWriter, "write_event", slow)
    file.add({"num_gpu": 0}, step=0, wall_s=0.0)
    assert entered.wait(5.0)
    for step in range(1, 5):  # two wait, two find no room: at once, not after a while
        file.add({"num_gpu": step, "num_decode_workers": step}, step=step, wall_s=0.0)
    assert file.dropped == 4
    free.set()
    file.close()
    assert named(read_points(tmp_path), "num_gpu") == [(0, 0.0), (1, 1.0), (2, 2.0)]


def test_a_full_disk_drops_points_and_a_new_file_is_begun_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = ScalarFile(tmp_path, retry_s=0.0)

    def full(_writer: EventsWriter, _event: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(EventsWriter, "write_event", full)
    file.add({"num_gpu": 1}, step=1, wall_s=0.0)
    _until(lambda: file.dropped == 1)
    monkeypatch.undo()
    file.add({"num_gpu": 2}, step=2, wall_s=0.0)
    file.close()
    assert named(read_points(tmp_path), "num_gpu") == [(2, 2.0)]
    assert file.dropped == 1


def test_while_the_disk_is_full_points_are_counted_as_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = ScalarFile(tmp_path, retry_s=3600.0)

    def full(_writer: EventsWriter, _event: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(EventsWriter, "write_event", full)
    for step in range(3):
        file.add({"num_gpu": step, "num_decode_workers": 1}, step=step, wall_s=0.0)
    file.close()
    assert file.dropped == 6


def test_a_folder_that_cannot_be_written_is_bad_input(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"log_dir: .*file/tb cannot be written to") as caught:
        ScalarFile(tmp_path / "file" / "tb")
    assert caught.value.exit_code == EXIT_BAD_INPUT


def test_without_a_log_dir_the_folder_is_beside_the_logs_with_the_start_in_its_name(tmp_path: Path) -> None:
    found = folder_for(None, base=tmp_path / "cwd", logs=tmp_path / "logs", now=NOW)
    assert found == tmp_path / "logs" / "tensorboard" / "0307_140509"


@pytest.mark.parametrize(("log_dir", "folder"), [("tb", "/graph/tb"), ("/abs", "/abs")])
def test_a_log_dir_is_taken_from_the_folder_of_the_graph_and_an_absolute_one_as_it_is(
    log_dir: str, folder: str
) -> None:
    assert folder_for(Path(log_dir), base=Path("/graph"), logs=Path("/logs"), now=NOW) == Path(folder)


def test_without_the_extra_nothing_is_written_and_a_log_dir_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensorboard, "available", lambda: False)
    for log_dir in (None, Path("tb")):
        assert folder_for(log_dir, base=tmp_path, logs=tmp_path, now=NOW) is None
    assert missing_library(None) is None
    assert re.search(r"extra `tensorboard`.*'\.\[tensorboard\]'", missing_library(Path("tb")) or "")


EXAMPLE = Path(__file__).parents[3] / "examples" / "llm"


def _understand(tmp_path: Path, *overrides: str, planner: bool | None) -> None:
    options = ServeOptions(
        "graphs.agg:Frontend", file=EXAMPLE / "configs/agg.yaml", overrides=overrides, planner=planner
    )
    with clean_imports():
        understand(options, {"HOME": str(tmp_path), "XDG_RUNTIME_DIR": str(tmp_path)}, EXAMPLE)


def test_without_the_extra_a_log_dir_does_not_stop_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensorboard, "available", lambda: False)
    _understand(tmp_path, "--Planner.log-dir=tb", planner=True)


def test_without_the_extra_a_planner_without_a_log_dir_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensorboard, "available", lambda: False)
    _understand(tmp_path, planner=True)
    _understand(tmp_path, "--Planner.log-dir=tb", planner=False)  # it does not start
