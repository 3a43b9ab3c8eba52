"""What people and circus may have a run do: each command is answered only while the run is ready."""

from __future__ import annotations

from typing import Any

from dynamo_local.autoscale.planning import Planning
from dynamo_local.errors import DynamoError
from dynamo_local.serve.applying import Applying
from dynamo_local.serve.composition import Parts


class RunCommands:
    """The commands of a `Supervisor`, which has what is named here. Each raises `DynamoError` while it is not ready."""

    state: str
    parts: Parts
    _applying: Applying

    async def scale(
        self,
        component: str,
        target: str,
        *,
        force: bool,
        victim_policy: str | None,
        stimulus_id: str,
        wake: bool = True,
    ) -> dict[str, Any]:
        """`dynamo scale`: returns once the intent is committed."""
        self._check_running()
        return await self.parts.orders.scale(
            component, target, force=force, victim_policy=victim_policy, stimulus_id=stimulus_id, wake=wake
        )

    async def sleep(self, name: str, *, level: int, force: bool, stimulus_id: str) -> dict[str, Any]:
        """`dynamo sleep NAME`."""
        self._check_running()
        return await self.parts.orders.sleep(name, level=level, force=force, stimulus_id=stimulus_id)

    async def wake(self, name: str, *, stimulus_id: str) -> dict[str, Any]:
        """`dynamo wake NAME`."""
        self._check_running()
        return await self.parts.orders.wake(name, stimulus_id=stimulus_id)

    async def drain(self, name: str, *, cancel: bool, force: bool, stimulus_id: str) -> dict[str, Any]:
        """`dynamo drain NAME [--cancel]`."""
        self._check_running()
        return await self.parts.orders.drain(name, cancel=cancel, force=force, stimulus_id=stimulus_id)

    async def flip(self, name: str, *, cancel: bool, force: bool, stimulus_id: str) -> dict[str, Any]:
        """`dynamo flip NAME [--cancel]`."""
        self._check_running()
        if cancel:
            return await self.parts.flips.cancel(name, stimulus_id=stimulus_id)
        return await self.parts.flips.flip(name, force=force, stimulus_id=stimulus_id)

    async def scale_flip(
        self, gives: str, takes: str, count: int, *, force: bool, victim_policy: str | None, stimulus_id: str
    ) -> dict[str, Any]:
        """`dynamo scale GIVES -N TAKES +N --flip`."""
        self._check_running()
        return await self.parts.flips.scale(
            gives, takes, count, force=force, victim_policy=victim_policy, stimulus_id=stimulus_id
        )

    async def restart(self, name_or_component: str, *, rolling: bool, force: bool, stimulus_id: str) -> dict[str, Any]:
        """`dynamo restart NAME|COMPONENT`."""
        self._check_running()
        return await self.parts.orders.restart(name_or_component, force=force, stimulus_id=stimulus_id)

    async def apply(self, deployment: Any, *, dry_run: bool, force: bool, stimulus_id: str) -> dict[str, Any]:
        """`dynamo apply -f FILE`."""
        self._check_running()
        return await self._applying.apply(deployment, dry_run=dry_run, force=force, stimulus_id=stimulus_id)

    def planner(self) -> Planning:
        """Whom the `dynamo planner` commands speak to."""
        self._check_running()
        return self.parts.planning

    def _check_running(self) -> None:
        if self.state != "ready":
            raise DynamoError(f"the graph is {self.state}; nothing can be changed now, see `dynamo status`")
