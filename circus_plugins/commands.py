"""What our arbiter answers beside circus's own commands (those it replaces or refuses are in `stock`).

Imported on both sides: by the arbiter before its controller is made, and by `dynamo ctl`, because `circusctl`
only knows the commands that its own process has imported (circus-facts).

A command that takes time is a coroutine of the supervisor. Its answer is the coroutine's result, always: circus would
answer "ok" at once unless the caller asked for `waiting`, and turn every exception into a bare "server error".
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any, ClassVar, Protocol

from circus.commands.base import Command
from circus.exc import ArgumentError, MessageError

from dynamo_local.circus_plugins.answers import answer, flag, new_stimulus_id, number, supervisor_of, text
from dynamo_local.circus_plugins.planner_commands import Planned
from dynamo_local.circus_plugins.stock import REFUSED, install_commands
from dynamo_local.errors import BadTarget, DynamoError

FORCE = ("", "force", False, "even if it leaves the role without a ready worker")


class Commanded(Protocol):
    """The part of the supervisor that commands speak to. All raise `DynamoError`s fit for a person."""

    def status(self) -> dict[str, Any]:
        """The object of `dynamo status --json`."""
        ...

    def request_down(self, why: str, *, now: bool = False) -> int:
        """Ask to leave; returns the arbiter's pid at once."""
        ...

    async def down(self, why: str) -> None:
        """Ask to leave, and return when everything but the arbiter is gone."""
        ...

    async def scale(
        self,
        component: str,
        target: str,
        *,
        force: bool,
        victim_policy: str | None,
        stimulus_id: str,
        wake: bool = True,
    ) -> dict[str, Any]:
        """`{"component", "instructions": [{"kind", "watcher_name"}], "ready", "target"}`, once committed."""
        ...

    async def drain(self, name: str, *, cancel: bool, force: bool, stimulus_id: str) -> dict[str, Any]:
        """`{"watcher_name", "state"}`, once committed."""
        ...

    async def flip(self, name: str, *, cancel: bool, force: bool, stimulus_id: str) -> dict[str, Any]:
        """`{"watcher_name", "becomes", "state"}`, once committed; with `cancel`, when it has stayed what it was."""
        ...

    async def scale_flip(
        self, gives: str, takes: str, count: int, *, force: bool, victim_policy: str | None, stimulus_id: str
    ) -> dict[str, Any]:
        """`{"components", "instructions"}`, once committed."""
        ...

    async def sleep(self, name: str, *, level: int, force: bool, stimulus_id: str) -> dict[str, Any]:
        """`{"watcher_name", "state"}`, once committed."""
        ...

    async def wake(self, name: str, *, stimulus_id: str) -> dict[str, Any]:
        """`{"watcher_name", "state"}`, once committed."""
        ...

    async def restart(self, name_or_component: str, *, rolling: bool, force: bool, stimulus_id: str) -> dict[str, Any]:
        """`{"workers": […]}`, once committed."""
        ...

    async def apply(self, deployment: Any, *, dry_run: bool, force: bool, stimulus_id: str) -> dict[str, Any]:
        """What differs, and what is done about it, once committed. `deployment` is as
        `arbiter.deployment_spec.DeploymentSpec` writes it."""
        ...

    def planner(self) -> Planned:
        """Whom the planner's commands speak to."""
        ...


class DynamoStatus(Command):  # type: ignore[misc]
    """\
    Get the graph's workers, states, GPUs and load as JSON
    ======================================================

    The same object as `dynamo status --json`.
    """

    name = "dynamo_status"

    def message(self, *args: Any, **opts: Any) -> Any:
        """The request as circusctl sends it."""
        return self.make_message(**opts)

    def execute(self, arbiter: Any, props: Any) -> dict[str, Any]:
        """`{"graph": {...}}`; never waits: loads are the last ones sampled."""
        return {"graph": _now(arbiter).status()}

    def console_msg(self, msg: dict[str, Any]) -> str:
        """One line a worker."""
        if msg.get("status") != "ok":
            return str(self.console_error(msg))
        rows = msg["graph"]["workers"]
        return "\n".join(f"{row['watcher_name']}: {row['state']} pid={row['pid']}" for row in rows)


