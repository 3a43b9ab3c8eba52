"""The graph that is measured: how it starts, and what is seen of it."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from dynamo_local.core.types import WorkerState
from dynamo_local.errors import BadInput
from dynamo_local.measuring.graph import GraphFailed, patiently, told_while, waiting_for
from dynamo_local.state.schema import ComponentEntry, State
from dynamo_local.system.paths import Paths

ENTRIES = {
    "profile_VllmWorker": ComponentEntry(
        watcher_name="profile_VllmWorker", component="VllmWorker", state=WorkerState.STARTING
    ),
    "profile_Processor": ComponentEntry(
        watcher_name="profile_Processor", component="Processor", state=WorkerState.READY
    ),
}


def test_who_is_late_is_named_by_its_short_name():
    state = State(namespace="profile", run_id="run", components=dict(ENTRIES))
    assert waiting_for(state) == "VllmWorker is starting"
    assert waiting_for(None) == "no worker runs yet"


async def test_a_long_start_is_told_of_until_it_is_over(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    paths = Paths.found("profile", os.environ)
    told: list[str] = []
    ready = asyncio.Event()

    async def start() -> str:
        await ready.wait()
        return "ready"

    def tell(text: str) -> None:
        told.append(text)
        if len(told) == 1:
            paths.statefile.parent.mkdir(parents=True, exist_ok=True)
            state = State(namespace="profile", run_id="run", components=dict(ENTRIES))
            paths.statefile.write_text(state.model_dump_json())
        else:
            ready.set()

    assert await told_while(start(), "profile", tell, every_s=0.01) == "ready"
    assert told[0].endswith("no worker runs yet")
    assert told[1].endswith("VllmWorker is starting")


async def test_a_start_that_fails_raises_what_it_raised() -> None:

    async def start() -> None:
        raise BadInput("no such model")

    with pytest.raises(BadInput, match="no such model"):
        await told_while(start(), "profile", lambda _: None, every_s=60.0)


async def test_ctrl_c_ends_the_start_before_it_goes_on() -> None:
    ended = asyncio.Event()

    async def start() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    task = asyncio.create_task(told_while(start(), "profile", lambda _: None, every_s=60.0))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()


# --- looking
# A graph that is measured is looked at, also while its host can hardly answer.


class Arbiter:
    """Answers after so many looks."""

    def __init__(self, silent: int) -> None:
        self.silent = silent
        self.asked = 0

    async def status(self) -> str:
        self.asked += 1
        if self.asked <= self.silent:
            raise GraphFailed(f"did not answer look {self.asked}")
        return "{}"


async def test_an_arbiter_that_does_not_answer_at_once_is_asked_again():
    arbiter = Arbiter(silent=2)
    assert await patiently(arbiter.status, tries=3) == "{}"
    assert arbiter.asked == 3


async def test_one_that_never_answers_is_given_up_with_what_it_said_last():
    with pytest.raises(GraphFailed, match="look 3"):
        await patiently(Arbiter(silent=9).status, tries=3)
