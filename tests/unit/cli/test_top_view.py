"""The picture of `dynamo top`, as text, at fixed widths."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from dynamo_local.cli.top import Frame, Histories, render, shorten, sparkline, view_as_json
from tests.fakes.arbiter.supervisor import status_row

LOAD = {
    "request_active_slots": 12,
    "request_total_slots": 256,
    "kv_total_blocks": 100,
    "num_requests_waiting": 3,
    "gpu_cache_usage_perc": 0.63,
}


def _gpu(index: int, worker: str | None = None, state: str | None = None, reason: str | None = None) -> dict[str, Any]:
    own = state or ("free" if worker is None else "held")
    return {"index": index, "uuid": f"GPU-{index}", "name": "X", "state": own, "worker": worker, "reason": reason}


def _graph(gpus: list[dict[str, Any]], *workers: dict[str, Any], **more: Any) -> dict[str, Any]:
    head = {"namespace": "dynamo", "run_id": "01J", "state": "ready", "frontend_url": "http://127.0.0.1:8000"}
    return {**head, "prefill_queue": None, "gpus": gpus, "workers": list(workers), "notes": [], **more}


def _worker(name: str, state: str = "ready", load: dict[str, Any] | None = LOAD, **more: Any) -> dict[str, Any]:
    return status_row(f"dynamo_{name}", state, **{"load": load, "uptime_s": 187.0, **more})


def _shown(frame: Frame, width: int = 120, height: int | None = None, **options: Any) -> list[str]:
    console = Console(width=width, file=io.StringIO(), force_terminal=False)
    console.print(render(frame, width, height, **options))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert max(map(len, lines)) <= width, "a line is wider than the terminal"
    return [line.rstrip() for line in lines]


def _row(lines: list[str], first: str) -> str:
    """The one line that begins with that word, blanks squeezed."""
    found = [" ".join(line.split()) for line in lines if line.split()[:1] == [first]]
    assert len(found) == 1, (first, lines)
    return found[0]


# --- GPUs and workers --------------------------------------------------------------------------


@pytest.mark.parametrize("width", [80, 120])
def test_each_gpu_has_its_worker_with_its_load(width: int) -> None:
    graph = _graph([_gpu(0, "dynamo_VllmWorker"), _gpu(1)], _worker("VllmWorker"), _worker("Frontend", load=None))
    histories = Histories()
    histories.add(graph)
    lines = _shown(Frame(graph, histories, at="14:05:09"), width)
    assert lines[0] == "dynamo  ready  1 of 2 GPUs held  http://127.0.0.1:8000  14:05:09"
    assert _row(lines, "0").startswith("0 VllmWorker ready 63% ▆ 12/256 3 █")
    assert _row(lines, "1") == "1 free"
    assert _row(lines, "-").startswith("- Frontend ready - - -")  # not known, and no 0
    assert ("3m07s" in _row(lines, "0")) is (width == 120)


@pytest.mark.parametrize("width", [80, 120])
def test_eight_gpus_with_workers_of_two_are_a_row_for_each_worker(width: int) -> None:
    names = [f"dynamo_VllmWorker{f'_{n}' if n else ''}" for n in range(4)]
    gpus = [_gpu(index, names[index % 4]) for index in range(8)]  # not neighbours
    lines = _shown(Frame(_graph(gpus, *(_worker(name.removeprefix("dynamo_")) for name in names))), width)
    assert [line.split()[:2] for line in lines[2:6]] == [
        ["0,4", "VllmWorker"],
        ["1,5", "VllmWorker_1"],
        ["2,6", "VllmWorker_2"],
        ["3,7", "VllmWorker_3"],
    ]


def test_a_quarantined_and_a_taken_gpu_say_why() -> None:
    gpus = [
        _gpu(0, None, "quarantined", "pid 4711 python (40.2 GiB) still holds it"),
        _gpu(1, None, "taken", "namespace other"),
    ]
    lines = _shown(Frame(_graph(gpus)))
    assert _row(lines, "0") == "0 quarantined"
    assert any("0 is quarantined: pid 4711 python (40.2 GiB) still holds it" in line for line in lines)
    assert any("1 is taken: namespace other" in line for line in lines)


def test_a_graph_without_gpus_shows_its_workers_and_speaks_of_no_gpus() -> None:
    lines = _shown(Frame(_graph([], _worker("VllmWorker"))), 80)
    assert "GPUs" not in lines[0]
    assert _row(lines, "-").startswith("- VllmWorker ready 63%")


def test_an_arbiter_of_an_older_version_is_shown_as_far_as_it_tells() -> None:
    graph = _graph([], _worker("VllmWorker"))
    del graph["gpus"]
    assert _row(_shown(Frame(graph)), "-").startswith("- VllmWorker ready")


@pytest.mark.parametrize("width", [80, 120])
def test_a_long_name_keeps_the_workers_number_and_the_columns_their_places(width: int) -> None:
    name = "AComponentWhoseNameIsMuchTooLongForAnyTerminalThatAnybodyHasOnTheirDesk_12"
    lines = _shown(Frame(_graph([_gpu(0, f"dynamo_{name}"), _gpu(1)], _worker(name))), width)
    row = _row(lines, "0")
    assert "…" in row
    assert "esk_12 ready 63%" in row
    assert len(lines) == 5  # nothing is wrapped


def test_a_terminal_that_is_too_low_is_told_how_many_workers_are_left_out() -> None:
    graph = _graph([_gpu(n, f"dynamo_W_{n}") for n in range(20)], *(_worker(f"W_{n}") for n in range(20)))
    lines = _shown(Frame(graph), 80, 12)
    assert len(lines) <= 12
    assert "12 more do not fit; `dynamo status` lists all" in lines
    assert _row(lines, "7").startswith("7 W_7 ready")
    assert not any("do not fit" in line for line in _shown(Frame(graph), 80, 40))


# --- below -------------------------------------------------------------------------------------


def test_a_drain_tells_what_is_left_and_when_it_ends() -> None:
    drain = {"left_requests": 3, "left_tokens": 4120, "eta_s": 12.0, "deadline_s": 588.0}
    graph = _graph([_gpu(0, "dynamo_VllmWorker_1")], _worker("VllmWorker_1", "draining", drain=drain))
    lines = _shown(Frame(graph), 80)
    assert "drain  VllmWorker_1: 3 requests left (4120 tokens), about 12s, at most 9m48s" in lines


def test_notes_are_told_with_their_times() -> None:
    note = {"text": "no room on the disk", "count": 2, "first_at": 0.0, "last_at": 60.0}
    lines = _shown(Frame(_graph([], _worker("A"), notes=[note])))
    assert _row(lines, "note").startswith("note no room on the disk (2 times, 19")


def test_a_worker_that_failed_tells_why() -> None:
    lines = _shown(Frame(_graph([], _worker("VllmWorker", "faulted", None, reason="was killed by SIGKILL"))))
    assert "trouble  VllmWorker is faulted: was killed by SIGKILL" in lines


def test_what_a_degraded_graph_lacks_is_told_first() -> None:
    graph = {**_graph([], _worker("VllmWorker", "exited", None)), "missing": ["VllmWorker: no worker serves"]}
    lines = _shown(Frame(graph))
    assert "missing  VllmWorker: no worker serves" in lines


def test_the_queue_has_a_history_and_dead_letters_are_told() -> None:
    histories = Histories()
    for pending in (0, 4, 8):
        queue = {"pending": pending, "outstanding": 2, "dead_letters": 1}
        graph = _graph([], prefill_queue=queue)
        histories.add(graph)
    line = next(line for line in _shown(Frame(graph, histories)) if line.startswith("prefill"))
    assert " ".join(line.split()) == "prefill 8 waiting ▁▅█ 2 outstanding 1 given up (dead letters)"


def test_a_queue_that_cannot_be_seen_is_a_dash() -> None:
    graph = _graph([], prefill_queue={"pending": None, "outstanding": None, "dead_letters": None})
    assert any(line.startswith("prefill  - waiting") for line in _shown(Frame(graph)))


def test_the_planner_tells_its_state_its_trouble_and_its_last_decision() -> None:
    planner = {
        "state": "running",
        "no_operation": True,
        "next_decision_s": 12.3,
        "waiting_for_gpus": ["VllmWorker"],
        "trouble": "holds: etcd does not answer",
        "last_decision": {"seq": 4},
    }
    lines = _shown(Frame(_graph([], planner=planner), words=("VllmWorker +1: mean KV load 0.93 is above 0.9",)))
    first = "planner  running, no operation: decides, acts on nothing, decides in 12s, waits for GPUs: VllmWorker"
    at = lines.index(first)
    assert [line.strip() for line in lines[at + 1 : at + 3]] == [
        "holds: etcd does not answer",
        "VllmWorker +1: mean KV load 0.93 is above 0.9",
    ]


def test_a_planner_that_never_ran_is_not_spoken_of() -> None:
    planner = {"state": "stopped", "no_operation": False, "last_decision": None}
    assert not any(line.startswith("planner") for line in _shown(Frame(_graph([], planner=planner))))


def test_when_the_arbiter_is_gone_the_last_picture_stays_and_says_so() -> None:
    graph = _graph([_gpu(0, "dynamo_VllmWorker")], _worker("VllmWorker"))
    lines = _shown(Frame(graph, lost="the arbiter of 'dynamo' has been killed"))
    assert lines[1].startswith("the arbiter of 'dynamo' has been killed; this is how it was.")
    assert any("VllmWorker" in line for line in lines)


# --- histories ---------------------------------------------------------------------------------


def test_a_sparkline_ends_with_now_and_shows_a_gap_where_nothing_is_known() -> None:
    assert sparkline([0.0, 0.5, None, 1.0], 6, 1.0) == "  ▁▅·█"
    assert sparkline([1, 2, 3, 4, 5, 6], 3) == "▆▇█"
    assert sparkline([0, 0], 3) == " ▁▁"
    assert sparkline([None, None], 3) == "   "
    assert sparkline([], 3) == "   "
    assert sparkline([0.2, 7.0], 2, 1.0) == "▂█"  # above the top is the top


def test_histories_are_of_one_run_and_forget_workers_that_are_gone() -> None:
    histories = Histories()
    for _ in range(100):
        histories.add(_graph([], _worker("VllmWorker")))
    assert histories.of("dynamo_VllmWorker", "kv") == (0.63,) * 60
    histories.add(_graph([], _worker("VllmWorker", "starting", None)))
    assert histories.of("dynamo_VllmWorker", "kv")[-2:] == (0.63, None)
    histories.add(_graph([], _worker("Other")))
    assert histories.of("dynamo_VllmWorker", "kv") == ()
    histories.add({**_graph([], _worker("Other")), "run_id": "01K"})
    assert len(histories.of("dynamo_Other", "kv")) == 1


def test_a_terminal_without_unicode_gets_ascii() -> None:
    name = "AComponentWhoseNameIsMuchTooLongForTheTerminal"
    graph = _graph(
        [_gpu(0, f"dynamo_{name}"), _gpu(1)], _worker(name), frontend_url="http://127.0.0.1:8000/" + "x" * 90
    )
    histories = Histories()
    for load in (LOAD, None, LOAD):
        histories.add(_graph([], _worker(name, load=load)))
    assert "".join(_shown(Frame(graph, histories), 80, ascii_only=True)).isascii()


def test_shorten_keeps_beginning_and_end() -> None:
    assert shorten("VllmWorker_1", 12) == "VllmWorker_1"
    assert shorten("AVeryLongComponentName_12", 16) == "AVeryLong…ame_12"
    assert all(len(shorten("AVeryLongComponentName_12", cells)) == cells for cells in range(2, 25))


# --- JSON --------------------------------------------------------------------------------------


def test_json_says_what_the_picture_says() -> None:
    drain = {"left_requests": 3, "left_tokens": None, "eta_s": None, "deadline_s": 588.0}
    graph = _graph(
        [_gpu(0, "dynamo_VllmWorker"), _gpu(1)],
        _worker("VllmWorker", "draining", drain=drain, gpus=["0"]),
        _worker("Frontend", load=None),
        planner={"state": "running"},
    )
    told = view_as_json(Frame(graph, words=("held",)))
    assert [gpu["worker_state"] for gpu in told["gpus"]] == ["draining", None]
    assert [(row["kv"], row["running"], row["waiting"]) for row in told["workers"]] == [(0.63, 12, 3), (None,) * 3]
    assert told["workers"][0]["drain"] == drain
    assert told["planner"] == {"state": "running", "words": ["held"]}
