"""The arbiter's own connections to etcd and NATS, and whether they answer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from dynamo_local.core.types import GraphSpec, Role
from dynamo_local.errors import EtcdUnavailable, InfraUnavailable
from dynamo_local.ports import KeyValueStore, QueueDepth

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
        self._queues: PrefillQueues | None = None
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
    def queues(self) -> PrefillQueues | None:
        """None before the connection stands, and while the graph has no prefill queue."""
        return self._queues if self._queues is not None and self._queues.names else None

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

    async def connect(self, env: Mapping[str, str], graph: Callable[[], GraphSpec]) -> None:
        """Wait until both servers answer, then connect; purge what an earlier run left in the graph's prefill queues.

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
        self._queues = PrefillQueues(self.nats, self._namespace, self._run_id, graph)
        await self._queues.start()

    async def revoke(self, lease: str) -> None:
        """Revoke a lease (hex) of a worker. Raises `EtcdUnavailable`."""
        await self.kv.revoke(int(lease, 16))

    async def delete_queue(self) -> None:
        """The run has left: nothing of it stays on a NATS that is not ours. Only logs a failure."""
        if self._queues is not None:
            try:
                await self._queues.delete()
            except InfraUnavailable as error:
                log.warning("the prefill queue was not deleted: %s", error)

    async def close(self) -> None:
        """Close both connections, whatever their state."""
        from dynamo_local.transport.nats import close_quietly

        if self._queues is not None:
            await self._queues.close()
        if self.nats is not None:
            await close_quietly(self.nats)
        if self._kv is not None:
            await self._kv.close()


class PrefillQueues:
    """The prefill queues of a graph: one, or one for each model of the section `Models`. `graph` is that of now."""

    def __init__(self, nats: Any, namespace: str, run_id: str, graph: Callable[[], GraphSpec]) -> None:
        self._of = (nats, namespace, run_id)
        self._graph = graph
        self._open: dict[str, Any] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """Commands have queues of their own, if any: only our own prefill workers use these."""
        own = (each for each in self._graph().services if each.role is Role.PREFILL and each.runtime is None)
        return tuple(dict.fromkeys(str(each.config.get("prefill_queue", "")) for each in own))

    async def start(self) -> None:
        """Create those of the graph, without the entries of other runs: these would jam this one."""
        for name in self.names:
            await self._queue(name).start(purge_stale=True)

    async def depth(self) -> QueueDepth:
        """The sum over all of them."""
        depths = await asyncio.gather(*(queue.depth() for queue in await self._all()))
        return QueueDepth(
            sum(each.pending for each in depths),
            sum(each.outstanding for each in depths),
            sum(each.late for each in depths),
        )

    async def dead_letters(self) -> int:
        """How many entries were given up."""
        return sum(map(len, await asyncio.gather(*(queue.dead_letters() for queue in await self._all()))))

    async def delete(self) -> None:
        """Delete all that were used."""
        for queue in self._open.values():
            await queue.delete()

    async def close(self) -> None:
        """Close all that were used."""
        for queue in self._open.values():
            await queue.close()

    async def _all(self) -> Iterable[Any]:
        """Those of the graph of now. One that an apply has brought is opened."""
        for name in self.names:
            if name not in self._open:
                await self._queue(name).start()
        return [self._open[name] for name in self.names]

    def _queue(self, name: str) -> Any:
        from dynamo_local.transport.prefill_queue import JetStreamPrefillQueue

        return self._open.setdefault(name, JetStreamPrefillQueue(*self._of, name=name))
