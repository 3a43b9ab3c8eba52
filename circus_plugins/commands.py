"""What our arbiter answers beside circus's own commands, and which of those it refuses.

Imported on both sides: by the arbiter before its controller is made, and by `dynamo ctl`, because `circusctl`
only knows the commands that its own process has imported (circus-facts).
"""

from __future__ import annotations

from typing import Any, ClassVar

from circus.commands.base import Command
from circus.exc import MessageError

REFUSED = {
    "reload": "it would start a second copy of a GPU worker",
    "reloadconfig": "it would drop every worker that was added since the start",
    "incr": "each worker has its own GPUs and its own watcher",
    "decr": "each worker has its own GPUs and its own watcher",
    "restart": "it holds the arbiter's only slot until the slowest worker is gone, and cuts streams",
    "start": "a worker is started on GPUs that the ledger chose",
    "add": "a worker is started on GPUs that the ledger chose",
    "set": "a worker's options come from its graph and configuration",
    "kill": "it would end streams in mid-sentence",
    "stats": "it stops the arbiter's loop while it samples every process (1.2 s at 256 workers)",
    "dstats": "it stops the arbiter's loop while it samples every process",
}
"""circus's command -> why not. The answer names what to use instead."""

INSTEAD = {
    "reload": "use `dynamo down` and `dynamo serve`",
    "reloadconfig": "use `dynamo down` and `dynamo serve`",
    "restart": "use `dynamo down` and `dynamo serve`",
    "stats": "use `dynamo status`",
    "dstats": "use `dynamo status`",
    "kill": "use `dynamo down`",
}


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
        return {"graph": _supervisor(arbiter).status()}

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
        return {"pid": _supervisor(arbiter).request_down("dynamo down", now=bool(props.get("now")))}


def _supervisor(arbiter: Any) -> Any:
    if arbiter.supervisor is None:
        raise MessageError("the arbiter is starting or leaving; try again")
    return arbiter.supervisor


class _Refused:
    """Stands in for a circus command: same name and help, never executed."""

    def __init__(self, original: Any) -> None:
        self._original = original

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def validate(self, props: Any) -> None:
        """Nothing to check: the answer is the same."""

    def execute(self, arbiter: Any, props: Any) -> dict[str, Any]:
        """Raise with the reason and what to do instead; circus sends it back as a refusal."""
        name = self._original.name
        instead = INSTEAD.get(name, "see `dynamo --help`")
        raise MessageError(f"`{name}` is refused: {REFUSED[name]}; {instead}")


def install_commands(commands: dict[str, Any]) -> None:
    """Replace the commands that would harm a graph in a controller's table."""
    for name in REFUSED:
        if name in commands:
            commands[name] = _Refused(commands[name])


__all__ = ["REFUSED", "DynamoDown", "DynamoStatus", "install_commands"]
