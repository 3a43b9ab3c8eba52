"""What a driver of a runtime is to the runner."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from dynamo_local.core.types import Load, Missing
from dynamo_local.errors import DynamoError


class ChildEnded(DynamoError):
    """The command has ended although nobody asked it to."""

    code = "command_ended"


class ChildSilent(DynamoError):
    """The command does not answer, or not with what it should: what it does is unknown."""

    code = "command_silent"


class Sample(NamedTuple):
    """What a command says of itself. `in_flight` counts the requests that it holds: a drain waits for 0."""

    load: Load | Missing
    in_flight: int


class Driver(Protocol):
    """One runtime's way with one command. Made once etcd and NATS are connected; used from one event loop."""

    async def wait_ready(self) -> None:
        """Return when the command answers, and its own registration (if it has one) is seen.

        Bounded from outside by the start deadline, and cancelled when the command ends. Raises a `DynamoError` where
        it never will be ready.
        """
        ...

    def facts(self) -> Mapping[str, str]:
        """After `wait_ready`, for the ready key: `frontend_url`, and `leases` (hex, joined by commas) that the arbiter
        revokes when this worker's process is gone, as it does with the worker's own."""
        ...

    async def sample(self) -> Sample:
        """Ask the command now. Raises `ChildSilent`: what is not known is no 0."""
        ...

    async def take_out(self) -> None:
        """From now on nothing new is routed to the command. Called again during a drain, so doing it twice changes
        nothing; may be cancelled halfway. Raises `InfraUnavailable` where that cannot be done now."""
        ...

    async def put_back(self) -> None:
        """The drain was taken back: it is routed to as before, also after a `take_out` that was broken off.

        Raises `InfraUnavailable` where that cannot be done now, another `DynamoError` where it never can.
        """
        ...

    async def lost(self) -> None:
        """The command is gone: take away by what others would still route to it. Doing it twice changes nothing."""
        ...


class Unrouted:
    """The half of a driver whose command is in no routing but by the worker's own registration: nothing else is to be
    taken out, put back or lost."""

    async def take_out(self) -> None:
        return None

    async def put_back(self) -> None:
        return None

    async def lost(self) -> None:
        return None
