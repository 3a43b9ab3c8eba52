"""What passes between runner and driver. Light: imported before the command is started."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from dynamo_local.core.types import Load, Missing


class Launch(NamedTuple):
    """How a command is started: its words with every placeholder filled in, its environment, its ports by name.

    `signs` names the ports that it listens on only when it is about to be up.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str]
    ports: Mapping[str, int]
    signs: tuple[str, ...] = ()


class Sample(NamedTuple):
    """What a command says of itself. `in_flight` counts the requests that it holds: a drain waits for 0."""

    load: Load | Missing
    in_flight: int
