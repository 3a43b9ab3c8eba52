"""KV transfers between simulated engines: what a prefill engine holds, and what a decode engine pulls."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from dynamo_local.clock import Clock
from dynamo_local.engines.sim.options import SimOptions
from dynamo_local.engines.sim.scheduling.handoffs import Handoff
from dynamo_local.engines.sim.scheduling.requests import PullReady
from dynamo_local.engines.sim.scheduling.scheduler import SimScheduler
from dynamo_local.engines.sim.streams import OutputStream
from dynamo_local.engines.sim.transport import KvListener, KvTransport, PullRequest
from dynamo_local.errors import KvTransferError

logger = logging.getLogger(__name__)

_REMEMBERED_EXPIRIES = 1000


def kv_transfer_params(
    engine_id: str, listener: KvListener | None, handoff: Handoff | None
) -> Mapping[str, Any] | None:
    """The parameters that a prefill returns, in the format of vLLM's NixlConnector, for a decode engine as they are.

    None for a request whose KV is not held, and from an engine that is closed.
    """
    if handoff is None or listener is None:
        return None
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": engine_id,
        "remote_block_ids": list(handoff.blocks),
        "remote_request_id": handoff.request_id,
        "remote_host": listener.host,
        "remote_port": listener.port,
        "tp_size": 1,
    }


class KvTransfers:
    """Both ends, for one engine (`transport.KvSource` is the giving one).

    `scheduler()` is None once the engine is closed or dead. `pump` advances its schedule to now, `kick` does so soon,
    `changed` reports that its load has changed.
    """

    def __init__(
        self,
        engine_id: str,
        options: SimOptions,
        clock: Clock,
        transport: KvTransport,
        *,
        scheduler: Callable[[], SimScheduler | None],
        pump: Callable[[], object],
        kick: Callable[[], None],
        changed: Callable[[], None],
    ) -> None:
        self._engine_id = engine_id
        self._options = options
        self._clock = clock
        self._transport = transport
        self._scheduler = scheduler
        self._pump = pump
        self._kick = kick
        self._changed = changed
        self._held: dict[str, str] = {}
        self._expired: deque[str] = deque(maxlen=_REMEMBERED_EXPIRIES)
        self._pulls: dict[str, asyncio.Task[None]] = {}
        self._telling: set[asyncio.Task[None]] = set()

    def tasks(self) -> Iterable[asyncio.Task[None]]:
        """The pulls that are under way."""
        return (*self._pulls.values(), *self._telling)

    def forget(self, request_id: str, stream: OutputStream) -> None:
        """Nobody waits for this request any more. KV that it was to pull is not wanted, either."""
        self._held.pop(request_id, None)
        task = self._pulls.pop(request_id, None)
        if task is not None:
            task.cancel()
        if stream.pull is not None and stream.error is None and not stream.first + stream.pending:
            telling = asyncio.get_running_loop().create_task(self._tell_unwanted(stream), name="KV is not wanted")
            self._telling.add(telling)
            telling.add_done_callback(self._telling.discard)

    # --- giving ------------------------------------------------------------------------------------

    def hold(self, request_id: str, prompt_digest: str) -> None:
        """Keep the KV of this request for another engine, which must know the prompt."""
        self._held[request_id] = prompt_digest

    def expired(self, request_id: str) -> None:
        """The lease ended before anybody pulled the KV."""
        self._held.pop(request_id, None)
        self._expired.append(request_id)
        logger.warning("the KV of request %s was not pulled within its lease", request_id)

    def release(self, params: Mapping[str, Any]) -> None:
        """See `ports.Engine.release_handoff`."""
        request_id, scheduler = str(params.get("remote_request_id")), self._scheduler()
        if scheduler is not None and self._held.pop(request_id, None) is not None:
            scheduler.release(request_id, self._clock.now_s())
            self._changed()
            self._kick()

    async def serve_pull(self, pull: PullRequest) -> None:
        """Return when the KV has been pulled, and free it. Raises `KvTransferError`."""
        scheduler = self._scheduler()
        if scheduler is None or pull.engine_id != self._engine_id:
            raise KvTransferError(
                f"the KV of request {pull.request_id} is of engine {pull.engine_id}, and this is engine "
                f"{self._engine_id}; prefill it again",
                remote_request_id=pull.request_id,
            )
        self._pump()
        if pull.unwanted:
            self.release({"remote_request_id": pull.request_id})
            return
        digest = self._held.get(pull.request_id)
        if digest is not None and digest != pull.prompt_digest:
            raise KvTransferError(f"the KV of request {pull.request_id} is that of another prompt; nothing was pulled")
        started_s = self._clock.now_s()
        self._pin(scheduler, pull, started_s)
        try:
            await self._clock.sleep_until(started_s + self._options.transfer_s(pull.num_tokens))
        except asyncio.CancelledError:
            scheduler.unpin(pull.request_id, self._clock.now_s())
            self._kick()
            raise
        if self._scheduler() is not scheduler:
            raise KvTransferError(f"engine {self._engine_id} was closed while the KV of {pull.request_id} was pulled")
        scheduler.release(pull.request_id, self._clock.now_s())
        self._held.pop(pull.request_id, None)
        self._changed()
        self._kick()

    def _pin(self, scheduler: SimScheduler, pull: PullRequest, now_s: float) -> None:
        try:
            scheduler.pin(pull.request_id, now_s)
        except KeyError:
            lease_s = self._options.kv_lease_duration_s
            why = f"its lease of {lease_s:g} s is over" if pull.request_id in self._expired else "it is not held here"
            raise KvTransferError(
                f"the KV of request {pull.request_id} cannot be pulled: {why}; prefill it again",
                remote_request_id=pull.request_id,
            ) from None
        self._kick()

    # --- pulling -----------------------------------------------------------------------------------

    def begin_pull(self, event: PullReady, stream: OutputStream) -> None:
        """The blocks are allocated here: fill them, in the background. A failure becomes the stream's error."""
        self._pulls[event.request_id] = asyncio.get_running_loop().create_task(self._pull(event, stream))

    async def _pull(self, event: PullReady, stream: OutputStream) -> None:
        assert stream.pull is not None
        params = stream.request.kv_transfer_params or {}
        identity = stream.pull
        request = PullRequest(identity.engine_id, identity.request_id, identity.prompt_digest, event.num_tokens)
        try:
            async with asyncio.timeout(self._options.kv_pull_timeout_s):
                await self._transport.pull(params["remote_host"], params["remote_port"], request)
        except TimeoutError:
            stream.error = KvTransferError(
                f"the KV of request {request.request_id} was not pulled within {self._options.kv_pull_timeout_s:g} s",
                remote_request_id=request.request_id,
            )
        except KvTransferError as error:
            stream.error = error
        finally:
            self._pulls.pop(event.request_id, None)
        scheduler = self._scheduler()
        if stream.error is not None:
            # Waking the stream ends it, which frees its blocks.
            stream.wake()
        elif scheduler is not None:
            scheduler.pulled(event.request_id, self._clock.now_s())
            self._kick()

    async def _tell_unwanted(self, stream: OutputStream) -> None:
        assert stream.pull is not None
        params = stream.request.kv_transfer_params or {}
        with contextlib.suppress(KvTransferError, TimeoutError):  # then its lease frees it
            async with asyncio.timeout(self._options.kv_pull_timeout_s):
                unwanted = replace(stream.pull, unwanted=True)
                await self._transport.pull(params["remote_host"], params["remote_port"], unwanted)
