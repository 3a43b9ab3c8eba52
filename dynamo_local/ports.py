"""The seams: Protocols between the pure core and the world, each with a fake that passes the same contract tests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from dynamo_local.core.passes import ForwardPass
from dynamo_local.core.routing.kv_events import KvEvent
from dynamo_local.core.types import Instance, Load

# --- etcd --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class KeyValue:
    """One key as etcd holds it. `lease_id` is 0 where no lease is attached."""

    key: str
    value: bytes
    lease_id: int = 0
    mod_revision: int = 0


@dataclass(frozen=True, slots=True)
class PutEvent:
    """A key was written."""

    kv: KeyValue


@dataclass(frozen=True, slots=True)
class DeleteEvent:
    """A key went away (deleted, or its lease was revoked or expired)."""

    key: str


@dataclass(frozen=True, slots=True)
class SnapshotEvent:
    """The whole truth under the prefix: sent first, and again whenever the watch had to start anew."""

    kvs: tuple[KeyValue, ...]
    revision: int


WatchEvent = PutEvent | DeleteEvent | SnapshotEvent


class KeyValueStore(Protocol):
    """etcd, as far as we need it. Every call has a deadline and raises `EtcdUnavailable` past it."""

    async def get(self, key: str) -> KeyValue | None:
        """The key's value and revisions; None where there is no such key."""
        ...

    async def get_prefix(self, prefix: str) -> tuple[list[KeyValue], int]:
        """All keys under the prefix, and the store's revision at that moment."""
        ...

    async def put(self, key: str, value: bytes, lease_id: int = 0) -> int:
        """Returns the revision. Raises `LeaseNotFound` if the lease is gone."""
        ...

    async def put_all(self, values: Mapping[str, bytes], lease_id: int = 0) -> int:
        """All of them at one revision, or none. Returns and raises as `put`."""
        ...

    async def delete(self, key: str) -> bool:
        """Remove the key. Returns whether it was there."""
        ...

    async def revision(self) -> int:
        """The store's revision now: it only grows, unless the store lost its data."""
        ...

    async def grant(self, ttl_s: int) -> int:
        """A new lease's id (never 0)."""
        ...

    async def keepalive(self, lease_id: int) -> int:
        """Refresh once; returns the TTL in seconds. Raises `LeaseNotFound` if it is gone."""
        ...

    async def revoke(self, lease_id: int) -> None:
        """Revoke; a lease that is gone already is no error."""
        ...

    async def remembers(self, key: str, mod_revision: int) -> bool:
        """Whether the key was written at that revision in this store's history (compacted counts as yes). No means that
        the store has lost its data since, however far its revision has come again."""
        ...

    def watch_prefix(self, prefix: str, on_lost: Callable[[], None] | None = None) -> AsyncIterator[WatchEvent]:
        """`SnapshotEvent` first, then changes as they come; survives restarts of the store by re-listing. Never ends
        by itself; closing the iterator ends the watch. While the store is away it waits; `on_lost` is called when that
        begins (what was yielded may be stale from then until the next `SnapshotEvent`)."""
        ...

    async def close(self) -> None:
        """End the connection; calls under way fail."""
        ...


# --- engines -----------------------------------------------------------------------------------

FinishReason = Literal["stop", "length", "abort", "error"]

TokenLogprobs = tuple[tuple[int, float], ...]
"""(token id, log probability): the token itself, then the likeliest others. In `prompt_logprobs` the first is empty."""


@dataclass(frozen=True, slots=True)
class SamplingExtras:
    """Options that few requests ask for. `logprobs`, `prompt_logprobs`: how many alternatives to report. None: no
    numbers. `script`: the tokens of the answer, if they are decided already (docs/sim-engine.md)."""

    logprobs: int | None = None
    prompt_logprobs: int | None = None
    script: tuple[int, ...] = ()
    min_p: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Mapping[str, float] | None = None
    bad_words: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The part of OpenAI's request that an engine understands, under vLLM's names."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    extras: SamplingExtras | None = None


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One request to an engine.

    `kv_transfer_params` is the connector's opaque mapping (vLLM's names): a prefill engine gets
    `{"do_remote_decode": True, "do_remote_prefill": False}` and answers with the mapping that the
    decode engine is then given unchanged.
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    sampling: SamplingParams
    kv_transfer_params: Mapping[str, Any] | None = None
    core: Sequence[bytes] | None = None
    """The request in the engine's own words, which say more than `sampling`: then those count."""
    generated: int = 0
    """The last so many of the prompt's tokens are the answer so far, of a worker that was lost. `max_tokens` and
    `min_tokens` are what is left."""


