"""Decision logs of before there were several policies can still be read."""

from __future__ import annotations

import json

from dynamo_local.planner.records.decision_log import describe, from_line

POOL = {
    "component": "VllmWorker", "gpus_per_worker": 1, "ready": 1, "coming": 0, "waiting": 0, "deferred": 0, "leaving": 0,
    "cancellable": 0, "routed": 0, "gpus_held": 1, "gpus_leaving": 0, "gpus_lacking": 0, "added_at_s": 3.5,
}  # fmt: skip
OLD = {
    "wall_s": 1.7e9,
    "stimulus_id": "planner:7",
    "inputs": {
        "interval_began_s": 30.0, "readings": 30, "prefill_queue_size": None, "average_kv_load": 0.93,
        "num_queued_request": 0.5, "fleet": {"prefill": None, "decode": POOL, "pending": False},
    },
    "decision": {
        "now_s": 60.0,
        "targets": {"VllmWorker": 2},
        "reasons": [
            {
                "component": "VllmWorker", "step": 1, "rule": "scale_up",
                "numbers": {
                    "scale_down_threshold": 0.5, "scale_up_threshold": 0.9, "workers": 1, "workers_min": 1,
                    "gpus_per_worker": 1, "gpus_counted": 1, "max_gpu_budget": 8, "average_kv_load": 0.93,
                },
                "otherwise": {"name": "average_kv_load", "value": 0.93, "needed": 0.9, "step": 0},
                "deferred": False,
            }
        ],
        "next_tick_at": 90.0,
        "notes": [],
    },
    "outcomes": {"VllmWorker": {"outcome": "committed", "workers": ["dynamo_VllmWorker_1"]}},
}  # fmt: skip


def test_a_line_of_before_is_the_load_planners() -> None:
    record = from_line(json.dumps(OLD))
    assert (record.inputs.policy, record.inputs.traffic, record.decision.acts) == ("load", None, (("VllmWorker", 1),))


def test_it_is_explained_as_then() -> None:
    said = describe({"seq": 7, **OLD})
    assert said.startswith("VllmWorker +1 (scale_up): KV load 0.93 > 0.9 with 1 of 8 GPUs held or promised")
    assert said.endswith("VllmWorker: carried out on dynamo_VllmWorker_1")
