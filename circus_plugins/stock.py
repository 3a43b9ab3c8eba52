"""circus's own commands, made safe: stock `circusctl` can neither cut a stream nor start a worker behind our back.

Some do what the user means in our way (`stop` is a drain); the others are refused, and the error names our command.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from circus.util import get_info, to_signum

from dynamo_local.circus_plugins.answers import answer, flag, new_stimulus_id, refusal, supervisor_of, text
from dynamo_local.core.fleet.events import Change, Drain, Restart, Scale
from dynamo_local.core.fleet.states import traits_of
from dynamo_local.core.secrets import mask_env
from dynamo_local.core.types import NAME, WorkerState
from dynamo_local.errors import BadInput, TimedOut
from dynamo_local.system.executors import SWEEPS

STATS_DEADLINE_S = 10.0
GONE_POLL_S = 0.1
GONE_TIMEOUT_S = 3600.0
"""How long `--waiting` waits at most; each drain has a deadline of its own, past which the supervisor ends it."""


class Refusal(NamedTuple):
    """Why a command is refused, and what to use instead; `{name}` is the watcher that it was for."""

    why: str
    instead: str


_LEDGER = "a worker is started on GPUs that the ledger chose"
_DOWN_UP = "use `dynamo down` and `dynamo serve`"
_STATUS = "use `dynamo status`"

REFUSED: dict[str, Refusal] = {
    "reload": Refusal("it would start a second copy of a GPU worker", _DOWN_UP),
    "reloadconfig": Refusal("it would drop every worker that was added since the start", _DOWN_UP),
    "add": Refusal(_LEDGER, "use `dynamo scale COMPONENT +1`"),
    "start": Refusal(_LEDGER, "use `dynamo scale COMPONENT +1`, or `dynamo restart {name}` where it is faulted"),
    "set": Refusal(
        "a worker's options come from its graph and configuration",
        "change those, then use `dynamo apply -f FILE`",
    ),
    "kill": Refusal("it would end streams in mid-sentence", "use `dynamo drain {name}`"),
    "ipython": Refusal("it would run a shell in the arbiter's own loop", _STATUS),
}
"""circus's command -> why it is refused, and what to use instead."""

LEAVE = frozenset({signal.SIGTERM, signal.SIGINT})
"""Signals that ask a worker to leave: to send one is a drain."""

HARMLESS = frozenset({signal.SIGCONT, signal.SIGWINCH, signal.SIGURG})
"""Signals that end nobody, whether handled or not."""

HANDLED = frozenset({signal.SIGUSR1, signal.SIGUSR2})
"""Signals that are passed to a worker that handles them; unhandled, they would end it. All others are refused."""

Handler = Callable[[Any, Any, Any], Awaitable[dict[str, Any]]]
"""`(arbiter, circus's own command, properties) -> reply`."""


async def _quit(arbiter: Any, original: Any, props: Any) -> dict[str, Any]:
    """`quit`, and `stop` without a name: `dynamo down`. With `--waiting`, until all but the arbiter is gone."""
    supervisor, why = supervisor_of(arbiter), f"circusctl {original.name}"
    if not flag(props, "wait_for_end"):
        return {"pid": supervisor.request_down(why)}
    await supervisor.down(why)
    return {"pid": os.getpid()}


async def _stop(arbiter: Any, original: Any, props: Any) -> dict[str, Any]:
    if props.get("name") is None:
        return await _quit(arbiter, original, props)
    return await _drain(arbiter, original, props)


async def _remove(arbiter: Any, original: Any, props: Any) -> dict[str, Any]:
    if flag(props, "nostop"):
        raise BadInput("`rm --nostop` is refused: nobody would know of the process, which keeps its GPUs")
    return await _drain(arbiter, original, props)


async def _drain(arbiter: Any, original: Any, props: Any) -> dict[str, Any]:
    """One worker finishes and leaves. With `--waiting` the reply comes when it is gone."""
    name = _worker_named(arbiter, text(props, "name"))
    supervisor = supervisor_of(arbiter)
    stimulus_id = new_stimulus_id(f"circusctl-{original.name}")
    result = await supervisor.run(Drain(stimulus_id=stimulus_id, name=name))
    if flag(props, "wait_for_end"):
        result = {**result, "state": await _until_gone(supervisor, name)}
    return {**result, "stimulus_id": stimulus_id}


