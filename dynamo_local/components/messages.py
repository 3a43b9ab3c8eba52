"""The messages between Processor, VllmWorker and PrefillWorker. Plain dicts: the data plane packs them as they are.

Requests are checked by msgspec when they arrive (once per request); response items are built and read
without it (once per frame of tokens, on the hot path).

    generate request  {"request_id", "token_ids": [int], "sampling": {SamplingParams}, "prefix_hit_rate"?: 0..1,
                       "core"?: [bytes], "prefill_here"?: str, "lora_id"?: int, "generated"?: int}
    generate item     {"token_ids": [int], "finish_reason"?: str, "num_cached_tokens"?: int, "logprobs"?,
                       "prompt_logprobs"?, "core"?: [bytes], "phases"?: seconds of the first token's time, for
                       the prompt and for its hand-off, and the watcher that prefilled it elsewhere}; the
                       first has no tokens, and the Router's "kv_hit_rate" if one chose the worker
    prefill entry     {"token_ids", "sampling", "reply_to", "cached_tokens"?: int, "generated"?: int}
    prefill reply     {"kv_transfer_params": {…}, "num_cached_tokens"?: int, "prefill_s"?: seconds, "worker"?: its
                      watcher}; a failure travels as PrefillReplies' error
    route request     {"token_ids", "request_id", "max_tokens", "avoid": [instance ids], "lora_id"}, to the Router
    route answer      {"worker_id", "prefix_hit_rate": 0..1, "router": the policy}
    response item     {"text", "num_tokens", "finish_reason", "usage"}, to the Frontend; the first also has
                      "prompt_tokens", "routed_s" and "kv_hit_rate"?, the one with the first tokens
                      "phases"?, the one with the first tokens of another worker "migrations", the last
                      "worker"? (the instance that decoded it);
                      `sim_api.choices` adds what requests with extras need
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from dynamo_local.components import limits
from dynamo_local.components.sim_api.requests import Extras
from dynamo_local.errors import InvalidRequest, KvTransferError
from dynamo_local.ports import EngineOutput, EngineRequest, SamplingParams
from dynamo_local.transport.requests.frames import RequestId, invalid_payload

_StopText = Annotated[str, Meta(max_length=limits.MAX_STOP_LENGTH)]


class ChatMessage(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """One message as the Frontend passes it on."""

    role: str
    content: str | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class TextRequest(msgspec.Struct, frozen=True):
    """A Frontend's message to a Processor: the validated body, with a `request_id`. None means that the client did
    not say.

    It is read from the wire as this, so that anything else that somebody may send is skipped, not made.
    """

    request_id: RequestId = ""
    model: Annotated[str, Meta(max_length=512)] = ""
    messages: Annotated[list[ChatMessage], Meta(max_length=limits.MAX_MESSAGES)] | None = None
    prompt: str | Annotated[list[int], Meta(max_length=limits.MAX_PROMPT_IDS)] | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    stop: Annotated[list[_StopText], Meta(max_length=limits.MAX_STOP_STRINGS)] | _StopText | None = None
    stop_token_ids: Annotated[list[int], Meta(max_length=limits.MAX_STOP_TOKEN_IDS)] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    extras: Extras | None = None
    trace_block_size: Annotated[int, Meta(ge=0, le=4096)] = 0
    """The last item names the prompt's blocks of so many tokens, and the worker; 0: it does not."""
    lost: int = 0
    """How many workers were lost with this request before, one after the other."""


class GenerateRequest(msgspec.Struct, frozen=True):
    """The request of `VllmWorker.generate`."""

    request_id: RequestId
    token_ids: list[int]
    sampling: SamplingParams
    prefix_hit_rate: float | None = None
    """The share of this prompt's blocks that the Router says this worker has cached; None: no Router was asked."""
    core: list[bytes] | None = None
    """The request in the engine's own words; see `ports.EngineRequest`."""
    prefill_here: str | None = None
    """Why no prefill worker can compute the prompt; None: one can."""
    lora_id: int = 0
    """The number of the LoRA adapter in the engine, by which its KV blocks are hashed; 0: no adapter."""
    generated: int = 0
    """As `ports.EngineRequest`: the last so many of `token_ids` are the answer so far."""


class RouteRequest(msgspec.Struct, frozen=True):
    """The request of `Router.generate`. `avoid` are workers that have failed this request already."""

    token_ids: list[int]
    request_id: RequestId = ""
    max_tokens: int = 0
    avoid: list[int] = []
    lora_id: int = 0


class RouteAnswer(msgspec.Struct, frozen=True):
    """The answer of `Router.generate`: the worker, the share of the prompt that it has cached, and the policy that
    chose."""

    worker_id: int
    prefix_hit_rate: float
    router: str


class PrefillEntry(msgspec.Struct, frozen=True):
    """The payload of a prefill queue entry; its request id is the queue's own field."""

    token_ids: list[int]
    sampling: SamplingParams
    reply_to: str
    cached_tokens: int = 0
    """Tokens of the prompt whose KV the decode worker has already. The prefill worker cannot read that KV."""
    generated: int = 0


class CanaryRequest(msgspec.Struct, frozen=True):
    """The request of `PrefillWorker.canary`, which answers one prefill reply."""

    request_id: RequestId
    token_ids: Annotated[list[int], Meta(max_length=1024)]


