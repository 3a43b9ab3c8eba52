"""The two steps of a disaggregated request between HTTP servers (vLLM's `kv_transfer_params`). Pure: values to values.

1. A prefill server gets the request with room for one token, unstreamed, and `do_remote_decode`. Its answer names
   where the prompt's KV is kept.
2. A decode server gets the client's request with that answer's `kv_transfer_params`, pulls the KV and streams.

Source: vLLM's `tests/v1/kv_connector/nixl_integration/toy_proxy_server.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PARAMS = "kv_transfer_params"

ASK_PREFILL: Mapping[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""What tells a prefill engine that somebody else decodes: vLLM's NixlConnector wants all of it (vllm-facts)."""

_ONE_TOKEN = ("max_completion_tokens", "min_tokens")
"""Where the client gives these, a prefill of one token must not contradict them."""

_NOT_FOR_PREFILL = ("stream_options",)


def why_not(request: Mapping[str, Any]) -> str | None:
    """Why this request cannot be handed over and is prefilled where it is decoded; None where it can."""
    if request.get(PARAMS) is not None:
        return f"it brings {PARAMS} of its own"
    for name in ("n", "best_of"):
        if request.get(name) not in (None, 1):
            return f"it asks for {name}={request[name]!r}: a hand-over is for one answer"
    prompt = request.get("prompt")
    if isinstance(prompt, list) and len(prompt) > 1 and not all(isinstance(token, int) for token in prompt):
        return "it has several prompts: a hand-over is for one"
    return None


def prefill_request(request: Mapping[str, Any]) -> dict[str, Any]:
    """Step 1: what the prefill server is sent."""
    asked = {name: value for name, value in request.items() if name not in _NOT_FOR_PREFILL}
    asked |= {name: 1 for name in _ONE_TOKEN if asked.get(name)}
    return {**asked, "stream": False, "max_tokens": 1, PARAMS: dict(ASK_PREFILL)}


def params_of(answer: Any) -> Mapping[str, Any] | None:
    """The KV's identity in the prefill server's answer; None where it kept none."""
    found = answer.get(PARAMS) if isinstance(answer, dict) else None
    return found if isinstance(found, dict) and found else None


def decode_request(request: Mapping[str, Any], params: Mapping[str, Any]) -> dict[str, Any]:
    """Step 2: what the decode server is sent."""
    return {**request, PARAMS: dict(params)}