class DynamoDown(Command):  # type: ignore[misc]
    """\
    Leave: finish what streams, end workers, then NATS and etcd
    ============================================================

    The same as `dynamo down`. `now` ends at once.
    """

    name = "dynamo_down"
    options: ClassVar[list[Any]] = [("", "now", False, "end at once, cutting what streams")]

    def message(self, *args: Any, **opts: Any) -> Any:
        """The request as circusctl sends it."""
        return self.make_message(**opts)

    def execute(self, arbiter: Any, props: Any) -> dict[str, Any]:
        """Answers at once; the arbiter is gone when its lock is free."""
        return {"pid": _now(arbiter).request_down("dynamo down", now=bool(props.get("now")))}


def _now(arbiter: Any) -> Commanded:
    try:
        return supervisor_of(arbiter)
    except DynamoError as error:
        raise MessageError(str(error)) from None


class _Asked:
    """A command that a coroutine of the supervisor carries out. No `Command` itself, else circus would register it."""

    name: ClassVar[str]
    arguments: ClassVar[tuple[str, ...]]
    """Property names of the words on circusctl's command line, all needed."""

    def message(self, *args: Any, **opts: Any) -> Any:
        """The request as circusctl sends it. Raises circus's `ArgumentError`, which circusctl prints."""
        if len(args) != len(self.arguments):
            wanted = " ".join(name.upper() for name in self.arguments)
            raise ArgumentError(f"{self.name} takes {wanted}; got {len(args)} words")
        return self.make_message(**dict(zip(self.arguments, args, strict=True)), **opts)  # type: ignore[attr-defined]

    def execute(self, arbiter: Any, props: Any) -> Any:
        """A future of the reply."""
        return answer(props, lambda: self._ask(arbiter, props))

    async def _ask(self, arbiter: Any, props: Any) -> dict[str, Any]:
        stimulus_id = new_stimulus_id(self.name.removeprefix("dynamo_"))
        result = await self.ask(supervisor_of(arbiter), props, stimulus_id)
        return {**result, "stimulus_id": stimulus_id}

    def ask(self, supervisor: Commanded, props: Any, stimulus_id: str) -> Awaitable[dict[str, Any]]:
        """Call the supervisor."""
        raise NotImplementedError


class DynamoScale(_Asked, Command):  # type: ignore[misc]
    """\
    Add or remove workers: dynamo_scale VllmWorker +1
    =================================================

    The same as `dynamo scale`: `+1`, `-1`, `=3` or `3`. Answers once the intent is committed.
    """

    name = "dynamo_scale"
    arguments = ("component", "target")
    options: ClassVar[list[Any]] = [
        FORCE,
        ("", "victim_policy", None, "highest-suffix, least-loaded or coldest"),
        ("", "no_wake", False, "start new workers, though some sleep"),
    ]

    def ask(self, supervisor: Commanded, props: Any, stimulus_id: str) -> Awaitable[dict[str, Any]]:
        """See `Commanded.scale`."""
        return supervisor.scale(
            text(props, "component"),
            text(props, "target"),
            force=flag(props, "force"),
            victim_policy=None if props.get("victim_policy") is None else text(props, "victim_policy"),
            stimulus_id=stimulus_id,
            wake=not flag(props, "no_wake"),
        )


class DynamoDrain(_Asked, Command):  # type: ignore[misc]
    """\
    Let one worker finish and leave: dynamo_drain dynamo_VllmWorker_1
    =================================================================

    The same as `dynamo drain`. `cancel` takes the drain back. Answers once the intent is committed.
    """

    name = "dynamo_drain"
    arguments = ("name",)
    options: ClassVar[list[Any]] = [FORCE, ("", "cancel", False, "take the drain back")]

    def ask(self, supervisor: Commanded, props: Any, stimulus_id: str) -> Awaitable[dict[str, Any]]:
        """See `Commanded.drain`."""
        return supervisor.drain(
            text(props, "name"), cancel=flag(props, "cancel"), force=flag(props, "force"), stimulus_id=stimulus_id
        )


class DynamoFlip(_Asked, Command):  # type: ignore[misc]
    """\
    Have a prefill worker decode, or the other way round: dynamo_flip NAME
    ======================================================================

    The same as `dynamo flip`. `cancel` has it stay what it is. Answers once the intent is committed.
    """

    name = "dynamo_flip"
    arguments = ("name",)
    options: ClassVar[list[Any]] = [FORCE, ("", "cancel", False, "have it stay what it is")]

    def ask(self, supervisor: Commanded, props: Any, stimulus_id: str) -> Awaitable[dict[str, Any]]:
        """See `Commanded.flip`."""
        return supervisor.flip(
            text(props, "name"), cancel=flag(props, "cancel"), force=flag(props, "force"), stimulus_id=stimulus_id
        )


