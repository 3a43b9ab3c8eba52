"""A server that changes its role, prefill or decode, when it is asked to over HTTP.

SGLang's `POST /pd_role_switch` (0.5.21, sgl-project/sglang#28403) answers `{"success", "message", …}`, 200 or 400. It
refuses while anything runs or is kept, and while another change is under way; the role that it has already it takes for
a success.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import logging
from collections.abc import Mapping
from typing import Any

from dynamo_local.errors import FlipFailed

log = logging.getLogger("dynamo_local.worker")

ROLE = "{role}"
DEFAULT_BODY: Mapping[str, Any] = {"new_role": ROLE}
SWITCH_TIMEOUT_S = 240.0
"""A server that captures its decode graphs anew takes as long as for a start."""
AGAIN_S = 0.2
SOON = ("not idle", "in progress")
"""Words of a refusal that passes by itself: something just ended, or another change goes on."""
SHOWN_CHARS = 200


async def switch_role(url: str, body: Mapping[str, Any], role: str) -> None:
    """Return when the server says that it has that role. Raises `FlipFailed` in its words; may be cancelled, and then
    nobody knows which role it has."""
    import httpx

    asked = {key: role if value == ROLE else value for key, value in body.items()}
    why = "it did not answer"
    try:
        async with asyncio.timeout(SWITCH_TIMEOUT_S), httpx.AsyncClient(timeout=None, trust_env=False) as client:
            while True:
                answer = await client.post(url, json=asked)
                why = _refusal(answer.status_code, answer.text)
                if not why:
                    return
                if not any(word in why for word in SOON):
                    break
                log.info("the server does not become %s yet: %s", role, why)
                await asyncio.sleep(AGAIN_S)
    except (TimeoutError, httpx.HTTPError) as error:
        why = f"{type(error).__name__}: {error}; {why}"
    raise FlipFailed(f"the server does not become {role}: {url} says: {why}")


def _refusal(status: int, text: str) -> str:
    """Why it has not changed its role; empty where it has."""
    try:
        told = json.loads(text)
    except ValueError:
        told = None
    said = told if isinstance(told, dict) else {}
    if http.client.OK <= status < http.client.MULTIPLE_CHOICES and said.get("success") is not False:
        return ""
    return f"{status}: {said.get('message') or text}"[:SHOWN_CHARS]
