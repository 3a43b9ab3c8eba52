"""Tests what an apply would change: a pure comparison of two deployments."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dynamo_local.core.differences import Described, Live, differences, planner_goal
from dynamo_local.core.types import GraphSpec, Resources, Role, ServiceSpec

FRONTEND = ServiceSpec("Frontend", Role.FRONTEND, depends=("VllmWorker",), max_workers=1)
WORKER = ServiceSpec(
    "VllmWorker",
    Role.DECODE,
    workers=2,
    resources=Resources(gpu=1),
    envs={"HF_TOKEN": "one"},
    config={"sim": {"speed": 1.0, "seed": 3}, "api_key": "old"},
)
COMMAND = ServiceSpec("Sidecar", Role.OTHER, runtime="none")
RUNNING = Described(GraphSpec("dynamo", "graphs.agg:Frontend", (FRONTEND, WORKER)))
LIVE = Live({"Frontend": 1, "VllmWorker": 2})


def graph(*services: ServiceSpec) -> Described:
    """A deployment of those services."""
    return Described(replace(RUNNING.graph, services=services))


def shown(wanted: Described, live: Live = LIVE, running: Described = RUNNING) -> list[tuple[str, Any, Any]]:
    """Each line as it is printed."""
    return [tuple(line.shown().values()) for line in differences(running, wanted, live).lines]  # type: ignore[misc]


def test_the_same_deployment_differs_in_nothing() -> None:
    found = differences(RUNNING, RUNNING, LIVE)
    assert (found.lines, found.touched, found.refused) == ((), (), ())


def test_options_are_compared_in_depth() -> None:
    """By key; whoever has other options needs new processes, nobody else does."""
    changed = replace(WORKER, config={"sim": {"speed": 2.0, "seed": 3}, "api_key": "old", "router": "kv"})
    assert shown(graph(FRONTEND, changed)) == [("VllmWorker.sim.speed", 1.0, 2.0), ("VllmWorker.router", None, "kv")]
    assert differences(RUNNING, graph(FRONTEND, changed), LIVE).renewed == {"VllmWorker"}


def test_secrets_are_masked_and_their_change_is_told() -> None:
    changed = replace(WORKER, config={**WORKER.config, "api_key": "new"}, envs={"HF_TOKEN": "two", "MODE": "x"})
    assert shown(graph(FRONTEND, changed)) == [
        ("VllmWorker.api_key", "****", "****"),
        ("VllmWorker.ServiceArgs.envs.HF_TOKEN", "****", "****"),
        ("VllmWorker.ServiceArgs.envs.MODE", None, "x"),
    ]


def test_more_gpus_a_worker_need_new_processes_and_deadlines_do_not() -> None:
    wider = graph(FRONTEND, replace(WORKER, resources=Resources(gpu=2)))
    assert differences(RUNNING, wider, LIVE).renewed == {"VllmWorker"}
    later = graph(FRONTEND, replace(WORKER, drain_deadline_s=5.0))
    assert shown(later) == [("VllmWorker.ServiceArgs.drain_deadline_s", None, 5.0)]
    assert differences(RUNNING, later, LIVE).renewed == frozenset()


def test_what_runs_in_a_process_is_renewed_with_it_and_moves_only_at_a_start() -> None:
    """Options of a guest are read by its host's process; whether it is one is chosen when the graph is started."""
    guest = ServiceSpec("Processor", Role.OTHER, config={"router": "random"})
    hosting = graph(replace(FRONTEND, guests=(guest,)), WORKER)
    other = graph(replace(FRONTEND, guests=(replace(guest, config={"router": "slo"}),)), WORKER)
    apart = graph(FRONTEND, guest, WORKER)

    found = differences(hosting, other, LIVE)
    assert [line.shown()["what"] for line in found.lines] == ["Processor.router"]
    assert found.renewed == {"Frontend"}
    (moves,) = differences(hosting, apart, LIVE).refused
    assert moves.startswith("Processor: it runs in Frontend's processes, and the file gives it workers of its own")
    (joins,) = differences(apart, hosting, LIVE).refused
    assert joins.startswith("Processor: it has workers of its own, and the file gives it a place in Frontend's")


