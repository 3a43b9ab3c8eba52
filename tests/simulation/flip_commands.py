"""The commands of a flip, as a simulated arbiter is given them."""

from __future__ import annotations

from typing import Any

from dynamo_local.control.flips import FlipOrders


class FlipCommands:
    """A part of `Arbiter`, which has all that is named here."""

    flips: FlipOrders
    unforced: set[str]
    _command: Any

    async def flip(self, name: str, *, cancel: bool, force: bool, stimulus_id: str) -> None:
        """`dynamo flip`."""
        if not force:
            self.unforced.add(stimulus_id)
        words = f"flip {name}{' --cancel' * cancel}{' --force' * force}"
        if cancel:
            await self._command(words, self.flips.cancel(name, stimulus_id=stimulus_id))
        else:
            await self._command(words, self.flips.flip(name, force=force, stimulus_id=stimulus_id))

    async def scale_flip(self, gives: str, takes: str, count: int, *, force: bool, stimulus_id: str) -> None:
        """`dynamo scale … --flip`."""
        if not force:
            self.unforced.add(stimulus_id)
        work = self.flips.scale(gives, takes, count, force=force, victim_policy=None, stimulus_id=stimulus_id)
        await self._command(f"scale {gives} -{count} {takes} +{count} --flip{' --force' * force}", work)
