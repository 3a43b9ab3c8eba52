"""A reserve of file descriptors for the moment when the process runs out of them.

An arbiter without descriptors cannot say what is wrong, read its statefile or start a worker. So it keeps a few, checks
every second whether it can still open one, and releases the reserve if it cannot. (The sockets of libzmq, which ends
its process where it cannot accept, have a reserve of their own: `circus_plugins.gate`.)
"""

from __future__ import annotations

import contextlib
import os
import resource

from dynamo_local.clock import Clock, sleep_to_next
from dynamo_local.core.notes import Over, Tell, Trouble

SPARE = 16
LOOK_EVERY_S = 1.0
NONE_LEFT = Trouble("file descriptors")


class ReservedDescriptors:
    """Holds `SPARE` descriptors while there are enough. `tell` takes messages for a person. Call `close` at the end."""

    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self._held: list[int] = []
        self._hold()

    @property
    def held(self) -> int:
        """How many are in reserve now: `SPARE`, or 0 while they are needed."""
        return len(self._held)

    async def run(self, clock: Clock) -> None:
        """Check once a second, for ever."""
        while True:
            await sleep_to_next(clock, LOOK_EVERY_S)
            self.look()

    def look(self) -> None:
        """Release the reserve if no other descriptor can be opened; take it back once there are enough again."""
        if not self._held:
            if self._hold():
                self._tell("there are file descriptors again", Over(NONE_LEFT.name))
        elif (fd := _opened()) is not None:
            os.close(fd)
        else:
            self.close()
            limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            self._tell(
                f"there are no file descriptors left (the limit is {limit}): what needs one is tried again later; "
                "start `dynamo serve` under a higher `ulimit -n`",
                NONE_LEFT,
            )

    def close(self) -> None:
        """Release the reserve."""
        for fd in self._held:
            os.close(fd)
        self._held = []

    def _hold(self) -> bool:
        """Take the reserve, if at least one descriptor is left besides it."""
        taken: list[int] = []
        while len(taken) <= SPARE and (fd := _opened()) is not None:
            taken.append(fd)
        if len(taken) > SPARE:
            os.close(taken.pop())
            self._held = taken
            return True
        for fd in taken:
            os.close(fd)
        return False


def _opened() -> int | None:
    with contextlib.suppress(OSError):
        return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    return None
