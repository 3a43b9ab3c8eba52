"""In the Processor: tokens of a text, the text of tokens, and embeddings. No worker is needed."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from dynamo_local.components import limits
from dynamo_local.components.messages import TextRequest
from dynamo_local.components.text.prepare import token_ids_of
from dynamo_local.errors import InvalidRequest
from dynamo_local.kv_hashes import token_bytes
from dynamo_local.transport.requests.frames import invalid_payload

if TYPE_CHECKING:
    from dynamo_local.components.text.tokenizer import Tokenizer

DIMENSIONS: Final = 256
MAX_DIMENSIONS: Final = 4096


class TextsRequest(msgspec.Struct, frozen=True):
    """The request of the Processor's endpoint `texts`. `request` has the prompts or the messages."""

    kind: Literal["tokenize", "detokenize", "embed"]
    request: TextRequest = TextRequest()
    token_ids: Annotated[list[int], Meta(max_length=limits.MAX_PROMPT_IDS)] = []
    add_special_tokens: bool | None = None
    with_texts: bool = False
    dimensions: Annotated[int, Meta(ge=1, le=MAX_DIMENSIONS)] = DIMENSIONS


def parse_texts_request(payload: Any) -> TextsRequest:
    """Raises `InvalidRequest` that names the field."""
    try:
        return msgspec.convert(payload, TextsRequest)
    except msgspec.ValidationError as error:
        raise invalid_payload(error) from error


def answer_texts(question: TextsRequest, tokenizer: Tokenizer, max_model_len: int) -> dict[str, Any]:
    """The answer, in the form that the HTTP API has. Raises `InvalidRequest`."""
    if question.kind == "tokenize":
        return _tokenized(question, tokenizer, max_model_len)
    if question.kind == "detokenize":
        for token in question.token_ids:
            if not 0 <= token < tokenizer.vocab_size:
                raise InvalidRequest(f"tokens holds {token}, which is no token of the model", param="tokens")
        return {"prompt": tokenizer.decode(question.token_ids, skip_special_tokens=False)}
    return _embedded(question, tokenizer, max_model_len)


def _tokenized(question: TextsRequest, tokenizer: Tokenizer, max_model_len: int) -> dict[str, Any]:
    request = question.request
    kind: Literal["chat", "completion"] = "chat" if request.messages is not None else "completion"
    ids = token_ids_of(kind, request, tokenizer, max_model_len, add_special_tokens=question.add_special_tokens)
    texts = [tokenizer.token_text(token) for token in ids] if question.with_texts else None
    return {"count": len(ids), "max_model_len": max_model_len, "tokens": ids, "token_strs": texts}


def _embedded(question: TextsRequest, tokenizer: Tokenizer, max_model_len: int) -> dict[str, Any]:
    """Vectors of length 1 that depend on the tokens alone: near texts are not near each other."""
    extras = question.request.extras
    prompts = [question.request.prompt] if extras is None or extras.prompts is None else extras.prompts
    vectors, count = [], 0
    for prompt in prompts:
        one = msgspec.structs.replace(question.request, prompt=prompt)
        ids = token_ids_of("completion", one, tokenizer, max_model_len)
        count += len(ids)
        vectors.append(embedding_of(ids, question.dimensions))
    return {"embeddings": vectors, "prompt_tokens": count}


def embedding_of(token_ids: Sequence[int], dimensions: int) -> list[float]:
    """A vector of length 1, drawn with the tokens as the seed."""
    draw = random.Random(blake2b(token_bytes(token_ids)).digest())
    values = [draw.gauss(0, 1) for _ in range(dimensions)]
    length = math.hypot(*values)
    return [value / length for value in values]
