"""In the Frontend: vLLM's `POST /tokenize` and `/detokenize`, and OpenAI's `POST /v1/embeddings`.

Each asks a Processor one question (`texts`), which needs no worker.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta
from starlette.types import Scope

from dynamo_local.components import limits
from dynamo_local.components.http_metrics import RequestObserver
from dynamo_local.components.openai.http_io import Reply, Whole
from dynamo_local.components.openai.requests import Fields, TokenId, decoded, parse_chat, parse_completion
from dynamo_local.components.openai.route import HttpDeps, ModelRoute
from dynamo_local.errors import WorkerLost
from dynamo_local.ports import EndpointClient


class _Tokenize(msgspec.Struct, frozen=True):
    add_special_tokens: bool | None = None
    return_token_strs: bool = False


class _Detokenize(msgspec.Struct, frozen=True):
    model: Annotated[str, Meta(min_length=1, max_length=512)]
    tokens: Annotated[list[TokenId], Meta(max_length=limits.MAX_PROMPT_IDS)]


class _Embeddings(msgspec.Struct, frozen=True):
    input: msgspec.Raw
    dimensions: Annotated[int, Meta(ge=1, le=4096)] = 256
    encoding_format: Literal["float", "base64"] = "float"


_tokenize, _detokenize, _embeddings = map(msgspec.json.Decoder, (_Tokenize, _Detokenize, _Embeddings))
_CHAT = {"model", "prompt", "messages", "tools", "chat_template_kwargs"}
_NEUTRAL = {"add_generation_prompt": (True,), "continue_final_message": (False,)}
_tokenize_fields = Fields({*_CHAT, *_Tokenize.__struct_fields__}, _NEUTRAL)
_detokenize_fields = Fields(_Detokenize.__struct_fields__, {})
_embedding_fields = Fields({"model", *_Embeddings.__struct_fields__}, {})


@dataclass(frozen=True, slots=True)
class Question:
    """A question to the Processor, and how its answer becomes the client's."""

    model: str
    payload: Mapping[str, Any]
    shape: Callable[[Any], Any]
    stream: bool = False


def parse_tokenize(body: bytes) -> Question:
    """Raises `ApiError` 400 that names the parameter."""
    fields = _tokenize_fields.split(body)
    own = decoded(_tokenize, {n: v for n, v in fields.items() if n not in _CHAT})
    given = {n: v for n, v in fields.items() if n in _CHAT}
    request = (parse_chat if "messages" in fields else parse_completion)(msgspec.json.encode(given))
    options = {"with_texts": own.return_token_strs, "add_special_tokens": own.add_special_tokens}
    return Question(request.model, {"kind": "tokenize", "request": request.payload, **options}, lambda answer: answer)


def parse_detokenize(body: bytes) -> Question:
    """Raises `ApiError` 400 that names the parameter."""
    own = decoded(_detokenize, _detokenize_fields.split(body))
    payload = {"kind": "detokenize", "token_ids": own.tokens, "request": {"model": own.model}}
    return Question(own.model, payload, lambda answer: answer)


def parse_embeddings(body: bytes) -> Question:
    """Raises `ApiError` 400 that names the parameter."""
    fields = _embedding_fields.split(body)
    own = decoded(_embeddings, fields)
    given = {"prompt": own.input, **({"model": fields["model"]} if "model" in fields else {})}
    request = parse_completion(msgspec.json.encode(given))

    def shape(answer: Mapping[str, Any]) -> dict[str, Any]:
        def shown(vector: list[float]) -> Any:
            packed = struct.pack(f"<{len(vector)}f", *vector)
            return base64.b64encode(packed).decode() if own.encoding_format == "base64" else vector

        data = [{"object": "embedding", "index": n, "embedding": shown(v)} for n, v in enumerate(answer["embeddings"])]
        usage = {"prompt_tokens": answer["prompt_tokens"], "total_tokens": answer["prompt_tokens"]}
        return {"object": "list", "data": data, "model": request.model, "usage": usage}

    return Question(request.model, {"kind": "embed", "request": request.payload, "dimensions": own.dimensions}, shape)


class TextsRoute(ModelRoute[Question]):
    """The ASGI application of one of them."""

    def __init__(self, parse: Callable[[bytes], Question], client: EndpointClient, deps: HttpDeps) -> None:
        super().__init__("embeddings" if parse is parse_embeddings else "tokenize", deps)
        self._parse, self._client = parse, client

    def parse(self, body: bytes, scope: Scope) -> Question:
        return self._parse(body)

    async def answer(self, request: Question, request_id: str, observer: RequestObserver, reply: Reply) -> Whole | None:
        timeout_s = self._deps.settings.request_timeout_s
        stream = await self._client.call(request.payload, request_id=request_id, timeout_s=timeout_s)
        try:
            async for item in stream:
                return Whole(200, msgspec.json.encode(request.shape(item)))
        finally:
            await stream.aclose()
        raise WorkerLost("The Processor gave no answer; send the request again.")
