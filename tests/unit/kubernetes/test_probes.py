"""The answers of a planner's pod to the kubelet."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dynamo_local.kubernetes.planner import probes_app


async def asked(path: str, why: str | None, method: str = "GET") -> tuple[int, Any]:
    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    await probes_app(lambda: why)({"path": path, "method": method}, None, send)
    body = sent[1]["body"]
    return sent[0]["status"], json.loads(body) if body else None


@pytest.mark.parametrize(
    ("path", "why", "status"),
    [
        ("/live", None, 200),
        ("/live", "it has not begun yet", 200),
        ("/health", None, 200),
        ("/health", "it has not begun yet", 503),
        ("/metrics", None, 404),
    ],
)
async def test_live_answers_always_and_health_while_it_plans(path: str, why: str | None, status: int) -> None:
    assert (await asked(path, why))[0] == status


async def test_the_reason_is_told_and_nothing_is_written() -> None:
    assert await asked("/health", "no") == (503, {"status": "unhealthy", "reason": "no"})
    assert (await asked("/live", None, "POST"))[0] == 405
    assert await asked("/live", None, "HEAD") == (200, None)
