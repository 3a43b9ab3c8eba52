"""How the drain benchmark turns what happened into its verdict, and a trace into requests."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest

from benchmarks.drain import page
from benchmarks.drain.client import Record, read_answer
from benchmarks.drain.facts import Asked, Down, Facts, Sent, Up
from benchmarks.drain.judge import judge
from benchmarks.drain.report import report
from benchmarks.drain.trace import asks
from benchmarks.traces import BESIDE, CHAT, CONVERSATION, FOLDER, conversation, folder, generated
from dynamo_local.errors import BadInput
from dynamo_local.simulator.trace import TraceRequest, write_trace

DECODE = "VllmWorker"


def _record(name: str, ended_s: float, outcome: str = "right") -> Record:
    return Record(0, name, 0.0, 1.0, ended_s, 300, outcome)  # type: ignore[arg-type]


def _sent(at_s: float, name: str, lease: int, outcome: str = "taken") -> Sent:
    return Sent(at_s, DECODE, lease, name, outcome)


def _down(lease: int, policy: str = "drain", **more: float) -> Down:
    return Down(policy, DECODE, f"w{lease}", 100 + lease, lease, 10.0, **more)


def _facts(**more: object) -> Facts:
    facts = Facts(10.0, lasted_s=60.0)
    facts.downs = [_down(1, deregistered_s=10.02, gone_s=16.0)]
    facts.records = [_record(f"r{n}", 10.0 + n) for n in range(1, 6)]
    facts.sent = [_sent(2.0, f"r{n}", 1) for n in range(1, 6)]
    for name, value in more.items():
        setattr(facts, name, value)
    return facts


def test_a_drain_that_finishes_everything_is_ok():
    """Five streams in flight at the command; all end right. Budgets are a tenth: 30 s cut what lasts longer than 3."""
    verdict = judge(_facts())

    assert verdict.ok
    assert verdict.rows["drain"].in_flight == 5
    assert {name: row.would_cut for name, row in verdict.rows.items()} == {
        "drain": 0,
        "kill at once": 5,
        "5 s": 5,
        "10 s": 4,
        "30 s": 2,
    }
    assert verdict.hard == 0, "two outlast every budget, four are asked for"
    assert verdict.out_of_routing_s == pytest.approx([0.02])
    assert verdict.drain_s == [6.0]


def test_a_request_that_breaks_on_a_drained_worker_is_ours():
    for outcome in ("cut", "refused", "wrong"):
        facts = _facts()
        facts.records[0] = replace(facts.records[0], outcome=outcome)
        verdict = judge(facts)

        assert not verdict.ok
        assert verdict.rows["drain"].cut + verdict.rows["drain"].wrong == 1


def test_a_request_that_breaks_on_a_killed_worker_is_its_policys():
    facts = _facts()
    facts.downs.append(_down(2, "5 s", killed_s=10.5))
    facts.records += [_record("a", 10.5, "cut"), _record("b", 10.5, "cut"), _record("c", 12.0)]
    facts.sent += [_sent(3.0, "a", 2), _sent(3.0, "b", 1), _sent(3.1, "b", 2), _sent(3.0, "c", 2, "worker_lost")]
    verdict = judge(facts)

    assert verdict.ok
    assert verdict.rows["5 s"].cut == 2
    assert verdict.rows["5 s"].in_flight == 2


def test_an_answer_that_is_wrong_is_nobodys_but_ours():
    facts = _facts(downs=[_down(1, "5 s", killed_s=10.5)])
    facts.records[0] = replace(facts.records[0], outcome="wrong")

    assert not judge(facts).ok


def test_what_is_sent_after_the_deregistration_is_counted_by_its_window():
    facts = _facts()
    facts.sent += [
        _sent(10.03, "r1", 1),
        _sent(10.06, "r2", 1, "worker_draining"),
        _sent(10.08, "r3", 1),
        _sent(99, "x", 9),
    ]
    verdict = judge(facts)

    assert (verdict.late_served, verdict.late_sent_on) == (1, 1)
    assert [sent.request_id for sent in verdict.too_late] == ["r3"]
    assert verdict.latest_s == pytest.approx(0.06)
    assert not verdict.ok


def test_the_report_refuses_what_is_no_matter_of_degree():
    good = _facts(ups=[Up(DECODE, "w1", False, 1.0, 2.0, "drain")], over_s=[0.01])
    good.asked = [Asked(command, 0.01, 2) for command in ("status", "scale")]
    figures = {figure.name: figure for figure in report(good).figures}
    lost = replace(good.records[0], outcome="cut", why="worker_lost")

    assert figures["dropped requests"].samples == (0,)
    with pytest.raises(RuntimeError, match="worker_lost"):
        report(replace(good, records=[lost]))
    with pytest.raises(RuntimeError, match="w7 exited"):
        report(replace(good, unasked=["w7 exited"]))


def test_facts_are_kept_and_read_again(tmp_path):
    facts = _facts(asked=[Asked("status", 0.01, 2)], over_s=[0.01], unasked=["x"])
    facts.save(tmp_path / "facts.json")

    assert Facts.load(tmp_path / "facts.json") == facts


def test_the_page_has_one_line_for_each_policy(tmp_path):
    text = page.section(judge(_facts(ups=[], asked=[])), _facts())

    assert "| **never: drain** | 1 | 5 | 0 | 0.0 |  |" in text
    assert "| after 30 s | 0 | 0 | 0 | – | 2 |" in text
    (tmp_path / "drain.md").write_text("no marks")
    with pytest.raises(ValueError, match="lacks"):
        page.write(tmp_path / "drain.md", judge(_facts()), _facts())


def test_the_trace_is_the_same_every_time_and_begins_anew():
    trace = generated(CHAT).rows
    again = [asks(trace[:40], thinning=4, speed=10.0, answer_max=600) for _ in range(2)]
    first, second = ([*islice(source, 25)] for source in again)

    assert first == second
    assert [ask.at_s for ask in first] == sorted(ask.at_s for ask in first)
    assert len({ask.prompt for ask in first}) == 25
    assert max(ask.max_tokens for ask in asks_of(trace)) == 600
    assert {ask.ignore_eos for ask in asks_of(trace)} == {True, False}


def asks_of(trace):
    return islice(asks(trace, thinning=4, speed=10.0, answer_max=600), 100)


def test_an_answer_is_read_as_far_as_it_came():
    whole = b'data: {"id":"chatcmpl-7","choices":[{"delta":{"content":"ab"},"finish_reason":null}]}\n\n'
    end = b'data: {"id":"chatcmpl-7","choices":[{"delta":{},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'
    error = b'data: {"error":{"code":"worker_lost","message":"gone"}}\n\n'

    assert read_answer(whole + end) == type(read_answer(b""))("7", "ab", "stop", None, True)
    assert (read_answer(whole + end[:30]).reason, read_answer(whole + end[:30]).ended) == (None, False)
    assert read_answer(whole + error).error == "worker_lost"


# --- benchmark traces
# Where benchmarks get their requests: recorded ones where they lie, else generated ones, and a line says which.

ROWS = [TraceRequest(0.0, 600, 3, (1, 2)), TraceRequest(1.5, 700, 4, (1, 3))]


def test_a_recorded_hour_is_taken_from_the_folder_that_is_named(tmp_path: Path) -> None:
    write_trace(tmp_path / CONVERSATION, ROWS)
    found = conversation(env={FOLDER: str(tmp_path)})
    assert (found.rows, found.recorded) == (ROWS, True)
    assert found.told == f"recorded requests ({CONVERSATION})"
    assert conversation(1, env={FOLDER: str(tmp_path)}).rows == ROWS[:1]


def test_without_one_the_requests_are_made_and_one_line_says_where_it_can_be_had(tmp_path: Path) -> None:
    found = conversation(20, env={FOLDER: str(tmp_path)})
    assert found.rows == generated("chat", 20).rows
    assert not found.recorded
    assert found.name == "generated requests (chat)"
    assert "https://github.com/kvcache-ai/Mooncake" in found.told
    assert str(tmp_path) in found.told
    assert "\n" not in found.told


def test_a_folder_that_was_named_and_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="is no folder"):
        conversation(env={FOLDER: str(tmp_path / "nowhere")})


def test_unset_it_is_the_folder_beside_the_checkout() -> None:
    assert folder({}) == folder({FOLDER: ""}) == BESIDE
    assert BESIDE.parts[-3:] == ("shared", "data", "traces")