@dataclass(frozen=True, slots=True)
class EngineOutput:
    """New tokens since the last output (never cumulative). The last one has a `finish_reason`."""

    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    num_cached_tokens: int | None = None
    kv_transfer_params: Mapping[str, Any] | None = None
    core: Sequence[bytes] | None = None
    """The same in the engine's own words, where they say more; only for requests that have a `core`."""
    logprobs: Sequence[TokenLogprobs] | None = None
    prompt_logprobs: Sequence[TokenLogprobs] | None = None
    """The numbers of each of these tokens, and of the prompt's in one of the outputs, if the request asks for them."""


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """An engine's facts, for model cards, status and validation. `handoff_address` is (host, port) where other
    engines reach it for KV. None: it hands nothing over."""

    engine: str
    engine_id: str
    model: str
    max_model_len: int
    block_size: int
    num_gpu_blocks: int
    max_num_seqs: int
    options: Mapping[str, Any] = field(default_factory=dict)
    handoff_address: tuple[str, int] | None = None
    max_num_batched_tokens: int | None = None
    dp_size: int = 1

    def __str__(self) -> str:
        """`sim-tiny on sim: 131,072 tokens long, KV for 945,024 tokens, 256 requests at once`; repr has all."""
        return (
            f"{self.model} on {self.engine}: {self.max_model_len:,} tokens long, KV for "
            f"{self.num_gpu_blocks * self.block_size:,} tokens, {self.max_num_seqs} requests at once"
        )

    def limits(self) -> dict[str, int | None]:
        """The figures that a planner sizes by, under the names of `transport.observation.LIMITS`."""
        return {
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "max_num_seqs": self.max_num_seqs,
            "max_kv_tokens": self.num_gpu_blocks * self.block_size,
            "context_length": self.max_model_len,
            "dp_size": self.dp_size,
        }


class PassSink(Protocol):
    """Where an engine says what each pass of its scheduler did."""

    refresh: Callable[[], None]
    """Called before the passes are read: the engine sets it where it has to catch up first."""

    def record(self, passed: ForwardPass) -> None:
        """From the event loop; returns at once and raises nothing. Its worker id is filled in by the sink, `at_s` is
        on the loop's clock."""
        ...


class KvEventPublisher(Protocol):
    """Where an engine says what its KV cache holds. Hashes are those of `kv_hashes.block_hashes`, never its own."""

    def publish(self, events: Sequence[KvEvent]) -> None:
        """In the order in which they happened. From the event loop; returns at once and raises nothing."""
        ...


class Engine(Protocol):
    """Turns a prompt into tokens: the sim engine, and vLLM."""

    @property
    def info(self) -> EngineInfo:
        """Valid after `start`."""
        ...

    async def start(self) -> None:
        """Load; returns when requests can be taken."""
        ...

    def generate(self, request: EngineRequest) -> AsyncIterator[EngineOutput]:
        """Stream the outputs; closing the iterator aborts the request and frees its blocks.

        Raises `InvalidRequest` (too long for the model), `KvTransferError` (the hand-off's identity is unknown, wrong
        or expired), `EngineError`, or `EngineDead` once the engine has ended by itself."""
        ...

    def why_not_continued(self, request: EngineRequest) -> str | None:
        """Why the engine cannot go on with this answer of a lost worker (`generated`) as that worker would have; None:
        it can."""
        ...

    def load(self) -> Load:
        """The published load: requests, KV blocks, latencies. Never waits."""
        ...

    async def load_changed(self) -> None:
        """Return when `load()` may differ from what it was at the call."""
        ...

    def prefix_hit_rate(self, prompt_token_ids: Sequence[int]) -> float:
        """The share (0..1) of this prompt whose KV blocks are cached now; 0.0 where it cannot be known."""
        ...

    def counters(self) -> Mapping[str, float]:
        """Numbers that only grow: `prefix_queries` and `prefix_hits` (prompt tokens looked up in the KV cache, and
        found), `drafts` and `accepted` (speculation: drafts, and their accepted tokens). The unknown is absent."""
        ...

    def death(self) -> str | None:
        """Why the engine has ended by itself; None: it has not."""
        ...

    async def wait_failed(self) -> None:
        """Raise `EngineDead` as soon as the engine has ended by itself; return once it was closed."""
        ...

    async def wait_handoffs(self) -> None:
        """Return when all KV that was handed over has been pulled, released or has expired."""
        ...

    def release_handoff(self, params: Mapping[str, Any]) -> None:
        """Nobody will pull the KV of these `kv_transfer_params`: free it soon. No error where it is unknown."""
        ...

    async def close(self) -> None:
        """End the engine; what still runs is aborted."""
        ...


