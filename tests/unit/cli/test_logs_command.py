"""`dynamo logs`: which processes, which lines, in which order."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from dynamo_local.errors import EXIT_BAD_INPUT, EXIT_NOT_RUNNING, EXIT_OK
from tests.fakes.arbiter.scripted_arbiter import dynamo

FILES = {
    "ns_1_VllmWorker.log": [1, 4],
    "ns_1_VllmWorker_1.log": [2, 5],
    "ns_1_VllmWorkerToo.log": [3],
    "ns_1_etcd.log": [6],
}


@pytest.fixture
def logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The log folder of namespace `ns_1`: each process has written in some minutes after noon. Nothing runs."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("DYN_LOCAL_LOG_DIR", str(tmp_path))
    monkeypatch.setenv("DYN_NAMESPACE", "ns_1")
    folder = tmp_path / "ns_1"
    folder.mkdir()
    for name, minutes in FILES.items():
        (folder / name).write_text("".join(f"2026-03-01 12:{n:02d}:00,000 INFO minute {n}\n" for n in minutes))
    return folder


@pytest.fixture
def shown(
    logs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., list[tuple[str, int]]]:
    """Runs `dynamo logs WORDS…`; the process and the minute of each line."""

    def run(*words: str) -> list[tuple[str, int]]:
        assert dynamo(monkeypatch, "logs", *words) == EXIT_OK
        lines = [line.split() for line in capsys.readouterr().out.splitlines()]
        return [(line[0].strip("[]").removeprefix("ns_1_"), int(line[-1])) for line in lines]

    return run


def test_all_processes_by_time(shown: Callable[..., list[tuple[str, int]]]) -> None:
    assert [minute for _, minute in shown()] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("names", "minutes"),
    [
        (("VllmWorker",), [1, 2, 4, 5]),
        (("VllmWorker_1",), [2, 5]),
        (("ns_1_VllmWorker",), [1, 4]),
        (("etcd", "VllmWorker_1"), [2, 5, 6]),
    ],
)
def test_a_component_is_all_of_its_workers_and_a_worker_is_one(
    shown: Callable[..., list[tuple[str, int]]], names: tuple[str, ...], minutes: list[int]
) -> None:
    assert [minute for _, minute in shown(*names)] == minutes


def test_so_many_lines_of_each_process(shown: Callable[..., list[tuple[str, int]]]) -> None:
    assert shown("-l", "1") == [("VllmWorkerToo", 3), ("VllmWorker", 4), ("VllmWorker_1", 5), ("etcd", 6)]
    assert shown("-l", "0") == []


def test_since_some_time_and_from_the_files_of_earlier_starts(
    logs: Path, shown: Callable[..., list[tuple[str, int]]]
) -> None:
    (logs / "ns_1_etcd.log.1").write_text("2026-03-01 11:59:00 ERROR minute 59\n2026-03-01 12:00:30 INFO minute 0\n")
    assert shown("etcd", "--since", "2026-03-01 12:00") == [("etcd", 0), ("etcd", 6)]
    assert shown("--since", "2026-03-01 12:04") == [("VllmWorker", 4), ("VllmWorker_1", 5), ("etcd", 6)]
    assert shown("--since", "2026-03-01 11:00", "-l", "1", "etcd") == [("etcd", 6)]
    assert shown("etcd") == [("etcd", 59), ("etcd", 0), ("etcd", 6)]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("Vllm",), "no process named 'Vllm'; there are: ns_1_VllmWorker, "),
        (("--since", "yesterday"), "--since yesterday: say how long ago"),
        (("-l", "-3"), "-3 is not in the range"),
    ],
)
def test_what_cannot_be_shown_is_one_line(
    logs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], said: str
) -> None:
    assert dynamo(monkeypatch, "logs", *words) == EXIT_BAD_INPUT
    assert said in capsys.readouterr().err


def test_a_namespace_without_logs_names_those_that_have_some(
    logs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert dynamo(monkeypatch, "logs", "-n", "other") == EXIT_NOT_RUNNING
    assert capsys.readouterr().err.rstrip().endswith("there are some of: ns_1")
