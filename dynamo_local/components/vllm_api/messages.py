"""What Frontend and Processor send each other about an HTTP exchange that the Frontend does not read.

request  ApiRequest
items    {"status", "headers"?: {str: str}, "stream": bool}, then {"body": bytes}; each may also tell
         "tokens": how many more the answer has, "prompt_tokens", "cached_tokens"
"""

from __future__ import annotations

import msgspec

from dynamo_local.runtime.requests.frames import RequestId


class ApiRequest(msgspec.Struct, frozen=True):
    """A request as the client made it; `headers` without those that are about the connection, or secret."""

    request_id: RequestId
    path: str
    headers: list[tuple[str, str]]
    body: bytes
    method: str = "POST"
    query: str = ""
