"""Answers without what must differ (ids, times), and streams as what they add up to: which event a token is in is
chance."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import Any

NAMES_AND_TIMES = frozenset(
    {"id", "created", "created_at", "completed_at", "request_id", "item_id", "call_id", "system_fingerprint"}
    | {"signature"}  # of Anthropic's thinking: a random number
)
_IDS = re.compile(r"\b(chatcmpl|cmpl|resp|msg|call|fc|chatcmpl-tool|tool|toolu)[-_][0-9A-Za-z_-]{6,}")
_NAMES = re.compile(r"\['\w+'(?:, '\w+')+\]")
"""Members of a set: each process of vLLM's lists its tasks in its own order."""
CLOSE = 1e-4
"""Other requests in a batch may change the last digits of a log-probability."""
ADDED = frozenset(
    {"text", "delta", "content", "arguments", "reasoning", "reasoning_content", "partial_json", "thinking"}
)

THOUGHTS = frozenset({"reasoning", "reasoning_content", "thinking"})


def plain(status: int, body: bytes, kind: str) -> dict[str, Any]:
    if kind.startswith("text/event-stream"):
        return {"status": status, "events": _thought(_summed(list(_events(body))))}
    try:
        value = json.loads(body)
    except ValueError:
        value = body.decode(errors="replace")
    return {"status": status, "body": _nameless(value)}


def _thought(value: Any) -> Any:
    """Without half a character at the end of what was thought: vLLM's parser drops it where the mark behind it comes in
    an event of its own, and gives it where both come together, which is chance."""
    if isinstance(value, dict):
        return {
            key: each.rstrip("\ufffd") if key in THOUGHTS and isinstance(each, str) else _thought(each)
            for key, each in value.items()
        }
    return [_thought(each) for each in value] if isinstance(value, list | tuple) else value


def _events(body: bytes) -> Iterator[tuple[str, Any]]:
    kind = ""
    for line in body.decode().splitlines():
        name, _, value = line.partition(": ")
        if name == "event":
            kind = value
        elif name == "data":
            yield kind, value if value == "[DONE]" else _nameless(json.loads(value))
            kind = ""


def _nameless(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _nameless(each) for key, each in value.items() if key not in NAMES_AND_TIMES}
    if isinstance(value, list):
        return [_nameless(each) for each in value]
    if isinstance(value, str):
        return _NAMES.sub(lambda found: str(sorted(found[0][1:-1].split(", "))), _IDS.sub("ID", value))
    return value


def _summed(events: list[tuple[str, Any]]) -> list[Any]:
    if events and isinstance(events[0][1], dict) and "choices" in events[0][1]:
        return _choices([event for _, event in events])
    found: list[Any] = []
    for kind, event in events:
        if found and kind and kind == found[-1][0] and "delta" in kind and isinstance(event, dict):
            found[-1] = (kind, _added(found[-1][1], event))
        else:
            found.append((kind, event))
    return [[kind, _unnumbered(event)] for kind, event in found]


def _unnumbered(event: Any) -> Any:
    if isinstance(event, dict):
        return {key: value for key, value in event.items() if key != "sequence_number"}
    return event


def _choices(events: list[Any]) -> list[Any]:
    """OpenAI's chunks: each choice added up, each form of the rest once, and the end."""
    choices: dict[int, Any] = {}
    beside: list[Any] = []
    for event in events:
        if not isinstance(event, dict) or "choices" not in event:
            beside.append(event)
            continue
        for choice in event["choices"]:
            index = choice["index"]
            choices[index] = _added(choices.get(index), choice)
        rest = {key: value for key, value in event.items() if key not in ("choices", "usage")}
        if rest not in beside:
            beside.append(rest)
        if not event["choices"]:
            beside.append({"usage": event.get("usage")})
    return [choices, beside]


def _added(first: Any, second: Any, name: str = "") -> Any:
    if isinstance(second, list) and name == "tool_calls":  # one chunk may have several parts of a call
        return _added_calls(first or [], second)
    if isinstance(second, dict) and (first is None or isinstance(first, dict)):
        before = first or {}
        return {key: _added(before.get(key), second.get(key), key) for key in {**before, **second}}
    if first is None or second is None:
        return second if first is None else first
    if isinstance(first, list) and isinstance(second, list):
        return first + second
    if isinstance(first, str) and isinstance(second, str) and name in ADDED:
        return first + second
    return second


def _added_calls(first: list[Any], second: list[Any]) -> list[Any]:
    calls = {call["index"]: call for call in first}
    for call in second:
        index = call["index"]
        calls[index] = _added(calls[index], call) if index in calls else call
    return [calls[index] for index in sorted(calls)]


def difference(ours: Any, theirs: Any, where: str = "") -> str | None:
    """The first place in which two answers differ, and how; None: nowhere."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for key in sorted({*ours, *theirs}, key=str):
            if (key in ours) != (key in theirs):
                return f"{where}{key}: only {'ours' if key in ours else 'theirs'}"
            if found := difference(ours[key], theirs[key], f"{where}{key}."):
                return found
        return None
    if isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        pairs = enumerate(zip(ours, theirs, strict=True))
        return next((found for at, (a, b) in pairs if (found := difference(a, b, f"{where}{at}."))), None)
    if isinstance(ours, float) and isinstance(theirs, float) and math.isclose(ours, theirs, abs_tol=CLOSE):
        return None
    return None if ours == theirs else f"{where.rstrip('.')}: {_short(ours)} against {_short(theirs)}"


def _short(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 200 else f"{text[:200]}…"
