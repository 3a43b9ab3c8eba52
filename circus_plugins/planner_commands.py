"""The planner's commands on the arbiter's endpoint: the same as `dynamo planner …`."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, ClassVar, Protocol

from circus.commands.base import Command
from circus.exc import ArgumentError

from dynamo_local.circus_plugins.answers import answer, supervisor_of
from dynamo_local.errors import BadInput

HISTORY_MAX = 1000


class Planned(Protocol):
    """The part of the arbiter that the planner's commands speak to. All raise `DynamoError`s fit for a person.

    All but `history` answer with the planner's status: `{"state", "options", "last_decision", …}`.
    """

    def status(self) -> dict[str, Any]:
        """How it is. Never waits."""
        ...

    async def start(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Begin to plan, with these options over the current ones."""
        ...

    async def stop(self) -> dict[str, Any]:
        """Stop planning; returns when a tick that is under way has ended."""
        ...

    async def pause(self) -> dict[str, Any]:
        """Go on observing, and decide nothing."""
        ...

    async def resume(self) -> dict[str, Any]:
        """Decide again; the interval begins anew."""
        ...

    async def set(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Change these options: all of them, or none."""
        ...

    async def history(self, count: int) -> list[dict[str, Any]]:
        """The last `count` decisions, as logged."""
        ...

    async def explain(self, count: int) -> list[str]:
        """The same in words."""
        ...


class _Planner:
    """A command that the planner carries out. No `Command` itself, else circus would register it."""

    name: ClassVar[str]

    def message(self, *args: Any, **opts: Any) -> Any:
        """The request as circusctl sends it. Raises circus's `ArgumentError`, which circusctl prints."""
        return self.make_message(**self.parsed_words(args), **opts)  # type: ignore[attr-defined]

    def parsed_words(self, args: Sequence[str]) -> dict[str, Any]:
        """Properties from the words of circusctl's command line."""
        if args:
            raise ArgumentError(f"{self.name} takes no words; got {len(args)}")
        return {}

    def execute(self, arbiter: Any, props: Any) -> Any:
        """A future of the reply."""
        return answer(props, lambda: self._ask(arbiter, props))

    async def _ask(self, arbiter: Any, props: Any) -> dict[str, Any]:
        return await self.ask(supervisor_of(arbiter).planner(), props)

    async def ask(self, planner: Planned, props: Any) -> dict[str, Any]:
        """Call the planner."""
        raise NotImplementedError

    def console_msg(self, msg: dict[str, Any]) -> str:
        """The reply as it is: it is nested, and circusctl would show its keys only."""
        if msg.get("status") != "ok":
            return str(self.console_error(msg))  # type: ignore[attr-defined]
        return json.dumps({key: value for key, value in msg.items() if key not in ("id", "status", "time")}, indent=2)


class _Changed(_Planner):
    """One whose answer is the planner's status."""

    async def ask(self, planner: Planned, props: Any) -> dict[str, Any]:
        """`{"planner": {...}}`"""
        return {"planner": await self.change(planner, props)}

    def change(self, planner: Planned, props: Any) -> Awaitable[dict[str, Any]]:
        """Carry it out."""
        raise NotImplementedError


class _WithOptions(_Changed):
    """One that takes KEY=VALUE."""

    def parsed_words(self, args: Sequence[str]) -> dict[str, Any]:
        """`{"options": {...}}`"""
        from dynamo_local.config.planner_section import parse_settings

        try:
            return {"options": parse_settings(args)}
        except BadInput as error:
            raise ArgumentError(str(error)) from None


class DynamoPlannerStatus(_Changed, Command):  # type: ignore[misc]
    """\
    Show the planner's state, options and last decision
    ===================================================

    The same as `dynamo planner status --json`.
    """

    name = "dynamo_planner_status"

    async def change(self, planner: Planned, props: Any) -> dict[str, Any]:
        """Nothing is changed."""
        return planner.status()


class DynamoPlannerStart(_WithOptions, Command):  # type: ignore[misc]
    """\
    Start the planner: dynamo_planner_start adjustment-interval=10
    ==============================================================

    The same as `dynamo planner start`.
    """

    name = "dynamo_planner_start"

    def change(self, planner: Planned, props: Any) -> Awaitable[dict[str, Any]]:
        return planner.start(_options(props))


class DynamoPlannerStop(_Changed, Command):  # type: ignore[misc]
    """\
    Stop the planner; the workers stay as they are
    ==============================================

    The same as `dynamo planner stop`.
    """

    name = "dynamo_planner_stop"

    def change(self, planner: Planned, props: Any) -> Awaitable[dict[str, Any]]:
        return planner.stop()


class DynamoPlannerPause(_Changed, Command):  # type: ignore[misc]
    """\
    Let the planner observe, and decide nothing
    ===========================================

    The same as `dynamo planner pause`.
    """

    name = "dynamo_planner_pause"

    def change(self, planner: Planned, props: Any) -> Awaitable[dict[str, Any]]:
        return planner.pause()


class DynamoPlannerResume(_Changed, Command):  # type: ignore[misc]
    """\
    End a pause of the planner; its interval begins anew
    ====================================================

    The same as `dynamo planner resume`.
    """

    name = "dynamo_planner_resume"

    def change(self, planner: Planned, props: Any) -> Awaitable[dict[str, Any]]:
        return planner.resume()


class DynamoPlannerSet(_WithOptions, Command):  # type: ignore[misc]
    """\
    Change options of the planner: dynamo_planner_set max-gpu-budget=6
    ==================================================================

    The same as `dynamo planner set`: all of them, or none.
    """

    name = "dynamo_planner_set"

    def change(self, planner: Planned, props: Any) -> Awaitable[dict[str, Any]]:
        return planner.set(_options(props))


class _Looking(_Planner):
    """One that takes a number of decisions."""

    def parsed_words(self, args: Sequence[str]) -> dict[str, Any]:
        """`{"count": N}`"""
        if len(args) > 1 or (args and not args[0].isdigit()):
            raise ArgumentError(f"{self.name} takes a number of decisions, or nothing; got {' '.join(args)}")
        return {"count": int(args[0])} if args else {}


class DynamoPlannerHistory(_Looking, Command):  # type: ignore[misc]
    """\
    The planner's last decisions, as logged: dynamo_planner_history 5
    =================================================================

    The same as `dynamo planner history --json`.
    """

    name = "dynamo_planner_history"

    async def ask(self, planner: Planned, props: Any) -> dict[str, Any]:
        """`{"decisions": [...]}`"""
        return {"decisions": await planner.history(_count(props, 20))}


class DynamoPlannerExplain(_Looking, Command):  # type: ignore[misc]
    """\
    The planner's last decisions in words: dynamo_planner_explain 3
    ===============================================================

    The same as `dynamo planner explain`.
    """

    name = "dynamo_planner_explain"

    async def ask(self, planner: Planned, props: Any) -> dict[str, Any]:
        """`{"words": [...]}`"""
        return {"words": await planner.explain(_count(props, 1))}


def _options(props: Any) -> dict[str, Any]:
    options = props.get("options") or {}
    if not isinstance(options, dict):
        raise BadInput(f"'options' must be an object of options and their values, not {json.dumps(options)}")
    return options


def _count(props: Any, default: int) -> int:
    count = props.get("count", default)
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= HISTORY_MAX:
        raise BadInput(f"'count' must be a whole number from 1 to {HISTORY_MAX}, not {json.dumps(count)}")
    return count
