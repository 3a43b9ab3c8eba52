"""What carries a planner's decisions out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from dynamo_local.planner.connectors.local_connector import Committed, Refused
from dynamo_local.planner.connectors.virtual_connector import Written


class Connector(Protocol):
    """`LocalConnector` or `VirtualConnector`. A refusal is a value."""

    @property
    def whole(self) -> bool:
        """Whether it takes decisions only as a whole, and no single steps."""
        ...

    async def add_component(self, component: str, *, stimulus_id: str | None = None) -> Committed | Written | Refused:
        """One more worker of it. `stimulus_id` is the decision, for the events."""
        ...

    async def remove_component(
        self, component: str, *, stimulus_id: str | None = None
    ) -> Committed | Written | Refused:
        """One worker less of it: a ready one drains, or one on its way is taken back."""
        ...

    async def set_component_replicas(
        self, targets: Mapping[str, int], *, stimulus_id: str | None = None
    ) -> Committed | Written | Refused:
        """So many workers of each of these components: all of it, or nothing."""
        ...
