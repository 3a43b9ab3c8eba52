"""A request as a Frontend passes it to the worker beside an HTTP server.

Apart from `payloads`, because that worker's own module imports it: it must be quick."""

from __future__ import annotations

from typing import Any

import msgspec

from dynamo_local.errors import InvalidRequest


class Ask(msgspec.Struct, frozen=True):
    """A POST. `tokens` bounds what it may generate; None where the request does not say."""

    path: str
    body: bytes
    headers: dict[str, str]
    tokens: int | None = None

    def payload(self) -> dict[str, Any]:
        """As it travels over the request plane."""
        return msgspec.structs.asdict(self)


def parse_ask(payload: Any) -> Ask:
    """The ask that `payload` made. Raises `InvalidRequest`."""
    try:
        return msgspec.convert(payload, Ask, builtin_types=(bytes,))
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"this is no HTTP request from a Frontend: {error}") from None