class DynamoScaleFlip(_Asked, Command):  # type: ignore[misc]
    """\
    Give workers of one component to another: dynamo_scale_flip PrefillWorker VllmWorker 1
    ======================================================================================

    The same as `dynamo scale PrefillWorker -1 VllmWorker +1 --flip`. Answers once the intent is committed.
    """

    name = "dynamo_scale_flip"
    arguments = ("gives", "takes", "count")
    options: ClassVar[list[Any]] = DynamoScale.options

    def ask(self, supervisor: Commanded, props: Any, stimulus_id: str) -> Awaitable[dict[str, Any]]:
        """See `Commanded.scale_flip`."""
        count = str(props.get("count"))
        if not count.isascii() or not count.isdecimal() or not 1 <= int(count) <= 9999:
            raise BadTarget(f"{count!r} is no number of workers: 1 or more")
        return supervisor.scale_flip(
            text(props, "gives"),
            text(props, "takes"),
            int(count),
            force=flag(props, "force"),
            victim_policy=None if props.get("victim_policy") is None else text(props, "victim_policy"),
            stimulus_id=stimulus_id,
        )


class DynamoSleep(_Asked, Command):  # type: ignore[misc]
    """\
    Put a worker to sleep: dynamo_sleep dynamo_VllmWorker_1
    =======================================================

    The same as `dynamo sleep`. Answers once the intent is committed.
    """

    name = "dynamo_sleep"
    arguments = ("name",)
    options: ClassVar[list[Any]] = [FORCE, ("", "level", 1, "1 keeps the weights in main memory, 2 keeps none")]

    def ask(self, supervisor: Commanded, props: Any, stimulus_id: str) -> Awaitable[dict[str, Any]]:
        """See `Commanded.sleep`."""
        return supervisor.sleep(
            text(props, "name"), level=number(props, "level", 1), force=flag(props, "force"), stimulus_id=stimulus_id
        )


class DynamoWake(_Asked, Command):  # type: ignore[misc]
    """\
    Wake a worker that sleeps: dynamo_wake dynamo_VllmWorker_1
    ==========================================================

    The same as `dynamo wake`. Answers once the intent is committed.
    """

    name = "dynamo_wake"
    arguments = ("name",)
    options: ClassVar[list[Any]] = []

    def ask(self, supervisor: Commanded, props: Any, stimulus_id: str) -> Awaitable[dict[str, Any]]:
        """See `Commanded.wake`."""
        return supervisor.wake(text(props, "name"), stimulus_id=stimulus_id)


class DynamoRestart(_Asked, Command):  # type: ignore[misc]
    """\
    Drain a worker (or each of a component) and start it again
    ==========================================================

    The same as `dynamo restart`. Clears a fault. Answers once the intent is committed.
    """

    name = "dynamo_restart"
    arguments = ("name",)
    options: ClassVar[list[Any]] = [FORCE, ("", "rolling", False, "one after the other")]

    def ask(self, supervisor: Commanded, props: Any, stimulus_id: str) -> Awaitable[dict[str, Any]]:
        """See `Commanded.restart`."""
        return supervisor.restart(
            text(props, "name"), rolling=flag(props, "rolling"), force=flag(props, "force"), stimulus_id=stimulus_id
        )


class DynamoApply(_Asked, Command):  # type: ignore[misc]
    """\
    Take over another deployment: use `dynamo apply -f FILE`
    ========================================================

    `deployment` is what that command has understood of the file. Answers once the intent is committed.
    """

    name = "dynamo_apply"
    arguments = ("deployment",)
    options: ClassVar[list[Any]] = [FORCE, ("", "dry_run", False, "only say what would be changed")]

    def ask(self, supervisor: Commanded, props: Any, stimulus_id: str) -> Awaitable[dict[str, Any]]:
        """See `Commanded.apply`."""
        return supervisor.apply(
            props.get("deployment"),
            dry_run=flag(props, "dry_run"),
            force=flag(props, "force"),
            stimulus_id=stimulus_id,
        )


__all__ = [
    "REFUSED",
    "Commanded",
    "DynamoApply",
    "DynamoDown",
    "DynamoDrain",
    "DynamoFlip",
    "DynamoRestart",
    "DynamoScale",
    "DynamoScaleFlip",
    "DynamoSleep",
    "DynamoStatus",
    "DynamoWake",
    "Planned",
    "install_commands",
]
