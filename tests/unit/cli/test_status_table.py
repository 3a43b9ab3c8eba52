"""The table that people read before they read docs."""

from __future__ import annotations

import pytest

from dynamo_local.cli.status import duration, render

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
