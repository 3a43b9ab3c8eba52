"""Requests that are held in a Frontend until their model has a worker.

Models that share the GPUs may have no worker (docs/models.md). A request for one waits here, in the order in which it
came. The Frontend tells the arbiter through etcd which models are asked for; the arbiter starts or wakes a worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from dynamo_local.clock import Clock
from dynamo_local.components.models_view import ModelsView
from dynamo_local.components.openai import errors as api_errors
from dynamo_local.components.openai.errors import ApiError
from dynamo_local.components.openai.http_io import Reply
from dynamo_local.components.openai.settings import SharedModel
from dynamo_local.core.gpu_shares import HeldNow
from dynamo_local.errors import InfraUnavailable, LeaseNotFound, NoWorkers, WorkerDraining, WorkerLost
from dynamo_local.ports import KeyValueStore
from dynamo_local.sdk.context import WorkerContext
from dynamo_local.transport.requests.calls import GONE

logger = logging.getLogger(__name__)

KEEP_ALIVE_S = 5.0
"""A client that streams gets a comment so often, so that nothing between takes the connection for dead."""
KEEP_ALIVE = b": waiting for a worker of the model\n\n"
TELL_EVERY_S = 0.25
"""The first held request of a model is told at once, changes after that so often at most."""
TELL_AGAIN_S = 5.0
"""While something is held it is told again so often, and the key's lease is refreshed."""
KEY_TTL_S = 15
"""The key of a killed Frontend stays so long."""
GONE_WAIT_S = 0.2
"""After a request found no worker although one was listed, the list is looked at again when it changes, or so late."""
NO_WORKER = (NoWorkers, WorkerDraining)
"""The worker has left since the list of models was read."""


def held_key(namespace: str, watcher_name: str) -> str:
    """The key under which a Frontend tells what it holds: `dynamo/held/dynamo_Frontend`."""
    return f"{namespace}/held/{watcher_name}"


@dataclass(slots=True)
class _Waiting:
    """One held request: since when (the loop's clock), its bytes, and its turn."""

    since_s: float
    size: int
    turn: asyncio.Future[ApiError | None]
    """Its result is the error with which the request ends; None: it goes on."""


