"""How a planner adds and removes workers of the arbiter in whose process it runs (Dynamo's `LocalConnector`)."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, Protocol

from dynamo_local.errors import DynamoError


class Scales(Protocol):
    """The arbiter's side: `serve.scaling.Scaler`."""

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
    ) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True)
class Committed:
    """The intent stands in the statefile; `workers` are the ones that it concerns."""

    workers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Refused:
    """Nothing was changed; `retryable` says that the same may succeed later (too few GPUs)."""

    reason: str
    code: str
    retryable: bool


class LocalConnector:
    """One worker more, or one less. Never forces: the last ready worker of a component stays.

    A refusal is a value, not an exception: a planner's tick goes on with it (lesson 15).
    """

    def __init__(self, scaler: Scales, *, victim_policy: str | None = None) -> None:
        self._scaler = scaler
        self._victim_policy = victim_policy
        self._count = itertools.count(1)

    async def add_component(self, component: str, *, stimulus_id: str | None = None) -> Committed | Refused:
        """One more: a drain is taken back before a new worker is started. It has its own `gpus_per_worker` (lesson 7);
        where they are still held by a worker that leaves, it waits for them."""
        return await self._scale(component, "+1", stimulus_id)

    async def remove_component(self, component: str, *, stimulus_id: str | None = None) -> Committed | Refused:
        """One less: drained, whatever it streams is finished first."""
        return await self._scale(component, "-1", stimulus_id)

    async def _scale(self, component: str, target: str, stimulus_id: str | None) -> Committed | Refused:
        try:
            answer = await self._scaler.scale(
                component,
                target,
                victim_policy=self._victim_policy,
                stimulus_id=stimulus_id or f"planner:{next(self._count)}",
                by_person=False,
                wait_for_gpus=True,
            )
        except DynamoError as error:
            return Refused(str(error), error.code, error.retryable)
        return Committed(tuple(item["watcher_name"] for item in answer["instructions"]))
