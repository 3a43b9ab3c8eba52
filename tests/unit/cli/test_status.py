"""The table of `dynamo status`, and its lines about the planner."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest

from dynamo_local.cli.planner_words import follow_line, status_lines
from dynamo_local.cli.status import drain_note, duration, render
from tests.fakes.arbiter.supervisor import FakeSupervisor


def note(count: int) -> dict[str, Any]:
    """Told so often, first a minute and last a second before that midnight."""
    midnight = datetime(2026, 3, 2).astimezone().timestamp()
    text = "dynamo_VllmWorker was killed by SIGKILL"
    return {"text": text, "count": count, "first_at": midnight - 60.0, "last_at": midnight - 1.0}


GRAPH = {
    "namespace": "dynamo",
    "run_id": "01J",
    "state": "ready",
    "frontend_url": "http://127.0.0.1:8000",
    "etcd_endpoints": "http://127.0.0.1:2379",
    "nats_server": "nats://127.0.0.1:4222",
    "notes": [note(3)],
    "workers": [
        {
            "watcher_name": "dynamo_VllmWorker",
            "component": "VllmWorker",
            "state": "ready",
            "pid": 4711,
            "gpus": ["0", "1"],
            "lease": "694d967da694ea1a",
            "endpoints": [],
            "uptime_s": 187.2,
            "reason": None,
            "load": {
                "request_active_slots": 3,
                "request_total_slots": 16,
                "num_requests_waiting": 2,
                "gpu_cache_usage_perc": 0.419,
                "kv_total_blocks": 100,
            },
        },
        {
            "watcher_name": "dynamo_PrefillWorker",
            "component": "PrefillWorker",
            "state": "crashed",
            "pid": None,
            "gpus": [],
            "lease": None,
            "endpoints": [],
            "uptime_s": None,
            "reason": "was killed by SIGKILL",
            "load": None,
        },
    ],
}


def test_what_is_missing_stands_below_the_state() -> None:
    missing = "VllmWorker: no worker serves (dynamo_VllmWorker is crashed)"
    graph = {**GRAPH, "state": "degraded", "missing": [missing], "etcd_shell_file": "/run/etcd.env"}
    lines = render(graph).splitlines()
    assert lines[0].endswith("state degraded")
    assert lines[1] == f"missing   {missing}"
    assert "          for etcdctl: . /run/etcd.env" in lines


def test_the_page_has_a_line_with_its_address_and_the_command_for_its_link() -> None:
    page = {"url": "http://127.0.0.1:8700/", "link": "dynamo dashboard --print-url -n dynamo"}
    lines = render({**GRAPH, "dashboard": page}).splitlines()
    assert "page      http://127.0.0.1:8700/   its link: dynamo dashboard --print-url -n dynamo" in lines
    assert "page      is starting" in render({**GRAPH, "keeps_dashboard": True}).splitlines()


def test_a_worker_without_load_shows_a_dash_and_not_zero() -> None:
    lines = render(GRAPH).splitlines()
    ready, crashed = lines[-2].split(), lines[-1]
    assert " ".join(ready) == "dynamo_VllmWorker VllmWorker ready 4711 0,1 694d967da694ea1a 3m07s 3/16 2 42%"
    assert " ".join(crashed.split()[2:]) == "crashed - - - - - - - was killed by SIGKILL"


@pytest.mark.parametrize(
    ("count", "times"),
    [(1, "2026-03-01 23:59:59"), (3, "3 times, 2026-03-01 23:59:00 to 2026-03-01 23:59:59")],
)
def test_a_note_is_one_line_with_its_times(count: int, times: str) -> None:
    lines = render({**GRAPH, "notes": [note(count)]}).splitlines()
    assert f"note      dynamo_VllmWorker was killed by SIGKILL ({times})" in lines


def test_a_note_of_an_arbiter_from_before_an_upgrade_is_its_text() -> None:
    assert "note      W was killed" in render({**GRAPH, "notes": ["W was killed"]}).splitlines()


@pytest.mark.parametrize(
    ("seconds", "text"), [(None, "-"), (0, "0s"), (59.9, "59s"), (187, "3m07s"), (18_120, "5h02m"), (187_200, "2d04h")]
)
def test_durations_are_short_and_unambiguous(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("drain", "text"),
    [
        (None, ""),
        (
            {"left_requests": 3, "left_tokens": 4120, "eta_s": 12.3, "deadline_s": 588},
            "3 requests left (4120 tokens), about 12s, at most 9m48s",
        ),
        (
            {"left_requests": 1, "left_tokens": 7, "eta_s": None, "deadline_s": -2},
            "1 request left (7 tokens), at most 0s",
        ),
        ({"left_requests": 0, "left_tokens": 0, "eta_s": 0.0, "deadline_s": None}, "0 requests left"),
        ({"left_requests": 12, "left_tokens": None, "eta_s": 0.4, "deadline_s": None}, "12 requests left"),
        (
            {"left_requests": None, "left_tokens": None, "eta_s": None, "deadline_s": 60},
            "unknown what is left, at most 1m00s",
        ),
        (
            {
                "left_requests": 5,
                "left_tokens": 0,
                "eta_s": None,
                "deadline_s": 457,
                "unread": 5,
                "unread_s": 42.3,
            },
            "5 requests left, 5 answers that no client reads, the oldest for 42s, at most 7m37s",
        ),
        (
            {"left_requests": 3, "left_tokens": 0, "eta_s": None, "deadline_s": None, "unread": 1, "unread_s": 9.0},
            "3 requests left, 1 answer that no client reads, for 9s",
        ),
    ],
)
def test_a_draining_worker_says_what_is_left(drain: dict[str, Any] | None, text: str) -> None:
    assert drain_note(drain) == text


def test_the_note_joins_reason_drain_and_restarts() -> None:
    left = {"left_requests": 2, "left_tokens": None, "eta_s": None, "deadline_s": None}
    worker = {**GRAPH["workers"][0], "state": "draining", "reason": "scale -1", "drain": left, "restarts": 1}
    line = render({**GRAPH, "workers": [worker]}).splitlines()[-1]
    assert line.endswith("scale -1; 2 requests left; 1 restart")


def test_the_metrics_address_is_shown_where_there_is_one() -> None:
    assert "metrics" not in render(GRAPH)
    assert "metrics   http://127.0.0.1:9/metrics" in render({**GRAPH, "metrics_url": "http://127.0.0.1:9/metrics"})


SERVER = {
    "watcher_name": "dynamo_etcd",
    "kind": "etcd",
    "state": "running",
    "pid": 7,
    "failures": 0,
    "next_try_s": None,
}


@pytest.mark.parametrize(
    ("more", "line"),
    [
        (
            {"state": "restarting", "failures": 3, "next_try_s": 4.2, "reason": "could not be started: No memory"},
            "etcd      is down and started again in 4s; it failed 3 times, last it could not be started: No memory",
        ),
        (
            {"state": "restarting", "failures": 1, "reason": "was killed by SIGKILL"},
            "etcd      is down and started again now; it failed 1 time, last it was killed by SIGKILL",
        ),
        (
            {"failures": 2, "reason": "was killed by SIGKILL"},
            "etcd      runs again; it failed 2 times, last it was killed by SIGKILL",
        ),
    ],
)
def test_an_embedded_server_that_failed_has_a_line(more: dict[str, Any], line: str) -> None:
    assert line in render({**GRAPH, "servers": [{**SERVER, **more}]}).splitlines()


def test_an_embedded_server_that_runs_well_has_none() -> None:
    assert render({**GRAPH, "servers": [{**SERVER, "reason": None}]}) == render(GRAPH)


def test_a_stale_gpu_inventory_is_said() -> None:
    stale = {"age_s": 187.0, "stale": "the GPU driver has not returned within 5 s"}
    line = "GPUs      last seen 3m07s ago, decisions go by that: the GPU driver has not returned within 5 s"
    assert line in render({**GRAPH, "gpu_inventory": stale}).splitlines()
    assert render({**GRAPH, "gpu_inventory": {"age_s": 187.0, "stale": None}}) == render(GRAPH)


TASK = {"task": "load sampling", "running": False, "deaths": 3, "why": "RuntimeError: boom", "again_s": 4.2}


@pytest.mark.parametrize(
    ("more", "line"),
    [
        (
            {},
            "arbiter   its load sampling is down and started again in 4s; it died 3 times, last of RuntimeError: boom",
        ),
        (
            {"deaths": 1, "again_s": 0.3},
            "arbiter   its load sampling is down and started again now; it died 1 time, last of RuntimeError: boom",
        ),
        (
            {"why": "ValueError: two\nlines"},
            "arbiter   its load sampling is down and started again in 4s; it died 3 times, last of ValueError: two",
        ),
    ],
)
def test_a_task_of_the_arbiter_that_does_not_run_has_a_line(more: dict[str, Any], line: str) -> None:
    assert line in render({**GRAPH, "tasks": [{**TASK, **more}]}).splitlines()


def test_a_task_of_the_arbiter_that_runs_has_none() -> None:
    runs = {**TASK, "running": True, "why": None, "again_s": None}
    assert render({**GRAPH, "tasks": [runs]}) == render(GRAPH)


def test_what_an_apply_has_still_to_come_to_is_shown() -> None:
    change = {"stimulus_id": "apply:1", "left": ["dynamo_VllmWorker"], "done": [], "substitutes": {}}
    worker = {**GRAPH["workers"][0], "outdated": True}
    lines = render({**GRAPH, "workers": [worker], "changes": [change]}).splitlines()
    assert "change    apply:1 is under way, and has still to come to dynamo_VllmWorker" in lines
    assert lines[-1].endswith("its old configuration")


def test_dispatch_is_one_line_over_all_workers() -> None:
    decode = {
        "prefills.local.sooner": 10,
        "prefills.local.came_back": 2,
        "prefills.remote.fewer_misses": 30,
        "first_tokens.local": 10,
        "first_tokens.remote": 10,
        "first_token_seen_s.local": 3.0,
        "first_token_seen_s.remote": 1.0,
        "first_token_estimated_s.local": 2.0,
        "first_token_estimated_s.remote": 1.0,
        "correction.local": 1.2,
        "fallbacks": 0,
        "refused": 1,
    }
    told = ({**GRAPH["workers"][0], "dispatch": decode}, {**GRAPH["workers"][1], "dispatch": {"deferred": 4}})
    assert (
        "dispatch  12 prefills here, 30 in prefill workers; first token after 200 ms, estimated 150 ms; 4 deferred; "
        "1 refused"
    ) in render({**GRAPH, "workers": told}).splitlines()
    idle = {**GRAPH["workers"][0], "dispatch": {"refused": 0.0, "correction.itl": 1.0}}
    assert "dispatch" not in render({**GRAPH, "workers": [idle]})


def test_a_worker_that_left_is_shown_only_while_its_component_has_no_other() -> None:
    left = {**GRAPH["workers"][1], "watcher_name": "dynamo_VllmWorker_1", "state": "exited"}
    alone = {**left, "component": "Router"}
    lines = render({**GRAPH, "workers": [GRAPH["workers"][0], {**left, "component": "VllmWorker"}, alone]}).splitlines()
    assert [line.split()[1:3] for line in lines[-2:]] == [["VllmWorker", "ready"], ["Router", "exited"]]


SERVED = {
    "seconds": 60.0,
    "requests_per_s": 0.034,
    "tokens_per_s": 1280.4,
    "ttft_ms": {"p50": 213.4, "p95": 12_400.0},
    "itl_ms": {"p50": 8.41, "p95": None},
}


def test_the_last_minute_of_each_component_is_a_table() -> None:
    lines = render({**GRAPH, "components": {"VllmWorker": SERVED, "PrefillWorker": None}}).splitlines()
    found = [" ".join(line.split()) for line in lines[-3:]]
    assert found == [
        "LAST MINUTE REQUESTS/S TOKENS/S TTFT P50 TTFT P95 ITL P50 ITL P95",
        "VllmWorker 0.03 1,280 213 ms 12.4 s 8.4 ms -",
        "PrefillWorker - - - - - -",
    ]
    assert render({**GRAPH, "components": {"VllmWorker": None}}) == render(GRAPH)


# --- follow words
# Tests what is said of the virtual connector in `dynamo status` and `dynamo planner status`: from JSON alone.

FOLLOW: dict[str, Any] = {
    "environment": "virtual",
    "layout": "v1",
    "keys": "v1/dynamo/planner/",
    "phase": "waiting",
    "decision_id": -1,
    "num_prefill_workers": -1,
    "num_decode_workers": -1,
    "scaled_decision_id": -1,
    "reason": "no decision yet",
}
DECIDED = {**FOLLOW, "decision_id": 7, "num_prefill_workers": 1, "num_decode_workers": 3}
HEAD = "virtual (v1/dynamo/planner/): "
PLANNER: dict[str, Any] = {"state": "running", "no_operation": False, "options": {"adjustment_interval": 30.0}}
VIRTUAL = {
    "keys": "v1/dynamo/planner/",
    "num_prefill_workers": 1,
    "num_decode_workers": 3,
    "decision_id": 7,
    "scaled_decision_id": 6,
    "pending": True,
    "waits_s": 12.3,
}


@pytest.mark.parametrize(
    ("follow", "line"),
    [
        (FOLLOW, "waits: no decision yet"),
        ({**DECIDED, "phase": "under_way", "reason": "D: 1 of 3 ready"}, "is under way: D: 1 of 3 ready"),
        ({**DECIDED, "phase": "done", "reason": None}, "is carried out"),
        (
            {**DECIDED, "phase": "refused", "reason": "D=3: no GPU"},
            "cannot be carried out, and is not acknowledged: D=3: no GPU",
        ),
        ({**DECIDED, "phase": "unreadable", "reason": "x"}, "cannot be read, nothing is changed: x"),
        ({**DECIDED, "phase": "of_a_newer_version", "reason": None}, "of_a_newer_version"),
    ],
)
def test_where_it_stands_is_one_line(follow: dict[str, Any], line: str) -> None:
    decision = "" if follow["decision_id"] < 0 else "decision 7 (prefill=1, decode=3) "
    assert follow_line(follow) == f"{HEAD}{decision}{line}"


def test_it_stands_in_the_status_only_where_somebody_is_followed() -> None:
    graph = FakeSupervisor(["dynamo_VllmWorker"]).status()
    assert "follow " not in render(graph)
    assert f"follow    {HEAD}waits: no decision yet" in render({**graph, "follow": FOLLOW})
    assert f"follow    {HEAD}waits: no decision yet" in "\n".join(
        status_lines({**PLANNER, "state": "stopped", "follow": FOLLOW})
    )


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"decision_id": -1}, "no decision yet"),
        ({}, "decision 7 (prefill=1, decode=3), not acknowledged for 12 s"),
        ({"pending": False}, "decision 7 (prefill=1, decode=3), not acknowledged for 12 s: given up"),
        ({"scaled_decision_id": 7, "waits_s": None}, "decision 7 (prefill=1, decode=3), acknowledged"),
    ],
)
def test_what_our_own_planner_waits_for_is_one_line(changed: dict[str, Any], line: str) -> None:
    shown = list(status_lines({**PLANNER, "virtual": {**VIRTUAL, **changed}}))
    assert f"virtual   v1/dynamo/planner/: {line}" in shown


@pytest.mark.parametrize(
    ("profile", "line"),
    [
        ({"name": "/srv/p", "measured": True, "certificate": "certified"}, "/srv/p (certified)"),
        ({"name": "/srv/p", "measured": True, "certificate": "uncertified"}, "/srv/p (uncertified)"),
        (
            {"name": "H200", "measured": False, "certificate": None},
            "H200 (not measured by `dynamo profile`: of other engines, and corrected by what is seen)",
        ),
    ],
)
def test_the_profile_that_is_planned_by_and_how_far_engines_are_off_it_are_lines(
    profile: dict[str, Any], line: str
) -> None:
    drift = {"component": "VllmWorker", "kind": "decode", "p50": 0.18, "p90": -0.02, "passes": 512}
    shown = list(status_lines({**PLANNER, "profile": profile, "drift": [drift]}))
    assert f"profile   {line}" in shown
    assert "drift     VllmWorker decode: +18% off the profile, p90 -2% (of 512 passes)" in shown
    assert not any(row.startswith(("profile ", "drift ")) for row in status_lines({**PLANNER, "profile": None}))


def test_only_options_that_were_set_are_shown() -> None:
    """There are fifty. The policy is always said, and what has no value any more is said to have none."""
    options = {"policy": "load", "max_gpu_budget": 6, "min_gpu_budget": 1, "no_operation": True, "log_dir": None}
    defaults = {"policy": "load", "max_gpu_budget": 8, "min_gpu_budget": 1, "no_operation": False, "log_dir": "here"}
    shown = list(status_lines({**PLANNER, "options": options}, defaults=defaults))
    assert shown[shown.index("") + 1 :] == [
        "policy          load",
        "max-gpu-budget  6",
        "no-operation    true",
        "log-dir         -",
        "(1 other options have their defaults: --json shows them)",
    ]
