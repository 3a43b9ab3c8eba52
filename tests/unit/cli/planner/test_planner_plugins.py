"""`dynamo planner plugins`: what a person sees of them."""

from __future__ import annotations

from dynamo_local.cli.planner import plugin_lines

HERE = {
    "plugin_id": "office-hours",
    "plugin_type": "propose",
    "priority": 5,
    "circuit_state": "OPEN",
    "evaluations_total": 132,
    "last_call_seconds_ago": 0.42,
    "endpoint": "unix:/tmp/p.sock",
    "origin": "gateway",
    "trouble": "UNAVAILABLE: nobody listens",
}


def test_the_table_and_what_is_wrong() -> None:
    told = {
        "plugins": [HERE, {**HERE, "plugin_id": "b", "last_call_seconds_ago": None, "trouble": None}],
        "not_taken": {"old": "protocol_version_unsupported"},
        "gateway": "unix:///run/plugins.sock",
        "last_tick": {"action": "skip_short_circuit", "why": "b rejects: a freeze"},
    }
    assert list(plugin_lines(told)) == [
        "plugin        stage    priority  circuit  calls  last       at",
        "office-hours  propose  5         open     132    0.4 s ago  unix:/tmp/p.sock (gateway)",
        "b             propose  5         open     132    -          unix:/tmp/p.sock (gateway)",
        "office-hours: UNAVAILABLE: nobody listens",
        "old: not taken: protocol_version_unsupported",
        "register at unix:///run/plugins.sock",
        "last tick: skip_short_circuit: b rejects: a freeze",
    ]


def test_nobody_is_told_in_words() -> None:
    nobody = {"plugins": [], "not_taken": {}, "gateway": None, "last_tick": {"action": "apply", "why": ""}}
    assert list(plugin_lines(nobody)) == ["no plugins"]