def test_workers_are_counted_as_they_are_now() -> None:
    found = differences(RUNNING, RUNNING, Live({"Frontend": 1, "VllmWorker": 3}))
    assert [line.shown() for line in found.lines] == [
        {"what": "VllmWorker.ServiceArgs.workers", "before": 3, "after": 2}
    ]
    assert found.counts == {"VllmWorker": 2}


def test_a_planners_number_of_workers_stands_until_somebody_writes_another() -> None:
    """Else each apply would undo what it did."""
    live = Live({"Frontend": 1, "VllmWorker": 5}, planned=frozenset({"VllmWorker"}))
    found = differences(RUNNING, RUNNING, live)
    assert (found.lines, found.counts) == ((), {})
    assert found.notes == ("VllmWorker: 5 workers run where the file starts 2: the planner decides that",)
    assert differences(RUNNING, graph(FRONTEND, replace(WORKER, workers=4)), live).counts == {"VllmWorker": 4}


def test_commands_come_and_go() -> None:
    both = graph(FRONTEND, WORKER, COMMAND)
    assert shown(both) == [("Sidecar", None, "1 worker")]
    assert differences(RUNNING, both, LIVE).added == ("Sidecar",)
    live = Live({**LIVE.workers, "Sidecar": 2})
    assert shown(RUNNING, live, both) == [("Sidecar", "2 workers", None)]
    assert differences(both, RUNNING, live).removed == ("Sidecar",)


def test_everything_that_cannot_be_applied_is_said_at_once() -> None:
    other = Described(
        GraphSpec("prod", "graphs.agg:Frontend", (replace(FRONTEND, depends=("Processor",)), COMMAND)),
        host={"nats_server": "nats://elsewhere:4222", "health_bound_s": 5},
    )
    refused = differences(RUNNING, other, LIVE).refused
    assert [reason.split(",")[0] for reason in refused] == [
        "the namespace is dynamo",
        "Frontend: its depends is VllmWorker",
        "VllmWorker: the graph's code no longer has this service: that is chosen when the graph is started; "
        "`dynamo down`",
        "Host.nats_server is chosen when the graph is started; `dynamo down`",
    ]


def test_the_planners_options_are_compared_with_those_of_now() -> None:
    """A person may have set some since; what a running planner cannot change is refused."""
    wanted = replace(RUNNING, planner={"max_gpu_budget": 6, "log_dir": "/tb"}, planner_starts=True)
    live = Live(LIVE.workers, planner={"max_gpu_budget": 8, "log_dir": None}, planner_state="running")
    found = differences(replace(RUNNING, planner_starts=True), wanted, live)
    assert found.lines[0].shown() == {"what": "Planner.max_gpu_budget", "before": 8, "after": 6}
    assert found.refused == (
        "Planner.log_dir can be chosen only when the planner starts: `dynamo planner stop`, and apply this again",
    )


@pytest.mark.parametrize(
    ("before", "after", "state", "by_flag", "goal"),
    [
        (False, True, "stopped", False, "running"),
        (True, False, "paused", False, "stopped"),
        (True, True, "stopped", False, None),
        (True, True, "paused", False, None),
        (False, True, "running", False, None),
        (False, True, "stopped", True, None),
    ],
)
def test_the_planner_starts_where_the_file_says_so_anew(
    before: bool, after: bool, state: str, by_flag: bool, goal: str | None
) -> None:
    live = Live({}, planner_state=state, planner_by_flag=by_flag)
    running, wanted = replace(RUNNING, planner_starts=before), replace(RUNNING, planner_starts=after)
    assert planner_goal(running, wanted, live) == goal
