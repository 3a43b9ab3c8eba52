"""vLLM's `POST /tokenize` and `/detokenize`, and OpenAI's `POST /v1/embeddings`: one question to a Processor."""

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
from dynamo_local.components.openai import requests as params
from dynamo_local.components.openai.errors import bad_param
from dynamo_local.components.openai.http_io import Reply, Whole
from dynamo_local.components.openai.requests import TokenId, decode, parse_chat, parse_completion
from dynamo_local.components.openai.route import HttpDeps, ModelRoute
from dynamo_local.components.sim_api.chats import optional
from dynamo_local.errors import WorkerLost
from dynamo_local.ports import EndpointClient

_flag = msgspec.json.Decoder(bool)
_name = msgspec.json.Decoder(Annotated[str, Meta(min_length=1, max_length=512)])
_ids = msgspec.json.Decoder(Annotated[list[TokenId], Meta(max_length=limits.MAX_PROMPT_IDS)])
_dimensions = msgspec.json.Decoder(Annotated[int, Meta(ge=1, le=4096)])
_encoding = msgspec.json.Decoder(Literal["float", "base64"])
_tokenize_fields = params.Fields(
    {"model", "prompt", "messages", "tools", "chat_template_kwargs", "add_special_tokens", "return_token_strs"},
    {"add_generation_prompt": (True,), "continue_final_message": (False,)},
)
_detokenize_fields = params.Fields({"model", "tokens"}, {})
_embedding_fields = params.Fields({"model", "input", "dimensions", "encoding_format"}, {})


@dataclass(frozen=True, slots=True)
class Question:
    """What the Processor is asked, and how its answer becomes the client's."""

    model: str
    payload: Mapping[str, Any]
    shape: Callable[[Any], Any]
    stream: bool = False


def parse_tokenize(body: bytes) -> Question:
    """Raises `ApiError` 400 that names the parameter."""
    fields = _tokenize_fields.split(body)
    with_texts = optional(_flag, fields, "return_token_strs") is True
    special = optional(_flag, fields, "add_special_tokens")
    kept = {n: v for n, v in fields.items() if n not in ("return_token_strs", "add_special_tokens")}
    request = (parse_chat if "messages" in fields else parse_completion)(msgspec.json.encode(kept))
    asked = {"kind": "tokenize", "request": request.payload, "with_texts": with_texts, "add_special_tokens": special}
    return Question(request.model, asked, lambda answer: answer)


def parse_detokenize(body: bytes) -> Question:
    """Raises `ApiError` 400 that names the parameter."""
    fields = _detokenize_fields.split(body)
    for name in ("model", "tokens"):
        if name not in fields:
            raise bad_param(name, f"Missing required parameter: `{name}`.", "missing_required_parameter")
    asked = {"kind": "detokenize", "token_ids": decode(_ids, fields["tokens"], "tokens")}
    model = decode(_name, fields["model"], "model")
    return Question(model, {**asked, "request": {"model": model}}, lambda answer: answer)


def parse_embeddings(body: bytes) -> Question:
    """Raises `ApiError` 400 that names the parameter."""
    fields = _embedding_fields.split(body)
    if "input" not in fields:
        raise bad_param("input", "Missing required parameter: `input`.", "missing_required_parameter")
    given = {"prompt": fields["input"], **({"model": fields["model"]} if "model" in fields else {})}
    request = parse_completion(msgspec.json.encode(given))
    dimensions = optional(_dimensions, fields, "dimensions")
    base64ed = optional(_encoding, fields, "encoding_format") == "base64"
    asked = {"kind": "embed", "request": request.payload, **({"dimensions": dimensions} if dimensions else {})}
    return Question(request.model, asked, lambda answer: _embeddings(answer, request.model, base64ed))


def _embeddings(answer: Mapping[str, Any], model: str, base64ed: bool) -> dict[str, Any]:
    def shown(vector: list[float]) -> Any:
        return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode() if base64ed else vector

    data = [{"object": "embedding", "index": n, "embedding": shown(one)} for n, one in enumerate(answer["embeddings"])]
    usage = {"prompt_tokens": answer["prompt_tokens"], "total_tokens": answer["prompt_tokens"]}
    return {"object": "list", "data": data, "model": model, "usage": usage}


class TextsRoute(ModelRoute[Question]):
    """The ASGI application of one of them."""

    def __init__(self, parse: Callable[[bytes], Question], client: EndpointClient, deps: HttpDeps) -> None:
        super().__init__("embeddings" if parse is parse_embeddings else "tokenize", deps)
        self._parse = parse
        self._client = client

    def parse(self, body: bytes, scope: Scope) -> Question:
        return self._parse(body)

    async def answer(self, request: Question, request_id: str, observer: RequestObserver, reply: Reply) -> Whole | None:
        stream = await self._client.call(
            request.payload, request_id=request_id, timeout_s=self._deps.settings.request_timeout_s
        )
        try:
            async for item in stream:
                return Whole(200, msgspec.json.encode(request.shape(item)))
        finally:
            await stream.aclose()
        raise WorkerLost("The Processor gave no answer; send the request again.")
