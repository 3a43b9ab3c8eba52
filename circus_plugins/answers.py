"""How commands read what was sent and how they reply: always typed, and without blocking other commands."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import MISSING, fields
from typing import Any, get_type_hints

from circus.commands import errors
from circus.exc import MessageError

from dynamo_local.core.fleet.events import Change, Command, VictimPolicy, parse_policy, parse_target
from dynamo_local.errors import BadInput, DynamoError, NotRunning

log = logging.getLogger(__name__)

Work = Callable[[], Coroutine[Any, Any, dict[str, Any]]]

_answering: set[asyncio.Task[dict[str, Any]]] = set()
"""The loop holds tasks weakly only, and circus's callback does not hold them at all."""


def answer(props: Any, work: Work) -> asyncio.Task[dict[str, Any]]:
    """A future of the reply of `work`, which never raises. circus replies when it is done (`waiting` asks for that)."""
    props["waiting"] = True
    task = asyncio.ensure_future(_reply(work()))
    _answering.add(task)
    task.add_done_callback(_answering.discard)
    return task


async def _reply(work: Coroutine[Any, Any, dict[str, Any]]) -> dict[str, Any]:
    try:
        result = await work
        json.dumps(result)  # in circus's callback an error would leave the caller without an answer
        return result
    except DynamoError as error:
        return refusal(error)
    except MessageError as error:  # circus's own error for bad input
        return refusal(BadInput(str(error)))
    except asyncio.CancelledError:
        # The loop is being closed. A cancelled future would raise in circus's callback instead of answering.
        return refusal(NotRunning("the arbiter is leaving"))
    except Exception as error:  # a bug of ours: tell the caller, log the traceback, and go on
        log.exception("a command failed")
        return refusal(DynamoError(f"the arbiter failed at it: {type(error).__name__}: {error}; its log says more"))


def refusal(error: DynamoError) -> dict[str, Any]:
    """The reply that tells an error: circus's keys, and our type and exit code."""
    bad = isinstance(error, BadInput)
    return {
        "status": "error",  # circus's ok() lets it override its own "ok"
        "reason": str(error),
        "errno": errors.MESSAGE_ERROR if bad else errors.COMMAND_ERROR,
        "code": error.code,
        "exit_code": error.exit_code,
    }


def supervisor_of(arbiter: Any) -> Any:
    """The arbiter's supervisor. Raises `NotRunning` if it has none yet, or none any more."""
    if arbiter.supervisor is None:
        raise NotRunning("the arbiter is starting or leaving; try again")
    return arbiter.supervisor


def new_stimulus_id(verb: str) -> str:
    """`scale:1f0c9a3e`: the id by which a command is followed through the statefile and the event log."""
    return f"{verb}:{secrets.token_hex(4)}"


def parsed(record: type[Command], props: Any, names: Iterable[str], stimulus_id: str) -> Any:
    """The properties of these names as that command. Each is read once, by the type of its field.

    A property that is absent leaves the field at its default. `no_wake` sets the field `wake` to its opposite.
    Raises `BadInput` that says what came instead.
    """
    types = get_type_hints(record)
    optional = {each.name for each in fields(record) if each.default is not MISSING}
    values: dict[str, Any] = {}
    for name in names:
        opposite = name not in types and name.startswith("no_")
        field = name.removeprefix("no_") if opposite else name
        if props.get(name) is None and field in optional:
            continue
        value = READERS[types[field]](props, name)
        values[field] = not value if opposite else value
    return record(stimulus_id=stimulus_id, **values)


def text(props: Any, name: str) -> str:
    """A property that must be a string or a number (`{"target": 3}`). Raises `BadInput` that says what came instead."""
    value = props.get(name)
    if isinstance(value, bool) or not isinstance(value, (str, int)) or value == "":
        raise BadInput(f"{name!r} must be a word, not {json.dumps(value)}")
    return str(value)


def number(props: Any, name: str) -> int:
    """A property that must be a whole number, or (as circusctl sends it) its digits."""
    value = props.get(name)
    if isinstance(value, bool) or not isinstance(value, (str, int)) or not str(value).isdecimal():
        raise BadInput(f"{name!r} must be a whole number, not {json.dumps(value)}")
    return int(value)


def flag(props: Any, name: str) -> bool:
    """A property that must be true or false; absent is false. `"false"` is refused rather than taken as true."""
    value = props.get(name, False)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise BadInput(f"{name!r} must be true or false, not {json.dumps(value)}")
    return value


READERS: dict[Any, Callable[[Any, str], Any]] = {
    str: text,
    bool: flag,
    int: number,
    Any: lambda props, name: props.get(name),
    Change: lambda props, name: parse_target(text(props, name)),
    VictimPolicy: lambda props, name: parse_policy(text(props, name)),
}
"""How a property becomes the value of a field of that type."""
