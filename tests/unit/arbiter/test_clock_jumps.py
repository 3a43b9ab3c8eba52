"""Somebody sets the time of day: nothing that is decided by time may follow it."""

from __future__ import annotations

import ast
import os
import time
from typing import Any

import pytest

from dynamo_local.arbiter.adoption import Adoption, Found
from dynamo_local.core.fleet.backoff import RestartHistory
from dynamo_local.core.fleet.fleet import Fleet
from dynamo_local.core.types import WorkerState
from dynamo_local.state.schema import ComponentEntry, State
from dynamo_local.system.processes import age_s
from tests.tools.pages import ROOT

FOR_RECORDS_ONLY = {
    "circus_plugins/arbiter.py": "circus wants a wall time for its own `started`, and in the events that it publishes",
    "circus_plugins/guardian.py": "the time of a record, for people",
    "dynamo_local/cli/ls.py": "whether a run ended in the last day, for people",
    "dynamo_local/cli/top.py": "the time of a decision, for people",
    "dynamo_local/cli/doctor/host.py": "whether the clock was set since the boot: that is what it looks for",
    "dynamo_local/clock.py": "it is the clock",
    "dynamo_local/components/openai/app.py": "`created` of a model that no worker serves now",
    "dynamo_local/components/openai/generation.py": "`created` of an answer, as OpenAI's API has it",
    "dynamo_local/components/openai/recorder.py": "when a request came, in a record; what lasted is monotonic",
    "dynamo_local/components/processor.py": "`created` of an adapter's card",
    "dynamo_local/components/vllm_worker.py": "`created` of the model card",
    "dynamo_local/engines/vllm/core_requests.py": "vLLM's `arrival_time`, for its own metrics",
    "dynamo_local/kubernetes/planner.py": "`renewTime` of a lease, for people: a holder's silence "
    "is measured on our own clock",
    "dynamo_local/planner/loop.py": "the time of a decision's record, for people",
    "dynamo_local/transport/load.py": "the age of a report is wrong until the next one, a second later",
    "dynamo_local/transport/prefill_queue.py": "deadlines between processes: what expires is prefilled locally",
    "dynamo_local/arbiter/arbiter_effects.py": "`started_at` of a process, for people",
    "dynamo_local/arbiter/notes.py": "since when something is wrong, for people; until when it is shown, is monotonic",
    "dynamo_local/arbiter/launch.py": "the time of a run's records, for people",
    "dynamo_local/arbiter/composition.py": "it hands the event log the time of an event, for people",
    "dynamo_local/arbiter/planner_following.py": "the time of a record, for people",
    "dynamo_local/system/log_files.py": "whether a log is of a run before; set back, first lines are not shown",
    "dynamo_local/transport/passes.py": "`published_at` of Dynamo's envelope",
    "dynamo_local/arbiter/planner_report_data.py": "the time between two records; an absurd one is left out",
    "dynamo_local/arbiter/planner_report_page.py": "when a decision was made, for people",
    "dynamo_local/arbiter/planner_report_schedule.py": "which decisions a page shows; a jump makes one early or late",
    "dynamo_local/arbiter/tensorboard.py": "the name of a folder, and the x axis of TensorBoard's wall view",
    "state/leads.py": "the name under which a file that cannot be read is put aside",
    "dynamo_local/dashboard/app.py": "the times that a viewer asks for, and the clock that it is shown",
    "dynamo_local/dashboard/collector.py": "the time of a point; a jump is a gap, and waits are monotonic",
    "dynamo_local/dashboard/commands.py": "the times that a person asks for",
    "dynamo_local/dashboard/whatif.py": "which requests are tried again; a jump takes fewer or more",
    "dynamo_local/arbiter/progress.py": "the time of a line; whether a boot report is young, or a log a fortnight old",
}
"""File -> why the time of day is right there, and what a jump does."""

NO_HOST: Any = None
"""Nothing is watched here."""


def _reads_time_of_day(source: str) -> bool:
    """It calls `time.time()` or `wall_s()`, or defines the latter."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and (
            node.attr == "wall_s"
            or (node.attr == "time" and isinstance(node.value, ast.Name) and node.value.id == "time")
        ):
            return True
    return False


def test_the_time_of_day_is_read_for_records_only() -> None:
    """A new use must be looked at: would a jump by a day end, keep or hide something?"""
    files = [*ROOT.glob("dynamo_local/**/*.py"), *ROOT.glob("circus_plugins/*.py"), *ROOT.glob("state/*.py")]
    shown = {path: path.resolve().relative_to(ROOT).as_posix() for path in files}
    assert {name for path, name in shown.items() if _reads_time_of_day(path.read_text())} == FOR_RECORDS_ONLY.keys()


def test_what_an_adopted_worker_has_run_does_not_follow_the_time_of_day(monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes from the kernel's clocks: a day set back or forth makes a worker neither new nor old."""
    before_s = age_s(os.getpid())
    monkeypatch.setattr(time, "time", lambda: 0.0)

    assert 0.0 < before_s <= age_s(os.getpid()) < before_s + 60.0


def test_failures_of_before_a_reboot_are_not_taken_for_ones_to_come() -> None:
    entry = ComponentEntry(
        watcher_name="dynamo_Echo",
        component="Echo",
        state=WorkerState.BACKING_OFF,
        failures_s=[10.0, 90.0, 5000.0],
        failures_streak=3,
    )

    found = Found(State(namespace="dynamo", run_id="01J", components={"dynamo_Echo": entry}), {})
    fleet = Adoption(found, NO_HOST).workers(Fleet("dynamo", ()), now_s=100.0)
    assert fleet.workers["dynamo_Echo"].history == RestartHistory((10.0, 90.0), 3)
