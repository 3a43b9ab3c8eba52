"""A model as `/v1/models` has it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from dynamo_local.components.models_view import ServedModel

_PERMISSION: Final[Mapping[str, Any]] = {
    "object": "model_permission",
    "allow_create_engine": False,
    "allow_sampling": True,
    "allow_logprobs": True,
    "allow_search_indices": False,
    "allow_view": True,
    "allow_fine_tuning": False,
    "organization": "*",
    "group": None,
    "is_blocking": False,
}


def model_object(model: ServedModel) -> dict[str, Any]:
    """OpenAI's object, with vLLM's `max_model_len` (tokens) and `root`, which its clients take for the tokenizer's
    place where nobody has told them. Where the engine is vLLM, or the model an adapter, it has all that vLLM says."""
    words = () if model.engine is None else model.engine.words
    folders = (word.removeprefix("--model=") for word in words if word.startswith("--model="))
    told: dict[str, Any] = {
        "id": model.name,
        "object": "model",
        "created": model.created_s,
        "owned_by": "dynamo",
        "root": model.root or next(folders, model.name),
        "max_model_len": model.max_model_len,
    }
    if model.engine is None and model.parent is None:
        return told
    permission = {"id": f"modelperm-{model.name}", "created": model.created_s, **_PERMISSION}
    return {**told, "owned_by": "vllm", "parent": model.parent, "permission": [permission]}
