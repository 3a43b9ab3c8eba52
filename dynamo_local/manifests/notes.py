"""What does not carry over as it is: told for every export and import, so that nothing is lost unseen."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pydantic import BaseModel

from dynamo_local.errors import BadInput


class Kind(enum.StrEnum):
    """What became of it."""

    LEFT_OUT = "left out"
    CHANGED = "changed"
    SECRET = "secret"


class Note(NamedTuple):
    """One line of the list. `where` names the place in what was read: `Decode.ServiceArgs.standby`."""

    kind: Kind
    where: str
    text: str


class NotCarried(BadInput):
    """It cannot be carried over at all; the message has every reason."""

    code = "not_carried"


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why one part cannot be carried over, and with it the whole."""

    where: str
    reason: str


def refuse(source: str, refusals: Sequence[Refusal]) -> None:
    """Raise `NotCarried` with all reasons, if there are any."""
    if refusals:
        raise NotCarried("\n".join(f"{source}: {refusal.where}: {refusal.reason}" for refusal in refusals))


def left_out(where: str, reasons: Mapping[str, str], keys: Iterable[str], otherwise: str) -> tuple[Note, ...]:
    """A note for each of these keys, with its own reason or this one."""
    return tuple(Note(Kind.LEFT_OUT, f"{where}.{key}", reasons.get(key, otherwise)) for key in keys)


def unread(model: BaseModel, known: Iterable[str]) -> tuple[str, ...]:
    """Fields that the document gives and nobody here reads, as they are spelt there."""
    fields = type(model).model_fields
    spelt = {name: fields[name].alias or name if name in fields else name for name in model.model_fields_set}
    empty: tuple[object, ...] = (None, [], {}, "")
    given = {name: text for name, text in spelt.items() if getattr(model, name) not in empty}
    return tuple(sorted(text for name, text in given.items() if name not in set(known)))
