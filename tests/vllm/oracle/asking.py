"""The same request to both."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from tests.vllm.oracle.comparing import difference, plain
from tests.vllm.oracle.requests import Case, encoded

TIMEOUT_S = 500.0
"""The first answer waits for vLLM's API, whose imports took more than two minutes on a busy host."""


@dataclass(frozen=True)
class Outcome:
    """Both answers, and the first difference."""

    case: Case
    ours: Any
    theirs: Any

    @property
    def differs(self) -> str | None:
        """None: nothing."""
        return difference(self.ours, self.theirs)


async def ask_both(graph: str, serve: str, cases: Sequence[Case]) -> list[Outcome]:
    """One after the other: what an engine computes together differs in the last digits of its numbers."""
    # A connection for each request: after an error of its own vLLM's server closes one without saying so.
    limits = httpx.Limits(max_keepalive_connections=0)
    async with httpx.AsyncClient(timeout=httpx.Timeout(TIMEOUT_S), limits=limits) as client:
        return [
            Outcome(case, *await asyncio.gather(_ask(client, graph, case), _ask(client, serve, case))) for case in cases
        ]


async def _ask(client: httpx.AsyncClient, url: str, case: Case) -> Any:
    headers = {"content-type": "application/json", **case.headers}
    if case.body is None:
        response = await client.get(url + case.path, headers=case.headers)
    else:
        response = await client.post(url + case.path, content=encoded(case), headers=headers)
    return plain(response.status_code, response.content, response.headers.get("content-type", ""))