async def _until_gone(supervisor: Any, name: str) -> str:
    """The state in which it ended (`ready` if the drain was taken back). circus's own `stop --waiting` waits, too."""
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + GONE_TIMEOUT_S
    while loop.time() < deadline_s:
        row = next((row for row in supervisor.status()["workers"] if row["watcher_name"] == name), None)
        if row is None:
            return str(WorkerState.EXITED)
        traits = traits_of(row["state"])
        if not traits.leaves or traits.gone:
            return str(row["state"])
        await asyncio.sleep(GONE_POLL_S)
    raise TimedOut(f"{name} is still draining after {GONE_TIMEOUT_S:.0f} s. The drain goes on: see `dynamo status`")


async def _signal(arbiter: Any, original: Any, props: Any) -> dict[str, Any]:
    """Only harmless signals are sent: one that asks to leave becomes a drain; those that a worker handles reach it."""
    name = _worker_named(arbiter, text(props, "name"))
    signum = _signum(props)
    if any(props.get(key) for key in ("children", "recursive", "childpid")):
        raise BadInput(f"`signal {signum.name}` to {name}'s own children is refused: an engine's processes are its own")
    watcher = original._get_watcher(arbiter, name)
    if props.get("pid") not in (None, watcher.pid):
        raise BadInput(f"{name} has pid {watcher.pid}, not {props['pid']}")
    if signum in LEAVE:
        return await _drain(arbiter, original, props)
    if signum in HARMLESS or (signum in HANDLED and _handles(watcher.pid, signum)):
        original.execute(arbiter, {"name": name, "signum": signum})
        return {"watcher_name": name, "signal": signum.name}
    raise BadInput(f"`signal {signum.name}` is refused: it would cut what {name} streams; use `dynamo drain {name}`")


async def _get(arbiter: Any, original: Any, props: Any) -> dict[str, Any]:
    """Options with secrets masked, as in `options`: circus would print the whole environment."""
    found: dict[str, Any] = original.execute(arbiter, props)["options"]
    return {"options": {key: mask_env(value or {}) if key == "env" else value for key, value in found.items()}}


def _signum(props: Any) -> signal.Signals:
    value = props.get("signum")
    try:
        return signal.Signals(to_signum(value))
    except (ValueError, TypeError, AttributeError):  # circus looks an unknown name up in `signal`
        raise BadInput(f"{value!r} is no signal") from None


def _handles(pid: int | None, signum: signal.Signals) -> bool:
    """The process has a handler for it (`SigCgt` of proc_pid_status(5)); False if it is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return False
    caught = next((int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:")), 0)
    return bool(caught >> (signum - 1) & 1)


def _worker_named(arbiter: Any, name: str) -> str:
    """The worker's name as we spell it (circus's `list` lower-cases it). The supervisor refuses an unknown one."""
    for row in supervisor_of(arbiter).status()["workers"]:
        if row["watcher_name"].lower() == name.lower():
            return str(row["watcher_name"])
    if name.lower() in arbiter._watchers_names:
        raise BadInput(f"{name} is no worker but part of the arbiter's own household, and leaves with `dynamo down`")
    if not NAME.fullmatch(name):
        raise BadInput(f"{name!r}: one worker's name is needed, not a pattern; `dynamo status` shows the names")
    return name


async def _scale(arbiter: Any, original: Any, props: Any) -> dict[str, Any]:
    """`incr` and `decr`: one worker more or less of the named worker's component, or `nb` of them."""
    count = props.get("nb", 1)
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise BadInput(f"'nb' must be a number from 1 on, not {count!r}")
    supervisor, name = supervisor_of(arbiter), _worker_named(arbiter, text(props, "name"))
    rows = {row["watcher_name"]: row for row in supervisor.status()["workers"]}
    if name not in rows:
        raise BadInput(f"there is no worker {name}: see `dynamo status`")
    stimulus_id = new_stimulus_id(f"circusctl-{original.name}")
    target = Change(count if original.name == "incr" else -count, relative=True)
    scale = Scale(stimulus_id=stimulus_id, component=rows[name]["component"], target=target)
    return {**await supervisor.run(scale), "stimulus_id": stimulus_id}