class PrefillReply(msgspec.Struct, frozen=True):
    """A prefill worker's answer: the KV's identity."""

    kv_transfer_params: dict[str, Any]
    num_cached_tokens: int | None = None
    prefill_s: float | None = None
    """How long the prompt's computation took, in seconds; None: an older worker does not say."""
    worker: str | None = None
    """The watcher of the prefill worker."""


def parse_text_request(payload: Any) -> TextRequest:
    """Raises `InvalidRequest` that names the parameter."""
    try:
        return msgspec.convert(payload, TextRequest)
    except msgspec.ValidationError as error:
        raise invalid_payload(error) from error


def size_of(request: TextRequest) -> int:
    """About how many characters are to be rendered and tokenised."""
    size = len(request.prompt or ()) + sum(len(message.content or "") + 16 for message in request.messages or ())
    if request.extras is not None and request.extras.prompts is not None:
        size += sum(map(len, request.extras.prompts))
    return size


def generate_request(request_id: str, token_ids: list[int], sampling: SamplingParams) -> dict[str, Any]:
    """The request as it travels."""
    return {"request_id": request_id, "token_ids": token_ids, "sampling": _sampling(sampling)}


def continued(request: Mapping[str, Any], given: Sequence[int]) -> dict[str, Any] | None:
    """A generate request that goes on after the tokens `given` of its answer, at any worker.

    Its prompt ends with these tokens. Token limits are what is left. None: no token is left to be generated.
    """
    count, sampling = len(given), request["sampling"]
    left = sampling["max_tokens"] - count
    if left < 1:
        return None
    sampling = {**sampling, "max_tokens": left, "min_tokens": max(0, sampling["min_tokens"] - count)}
    if (extras := sampling.get("extras")) is not None:
        sampling["extras"] = {**extras, "prompt_logprobs": None}  # the client has them
    return {**request, "token_ids": [*request["token_ids"], *given], "sampling": sampling, "generated": count}


_SAMPLING = tuple(field.name for field in fields(SamplingParams))


def _sampling(sampling: SamplingParams) -> dict[str, Any]:
    """As `asdict`, which copies each value deeply; these are numbers, and a tuple of them."""
    found = {name: getattr(sampling, name) for name in _SAMPLING}
    if sampling.extras is not None:
        found["extras"] = asdict(sampling.extras)
    return found


def parse_generate_request(payload: Any) -> GenerateRequest:
    """Raises `InvalidRequest` that names the field."""
    try:
        return msgspec.convert(payload, GenerateRequest)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"generate request: {error}") from error


def parse_route_request(payload: Any) -> RouteRequest:
    """Raises `InvalidRequest` that names the field."""
    try:
        return msgspec.convert(payload, RouteRequest)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"route request: {error}") from error


def generate_item(output: EngineOutput, *, goes_on: bool = False) -> dict[str, Any]:
    """An engine's output as it travels; what is None is left out. The prompt of an answer that `goes_on` here holds
    tokens of the answer, so the cached ones are not told."""
    item: dict[str, Any] = {"token_ids": output.token_ids}
    if output.finish_reason is not None:
        item["finish_reason"] = output.finish_reason
    if output.num_cached_tokens is not None and not goes_on:
        item["num_cached_tokens"] = output.num_cached_tokens
    if output.core is not None:
        item["core"] = output.core
    if output.logprobs is not None:
        item["logprobs"] = output.logprobs
    if output.prompt_logprobs is not None:
        item["prompt_logprobs"] = output.prompt_logprobs
    return item


def prefill_entry(request: EngineRequest, reply_to: str, cached_tokens: int = 0) -> dict[str, Any]:
    """The queue entry for a request; the prefill worker answers on `reply_to`."""
    return {
        "token_ids": list(request.prompt_token_ids),
        "sampling": _sampling(request.sampling),
        "reply_to": reply_to,
        "cached_tokens": cached_tokens,
        "generated": request.generated,
    }


def parse_prefill_entry(payload: Mapping[str, Any]) -> PrefillEntry:
    """Raises `InvalidRequest` that names the field."""
    try:
        return msgspec.convert(payload, PrefillEntry)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"prefill entry: {error}") from error


def prefill_reply(output: EngineOutput) -> dict[str, Any]:
    """A finished prefill's answer. Raises `KvTransferError` when the engine gave no identity of the KV."""
    if output.kv_transfer_params is None:
        raise KvTransferError("the prefill engine finished without kv_transfer_params; nothing can be handed over")
    reply: dict[str, Any] = {"kv_transfer_params": dict(output.kv_transfer_params)}
    if output.num_cached_tokens is not None:
        reply["num_cached_tokens"] = output.num_cached_tokens
    return reply


def parse_prefill_reply(payload: Any) -> PrefillReply:
    """The `kv_transfer_params` are unchanged. Raises `KvTransferError` for an answer without them."""
    try:
        return msgspec.convert(payload, PrefillReply)
    except msgspec.ValidationError as error:
        raise KvTransferError(f"the prefill worker's answer cannot be read: {error}") from error


# --- Frontend and Processor exchange these about an HTTP request that the Frontend does not read.
#
# request  ApiRequest
# items    {"status", "headers"?: {str: str}, "stream": bool}, then {"body": bytes}; each may also tell
#          "tokens": how many more the answer has, "prompt_tokens", "cached_tokens"


class ApiRequest(msgspec.Struct, frozen=True):
    """A request as the client made it; `headers` without those that are about the connection, or secret."""

    request_id: RequestId
    path: str
    headers: list[tuple[str, str]]
    body: bytes
    method: str = "POST"
    query: str = ""
    lost: int = 0
    """As in `TextRequest`."""
