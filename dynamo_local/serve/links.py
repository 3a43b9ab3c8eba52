"""The arbiter's own connections to etcd and NATS, and whether they answer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dynamo_local.errors import EtcdUnavailable, InfraUnavailable
from dynamo_local.ports import KeyValueStore, PrefillQueue

log = logging.getLogger(__name__)

INFRA_TIMEOUT_S = 30.0


class Links:
    """Made before etcd and NATS run; usable once `connect` has returned."""

    def __init__(self, namespace: str, run_id: str) -> None:
        self._namespace = namespace
        self._run_id = run_id
        self._kv: KeyValueStore | None = None
        self.nats: Any = None
        self.queue: PrefillQueue | None = None
        self._queue: Any = None
        self.etcd_answers = False

    @property
    def connected(self) -> bool:
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

        Raises `InfraUnavailable` that names the server and its address.
        """
        from dynamo_local.runtime.etcd import EtcdStore
        from dynamo_local.runtime.nats import connect_nats, read_token
        from dynamo_local.serve.infra import probe_etcd, probe_nats

        token_file = Path(env["DYN_NATS_TOKEN_FILE"]) if env.get("DYN_NATS_TOKEN_FILE") else None
        await asyncio.gather(
            probe_etcd(env["ETCD_ENDPOINTS"], INFRA_TIMEOUT_S),
            probe_nats(env["NATS_SERVER"], read_token(token_file), INFRA_TIMEOUT_S),
        )
        self._kv = await EtcdStore.connect(env["ETCD_ENDPOINTS"])
        self.etcd_answers = True
        self.nats = await connect_nats(env["NATS_SERVER"], token_file, name=f"{self._namespace}-arbiter")
        if prefill_queue:
            await self._open_queue()

    async def _open_queue(self) -> None:
        from dynamo_local.runtime.prefill_queue import JetStreamPrefillQueue

        queue = JetStreamPrefillQueue(self.nats, self._namespace, self._run_id)
        await queue.start(purge_stale=True)  # lesson 18: a stale queue from the last run jams the next
        self.queue = self._queue = queue

    async def revoke(self, lease: str) -> None:
        """Revoke a lease (hex) of a worker. Raises `EtcdUnavailable`."""
        await self.kv.revoke(int(lease, 16))

    async def try_revoke(self, lease: str | None, whose: str) -> None:
        """Revoke the lease of a worker that is gone, else it is routed to until the TTL; only logs a failure."""
        if lease is None or self._kv is None:
            return
        try:
            await self._kv.revoke(int(lease, 16))
        except (InfraUnavailable, ValueError) as error:
            log.warning("%s: its lease %s could not be revoked (%s); it expires by itself", whose, lease, error)

    async def delete_queue(self) -> None:
        """The run has left: nothing of it stays on a NATS that is not ours. Only logs a failure."""
        if self._queue is not None:
            try:
                await self._queue.delete()
            except InfraUnavailable as error:
                log.warning("the prefill queue was not deleted: %s", error)

    async def close(self) -> None:
        """Close both connections, whatever their state."""
        from dynamo_local.runtime.nats import close_quietly

        if self._queue is not None:
            await self._queue.close()
        if self.nats is not None:
            await close_quietly(self.nats)
        if self._kv is not None:
            await self._kv.close()
