"""Which workers serve an endpoint: the registry's format, and a live view of it.

Keys are `{ns}/components/{Component}/{endpoint}:{lease hex}`; values are the JSON that tools written for Dynamo read:

    {"component": "VllmWorker", "endpoint": "generate", "namespace": "dynamo", "lease_id": 7587886413599009306,
     "transport": {"nats_tcp": "dynamo_vllmworker_3f6fafd3.generate-694d967da694ea1a"}}
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import re
from contextlib import aclosing
from typing import Any

from dynamo_local.core.types import Instance, instance_key, instance_prefix, lease_hex
from dynamo_local.ports import DeleteEvent, KeyValue, KeyValueStore, SnapshotEvent, WatchEvent
from dynamo_local.system.executors import ended

log = logging.getLogger(__name__)

RESTART_WAIT_S = 0.5
"""The pause after a watch that ended with an unexpected error."""

_NOT_SLUG = re.compile(r"[^a-z0-9_-]")
_NOT_SUBJECT = re.compile(r"[^A-Za-z0-9_/=+-]")


def subject_for(namespace: str, component: str, endpoint: str, lease_id: int) -> str:
    """The NATS subject of an instance: `dynamo_vllmworker_3f6fafd3.generate-694d967da694ea1a`.

    The hash keeps apart what lower-casing makes equal. A slash in an endpoint is legal for NATS and stays;
    dots, wildcards and blanks are not and become `_`.
    """
    service = f"{namespace}_{component}".lower()
    digest = hashlib.sha256(f"{namespace}/{component}".encode()).hexdigest()[:8]
    return f"{_NOT_SLUG.sub('_', service)}_{digest}.{_NOT_SUBJECT.sub('_', endpoint)}-{lease_hex(lease_id)}"


def make_instance(namespace: str, component: str, endpoint: str, lease_id: int) -> Instance:
    """The instance that a worker under that lease registers."""
    return Instance(namespace, component, endpoint, lease_id, subject_for(namespace, component, endpoint, lease_id))


def key_of(instance: Instance) -> str:
    """Where the instance is registered."""
    return instance_key(instance.namespace, instance.component, instance.endpoint, instance.lease_id)


def instance_to_value(instance: Instance) -> bytes:
    """The JSON that is put under `key_of(instance)`; `lease_id` is decimal."""
    value = {
        "component": instance.component,
        "endpoint": instance.endpoint,
        "namespace": instance.namespace,
        "lease_id": instance.lease_id,
        "transport": {"nats_tcp": instance.subject},
    }
    return json.dumps(value).encode()


def instance_from_kv(kv: KeyValue) -> Instance:
    """The inverse. Raises `ValueError` that says what is wrong: the registry is open to other programs."""
    try:
        value = json.loads(kv.value)
    except ValueError as error:
        raise ValueError(f"it is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError("it is not a JSON object")
    transport = value.get("transport")
    instance = Instance(
        namespace=_field(value, "namespace", str),
        component=_field(value, "component", str),
        endpoint=_field(value, "endpoint", str),
        lease_id=_field(value, "lease_id", int),
        subject=_field(transport if isinstance(transport, dict) else {}, "nats_tcp", str),
    )
    if key_of(instance) != kv.key:
        raise ValueError(f"it belongs to the key {key_of(instance)}")
    return instance


def _field(value: dict[str, Any], name: str, kind: type[Any]) -> Any:
    found = value.get(name)
    if not isinstance(found, kind) or isinstance(found, bool):
        raise ValueError(f"its {name} is {found!r}, not {'a number' if kind is int else 'a string'}")
    return found


class InstanceView:
    """The instances of one endpoint, kept current by a watch.

    While etcd is away the last known instances stay, and `stale` is True. A stale view is better than none, and a
    request to a worker that is really gone fails at once.
    """

    def __init__(self, kv: KeyValueStore, namespace: str, component: str, endpoint: str) -> None:
        self.component = component
        self.endpoint = endpoint
        self.stale = True
        self._kv = kv
        self._prefix = instance_prefix(namespace, component, endpoint)
        self._by_key: dict[str, Instance] = {}
        self._broken: dict[str, bytes] = {}
        self._ordered: tuple[Instance, ...] = ()
        self._changed = asyncio.Event()
        self._first = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self, timeout_s: float) -> None:
        """Begin to watch; returns with the first list. Where etcd is away past `timeout_s` it goes on trying
        in the background: the view is empty and `stale` until then."""
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name=f"watch {self._prefix}")
        try:
            async with asyncio.timeout(timeout_s):
                await self._first.wait()
        except TimeoutError:
            log.warning("no list of %s from etcd within %g s; still trying", self._prefix, timeout_s)

    def instances(self) -> tuple[Instance, ...]:
        """Registered as far as we know, in order of lease id."""
        return self._ordered

    async def changed(self) -> None:
        """Return when `instances()` or `stale` may differ from what it was at the call."""
        await self._changed.wait()

    async def close(self) -> None:
        """End the watch. Closing twice is no error."""
        task, self._task = self._task, None
        await ended(task)

    # --- inside ----------------------------------------------------------------------------------

    async def _run(self) -> None:
        while True:
            try:
                # Typed as AsyncIterator by the Protocol, but every watch is a generator, which must be closed here.
                async with aclosing(self._kv.watch_prefix(self._prefix, self._lost)) as events:  # type: ignore[type-var]
                    async for event in events:
                        self._apply(event)
            except Exception:
                log.exception("the watch of %s failed, and begins again in %g s", self._prefix, RESTART_WAIT_S)
            self._lost()
            await asyncio.sleep(RESTART_WAIT_S)

    def _lost(self) -> None:
        if not self.stale:
            self.stale = True
            self._announce()

    def _apply(self, event: WatchEvent) -> None:
        if isinstance(event, SnapshotEvent):
            self.stale = False
            self._by_key = {}
            for kv in event.kvs:
                self._put(kv)
            self._first.set()
        elif isinstance(event, DeleteEvent):
            self._by_key.pop(event.key, None)
            self._broken.pop(event.key, None)
        else:
            self._put(event.kv)
        self._ordered = tuple(sorted(self._by_key.values(), key=lambda instance: instance.lease_id))
        self._announce()

    def _put(self, kv: KeyValue) -> None:
        try:
            self._by_key[kv.key] = instance_from_kv(kv)
        except ValueError as error:
            self._by_key.pop(kv.key, None)
            if self._broken.get(kv.key) != kv.value:
                log.warning("the value of %s in etcd is skipped: %s", kv.key, error)
            self._broken[kv.key] = kv.value

    def _announce(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
