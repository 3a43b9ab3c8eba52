"""A process changes its role while etcd fails: what others see of it follows what it has become, at every moment."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, cast

import pytest

from dynamo_local.clock import run_virtual
from dynamo_local.errors import FlipFailed, FlipUnderWay
from dynamo_local.ports import PutEvent
from dynamo_local.sdk import dynamo_context, service
from dynamo_local.sdk.context import current_context
from dynamo_local.sdk.loader import LoadedGraph
from dynamo_local.transport.requests.client import RequestPlane
from dynamo_local.worker.context import Connections
from dynamo_local.worker.flip import Flipping
from dynamo_local.worker.served_role import RoleHost, ServedRole
from tests.fakes.infra.etcd import FakeEtcd
from tests.fakes.infra.memory_nats import MemoryNats
from tests.fakes.worker.identities import identity_of

OLD, NEW = "dynamo_Prefill", "dynamo_Decode"
READY_KEYS = "dynamo/workers/"
AWAY_S = 25.0
"""Longer than a flip may take, and than one attempt to register."""
LATE_S = 0.3
A_MOMENT = 20
"""Turns of the event loop: what is heard of etcd is acted on within so many."""


class Part:
    """A component that has nothing to do."""

    def hand_over(self) -> Mapping[str, Any]:
        return {}

    async def try_out(self) -> None: ...

    async def settle(self) -> None: ...


@service(dynamo={"namespace": "dynamo", "role": "prefill"})
class Prefill(Part): ...


@service(dynamo={"namespace": "dynamo", "role": "decode"})
class Decode(Part): ...


class LateEtcd(FakeEtcd):
    """It has put a ready key at once, and says so later."""

    async def put_all(self, values: Mapping[str, bytes], lease_id: int = 0) -> int:
        revision = await super().put_all(values, lease_id)
        if any(key.startswith(READY_KEYS) for key in values):
            await asyncio.sleep(LATE_S)
        return revision


class Process:
    """One that serves `Prefill` and may become `Decode`. `before_ready` is run before the new role's ready key."""

    def __init__(self, etcd: FakeEtcd | None = None) -> None:
        self.etcd = etcd or FakeEtcd()
        self.before_ready: Callable[[], object] = lambda: None
        self.seen: list[tuple[str, str]] = []
        self._watching: asyncio.Task[None] | None = None
        identity = identity_of("Prefill", flips_to="Decode")
        graph = LoadedGraph(Prefill, {"Prefill": Prefill, "Decode": Decode}, "dynamo", "tests:Prefill")
        host = RoleHost(
            graph,
            {},
            contextlib.AsyncExitStack(),
            facts=lambda role: {},
            on_fatal=lambda what, error: None,
            on_wait=lambda what: None,
            on_change=lambda *, resumed=None: None,
            on_revoked=lambda role: None,
            serves=lambda role: role is self.flipping.role,
            is_draining=self._is_draining,
        )
        self.flipping = Flipping(
            host,
            ServedRole(host, Prefill, identity, {}, {}),
            on_switched=lambda role: None,
            flush=self._flush,
            refusal=lambda: None,
            bounded=_bounded,
        )

    async def start(self) -> None:
        nats = MemoryNats().client()
        connections = Connections(self.etcd, nats, cast(RequestPlane, None))
        role = self.flipping.role
        self.flipping.connected(connections)
        await role.answer(nats)
        await role.take_lease(connections)
        await role.begin(connections)
        await role.serve()
        await role.register()
        await role.register_ready(lambda: asyncio.sleep(0))
        self._watching = asyncio.create_task(self._watch())

    async def flip(self, to: str = NEW, component: str = "Decode") -> dict[str, Any]:
        return await self.flipping.flip({"pid": os.getpid(), "to": to, "component": component, "section": {}})

    async def close(self) -> None:
        assert self._watching is not None
        self._watching.cancel()
        await self.flipping.close()
        await self.flipping.role.close()

    async def ready_keys(self) -> list[str]:
        """The names under which it is found."""
        return [kv.key.removeprefix(READY_KEYS).partition(":")[0] for kv in (await self.etcd.get_prefix(READY_KEYS))[0]]

    async def _watch(self) -> None:
        """What an arbiter sees, and what the process calls itself a moment later."""
        async for event in self.etcd.watch_prefix(READY_KEYS):
            if isinstance(event, PutEvent):
                for _ in range(A_MOMENT):
                    await asyncio.sleep(0)
                name = event.kv.key.removeprefix(READY_KEYS).partition(":")[0]
                self.seen.append((name, self.flipping.role.identity.watcher_name))

    async def _flush(self, _timeout_s: float) -> None:
        self.before_ready()

    async def _is_draining(self) -> bool:
        return False


async def _bounded(_what: str, work: Awaitable[None], _timeout_s: float) -> None:
    await work


@pytest.mark.parametrize("lose_data", [True, False])
def test_an_etcd_that_fails_at_the_ready_key_ends_in_the_new_role(lose_data: bool) -> None:
    """seed 740000277: whoever sees the new ready key sees a process that has the new role, and it never goes back."""

    async def main() -> None:
        process = Process()
        await process.start()
        away: list[float] = []

        def goes_away() -> None:
            if not away:
                loop = asyncio.get_running_loop()
                away.append(loop.time())
                process.etcd.available = False
                loop.call_later(AWAY_S, lambda: process.etcd.restart(lose_data=lose_data))

        process.before_ready = goes_away
        answer = await process.flip()
        await asyncio.sleep(5.0)

        assert away
        assert (answer["watcher_name"], process.flipping.role.identity.watcher_name) == (NEW, NEW)
        assert await process.ready_keys() == [NEW]
        assert (NEW, NEW) in process.seen
        assert (NEW, OLD) not in process.seen
        await process.close()

    run_virtual(main())


def test_a_new_lease_that_is_revoked_ends_in_the_old_role() -> None:

    async def main() -> None:
        process = Process()
        await process.start()
        process.before_ready = lambda: process.etcd.end_lease_now(max(process.etcd.lease_ids()))
        with pytest.raises(FlipFailed, match="revoked"):
            await process.flip()

        assert process.flipping.role.identity.watcher_name == OLD
        assert (current_context().component, dynamo_context["component"]) == ("Prefill", "Prefill")
        assert await process.ready_keys() == [OLD]
        assert process.seen == []
        await process.close()

    run_virtual(main())


def test_who_has_seen_its_new_ready_key_may_have_it_flip_back_at_once() -> None:
    """Seen with vLLM on two cores: the answer to its last put came late, and the next flip was refused, because the one
    before was still under way."""

    async def main() -> None:
        process = Process(LateEtcd())
        await process.start()
        keys = process.etcd.watch_prefix(READY_KEYS)
        flipping = asyncio.create_task(process.flip())
        async for event in keys:
            if isinstance(event, PutEvent) and NEW in event.kv.key:
                break
        assert not flipping.done()
        answer = await process.flip("dynamo_Prefill_1", "Prefill")

        assert (await flipping)["watcher_name"] in (NEW, "dynamo_Prefill_1")
        assert answer["watcher_name"] == "dynamo_Prefill_1"
        await process.close()

    run_virtual(main())


def test_while_it_can_still_be_undone_another_flip_is_refused() -> None:
    """The arbiter has one flip under way for a worker; anything else is a mistake."""

    async def main() -> None:
        process = Process()
        await process.start()
        flipping = asyncio.create_task(process.flip())
        await asyncio.sleep(0)
        with pytest.raises(FlipUnderWay):
            await process.flip("dynamo_Other", "Decode")
        await flipping
        await process.close()

    run_virtual(main())
