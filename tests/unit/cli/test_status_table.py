"""The table that people read before they read docs."""

from __future__ import annotations

from typing import Any

import pytest

from dynamo_local.cli.status import drain_note, duration, render

GRAPH = {
    "namespace": "dynamo",
    "run_id": "01J",
    "state": "ready",
    "frontend_url": "http://127.0.0.1:8000",
    "etcd_endpoints": "http://127.0.0.1:2379",
    "nats_server": "nats://127.0.0.1:4222",
    "notes": ["dynamo_VllmWorker: was killed by SIGKILL"],
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


def test_a_worker_without_load_shows_a_dash_and_not_zero() -> None:
    """Missing is not zero."""
    lines = render(GRAPH).splitlines()
    ready, crashed = lines[-2].split(), lines[-1]
    assert " ".join(ready) == "dynamo_VllmWorker VllmWorker ready 4711 0,1 694d967da694ea1a 3m07s 3/16 2 42%"
    assert " ".join(crashed.split()[2:]) == "crashed - - - - - - - was killed by SIGKILL"
    assert "note      dynamo_VllmWorker: was killed by SIGKILL" in lines


@pytest.mark.parametrize(
    ("seconds", "text"), [(None, "-"), (0, "0s"), (59.9, "59s"), (187, "3m07s"), (18_120, "5h02m"), (187_200, "2d04h")]
)
def test_durations_are_short_and_unambiguous(seconds: float | None, text: str) -> None:
    """Two units at most."""
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
        ({"left_requests": 0, "left_tokens": 0, "eta_s": 0.0, "deadline_s": None}, "0 requests left, about 0s"),
        (
            {"left_requests": None, "left_tokens": None, "eta_s": None, "deadline_s": 60},
            "unknown what is left, at most 1m00s",
        ),
    ],
)
def test_a_draining_worker_says_what_is_left(drain: dict[str, Any] | None, text: str) -> None:
    """Missing is not zero: unknown is said, an estimate that cannot be had is left out."""
    assert drain_note(drain) == text


def test_the_note_joins_reason_drain_and_restarts() -> None:
    """All that one wants to know of a worker in trouble, in one column."""
    left = {"left_requests": 2, "left_tokens": None, "eta_s": None, "deadline_s": None}
    worker = {**GRAPH["workers"][0], "state": "draining", "reason": "scale -1", "drain": left, "restarts": 1}
    line = render({**GRAPH, "workers": [worker]}).splitlines()[-1]
    assert line.endswith("scale -1; 2 requests left; 1 restart")


def test_the_metrics_address_is_shown_where_there_is_one() -> None:
    assert "metrics" not in render(GRAPH)
    assert "metrics   http://127.0.0.1:9/metrics" in render({**GRAPH, "metrics_url": "http://127.0.0.1:9/metrics"})
