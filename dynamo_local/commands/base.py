"""What the runner needs of a runtime's driver."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from dynamo_local.core.types import Load, Missing
from dynamo_local.errors import DynamoError


class ChildEnded(DynamoError):
    """The command has ended although nobody asked it to."""

    code = "command_ended"


class ChildSilent(DynamoError):
    """The command does not answer, or its answer is unusable: its state is unknown."""

    code = "command_silent"


class Sample(NamedTuple):
    """What a command reports. `in_flight` counts the requests that it holds: a drain waits for 0."""

    load: Load | Missing
    in_flight: int


class Driver(Protocol):
    """Handles one command of a runtime. Made once etcd and NATS are connected; used from one event loop."""

    async def wait_ready(self) -> None:
        """Return when the command answers, and its own registration (if it has one) is seen.

        Bounded from outside by the start deadline, and cancelled when the command ends. Raises a `DynamoError` if
        it can never become ready.
        """
        ...

    def facts(self) -> Mapping[str, str]:
        """After `wait_ready`, for the ready key: `frontend_url`, and `leases` (hex, joined by commas) that the arbiter
        revokes when this worker's process is gone, as it does with the worker's own."""
        ...

    async def sample(self) -> Sample:
        """Ask the command now. Raises `ChildSilent`: unknown is not 0."""
        ...

    async def take_out(self) -> None:
        """From now on nothing new is routed to the command. Called again during a drain, so doing it twice changes
        nothing; may be cancelled halfway. Raises `InfraUnavailable` where that cannot be done now."""
        ...

    async def put_back(self) -> None:
        """The drain was taken back: route to it as before, also after a `take_out` that was cut short.

        Raises `InfraUnavailable` where that cannot be done now, another `DynamoError` where it never can.
        """
        ...

    async def lost(self) -> None:
        """The command is gone: remove what others would still route by. Doing it twice changes nothing."""
        ...


class UnroutedDriver:
    """Part of a driver whose command is routed to only by the worker's own registration: there is nothing else to take
    out or put back."""

    async def take_out(self) -> None:
        return None

    async def put_back(self) -> None:
        return None

    async def lost(self) -> None:
        return None
