"""vLLM's own messages to and from EngineCore as bytes, and what of a request the graph must know."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from dynamo_local.errors import InvalidRequest
from dynamo_local.ports import SamplingParams as EngineSampling

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
    """What the graph reads of the parameters: routers and planners count tokens, prefills ignore the rest."""
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