class HeldRequests:
    """Those of one Frontend. `shared` are the models that may have no worker, by name.

    A request for an adapter waits for the model that it adapts.
    """

    def __init__(
        self, shared: Mapping[str, SharedModel], models: ModelsView, adapters: ModelsView | None, clock: Clock
    ) -> None:
        self._shared = shared
        self._models = models
        self._adapters = adapters
        self._clock = clock
        self._waiting: dict[str, deque[_Waiting]] = {name: deque() for name in shared}
        self._took_s: dict[str, float] = {}
        self._changed = asyncio.Event()
        self._listed = asyncio.Event()
        models.on_change(self._on_models)

    def model_of(self, name: str) -> str | None:
        """The model whose worker a request for `name` needs; None for one that does not share the GPUs."""
        if name in self._shared:
            return name
        adapter = None if self._adapters is None else self._adapters.get(name)
        parent = None if adapter is None else adapter.parent
        return parent if parent in self._shared else None

    def model_with_engine_api(self) -> str | None:
        """A model whose engine has an API of its own, with or without a worker; None: there is none."""
        return next((name for name, each in self._shared.items() if each.engine == "vllm"), None)

    def states(self) -> dict[str, str]:
        """Each shared model by name: `ready`, `waited for`, or `asleep` where nobody asks for it."""
        return {
            name: "ready" if self._models.get(name) is not None else "waited for" if self._waiting[name] else "asleep"
            for name in self._shared
        }

    def now(self) -> dict[str, HeldNow]:
        """Held requests, by the component of the model's workers. A model may have several names."""
        found: dict[str, HeldNow] = {}
        for name, each in self._waiting.items():
            if each:
                component = self._shared[name].component
                other = found.get(component, HeldNow(0, each[0].since_s))
                found[component] = HeldNow(other.count + len(each), min(other.since_s, each[0].since_s))
        return found

    async def until_served(
        self, model: str, size: int, since_s: float, reply: Reply | None, *, again: bool = False
    ) -> None:
        """Return when the model has a worker. A client that streams (`reply`) gets comments meanwhile.

        The request came at `since_s`. `again`: the model was listed, but no worker was there. Raises `ApiError` 503
        where too many are held, or for too long, and 404 where the model was removed meanwhile.
        """
        deadline_s = since_s + self._shared[model].max_wait_s
        if again:
            await self._until_listed_anew()
            if self._clock.now_s() >= deadline_s:
                raise self._too_late(model, since_s)
        if self._models.get(model) is not None and not self._waiting[model]:
            return
        with self._held(model, size, since_s) as waiting:
            if self._models.get(model) is not None:
                self._release(model)
            while not await self._turn(waiting, deadline_s):
                if self._clock.now_s() >= deadline_s:
                    raise self._too_late(model, since_s)
                if reply is not None:
                    await reply.comment(KEEP_ALIVE)
            if (removed := waiting.turn.result()) is not None:
                raise removed

    def _too_late(self, model: str, since_s: float) -> ApiError:
        held_s = self._clock.now_s() - since_s
        return api_errors.not_served_in_time(model, held_s, self._retry_after_s(model))

    async def _until_listed_anew(self) -> None:
        listed = self._listed
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GONE_WAIT_S):
                await listed.wait()

    async def _turn(self, waiting: _Waiting, deadline_s: float) -> bool:
        """Whether its turn came before the next comment is due."""
        left_s = max(0.0, min(KEEP_ALIVE_S, deadline_s - self._clock.now_s()))
        await asyncio.wait((waiting.turn,), timeout=left_s)
        return waiting.turn.done()

    @contextmanager
    def _held(self, model: str, size: int, since_s: float) -> Iterator[_Waiting]:
        """Held while this is open. Raises `ApiError` 503 beyond the bounds."""
        shared, line = self._shared[model], self._waiting[model]
        if len(line) >= shared.max_held or sum(each.size for each in line) + size > shared.max_held_bytes:
            raise api_errors.too_many_held(model, len(line), self._retry_after_s(model))
        waiting = _Waiting(since_s, size, asyncio.get_running_loop().create_future())
        line.append(waiting)
        if len(line) == 1:
            logger.info("requests for %s are held: it has no worker now", model)
        self._changed.set()
        try:
            yield waiting
        finally:
            if waiting in line:
                line.remove(waiting)
            self._changed.set()

    def _retry_after_s(self, model: str) -> int:
        """As long as it took the last time; a second where it never did."""
        return max(1, math.ceil(self._took_s.get(model, 1.0)))

    def _on_models(self) -> None:
        self._listed.set()
        self._listed = asyncio.Event()
        for name in self._waiting:
            if self._models.get(name) is not None:
                self._release(name)

    def _release(self, model: str) -> None:
        """Let all go on, in order. They pass the entrance again, in the same order."""
        line = self._waiting[model]
        if not line:
            return
        took_s = self._took_s[model] = self._clock.now_s() - line[0].since_s
        logger.info("%s has a worker: %d held requests go on, the first after %.2f s", model, len(line), took_s)
        self._end(line, lambda: None)

    def _end(self, line: deque[_Waiting], result: Callable[[], ApiError | None]) -> None:
        while line:
            waiting = line.popleft()
            if not waiting.turn.done():
                waiting.turn.set_result(result())
        self._changed.set()

    # --- models that were removed ------------------------------------------------------------------

    async def let_go(self, args: Mapping[str, Any]) -> Mapping[str, Any]:
        """End what is held for these `components`. The arbiter asks for it: they were removed, and have no worker left.

        Later requests are held again, and the arbiter asks again: another `dynamo apply` may bring the model back.
        """
        count = 0
        for model, line in self._waiting.items():
            if self._shared[model].component in args["components"]:
                count += len(line)
                self._end(line, partial(api_errors.model_removed, model))
        if count:
            logger.info("%d held requests have ended: their models were removed", count)
        return {"let_go": count}

    # --- telling ---------------------------------------------------------------------------------

    async def tell(self, context: WorkerContext) -> None:
        """For ever: keep the Frontend's key as what is held; no key where nothing is.

        The key has a lease of its own. A Frontend that leaves has given its lease back, and still holds requests.
        """
        key = _ToldKey(context.kv, held_key(context.namespace, context.watcher_name))
        while True:
            self._changed.clear()
            held = self.now()
            try:
                await key.be(held)
            except (InfraUnavailable, LeaseNotFound) as error:
                logger.warning("the arbiter was not told of %d models with held requests: %s", len(held), error)
                self._changed.set()
            await asyncio.sleep(TELL_EVERY_S)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TELL_AGAIN_S if key.is_there else None):
                    await self._changed.wait()


class _ToldKey:
    """A Frontend's key, under a lease that ends with it, or soon after the Frontend was killed."""

    def __init__(self, kv: KeyValueStore, key: str) -> None:
        self._kv = kv
        self._key = key
        self._lease_id: int | None = None

    @property
    def is_there(self) -> bool:
        """Whether it has to be looked after."""
        return self._lease_id is not None

    async def be(self, held: Mapping[str, HeldNow]) -> None:
        """Write what is held, or remove the key. Raises `InfraUnavailable`, and `LeaseNotFound` to be called again."""
        if not held:
            if self._lease_id is not None:
                await self._kv.revoke(self._lease_id)
                self._lease_id = None
            return
        try:
            if self._lease_id is None:
                self._lease_id = await self._kv.grant(KEY_TTL_S)
            else:
                await self._kv.keepalive(self._lease_id)
            await self._kv.put(self._key, msgspec.json.encode(held), self._lease_id)
        except LeaseNotFound:
            self._lease_id = None
            raise


def no_worker(error: Exception) -> bool:
    """Whether the request failed because its model has no worker now, and so may be held.

    A worker that was killed stays registered until its lease ends: a request that it never got may be held, too.
    """
    if isinstance(error, WorkerLost):
        return error.details.get("reason") == GONE
    return isinstance(error, NO_WORKER) or (isinstance(error, ApiError) and error.code == NoWorkers.code)
