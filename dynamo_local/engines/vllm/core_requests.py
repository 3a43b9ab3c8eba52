"""The worker's side: requests of vLLM's own go to EngineCore as they came, its outputs go back as they are.

AsyncLLM in the worker sees them too, without their log-probabilities and texts: it counts what is published as load.
"""

from __future__ import annotations

import asyncio
import copy
import time
from collections import deque
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from dynamo_local.errors import EngineError, InvalidRequest
from dynamo_local.ports import EngineOutput, EngineRequest, FinishReason
from dynamo_local.ports import SamplingParams as EngineSampling

# Encodes vLLM's messages to and from EngineCore, and reads the parts of a request that the graph needs.

_MORE = tuple(zip(EngineCoreOutput.__struct_fields__[2:], EngineCoreOutput.__struct_defaults__, strict=True))
"""The fields after the request's id and the token ids, with what they are where there is nothing to say."""


class Wire:
    """Encoder and decoders, which vLLM allows one thread at a time to use."""

    def __init__(self) -> None:
        self._encoder = MsgpackEncoder()
        self._requests = MsgpackDecoder(EngineCoreRequest)
        self._outputs = MsgpackDecoder(EngineCoreOutput)

    def encode(self, message: EngineCoreRequest | EngineCoreOutput) -> list[bytes]:
        """The message, and the tensors that it refers to."""
        return [bytes(part) for part in self._encoder.encode(message)]

    def request(self, parts: Sequence[bytes]) -> EngineCoreRequest:
        """Raises `InvalidRequest` for what another version of vLLM has written."""
        return self._decoded(self._requests, parts)

    def output(self, parts: Sequence[bytes]) -> EngineCoreOutput:
        """Raises `InvalidRequest` for what another version of vLLM has written."""
        return self._decoded(self._outputs, parts)

    def _decoded(self, decoder: MsgpackDecoder, parts: Sequence[bytes]) -> Any:
        try:
            return decoder.decode(parts)
        except (ValueError, TypeError, IndexError) as error:  # msgspec's errors are ValueErrors
            raise InvalidRequest(f"vLLM's message cannot be read, are both sides of one version? {error}") from error


def is_plain(output: EngineCoreOutput) -> bool:
    """Whether its token ids are all that it says: so it is for all tokens but the first and the last."""
    return all(getattr(output, name) is nothing for name, nothing in _MORE)


def sampling_of(request: EngineCoreRequest) -> EngineSampling:
    """The parameters that the graph reads. Routers and planners count tokens; prefills ignore the rest."""
    params = request.sampling_params
    return EngineSampling(max_tokens=1 if params is None or params.max_tokens is None else params.max_tokens)


def why_prefilled_here(request: EngineCoreRequest) -> str | None:
    """Why a prefill worker cannot compute this prompt for others; None: it can."""
    params = request.sampling_params
    if params is None:
        return "a pooling model has no decode"
    if params.prompt_logprobs is not None:
        return "log-probabilities of the prompt come from the prefill"
    if request.mm_features or request.prompt_embeds is not None:
        return "the prompt is not token ids alone"
    if request.lora_request is not None:
        return "its LoRA adapter belongs to the request"
    if request.cache_salt is not None:
        return "its blocks are salted"
    return None


def core_continued(request: EngineCoreRequest, given: Sequence[int]) -> EngineCoreRequest | None:
    """The request that goes on after the tokens `given` of its answer; None: another worker cannot go on as this one.

    So it is with a grammar, whose state begins with the answer, and with penalties of generated tokens: these tokens
    belong to the prompt now.
    """
    params = request.sampling_params
    if params is None or request.prompt_token_ids is None or request.prompt_embeds is not None:
        return None
    if params.structured_outputs is not None or params.presence_penalty or params.frequency_penalty:
        return None
    looks_back = any(getattr(params, name, None) not in (None, []) for name in _OF_GENERATED)
    if looks_back or getattr(request, "resumable", False):
        return None
    left = (params.max_tokens or 0) - len(given)
    if left < 1:
        return None
    found = copy.copy(request)
    found.prompt_token_ids = [*request.prompt_token_ids, *given]
    found.sampling_params = params.clone()
    found.sampling_params.max_tokens = left
    found.sampling_params.min_tokens = max(0, params.min_tokens - len(given))
    found.sampling_params.prompt_logprobs = None  # the client has them
    return found


_OF_GENERATED = ("bad_words", "thinking_token_budget", "repetition_detection")
"""Parameters that look back at generated tokens."""

