"""The page's acts: each is a command of the control socket, as the command line sends it. A dry run says what it would
do."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dynamo_local.cli.workers import describe_flip, describe_restart, describe_scale
from dynamo_local.dashboard.collector import Collector
from dynamo_local.errors import BadInput

Body = Mapping[str, Any]
COMMIT_TIMEOUT_S = 30.0
NAME_MAX = 200


@dataclass(frozen=True, slots=True)
class Act:
    """The command, the body as its properties, and the answer in words. A `destructive` one needs the name again."""

    command: str
    properties: Callable[[Body], dict[str, Any]]
    words: Callable[[dict[str, Any]], str]
    destructive: bool = False


def _text(body: Body, key: str) -> str:
    value = body.get(key)
    if not isinstance(value, str) or not 0 < len(value) <= NAME_MAX:
        raise BadInput(f"the act needs {key!r}, a name")
    return value


def _state(reply: Mapping[str, Any]) -> str:
    return f"{reply['watcher_name']}: {reply['state']}"


def _planner(reply: Mapping[str, Any]) -> str:
    return f"planner: {reply['planner']['state']}"


def _force(body: Body) -> bool:
    return body.get("force") is True


def _scale(body: Body) -> dict[str, Any]:
    return {"component": _text(body, "component"), "target": str(body.get("value", "")), "force": _force(body)}


def _named(body: Body) -> dict[str, Any]:
    return {"name": _text(body, "worker"), "force": _force(body)}


ACTS: Mapping[str, Act] = {
    "scale": Act("dynamo_scale", _scale, describe_scale),
    "drain": Act("dynamo_drain", _named, _state, destructive=True),
    "cancel": Act("dynamo_drain", lambda body: {**_named(body), "cancel": True}, _state),
    "flip": Act("dynamo_flip", _named, lambda reply: describe_flip(reply, cancel=False), destructive=True),
    "sleep": Act("dynamo_sleep", lambda body: {**_named(body), "level": _level(body)}, _state, destructive=True),
    "wake": Act("dynamo_wake", lambda body: {"name": _text(body, "worker")}, _state),
    "restart": Act("dynamo_restart", _named, describe_restart, destructive=True),
    "pause": Act("dynamo_planner_pause", lambda body: {}, _planner),
    "resume": Act("dynamo_planner_resume", lambda body: {}, _planner),
}
WITHOUT_DRY_RUN = {
    "cancel": "The worker's drain is taken back: the same process serves on.",
    "pause": "The planner decides nothing until it is resumed. Workers stay as they are.",
    "resume": "The planner decides again from its next interval on.",
}
"""These always do the same, so the arbiter is not asked."""


def _level(body: Body) -> int:
    value = body.get("value")
    return 2 if value in (2, "2") else 1


class Acts:
    """Carries acts out through the control socket."""

    def __init__(self, collector: Collector) -> None:
        self._collector = collector

    async def run(self, body: Body) -> dict[str, Any]:
        """The answer of an act. Raises `BadInput`, or the arbiter's refusal."""
        name = body.get("act")
        if name == "apply":
            return await self._apply(body)
        act = ACTS.get(name) if isinstance(name, str) else None
        if act is None:
            raise BadInput(f"there is no act {str(name)[:40]!r}; there are {', '.join([*ACTS, 'apply'])}")
        properties = act.properties(body)
        dry = body.get("dry_run") is True
        if dry and name in WITHOUT_DRY_RUN:
            return {"text": WITHOUT_DRY_RUN[name], "would": []}
        if not dry and act.destructive:
            confirmed(body, str(properties["name"]))
        if dry:
            properties["would"] = True
        reply = await self._collector.ask(act.command, COMMIT_TIMEOUT_S, **properties)
        if dry:
            return {"text": act.words(reply), "would": reply.get("instructions") or reply.get("workers") or []}
        return {"text": act.words(reply), "done": True, "cause": reply.get("stimulus_id")}

    async def _apply(self, body: Body) -> dict[str, Any]:
        from dynamo_local.dashboard.whatif import finished

        path = Path(_text(body, "value"))
        if not path.is_absolute() or not await asyncio.to_thread(path.is_file):
            raise BadInput(f"{path} is no file; name the configuration by its whole path")
        dry = body.get("dry_run") is True
        if not dry:
            confirmed(body, path.name)
        words = ("apply", "-f", str(path), "-n", self._collector.paths.namespace, *(("--dry-run",) if dry else ()))
        text = await finished(words, deadline_s=COMMIT_TIMEOUT_S if dry else 3_600.0)
        return {"text": text, "would": text.splitlines()} if dry else {"text": text, "done": True}


def confirmed(body: Body, name: str) -> None:
    """Raise `BadInput` unless the person has typed the name."""
    said = body.get("confirm")
    if said != name:
        raise BadInput(f"this needs a confirmation: `confirm` must be {name!r}")