# --- requests between components ---------------------------------------------------------------


class ResponseStream(Protocol):
    """A streaming answer. Read it to the end, or `aclose()` it: that cancels the handler.

    Product code reads it with `transport.requests.stream.pump`; user code may iterate.
    """

    instance_id: int

    def __aiter__(self) -> AsyncIterator[Any]: ...

    async def aclose(self) -> None:
        """Give the rest up: the worker stops computing it."""
        ...


class EndpointClient(Protocol):
    """A live view of one endpoint's instances, and calls to them."""

    def instances(self) -> tuple[Instance, ...]:
        """Registered now, in order of lease id."""
        ...

    async def wait_for_instances(self, timeout_s: float) -> tuple[Instance, ...]:
        """At least one; raises `NoWorkers` past the timeout."""
        ...

    async def wait_for_others(self, than: Collection[int], timeout_s: float) -> tuple[Instance, ...]:
        """Those that are not among these instance ids, as soon as there is one; none past the timeout."""
        ...

    async def call(
        self,
        payload: Any,
        *,
        instance_id: int | None = None,
        request_id: str | None = None,
        timeout_s: float | None = None,
    ) -> ResponseStream:
        """Send to that instance, or to the next one in turn. Returns once a worker has *accepted* it.

        Raises `NoWorkers`, `WorkerDraining`, `WorkerBusy`, `WorkerLost`, `DeadlineExceeded`, `NatsUnavailable`:
        after any of these the handler has produced nothing.
        """
        ...


@dataclass(frozen=True, slots=True)
class PrefillTask:
    """An entry pulled from the prefill queue. `attempt` counts from 1; `x_request_id` is the client's, for the log.

    `trace` are the headers of the request's trace, and `queued_at_s` is when the entry came (seconds since 1970); None:
    nobody traces it.
    """

    request_id: str
    payload: Mapping[str, Any]
    attempt: int
    x_request_id: str = ""
    trace: Mapping[str, str] | None = None
    queued_at_s: float | None = None


class PulledTask(Protocol):
    """A pulled entry and its fate."""

    task: PrefillTask

    async def in_progress(self) -> None:
        """It is still worked on: it is not delivered again for another `ack_wait_s`."""
        ...

    async def ack(self) -> None:
        """It is done: nobody gets it again."""
        ...

    async def nak(self, delay_s: float = 0.0) -> None:
        """Give it back: it is delivered again, to anybody, after `delay_s`."""
        ...


@dataclass(frozen=True, slots=True)
class QueueDepth:
    """`pending` waits (JetStream's num_pending); `outstanding` = pending + pulled but not acked. `late` of those that
    wait cannot keep their target any more, and wait behind the others."""

    pending: int
    outstanding: int
    late: int = 0


class PrefillQueue(Protocol):
    """The namespace's JetStream work queue `{ns}_prefill_queue`."""

    ack_wait_s: float
    """A pulled entry that shows no sign of life for so long is delivered again."""
    deferred: int
    """Entries that this client has put behind the others, because they cannot keep their target any more."""
    late_pulled: int
    """Those of them that it has pulled after all (and those that others had put there)."""

    async def enqueue(
        self,
        request_id: str,
        payload: Mapping[str, Any],
        *,
        deadline_s: float,
        start_within_s: float | None = None,
    ) -> None:
        """Append. `deadline_s` is seconds from now after which the entry is worthless. `start_within_s`: a prefill
        worker must begin the entry within this time for its target to be kept (None: no target; below 0: late
        already)."""
        ...

    async def cancel(self, request_id: str) -> None:
        """The caller does not want it any more: dropped unprefilled when pulled."""
        ...

    async def pull(self, timeout_s: float) -> PulledTask | None:
        """The next live entry, or None past the timeout. Cancelled and expired ones are acked and skipped. Entries
        that can keep their target come first. The others have a turn in every `core.routing.prompts.LATE_EVERY`."""
        ...

    async def depth(self) -> QueueDepth:
        """Raises `NatsUnavailable`; never 0 for "I do not know"."""
        ...
