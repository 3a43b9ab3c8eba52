"""What passes between runner and driver. Light: imported before the command is started."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dynamo_local.core.types import Load, Missing


@dataclass(frozen=True, slots=True)
class Launch:
    """How a command is started: its words with every placeholder filled in, its environment, its ports by name."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    ports: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Sample:
    """What a command says of itself. `in_flight` counts the requests that it holds: a drain waits for 0."""

    load: Load | Missing
    in_flight: int
