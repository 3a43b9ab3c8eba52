"""Notes of `dynamo status`: each once, with a count, for as long as its cause lasts."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from dynamo_local.core.notes import KEPT, NEWS_KEPT_S, About, Ailing, Elsewhere, Note, Over, Trouble, noted, still_due
from dynamo_local.core.types import WorkerState


@dataclass
class Worker:
    """All that a note asks of one."""

    state: WorkerState


def told(*each: tuple[str, About]) -> tuple[Note, ...]:
    """The notes after all of these, a second apart."""
    notes: tuple[Note, ...] = ()
    for n, (text, about) in enumerate(each):
        notes = noted(notes, text, about, float(n))
    return notes


def test_what_is_told_again_is_counted_and_comes_last() -> None:
    notes = told(("it broke", None), ("another thing", None), ("it broke", None))
    assert [(note.text, note.count, note.first_s, note.last_s) for note in notes] == [
        ("another thing", 1, 1.0, 1.0),
        ("it broke", 2, 0.0, 2.0),
    ]


def test_of_a_trouble_there_is_one_note_with_the_latest_words() -> None:
    disk = Trouble("disk")
    (note,) = told(("3 events wait", disk), ("5 events wait", disk))
    assert (note.text, note.count) == ("5 events wait", 2)


def test_a_trouble_is_noted_until_it_is_over() -> None:
    notes = told(("no disk", Trouble("disk")), ("no driver", Trouble("driver")))
    assert still_due(notes, {}, 1e9) == notes
    notes = noted(notes, "there is a disk again", Over("disk"), 2.0)
    assert [note.text for note in notes] == ["no driver"]


@pytest.mark.parametrize("state", list(WorkerState))
def test_a_note_of_a_worker_goes_when_it_is_ready_or_has_left(state: WorkerState) -> None:
    notes = told(("W was killed", Ailing("W")), ("V was killed", Ailing("V")))
    left = still_due(notes, {"W": Worker(state), "V": Worker(WorkerState.CRASHED)}, 1e9)
    well = state in (WorkerState.READY, WorkerState.EXITED)
    assert [note.text for note in left] == [*([] if well else ["W was killed"]), "V was killed"]
    assert still_due(notes, {}, 1.0) == ()


def test_news_go_some_time_after_they_were_told_last() -> None:
    notes = told(("3 requests were cut", None), ("3 requests were cut", None))
    assert still_due(notes, {}, 1.0 + NEWS_KEPT_S - 0.1) == notes
    assert still_due(notes, {}, 1.0 + NEWS_KEPT_S) == ()


def test_what_the_status_shows_elsewhere_is_no_note() -> None:
    assert told(("GPU 3 is quarantined", Elsewhere())) == ()


def test_the_oldest_go_where_there_are_too_many() -> None:
    notes = told(*((f"thing {n}", None) for n in range(KEPT + 2)))
    assert [notes[0].text, len(notes)] == ["thing 2", KEPT]
