"""Our commands on the arbiter's endpoint, beside circus's own (`stock` replaces or refuses some of those).

Imported on both sides: by the arbiter before its controller is made, and by `dynamo ctl`, because `circusctl`
only knows the commands that its own process has imported.

A command's JSON properties are parsed here, once, into a record of `core.fleet.events`. The supervisor runs the record.
Its answer is the reply, always: circus would answer "ok" at once unless the caller asked for `waiting`, and turn every
exception into a bare "server error".
"""

from __future__ import annotations

from typing import Any, ClassVar

from circus.commands.base import Command
from circus.exc import ArgumentError, MessageError

import dynamo_local.circus_plugins.planner_commands  # noqa: F401  registers the planner's commands with circus
from dynamo_local.arbiter.commands import ApplyDeployment
from dynamo_local.circus_plugins.answers import answer, new_stimulus_id, parsed, supervisor_of
from dynamo_local.circus_plugins.stock import REFUSED, install_commands
from dynamo_local.core.fleet import events as fleet
from dynamo_local.errors import DynamoError

VICTIM_POLICY = ("", "victim_policy", None, "highest-suffix, least-loaded or coldest")
WOULD = "would"
"""With this property a command changes nothing. Its answer says what it would do."""
FORCE = ("", "force", False, "even if it leaves the role without a ready worker")


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
        """`{"graph": {...}}`; never waits: loads are the last ones sampled. The page says in `page` where it is."""
        supervisor = _now(arbiter)
        if isinstance(url := props.get("page"), str):
            supervisor.parts.dashboard.heard(url)
        return {"graph": supervisor.status()}

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


def _now(arbiter: Any) -> Any:
    try:
        return supervisor_of(arbiter)
    except DynamoError as error:
        raise MessageError(str(error)) from None


class _FleetCommand:
    """A command that the supervisor runs (`Supervisor.run`). No `Command` itself, else circus would register it.

    The words, and the names of the options, are the properties from which the record is parsed.
    """

    name: ClassVar[str]
    #: The properties are parsed into this, once.
    record: ClassVar[type[fleet.Command]]
    #: Property names of the words on circusctl's command line, all needed.
    arguments: ClassVar[tuple[str, ...]]
    options: ClassVar[list[Any]] = []

    def message(self, *args: Any, **opts: Any) -> Any:
        """The request as circusctl sends it. Raises circus's `ArgumentError`, which circusctl prints."""
        if len(args) != len(self.arguments):
            wanted = " ".join(name.upper() for name in self.arguments)
            raise ArgumentError(f"{self.name} takes {wanted}; got {len(args)} words")
        return self.make_message(**dict(zip(self.arguments, args, strict=True)), **opts)  # type: ignore[attr-defined]

    def execute(self, arbiter: Any, props: Any) -> Any:
        """A future of the reply."""
        return answer(props, lambda: self._run(arbiter, props))

    async def _run(self, arbiter: Any, props: Any) -> dict[str, Any]:
        names = (*self.arguments, *(option[1] for option in self.options))
        command = parsed(self.record, props, names, new_stimulus_id(self.name.removeprefix("dynamo_")))
        supervisor = supervisor_of(arbiter)
        if props.get(WOULD) is True:
            return await supervisor.would(command)
        return {**await supervisor.run(command), "stimulus_id": command.stimulus_id}


class DynamoScale(_FleetCommand, Command):  # type: ignore[misc]
    """\
    Add or remove workers: dynamo_scale VllmWorker +1
    =================================================

    The same as `dynamo scale`: `+1`, `-1`, `=3` or `3`. Answers once the intent is committed.
    """

    name = "dynamo_scale"
    record = fleet.Scale
    arguments = ("component", "target")
    options: ClassVar[list[Any]] = [
        FORCE,
        VICTIM_POLICY,
        ("", "no_wake", False, "start new workers, though some sleep"),
    ]


class DynamoDrain(_FleetCommand, Command):  # type: ignore[misc]
    """\
    Let one worker finish and leave: dynamo_drain dynamo_VllmWorker_1
    =================================================================

    The same as `dynamo drain`. `cancel` takes the drain back. Answers once the intent is committed.
    """

    name = "dynamo_drain"
    record = fleet.Drain
    arguments = ("name",)
    options: ClassVar[list[Any]] = [FORCE, ("", "cancel", False, "take the drain back")]


class DynamoFlip(_FleetCommand, Command):  # type: ignore[misc]
    """\
    Have a prefill worker decode, or the other way round: dynamo_flip NAME
    ======================================================================

    The same as `dynamo flip`. `cancel` has it stay what it is. Answers once the intent is committed.
    """

    name = "dynamo_flip"
    record = fleet.Flip
    arguments = ("name",)
    options: ClassVar[list[Any]] = [FORCE, ("", "cancel", False, "have it stay what it is")]


class DynamoScaleFlip(_FleetCommand, Command):  # type: ignore[misc]
    """\
    Give workers of one component to another: dynamo_scale_flip PrefillWorker VllmWorker 1
    ======================================================================================

    The same as `dynamo scale PrefillWorker -1 VllmWorker +1 --flip`. Answers once the intent is committed.
    """

    name = "dynamo_scale_flip"
    record = fleet.ScaleFlip
    arguments = ("gives", "takes", "count")
    options: ClassVar[list[Any]] = [FORCE, VICTIM_POLICY]


class DynamoSleep(_FleetCommand, Command):  # type: ignore[misc]
    """\
    Put a worker to sleep: dynamo_sleep dynamo_VllmWorker_1
    =======================================================

    The same as `dynamo sleep`. Answers once the intent is committed.
    """

    name = "dynamo_sleep"
    record = fleet.Sleep
    arguments = ("name",)
    options: ClassVar[list[Any]] = [FORCE, ("", "level", 1, "1 keeps the weights in main memory, 2 keeps none")]


class DynamoWake(_FleetCommand, Command):  # type: ignore[misc]
    """\
    Wake a worker that sleeps: dynamo_wake dynamo_VllmWorker_1
    ==========================================================

    The same as `dynamo wake`. Answers once the intent is committed.
    """

    name = "dynamo_wake"
    record = fleet.Wake
    arguments = ("name",)


class DynamoRestart(_FleetCommand, Command):  # type: ignore[misc]
    """\
    Drain a worker (or each of a component) and start it again
    ==========================================================

    The same as `dynamo restart`. Clears a fault. Answers once the intent is committed.
    """

    name = "dynamo_restart"
    record = fleet.Restart
    arguments = ("name",)
    options: ClassVar[list[Any]] = [FORCE, ("", "rolling", False, "one after the other")]


class DynamoApply(_FleetCommand, Command):  # type: ignore[misc]
    """\
    Take over another deployment: use `dynamo apply -f FILE`
    ========================================================

    `deployment` is what that command has understood of the file. Answers once the intent is committed.
    """

    name = "dynamo_apply"
    record = ApplyDeployment
    arguments = ("deployment",)
    options: ClassVar[list[Any]] = [FORCE, ("", "dry_run", False, "only say what would be changed")]


__all__ = [
    "REFUSED",
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
    "install_commands",
]
