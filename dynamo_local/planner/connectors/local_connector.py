"""How a planner adds and removes workers of the arbiter in whose process it runs (Dynamo's `LocalConnector`)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from dynamo_local.core.actuators import WAKES, Actuator
from dynamo_local.errors import DynamoError


class Scales(Protocol):
    """The arbiter's side: `control.orders.Orders`."""

    async def scale(
        self,
        component: str,
        target: str,
        *,
        force: bool = False,
        victim_policy: str | None = None,
        stimulus_id: str,
        by_person: bool = True,
        wait_for_gpus: bool = False,
        wake: bool = True,
        sleep: bool = False,
    ) -> dict[str, Any]: ...

    async def scale_all(
        self,
        targets: Mapping[str, int],
        *,
        victim_policy: str | None = None,
        actuators: frozenset[Actuator] = WAKES,
        stimulus_id: str,
    ) -> dict[str, dict[str, Any]]:
        """So many workers of each component, or none of it; the answer of `scale` for each."""
        ...


@dataclass(frozen=True, slots=True)
class Committed:
    """The intent was committed to the statefile; `workers` are the workers concerned, of several components also by
    component."""

    workers: tuple[str, ...]
    by_component: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Refused:
    """Nothing was changed; `retryable` says that the same may succeed later (too few GPUs)."""

    reason: str
    code: str
    retryable: bool


class LocalConnector:
    """One worker more, or one less; or so many of each component, together. Never forces: the last ready worker of a
    component stays.

    By what that may be done beside starts and drains, `actuators` says at each step: the options may change.

    A refusal is a value, not an exception: a planner's tick goes on with it (lesson 15).
    """

    whole = False
    """Steps can also be taken one by one."""

    def __init__(
        self,
        scaler: Scales,
        *,
        victim_policy: str | None = None,
        actuators: Callable[[], frozenset[Actuator]] = lambda: WAKES,
    ) -> None:
        self._scaler = scaler
        self._actuators = actuators
        self._victim_policy = victim_policy
        self._count = itertools.count(1)

    async def add_component(self, component: str, *, stimulus_id: str | None = None) -> Committed | Refused:
        """One more: a drain is taken back before a new worker is started. It has its own `gpus_per_worker` (lesson 7);
        where they are still held by a worker that leaves, it waits for them."""
        return await self._scale(component, "+1", stimulus_id)

    async def remove_component(self, component: str, *, stimulus_id: str | None = None) -> Committed | Refused:
        """One less: it drains, finishing its streams first."""
        return await self._scale(component, "-1", stimulus_id)

    async def set_component_replicas(
        self, targets: Mapping[str, int], *, stimulus_id: str | None = None
    ) -> Committed | Refused:
        """So many workers of each component, in one commit; refused as a whole where one of them is.

        An up that needs the GPUs of a down waits in the fleet until they are really free.
        """
        try:
            answer = await self._scaler.scale_all(
                targets,
                victim_policy=self._victim_policy,
                actuators=self._actuators(),
                stimulus_id=stimulus_id or f"planner:{next(self._count)}",
            )
        except DynamoError as error:
            return Refused(str(error), error.code, error.retryable)
        found = {
            component: tuple(item["watcher_name"] for item in told["instructions"])
            for component, told in answer.items()
        }
        return Committed(tuple(dict.fromkeys(name for names in found.values() for name in names)), found)

    async def _scale(self, component: str, target: str, stimulus_id: str | None) -> Committed | Refused:
        standby = Actuator.WAKE in self._actuators()
        try:
            answer = await self._scaler.scale(
                component,
                target,
                victim_policy=self._victim_policy,
                stimulus_id=stimulus_id or f"planner:{next(self._count)}",
                by_person=False,
                wait_for_gpus=True,
                wake=standby,
                sleep=standby,
            )
        except DynamoError as error:
            return Refused(str(error), error.code, error.retryable)
        return Committed(tuple(item["watcher_name"] for item in answer["instructions"]))
