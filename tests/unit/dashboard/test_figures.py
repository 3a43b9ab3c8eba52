"""The page's state, points and verdict, from a status."""

from __future__ import annotations

from typing import Any

from dynamo_local.dashboard.figures import (
    TEXT_MAX,
    allocated,
    event_mark,
    percentile,
    point_of,
    state_of,
    strangers,
    verdict,
)


def worker(name: str = "dynamo_VllmWorker", state: str = "ready", **more: Any) -> dict[str, Any]:
    load = {"request_active_slots": 2, "num_requests_waiting": 1, "kv_total_blocks": 10, "gpu_cache_usage_perc": 0.5}
    return {"watcher_name": name, "component": "VllmWorker", "role": "decode", "state": state, "load": load, **more}


def graph(*workers: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"namespace": "dynamo", "run_id": "r", "state": "ready", "workers": list(workers), "gpus": [], **more}


def test_a_graph_without_trouble_is_well() -> None:
    found = verdict(graph(worker()), alive=True)
    assert (found["ok"], found["problems"]) == (True, [])
    assert found["text"] == "All is well. No request ended in the last minute."
    assert found["kept"] == {"minute": None, "hour": None, "day": None}


def test_a_crash_is_said_with_a_link_to_its_worker() -> None:
    found = verdict(graph(worker(state="crashed", reason="exit code 3")), alive=True)
    text = "dynamo_VllmWorker is crashed: exit code 3"
    assert found["problems"] == [{"text": text, "link": "#worker=dynamo_VllmWorker"}]
    assert found["text"] == text


def test_missed_targets_are_said_with_their_cause() -> None:
    targets = {"minute": {"requests": 200, "share": 0.9, "missed": {"waited": 15, "decoded": 5}}}
    found = verdict(graph(worker(), targets=targets), alive=True)
    assert not found["ok"]
    assert "90.0 % of 200 requests" in found["text"]
    assert "waited" in found["text"]


def test_an_arbiter_that_is_away_is_the_only_problem() -> None:
    found = verdict(graph(worker(state="crashed", reason="x")), alive=False, why="it was killed")
    assert [each["text"] for each in found["problems"]] == ["The arbiter does not answer: it was killed"]


def test_a_history_that_loses_points_is_a_problem_after_those_of_the_graph() -> None:
    extra = {"history": "points are lost: the disk is full or fails (database or disk is full)"}
    crashed = graph(worker(state="crashed", reason="x"))
    found = state_of(crashed, alive_since_s=1.0, adopted=False, why=None, extra=extra)["verdict"]
    assert [each["text"] for each in found["problems"]] == [
        "dynamo_VllmWorker is crashed: x",
        f"The history: {extra['history']}",
    ]
    found = state_of(graph(worker()), alive_since_s=1.0, adopted=False, why=None, extra=extra)["verdict"]
    assert (found["ok"], found["text"]) == (False, f"The history: {extra['history']}")


def test_a_state_without_a_status_is_whole() -> None:
    state = state_of(None, alive_since_s=None, adopted=False, why="nothing runs", extra={})
    assert (state["workers"], state["gpus"], state["arbiter"]["alive"]) == ({}, [], False)


def test_a_worker_that_dies_with_megabytes_on_its_lips_costs_little() -> None:
    words = {"dynamo_VllmWorker": "x" * 10_000_000}
    state = state_of(graph(worker()), alive_since_s=1.0, adopted=False, why=None, extra={"last_words": words})
    assert len(state["workers"]["dynamo_VllmWorker"]["last_words"]) == TEXT_MAX + 1


def test_a_point_has_percentiles_of_the_requests() -> None:
    requests = [{"ttft_s": n / 100, "itl_s": None, "tokens": 10, "missed": ["ttft"] * (n > 90)} for n in range(1, 101)]
    point = point_of(graph(worker()), requests, 10.0)
    assert (point["ttft_p50"], point["ttft_p90"], point["ttft_p99"]) == (500.0, 900.0, 990.0)
    assert (point["itl_p50"], point["requests_per_s"], point["tokens_per_s"]) == (None, 10.0, 100.0)
    assert (point["kept"], point["running"], point["waiting"], point["kv_use"]) == (0.9, 2, 1, 0.5)
    assert point["workers_VllmWorker"] == 1


def test_what_is_unknown_is_null() -> None:
    silent = {**worker(), "load": None}
    point = point_of(graph(silent), [], 10.0)
    assert point["running"] is None
    assert point["waiting"] is None
    assert point["gpus_used"] is None


def test_a_strangers_process_is_named_and_ours_are_not() -> None:
    processes = [
        {"pid": 7, "session": 7, "name": "worker", "bytes": 1},
        {"pid": 8, "session": 7, "name": "its engine", "bytes": 2},
        {"pid": 9, "session": 9, "name": "</script>", "bytes": None},
    ]
    assert strangers({"processes": processes}, {7, None}) == [{"pid": 9, "name": "</script>", "bytes": None}]
    assert strangers({}, {7}) == []


def test_memory_that_workers_allocated_is_that_of_their_sessions_and_unknown_if_one_is_unknown() -> None:
    ours = [{"pid": 7, "session": 7, "bytes": 1}, {"pid": 8, "session": 7, "bytes": 2}]
    theirs = {"pid": 9, "session": 9, "bytes": None}
    assert allocated({"processes": [*ours, theirs]}, {7}) == 3
    assert allocated({"processes": [theirs]}, {7}) == 0
    assert allocated({"processes": [*ours, {"pid": 7, "bytes": None}]}, {7}) is None
    assert allocated({}, {7}) is None


def test_a_gpu_has_the_model_of_its_worker() -> None:
    gpus = [{"uuid": "G0", "worker": "dynamo_VllmWorker"}, {"uuid": "G1", "worker": None}]
    found = state_of(graph(worker(model="m"), gpus=gpus), alive_since_s=1.0, adopted=False, why=None, extra={})
    assert [each["model"] for each in found["gpus"]] == ["m", None]


def test_no_values_have_no_percentile() -> None:
    assert percentile([], 0.5) is None
    assert percentile([1.0], 0.99) == 1.0


def test_an_event_says_what_happened_to_whom_and_by_what() -> None:
    record = {"time": 5.0, "seq": 1, "watcher_name": "w", "event": "DrainRequested", "from": "ready", "to": "draining"}
    mark = event_mark({**record, "stimulus_id": "scale:1", "reason": "scale -1", "left": 3})
    assert (mark["kind"], mark["title"], mark["reason"]) == ("drain", "w: ready to draining", "scale -1")
    assert mark["detail"] == {"left": "3", "cause": "scale:1"}
