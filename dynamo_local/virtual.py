"""For an environment of your own that carries a planner's decisions out: ours, or Dynamo's (`environment: virtual`).

    async with VirtualConnectorClient("dynamo", "http://127.0.0.1:2379") as client:
        while True:
            await client.wait()
            decision = await client.get()
            await scale(prefill=decision.num_prefill_workers, decode=decision.num_decode_workers)  # your part
            await client.complete(decision)

Names and meaning are those of Dynamo's own `VirtualConnectorClient`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from types import TracebackType
from typing import Self

from dynamo_local.core.virtual import NOT_SET, KeysState, Layout, PlannerDecision
from dynamo_local.errors import BadInput, DecisionUnreadable
from dynamo_local.planner.connectors import VirtualKeys
from dynamo_local.ports import KeyValueStore

__all__ = ["Layout", "PlannerDecision", "VirtualConnectorClient"]

log = logging.getLogger(__name__)

DEFAULT_ENDPOINTS = "http://127.0.0.1:2379"
HALF_WRITTEN_S = 5.0
HALF_WRITTEN_POLL_S = 0.05


class VirtualConnectorClient:
    """The decisions about one namespace. Use it as `async with`, or `close` it.

    `etcd_endpoints`: default from the variable `ETCD_ENDPOINTS`, else 127.0.0.1:2379. `layout`: `v1` for the keys of
    Dynamo 1.x, `v0` for Dynamo up to 0.5. `kv`: replaces etcd in tests, and is not closed.
    """

    def __init__(
        self,
        namespace: str,
        etcd_endpoints: str | None = None,
        *,
        layout: Layout | str = Layout.V1,
        kv: KeyValueStore | None = None,
    ) -> None:
        self._namespace = namespace
        self._endpoints = etcd_endpoints or os.environ.get("ETCD_ENDPOINTS") or DEFAULT_ENDPOINTS
        self._layout = Layout(layout)
        self._given = kv
        self._kv = kv
        self._keys: VirtualKeys | None = None
        self._following: asyncio.Task[None] | None = None
        self._got = PlannerDecision()
        self._told_of: tuple[str, ...] = ()

    async def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for a decision that is to be carried out, one that stands there already included; then `get` it.

        One that `get` has given is not waited for again. False: none came in that time (seconds), so what could not
        be carried out may be tried again. While etcd is away it waits.
        """
        keys = self._followed()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await keys.until(lambda told: keys.current and self._is_new(told))
            return True
        return False

    async def get(self) -> PlannerDecision:
        """The last decision; -1 is not set. Raises `EtcdUnavailable`; `DecisionUnreadable` where a value is no number,
        or a decision stays half written."""
        keys = self._followed()
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + HALF_WRITTEN_S
        while (told := await keys.refresh()).half_written and not told.faults:
            if loop.time() >= deadline_s:
                raise DecisionUnreadable(
                    f"{keys.root}: a number is younger than decision_id {told.decision.decision_id}; its planner "
                    "has not written the next id yet"
                )
            await asyncio.sleep(HALF_WRITTEN_POLL_S)
        if told.faults:
            raise DecisionUnreadable(f"{keys.root}: {'; '.join(told.faults)}")
        self._got = told.decision
        return told.decision

    async def complete(self, decision: PlannerDecision) -> None:
        """Say that this decision is carried out. Raises `EtcdUnavailable`; `BadInput` for none."""
        if decision.decision_id == NOT_SET:
            raise BadInput("no decision was made yet (its decision_id is -1): there is nothing to complete")
        await self._followed().acknowledge(decision.decision_id)

    async def close(self) -> None:
        """End the watch and the connection. Closing twice is no error."""
        task, self._following = self._following, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        kv, self._kv, self._keys = self._kv, self._given, None
        if kv is not None and kv is not self._given:
            await kv.close()

    async def __aenter__(self) -> Self:
        self._followed()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # --- inside ----------------------------------------------------------------------------------

    def _followed(self) -> VirtualKeys:
        """The keys, with their watch under way. Raises `ConfigError` for endpoints that make no sense."""
        if self._keys is None:
            if self._kv is None:
                from dynamo_local.transport.access import EtcdAccess
                from dynamo_local.transport.etcd import EtcdStore

                self._kv = EtcdStore(self._endpoints, access=EtcdAccess.of(os.environ))
            self._keys = VirtualKeys(self._kv, self._namespace, self._layout)
            self._following = asyncio.ensure_future(self._keys.follow())
        return self._keys

    def _is_new(self, told: KeysState) -> bool:
        if told.faults and told.faults != self._told_of:
            log.warning("this is no decision, and is waited over: %s", "; ".join(told.faults))
        self._told_of = told.faults
        return not (told.acknowledged or told.faults or told.half_written or told.decision == self._got)
