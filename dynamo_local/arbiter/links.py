"""The arbiter's own connections to etcd and NATS, and whether they answer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any

from dynamo_local.errors import EtcdUnavailable, InfraUnavailable
from dynamo_local.ports import KeyValueStore, PrefillQueue

log = logging.getLogger(__name__)

INFRA_TIMEOUT_S = 30.0


class Links:
    """Made before etcd and NATS run; usable once `connect` has returned.

    `on_answer` is called with `answer` after each check.
    """

    def __init__(self, namespace: str, run_id: str, on_answer: Callable[[bool], Any] = lambda _: None) -> None:
        self._namespace = namespace
        self._run_id = run_id
        self._kv: KeyValueStore | None = None
        self.nats: Any = None
        self.queue: PrefillQueue | None = None
        self._queue: Any = None
        self.etcd_answers = False
        self.etcd_lost_s: float | None = None
        """Since when it does not (of the loop's clock); None while it does."""
        self.ready_keys: dict[str, int] = {}
        """The workers' ready keys as last seen, and the revision at which each was written."""
        self._on_answer = on_answer

    def attach(self, kv: KeyValueStore, nats: Any) -> None:
        """Use connections that stand already."""
        self._kv, self.nats, self.etcd_answers = kv, nats, True

    def etcd_seen(self, answers: bool) -> None:
        """Whether etcd answered just now."""
        if answers:
            self.etcd_lost_s = None
        elif self.etcd_lost_s is None:
            self.etcd_lost_s = asyncio.get_running_loop().time()
        self.etcd_answers = answers
        self._on_answer(self.answer)

    @property
    def connected(self) -> bool:
        """Whether both were reached once; `answer` says whether they do now."""
        return self._kv is not None and self.nats is not None

    @property
    def kv(self) -> KeyValueStore:
        """Raises `EtcdUnavailable` before the connection stands."""
        if self._kv is None:
            raise EtcdUnavailable("etcd is not connected yet; try again in a moment")
        return self._kv

    @property
    def answer(self) -> bool:
        """Both answered when last seen: failures of workers while this is False are not the workers' own."""
        return self.connected and self.etcd_answers and bool(self.nats.is_connected)

    async def connect(self, env: Mapping[str, str], *, prefill_queue: bool) -> None:
        """Wait until both servers answer, then connect; purge what an earlier run left in the prefill queue.

        `env` has their addresses, and with what they are reached (`transport.access`), as a worker's has. Raises
        `InfraUnavailable` that names the server and its address.
        """
        from dynamo_local.transport.access import EtcdAccess, NatsAccess
        from dynamo_local.transport.etcd import EtcdStore
        from dynamo_local.transport.nats import connect_nats
        from dynamo_local.transport.probes import probe_etcd, probe_nats

        to_etcd, to_nats = EtcdAccess.of(env), NatsAccess.of(env)
        await asyncio.gather(
            probe_etcd(env["ETCD_ENDPOINTS"], INFRA_TIMEOUT_S, to_etcd),
            probe_nats(env["NATS_SERVER"], to_nats, INFRA_TIMEOUT_S),
        )
        self._kv = await EtcdStore.connect(env["ETCD_ENDPOINTS"], access=to_etcd)
        self.nats = await connect_nats(env["NATS_SERVER"], to_nats, name=f"{self._namespace}-arbiter")
        self.etcd_seen(True)
        if prefill_queue:
            await self._open_queue()

    async def _open_queue(self) -> None:
        from dynamo_local.transport.prefill_queue import JetStreamPrefillQueue

        queue = JetStreamPrefillQueue(self.nats, self._namespace, self._run_id)
        await queue.start(purge_stale=True)  # a stale queue of the last run would jam this one
        self.queue = self._queue = queue

    async def revoke(self, lease: str) -> None:
        """Revoke a lease (hex) of a worker. Raises `EtcdUnavailable`."""
        await self.kv.revoke(int(lease, 16))

    async def delete_queue(self) -> None:
        """The run has left: nothing of it stays on a NATS that is not ours. Only logs a failure."""
        if self._queue is not None:
            try:
                await self._queue.delete()
            except InfraUnavailable as error:
                log.warning("the prefill queue was not deleted: %s", error)

    async def close(self) -> None:
        """Close both connections, whatever their state."""
        from dynamo_local.transport.nats import close_quietly

        if self._queue is not None:
            await self._queue.close()
        if self.nats is not None:
            await close_quietly(self.nats)
        if self._kv is not None:
            await self._kv.close()
