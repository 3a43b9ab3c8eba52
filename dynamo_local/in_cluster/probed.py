"""What the kubelet asks a planner's pod: `/live` and `/health`, on the port that Dynamo's operator probes.

The operator's startup and liveness probes ask /live, which answers as long as the process does: a planner that holds
since the API server is away is not helped by a restart. /health answers 503 until the planner has begun, and while its
ticks fail.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

LIVE, HEALTH = "/live", "/health"
PORT_VARIABLE = "DYN_SYSTEM_PORT"
PORT = 9090
"""Where the operator's probes ask; it sets the variable, too."""


def probes_app(health: Callable[[], str | None]) -> Any:
    """An ASGI application. `health` says why the planner is not healthy; None where it is."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        asked, read = scope["path"], scope["method"] in ("GET", "HEAD")
        why = health() if asked == HEALTH else None
        status = 404 if asked not in (LIVE, HEALTH) else 405 if not read else 200 if why is None else 503
        told: dict[str, str] = {"status": "healthy" if status == 200 else "unhealthy"}
        if status in (404, 405):
            told = {"error": f"there are only GET {LIVE} and GET {HEALTH}"}
        elif why is not None:
            told["reason"] = why
        body = json.dumps(told).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        if status == 405:
            headers.append((b"allow", b"GET, HEAD"))
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body})

    return app
