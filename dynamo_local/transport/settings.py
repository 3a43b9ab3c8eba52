"""Settings watched in etcd and changeable at run time: thresholds of the prefill decision, the Router's policy.

etcdctl put dynamo/disagg_router/Qwen/Qwen3-0.6B '{"max_local_prefill_length": 500}'
etcdctl put dynamo/router/Qwen/Qwen3-0.6B '{"router": "kv"}'
"""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import json
import logging
from collections.abc import AsyncGenerator
from dataclasses import asdict, fields
from typing import Generic, TypeVar, cast

from dynamo_local.core.routing.choice import RouterSettings
from dynamo_local.core.routing.disagg import DisaggSettings
from dynamo_local.errors import ConfigError
from dynamo_local.ports import DeleteEvent, KeyValueStore, PutEvent, SnapshotEvent, WatchEvent
from dynamo_local.system.executors import ended

__all__ = [
    "DisaggSettings",
    "RouterSettings",
    "WatchedSettings",
    "disagg_settings_key",
    "encode_settings",
    "parse_settings",
    "router_settings_key",
]

S = TypeVar("S", DisaggSettings, RouterSettings)

log = logging.getLogger(__name__)

FIRST_READ_TIMEOUT_S = 2.0
REWATCH_PAUSE_S = 1.0


def disagg_settings_key(namespace: str, name: str) -> str:
    """etcd key of the settings; `name` is the served model name, or the component where there is none."""
    return f"{namespace}/disagg_router/{name}"


def router_settings_key(namespace: str, name: str) -> str:
    """etcd key of the Router's policy; `name` as above."""
    return f"{namespace}/router/{name}"


def encode_settings(settings: DisaggSettings | RouterSettings) -> bytes:
    """JSON, as `parse_settings` reads it."""
    return json.dumps(asdict(settings)).encode()


def parse_settings(value: bytes, default: S) -> S:
    """JSON object -> settings; a field that is left out keeps the default's value.

    Raises `ConfigError` that names the field: not JSON, not an object, an unknown field, a value out of range.
    """
    try:
        raw = json.loads(value)
    except ValueError as error:
        raise ConfigError(f"not JSON: {error}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"not a JSON object but {raw!r}")
    known = [f.name for f in fields(default)]
    for name in raw:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; known are {', '.join(known)}"
            raise ConfigError(f"unknown field {name!r}{hint}")
    try:
        return type(default)(**{**asdict(default), **raw})
    except ValueError as error:
        raise ConfigError(str(error)) from error


class WatchedSettings(Generic[S]):
    """A live view of one key. A value that cannot be used is logged with its reason, and the old one stays.

    The key's absence (also its deletion) means the default. While etcd is away, the last value stays.
    """

    def __init__(self, kv: KeyValueStore, key: str, default: S) -> None:
        self._kv = kv
        self._key = key
        self._default: S = default
        self._current: S = default
        self._seen = asyncio.Event()
        self._watcher: asyncio.Task[None] | None = None

    @property
    def current(self) -> S:
        """The settings in force."""
        return self._current

    async def start(self, timeout_s: float = FIRST_READ_TIMEOUT_S) -> None:
        """Watch; returns after the first read. Past the timeout the default is in force until etcd answers."""
        if self._watcher is None:
            self._watcher = asyncio.create_task(self._watch(), name=f"watch {self._key}")
        try:
            async with asyncio.timeout(timeout_s):
                await self._seen.wait()
        except TimeoutError:
            log.warning("etcd did not answer for %s within %.1f s; using %s until it does", self._key, timeout_s, self)

    async def close(self) -> None:
        """End the watch; `current` stays readable."""
        await ended(self._watcher)
        self._watcher = None

    def __str__(self) -> str:
        return encode_settings(self._current).decode()

    async def _watch(self) -> None:
        while True:
            # Closed explicitly: an abandoned async generator is finished only by the garbage collector.
            events = cast(AsyncGenerator[WatchEvent, None], self._kv.watch_prefix(self._key))
            try:
                async with contextlib.aclosing(events):
                    async for event in events:
                        self._apply(event)
                        self._seen.set()
            except Exception:  # a watch should never end; if it does, the settings must not freeze silently
                log.exception("the watch of %s ended; watching again, %s stays in force", self._key, self)
            await asyncio.sleep(REWATCH_PAUSE_S)

    def _apply(self, event: WatchEvent) -> None:
        # The prefix also matches longer keys: `…/Qwen3` is the start of `…/Qwen3-8B`.
        if isinstance(event, SnapshotEvent):
            self._set(next((kv.value for kv in event.kvs if kv.key == self._key), None))
        elif isinstance(event, PutEvent) and event.kv.key == self._key:
            self._set(event.kv.value)
        elif isinstance(event, DeleteEvent) and event.key == self._key:
            self._set(None)

    def _set(self, value: bytes | None) -> None:
        try:
            new = self._default if value is None else parse_settings(value, self._default)
        except ConfigError as error:
            log.warning("%s in etcd was refused, %s stays in force: %s", self._key, self, error)
            return
        if new != self._current:
            self._current = new
            log.info("%s is now %s", self._key, self)
