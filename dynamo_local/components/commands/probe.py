"""One small GET of a command's health or metrics, with a deadline."""

from __future__ import annotations

import asyncio
import http.client
from urllib.parse import urlsplit

from dynamo_local.components.commands.runner import ChildSilent

PROBE_TIMEOUT_S = 2.0
ANSWER_BYTES_MAX = 16 * 1024 * 1024


async def get(url: str, timeout_s: float = PROBE_TIMEOUT_S) -> tuple[int, str]:
    """Status and body. Raises `ChildSilent` that says why there is no answer."""
    try:
        async with asyncio.timeout(2 * timeout_s):  # each of connecting and reading has its own below
            return await asyncio.to_thread(_get, url, timeout_s)
    except (OSError, http.client.HTTPException) as error:  # TimeoutError is an OSError
        raise ChildSilent(f"no answer from {url}: {error or type(error).__name__}") from None


async def get_ok(url: str) -> str:
    """The body of a 200. Raises `ChildSilent` for any other answer, too."""
    status, text = await get(url)
    if status != http.client.OK:
        raise ChildSilent(f"{url} answers {status}")
    return text


def _get(url: str, timeout_s: float) -> tuple[int, str]:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "127.0.0.1", parts.port or 80, timeout=timeout_s)
    try:
        path = parts.path or "/"
        connection.request("GET", f"{path}?{parts.query}" if parts.query else path)
        response = connection.getresponse()
        return response.status, response.read(ANSWER_BYTES_MAX).decode("utf-8", "replace")
    finally:
        connection.close()


async def wait_ok(url: str, every_s: float = 0.02) -> None:
    """Return once it answers 200. Bounded from outside."""
    while True:
        try:
            status, _body = await get(url)
        except ChildSilent:
            status = 0
        if status == http.client.OK:
            return
        await asyncio.sleep(every_s)