_REASONS: Mapping[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort", "repetition": "stop"}


class _Outputs:
    """One request's outputs, in the place of AsyncLLM's own queue of them."""

    def __init__(self) -> None:
        self._ready = asyncio.Event()
        self._raw: deque[EngineCoreOutput] = deque()
        self._error: Exception | None = None

    def take(self, output: EngineCoreOutput) -> None:
        """From EngineCore."""
        self._raw.append(output)
        self._ready.set()

    def put(self, output: Any) -> None:
        """From AsyncLLM: only its errors are of interest."""
        if isinstance(output, Exception):
            self._error = output
            self._ready.set()

    async def next(self) -> EngineCoreOutput:
        """Raises what AsyncLLM said."""
        while not self._raw:
            if self._error is not None:
                raise self._error
            self._ready.clear()
            await self._ready.wait()
        return self._raw.popleft()


class CoreRequests:
    """Those of one AsyncLLM, whose outputs it reads first."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._wire = Wire()
        self._open: dict[str, _Outputs] = {}
        self._process = llm.output_processor.process_outputs
        llm.output_processor.process_outputs = self._processed

    def _processed(self, outputs: list[EngineCoreOutput], *args: Any, **kwargs: Any) -> Any:
        seen = outputs
        if self._open:
            seen = []
            for output in outputs:
                taker = self._open.get(output.request_id)
                if taker is not None:
                    taker.take(output)
                    output = _without_logprobs(output)
                seen.append(output)
        return self._process(seen, *args, **kwargs)

    async def run(
        self,
        request: EngineRequest,
        request_id: str,
        params: Mapping[str, Any],
        trace_headers: Mapping[str, str] | None = None,
    ) -> AsyncGenerator[EngineOutput, None]:
        """The outputs of a request that has a `core`; closed, it aborts the request. Raises what vLLM raises."""
        assert request.core is not None
        if self._llm.errored:
            raise self._llm.dead_error
        core = self._wire.request(request.core)
        _made_ours(core, request_id, params)
        core.trace_headers = trace_headers
        outputs = self._open[request_id] = _Outputs()
        ended = False
        try:
            self._llm._run_output_handler()
            self._llm.output_processor.add_request(_to_be_counted(core), None, None, 0, outputs)
            await self._llm.engine_core.add_request_async(core)
            while not ended:
                output = await outputs.next()
                ended = output.finish_reason is not None
                if request.generated:  # its prompt holds tokens of the answer: the client knows the real one
                    output.prefill_stats = None
                yield self._converted(output, params)
        finally:
            del self._open[request_id]
            if not ended:
                await self._llm.abort(request_id, internal=True)

    def _converted(self, output: EngineCoreOutput, params: Mapping[str, Any]) -> EngineOutput:
        output.trace_headers = None  # AsyncLLM has read them by now; with them no output would be plain
        reason = None if output.finish_reason is None else _REASONS.get(str(output.finish_reason), "error")
        if output.mm_cache_miss_hashes:
            raise EngineError("the worker does not have this request's images; send it again")
        stats = output.prefill_stats
        return EngineOutput(
            token_ids=tuple(output.new_token_ids),
            finish_reason=reason,
            num_cached_tokens=None if stats is None else stats.num_cached_tokens,
            kv_transfer_params=output.kv_transfer_params,
            core=None if is_plain(output) else self._wire.encode(_as_prefilled(output, params)),
        )


def _made_ours(core: EngineCoreRequest, request_id: str, params: Mapping[str, Any]) -> None:
    """Set the fields that this worker decides, not the Processor: names, clocks, the source of the KV."""
    core.request_id = core.external_req_id = request_id
    core.arrival_time = time.time()
    core.client_index = core.current_wave = 0
    core.data_parallel_rank = None
    if params and core.sampling_params is not None:
        core.sampling_params.extra_args = {
            **(core.sampling_params.extra_args or {}),
            "kv_transfer_params": dict(params),
        }


def _as_prefilled(output: EngineCoreOutput, params: Mapping[str, Any]) -> EngineCoreOutput:
    """A client sees as cached only the tokens that the prefill worker had cached, as in vLLM."""
    cached = params.get("remote_prefill_cached_tokens", 0)
    if output.prefill_stats is None or not params.get("do_remote_prefill"):
        return output
    shown = copy.copy(output)
    shown.prefill_stats = replace(output.prefill_stats, num_cached_tokens=cached)
    return shown


def _to_be_counted(core: EngineCoreRequest) -> EngineCoreRequest:
    if core.sampling_params is None:
        return core
    seen = copy.copy(core)
    seen.sampling_params = SamplingParams(
        max_tokens=core.sampling_params.max_tokens, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
    )
    return seen


def _without_logprobs(output: EngineCoreOutput) -> EngineCoreOutput:
    if output.new_logprobs is None and output.new_prompt_logprobs_tensors is None:
        return output
    seen = copy.copy(output)
    seen.new_logprobs = seen.new_prompt_logprobs_tensors = None
    return seen
