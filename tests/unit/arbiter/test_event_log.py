"""The event log: written by one, read by anybody, whatever happens to the file."""

from __future__ import annotations

import asyncio
import errno
import itertools
import json
import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dynamo_local.arbiter.event_log import (
    EventLog,
    EventLogUnwritable,
    EventRecorder,
    EventTail,
    RunRecords,
    event_log_path,
    read,
    record_of,
)
from dynamo_local.core.fleet.effects import Commit, Spawn
from dynamo_local.core.fleet.events import Change, Event, RevokeFailed, Scale
from dynamo_local.core.fleet.fleet import Fleet
from dynamo_local.core.fleet.lifecycle import Transition, apply
from dynamo_local.core.fleet.lifecycle import TransitionKind as K
from dynamo_local.core.fleet.step import step
from dynamo_local.core.types import WorkerState
from dynamo_local.system.json_lines import Record
from tests.fakes.arbiter.fleet_views import fleet, lease_of, name, pid_of
from tests.fakes.arbiter.told import Told

NAME = "dynamo_VllmWorker"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where the log of a namespace is."""
    return event_log_path(tmp_path)


def record(n: int = 0, *, name: str = NAME) -> dict[str, Any]:
    """An event that can be told by its time."""
    return happened(K.DRAIN_REQUESTED, "scale:ab12", time_s=float(n), name=name, reason="scale -1")


def happened(kind: K, cause: str, *, time_s: float = 0.0, name: str = NAME, **details: Any) -> dict[str, Any]:
    """The record of what happened to a worker that was ready."""
    after = apply(WorkerState.READY, kind)
    return record_of(Transition(name, "VllmWorker", WorkerState.READY, after, kind, cause, details), time_s=time_s)


def numbers(records: list[Record]) -> list[int]:
    """Their `seq`s."""
    return [record["seq"] for record in records]


def test_a_record_has_the_cause_both_states_and_the_events_own_fields() -> None:
    assert record(7) == {
        "time": 7.0,
        "watcher_name": NAME,
        "component": "VllmWorker",
        "event": "DrainRequested",
        "from": "ready",
        "to": "draining",
        "stimulus_id": "scale:ab12",
        "reason": "scale -1",
    }


def test_records_are_numbered_and_come_back_in_order(path: Path) -> None:
    log = EventLog(path)
    log.append([record(1), record(2)])
    log.append([record(3)])
    assert [(found["seq"], found["time"]) for found in read(path)] == [(1, 1.0), (2, 2.0), (3, 3.0)]
    assert path.stat().st_mode & 0o777 == 0o600
    assert len(path.read_text().splitlines()) == 3


def test_nothing_written_is_nothing_read(path: Path) -> None:
    EventLog(path).append([])
    assert read(path) == []
    assert not path.exists()


def test_numbers_go_on_from_one_arbiter_to_the_next(path: Path) -> None:
    """The log outlives the run, rotation included: `dynamo events -f` must not see a number twice."""
    EventLog(path).append([record(), record()])
    EventLog(path).append([record()])
    os.replace(path, path.with_name("events.jsonl.1"))
    EventLog(path).append([record()])
    assert numbers(read(path)) == [1, 2, 3, 4]


def test_reading_can_be_narrowed(path: Path) -> None:
    """Since a number, the last so many, of some workers: the last so many *of those*."""
    EventLog(path).append([record(n, name="even" if n % 2 == 0 else "odd") for n in range(1, 11)])
    assert numbers(read(path, since_seq=8)) == [9, 10]
    assert numbers(read(path, last=3)) == [8, 9, 10]
    assert numbers(read(path, last=3, of={"odd"})) == [5, 7, 9]
    assert read(path, last=0) == []


def test_the_file_is_rotated_by_size_and_no_event_is_lost_before_its_time(path: Path) -> None:
    log = EventLog(path, max_bytes=1000, kept=3)
    for n in range(1, 41):
        log.append([record(n)])
    found = numbers(read(path))
    assert found == list(range(found[0], 41))
    assert len(found) > 12
    files = sorted(file.name for file in path.parent.iterdir())
    assert files == ["events.jsonl", "events.jsonl.1", "events.jsonl.2", "events.jsonl.3"]
    assert all(file.stat().st_size <= 1000 for file in path.parent.iterdir())


def test_a_half_written_last_line_is_left_out_and_stays_alone(path: Path) -> None:
    EventLog(path).append([record(1)])
    with path.open("a") as file:
        file.write('{"seq": 2, "time": 2.0, "watch')
    assert numbers(read(path)) == [1]
    EventLog(path).append([record(3)])
    assert [found["time"] for found in read(path)] == [1.0, 3.0]


@pytest.mark.parametrize("line", ["", "null", "[]", "{}", "not json", '{"seq": "1"}', "\x00\xff", '{"seq": 1}'])
def test_lines_that_are_no_records_are_left_out(path: Path, line: str) -> None:
    EventLog(path).append([record(1)])
    with path.open("a") as file:
        file.write(line + "\n")
    EventLog(path).append([record(2)])
    assert [found["time"] for found in read(path)] == [1.0, 2.0]


def test_a_full_disk_keeps_the_events_for_later(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = EventLog(path)
    log.append([record(1)])
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, block: real(fd, block[:40]))
    with pytest.raises(EventLogUnwritable, match=r"2 events wait to be written \(No space left on device\)"):
        log.append([record(2), record(3)])
    assert path.read_text().count("\n") == 1
    assert path.read_text().endswith("\n")

    def full(_fd: int, _block: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(EventLogUnwritable, match="3 events wait"):
        log.append([record(4)])
    monkeypatch.setattr(os, "write", real)
    log.append([])
    assert [(found["seq"], found["time"]) for found in read(path)] == [(n, float(n)) for n in range(1, 5)]


def test_a_link_in_its_place_is_not_followed(path: Path, tmp_path: Path) -> None:
    """The log never writes to a file that somebody else chose."""
    victim = tmp_path / "victim"
    victim.write_text("")
    path.symlink_to(victim)
    with pytest.raises(EventLogUnwritable):
        EventLog(path).append([record()])
    assert victim.read_text() == ""


def test_appends_from_several_threads_are_whole_and_numbered_once(path: Path) -> None:
    log = EventLog(path, max_bytes=20_000, kept=3)
    threads = [threading.Thread(target=lambda: [log.append([record(), record()]) for _ in range(20)]) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert numbers(read(path)) == list(range(1, 201))


def test_an_event_with_a_lone_surrogate_is_written(path: Path) -> None:
    event = happened(K.DRAIN_REQUESTED, "x", reason="bad \udcff byte")
    EventLog(path).append([event])
    assert [found["reason"] for found in read(path)] == ["bad ? byte"]


# --- following -------------------------------------------------------------------------------------


def test_a_tail_gives_each_event_once_as_it_comes(path: Path) -> None:
    tail = EventTail(path, 0)
    assert tail.poll() == []
    log = EventLog(path)
    log.append([record(), record()])
    assert numbers(tail.poll()) == [1, 2]
    assert tail.poll() == []
    line = json.dumps({"seq": 3, **record()}) + "\n"
    with path.open("a") as file:
        file.write(line[:30])
    assert tail.poll() == []
    with path.open("a") as file:
        file.write(line[30:])
    assert numbers(tail.poll()) == [3]


def test_a_tail_begins_after_what_was_shown_already(path: Path) -> None:
    """`dynamo events -l 5 -f` shows nothing twice."""
    EventLog(path).append([record() for _ in range(5)])
    tail = EventTail(path, 5)
    assert tail.poll() == []
    EventLog(path).append([record()])
    assert numbers(tail.poll()) == [6]


def test_a_tail_survives_rotations_between_two_polls(path: Path) -> None:
    log = EventLog(path, max_bytes=600, kept=3)
    tail = EventTail(path, 0)
    found: list[int] = []
    for batch in (1, 1, 1, 1, 4, 1, 1, 5, 1):
        for _ in range(batch):
            log.append([record()])
        found += numbers(tail.poll())
    assert found == list(range(1, 17))


def test_a_tail_survives_a_deleted_log(path: Path) -> None:
    EventLog(path).append([record() for _ in range(5)])
    tail = EventTail(path, 0)
    assert len(tail.poll()) == 5
    path.unlink()
    assert tail.poll() == []
    EventLog(path).append([record(1)])
    assert numbers(tail.poll()) == [1]


def test_a_tail_survives_a_truncated_log(path: Path) -> None:
    log = EventLog(path)
    log.append([record() for _ in range(5)])
    tail = EventTail(path, 0)
    tail.poll()
    path.write_text("")
    log.append([record()])
    assert numbers(tail.poll()) == [6]


def test_null_fields_of_an_event_are_kept_as_null(path: Path) -> None:
    event = happened(K.PROCESS_EXITED, "exit:1", exit_code=None)
    EventLog(path).append([event])
    assert read(path)[0]["exit_code"] is None


# --- the arbiter's end -----------------------------------------------------------------------------


class Recorded:
    """A recorder on a real file, at a wall clock that goes on by a second per look."""

    def __init__(self, path: Path) -> None:
        self.told = Told()
        self.seconds = itertools.count(1)
        self.recorder = EventRecorder(EventLog(path), lambda: float(next(self.seconds)), self.told)

    async def step(self, fleet: Fleet, event: Event) -> None:
        """Let the machine take a step, and log it as the arbiter does."""
        _, effects, _ = step(fleet, event, 50.0)
        (commit,) = (each for each in effects if isinstance(each, Commit))
        await self.recorder.append(commit, effects)


async def test_a_step_is_logged_with_what_is_done_about_each_worker(path: Path) -> None:
    order = Scale(stimulus_id="scale:ab12", component="VllmWorker", target=Change(1, relative=False))
    await Recorded(path).step(fleet("ready", "ready", "ready"), order)
    records = read(path)
    assert [(each["watcher_name"], each["event"], each["stimulus_id"]) for each in records] == [
        (name(2), "DrainRequested", "scale:ab12"),
        (name(1), "DrainRequested", "scale:ab12"),
    ]
    assert [each["instructions"] for each in records] == [[f"revoke {lease_of(2)}"], [f"revoke {lease_of(1)}"]]
    assert [each["time"] for each in records] == [1.0, 1.0]  # one step is one moment


async def test_what_is_ordered_without_an_event_is_logged_beside_the_events(path: Path) -> None:
    """Its lease could not be revoked, so it is asked by SIGTERM: it drains as before. `read` gives changes alone."""
    failed = RevokeFailed(stimulus_id="etcd:1f", name=name(1), lease=lease_of(1), why="away")
    await Recorded(path).step(fleet("ready", "draining"), failed)
    assert read(path) == []
    (found,) = read(path, asides=True)
    assert (found["seq"], found["watcher_name"], found["from"], found["to"]) == (1, name(1), "draining", "draining")
    assert (found["event"], found["stimulus_id"]) == ("RevokeFailed", "etcd:1f")
    assert found["instructions"] == [f"SIGTERM {pid_of(1)}"]


async def test_two_events_of_one_step_have_the_instructions_once(path: Path) -> None:
    both = Commit((name(1),), tuple(_transition(event) for event in ("first", "second")))
    await Recorded(path).recorder.append(both, [both, Spawn(name(1), "first")])
    told = [(each["event"], each["instructions"]) for each in read(path)]
    assert told == [("DrainRequested", ["spawn"]), ("DrainRequested", [])]


def _transition(cause: str) -> Transition:
    kind = K.DRAIN_REQUESTED
    return Transition(name(1), "VllmWorker", WorkerState.READY, WorkerState.DRAINING, kind, cause, {"reason": ""})


async def test_steps_and_other_records_are_written_in_the_order_in_which_they_came(path: Path) -> None:
    recorded = Recorded(path)
    commit = Commit((name(1),), (_transition("first"),))
    await asyncio.gather(
        recorded.recorder.append(commit, [commit]),
        recorded.recorder.record(record(7, name="dynamo_follow")),
        recorded.recorder.append(Commit((name(1),), (_transition("third"),)), []),
        recorded.recorder.append(Commit((name(1),)), []),
    )
    records = read(path)
    assert [each["stimulus_id"] for each in records] == ["first", "scale:ab12", "third"]
    assert numbers(records) == [1, 2, 3]


async def test_events_that_cannot_be_written_are_told_and_come_later(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "events.jsonl"
    recorded = Recorded(path)
    (tmp_path / "logs").write_text("a file, where the folder should be")
    commit = Commit((name(1),), (_transition("first"),))
    await recorded.recorder.append(commit, [commit])
    assert "1 event" in recorded.told[0]
    (tmp_path / "logs").unlink()
    (tmp_path / "logs").mkdir()
    await recorded.recorder.append(Commit((name(1),), (_transition("second"),)), [])
    assert [each["stimulus_id"] for each in read(path)] == ["first", "second"]
    assert recorded.told[1:] == ["the event log is written again"]
    assert recorded.told.notes == []


@pytest.fixture
def records(tmp_path: Path) -> RunRecords:
    """Those of an arbiter of namespace `ns`, which is we ourselves."""
    deployment: Any = SimpleNamespace(
        graph=SimpleNamespace(namespace="ns", target="g:F"), paths=SimpleNamespace(logs=tmp_path), run_id="01J"
    )
    return RunRecords(deployment, EventRecorder(EventLog(event_log_path(tmp_path)), lambda: 7.0, Told()), lambda: 7.0)


def written(folder: Path) -> list[tuple[str, int | None]]:
    """The event, and the pid of an arbiter that was killed before it."""
    return [(each["event"], each.get("killed_pid")) for each in read(event_log_path(folder))]


async def test_a_run_says_who_runs_it_and_how_it_ended(records: RunRecords, tmp_path: Path) -> None:
    await records.began(adopted=False)
    await records.ended("W died; the end of its log:\n  | boom", 1, ours=True)
    began, ended = read(event_log_path(tmp_path))
    assert (began["run_id"], began["arbiter_pid"], began["target"], began["time"]) == ("01J", os.getpid(), "g:F", 7.0)
    assert (ended["event"], ended["reason"], ended["exit_code"]) == ("RunEnded", "W died; the end of its log:", 1)


async def test_an_arbiter_that_wrote_no_end_is_named_by_the_next(records: RunRecords, tmp_path: Path) -> None:
    await records.began(adopted=False)
    await records.began(adopted=True)
    await records.ended("no etcd", 1, ours=False)
    await records.began(adopted=True)
    await records.ended("dynamo down", 0, ours=True)
    await records.began(adopted=False)
    assert written(tmp_path) == [
        ("RunStarted", None),
        ("RunAdopted", os.getpid()),
        ("RunNotAdopted", None),
        ("RunAdopted", None),
        ("RunEnded", None),
        ("RunStarted", None),
    ]
