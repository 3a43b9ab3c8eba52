"""The options of the Frontend before HTTP servers: its section in the YAML file."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from dynamo_local.components.openai.settings import FrontendConfig


class HttpFrontendConfig(FrontendConfig):
    """Options of the `Frontend` service in a graph of `runtime: http` sections."""

    router: Literal["least-loaded", "kv-load", "round-robin", "random"] = Field(
        default="least-loaded",
        description="How a server is picked: fewest requests; by KV use and waiting requests; in turn; by chance.",
    )
    max_tries: int = Field(
        default=3, ge=1, le=16, description="Servers that may fail a request before its first byte until it fails."
    )
    prefill_timeout_s: float = Field(
        default=60.0,
        gt=0,
        description="How long a request waits for a prefill server before it is prefilled where it is decoded.",
    )