async def _restart(arbiter: Any, original: Any, props: Any) -> dict[str, Any]:
    """One worker drains, and starts again. circus's own restart would cut its streams."""
    if props.get("name") is None:
        raise BadInput("`restart` without a name is refused: use `dynamo restart COMPONENT`")
    name = _worker_named(arbiter, text(props, "name"))
    stimulus_id = new_stimulus_id("circusctl-restart")
    return {**await supervisor_of(arbiter).run(Restart(stimulus_id=stimulus_id, name=name)), "stimulus_id": stimulus_id}


async def _stats(arbiter: Any, original: Any, props: Any) -> dict[str, Any]:
    """psutil's figures of each process, as circus has them.

    A thread reads /proc: for 256 workers circus's own command would hold the loop for 1.2 s.
    """
    if props.get("name") is None:
        pids = {watcher.name: list(watcher.processes) for watcher in arbiter.watchers}
        return {"infos": await _sampled(pids)}
    name = text(props, "name")
    watcher = next((each for each in arbiter.watchers if each.name.lower() == name.lower()), None)
    if watcher is None:
        raise BadInput(f"there is no watcher {name}: `circusctl list` shows the names")
    info = (await _sampled({name: list(watcher.processes)}))[name]
    if props.get("process") is None:
        return {"name": name, "info": info}
    if props["process"] not in info:
        raise BadInput(f"{name} has no process {props['process']!r}")
    return {"process": props["process"], "info": info[props["process"]]}


async def _sampled(pids: Mapping[str, Sequence[int]]) -> dict[str, dict[int, Any]]:
    """`_infos` in a thread."""
    return await SWEEPS.run(partial(_infos, pids), STATS_DEADLINE_S, what="reading the process table")


def _infos(pids: Mapping[str, Sequence[int]]) -> dict[str, dict[int, Any]]:
    """Watcher -> pid -> figures. Blocks. A process that has ended is left out."""
    found: dict[str, dict[int, Any]] = {}
    for name, numbers in pids.items():
        found[name] = {}
        for pid in numbers:
            with contextlib.suppress(psutil.NoSuchProcess):
                found[name][pid] = get_info(psutil.Process(pid))
    return found


async def _dstats(arbiter: Any, original: Any, props: Any) -> dict[str, Any]:
    """The figures of the arbiter's own process."""
    return {"info": (await _sampled({"arbiter": [os.getpid()]}))["arbiter"][os.getpid()]}


INSTEAD: dict[str, Handler] = {
    "quit": _quit,
    "stop": _stop,
    "rm": _remove,
    "signal": _signal,
    "get": _get,
    "incr": _scale,
    "decr": _scale,
    "restart": _restart,
    "stats": _stats,
    "dstats": _dstats,
}
"""circus's command -> what we do instead."""


class _Replaced:
    """Stands in for a circus command: the same name and help, our implementation."""

    def __init__(self, original: Any, handler: Handler) -> None:
        self._original = original
        self._handler = handler

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def validate(self, props: Any) -> None:
        """Nothing: the handler checks, and answers with a typed error."""

    def execute(self, arbiter: Any, props: Any) -> Any:
        """A future of the reply. `answer` uses circus's `waiting`, so the caller's own becomes `wait_for_end`."""
        wanted = {**props, "wait_for_end": bool(props.get("waiting"))}
        return answer(props, lambda: self._carry_out(arbiter, wanted))

    async def _carry_out(self, arbiter: Any, props: Any) -> dict[str, Any]:
        return await self._handler(arbiter, self._original, props)


class _Refused:
    """Stands in for a circus command that is never executed."""

    def __init__(self, original: Any, refused: Refusal) -> None:
        self._original = original
        self._refused = refused

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def validate(self, props: Any) -> None:
        """Nothing to check: the answer is the same."""

    def execute(self, arbiter: Any, props: Any) -> dict[str, Any]:
        """The reason, and what to do instead."""
        why, instead = self._refused
        instead = instead.format(name=props.get("name") or "NAME")
        return refusal(BadInput(f"`{self._original.name}` is refused: {why}; {instead}"))


def install_commands(commands: dict[str, Any]) -> None:
    """Replace, in a controller's table, the commands that would harm a graph."""
    for name, refused in REFUSED.items():
        if name in commands:
            commands[name] = _Refused(commands[name], refused)
    for name, handler in INSTEAD.items():
        commands[name] = _Replaced(commands[name], handler)
